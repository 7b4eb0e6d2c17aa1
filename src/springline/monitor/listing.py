"""`springline ls`: the runs, and what they hold."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from springline.center.checkpoint import describe
from springline.center.directory import LAYOUT_NAME
from springline.center.shared import CHECKPOINT_NAME
from springline.launch.directory import CENTER, is_held, short
from springline.launch.holdings import Holding, disk_usage
from springline.launch_state import LaunchState
from springline.monitor.sources import CenterReader, CenterState
from springline.monitor.words import ago

_COLUMNS = ("run", "workers", "version", "changed", "memory", "disk", "state")
_LEFT = {"run", "state"}  # columns of words


@dataclass(frozen=True)
class RunSummary:
    """What `ls` shows of a run. None: unknown."""

    state: str
    workers: int | None = None
    version: int | None = None


def describe_run(holding: Holding) -> RunSummary:
    """Read the state of a run. A run that is damaged costs the others nothing."""
    if holding.gone:
        state = "gone" if any(segment.owner for segment in holding.segments) else "left over"
        return RunSummary(f"{state}, in use" if any(s.mapped for s in holding.segments) else state)
    try:
        if holding.path.stat().st_uid != os.getuid():
            return RunSummary("another user's")
        return _read(holding.path)
    except Exception as error:  # whatever its files make of the readers
        return RunSummary(f"damaged: {str(error) or repr(error)}")


def show(holdings: list[Holding], console: Console) -> None:
    """Print a table: in a terminal as such, elsewhere as aligned text."""
    rows = [_cells(holding) for holding in holdings]
    if console.is_terminal:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
        for name in _COLUMNS:
            left = name in _LEFT
            table.add_column(
                name, justify="left" if left else "right", no_wrap=not left, overflow="fold"
            )
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    rows.insert(0, _COLUMNS)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(_COLUMNS, row, widths, strict=True)
        words = [cell.ljust(n) if name in _LEFT else cell.rjust(n) for name, cell, n in cells]
        console.print("  ".join(words).rstrip(), markup=False, highlight=False, soft_wrap=True)


def _read(run: Path) -> RunSummary:
    place = run if (run / LAYOUT_NAME).exists() else run / CENTER
    launch, reader = LaunchState.read(run), CenterReader(place)
    try:
        center = reader.read()
    finally:
        reader.close()
    if center.version is None and (place / CHECKPOINT_NAME).exists():
        describe(place / CHECKPOINT_NAME)  # raises: it is damaged
    planned = center.plan.workers if center.plan else None
    workers = len(launch.workers) if launch and launch.workers else planned
    return RunSummary(_state(run, launch, center), workers, center.version)


def _state(run: Path, launch: LaunchState | None, center: CenterState) -> str:
    if center.members or is_held(run):
        return "running"
    if launch is None:
        return "ended"  # how is unknown
    states = {worker.state for worker in launch.workers}
    if "failed" in states:
        return "failed"
    return "finished" if states == {"finished"} else "stopped"


def _cells(holding: Holding) -> tuple[str, ...]:
    row, (disk, changed) = describe_run(holding), disk_usage(holding.path)
    if holding.gone:
        disk = 0  # of another run, which is there now
    return (
        str(short(holding.path)),
        "-" if row.workers is None else str(row.workers),
        "-" if row.version is None else f"{row.version:,}",
        ago(max(0.0, time.time() - changed)) if changed else "-",
        decimal(holding.memory) if holding.memory else "-",
        decimal(disk) if disk else "-",
        " ".join(row.state.split()),
    )
