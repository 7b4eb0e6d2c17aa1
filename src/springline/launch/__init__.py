"""Start, watch and restart the workers of a run."""
