"""What the pages of the torch benchmarks have in common."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from springline.launch.process import cores


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cells)} |"


def facts() -> str:
    """Say what was measured with."""
    return (
        f"Measured with {cores()} cores, torch {torch.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}."
    )
