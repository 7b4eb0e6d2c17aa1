"""What one sees of a run: metrics, live screen, plots."""
