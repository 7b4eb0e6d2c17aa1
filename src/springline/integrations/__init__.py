"""springline inside the trainers that people already have: one file each, which imports its own."""
