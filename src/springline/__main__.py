"""`python -m springline`: the command."""

from springline.cli import app

app(prog_name="springline")
