"""What the pages of the benchmarks have in common."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

import numpy as np

from springline.launch.process import cores


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cells)} |"


def facts(framework: str = "torch") -> str:
    """Say what was measured with."""
    return (
        f"Measured with {cores()} cores, {framework} {version(framework)}, numpy "
        f"{np.__version__}, Python {platform.python_version()}."
    )
