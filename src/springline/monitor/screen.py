"""A run on the screen: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from io import TextIOWrapper
from itertools import compress
from pathlib import Path
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from springline.center import CenterError
from springline.monitor.status import NotARunError, State, Status, StatusReader, WorkerStatus
from springline.monitor.words import (
    clock,
    evaluations_in_words,
    footer,
    introduction,
    line,
    loss_in_words,
    many,
    rule_in_words,
    whole_steps,
)

_LIVE_EVERY, _PLAIN_EVERY = 0.25, 5.0  # seconds
_STATES: dict[State, tuple[str, str]] = {
    "starting": ("○", "cyan"),
    "running": ("●", "green"),
    "restarting": ("↻", "yellow"),
    "finished": ("✓", "bold green"),
    "failed": ("✗", "bold red"),
    "stopped": ("■", "magenta"),
    "left": ("○", "dim"),
    "unknown": ("?", "dim"),
}
# Columns and their least widths, so that they stay where they are.
_COLUMNS = {
    "worker": 6,
    "step": 6,
    "steps/s": 7,
    "loss": 7,
    "exchanges": 9,
    "ms/exchange": 11,
    "distance": 8,
    "restarts": 8,
    "state": 12,
}
# The first goes first.
_SPARE = ("exchanges", "restarts", "ms/exchange", "distance", "steps/s", "loss")
_GAP = 2  # between two columns
_OTHER_ROWS = 9  # of the live screen, beside the workers'


class Screen:
    """Shows a run for as long as the context lasts.

    Live it is a picture that is redrawn; else a line every five seconds and at the
    end, without control characters.
    """

    def __init__(self, directory: Path, console: Console, live: bool) -> None:
        self.status: Status | None = None  # the last that was read
        self._directory = directory
        self._console = console
        self._reader = StatusReader(directory)
        self.trouble = ""
        self._every = _LIVE_EVERY if live else _PLAIN_EVERY
        self._next = 0.0
        self._introduced = False
        self._live: Live | None = None
        if isinstance(console.file, TextIOWrapper):
            console.file.reconfigure(errors="replace")  # not every terminal knows τ
        if live:
            self._live = Live(Text(""), console=console, auto_refresh=False)

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._live or not (self.status and self.status.over):  # not the last line twice
                self._draw()
        finally:
            if self._live:
                self._live.stop()
            self._reader.close()

    def refresh(self) -> None:
        """Draw the run if it is time to; to be called often."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            self._draw()

    def _draw(self) -> None:
        before = self.trouble
        try:
            self.status = self._reader.read()
            self.trouble = ""
        except NotARunError:  # not yet
            pass
        except CenterError as error:  # watching must not end the run
            self.trouble = str(error)
        if self._live:
            self._live.update(self._picture(), refresh=True)
            return
        if self.trouble and self.trouble != before:
            self._print(self.trouble)
        if self.status:
            if self.status.settings and not self._introduced:
                self._introduced = True
                self._print(introduction(self.status))
            self._print(line(self.status))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, style=None)

    def _picture(self) -> RenderableType:
        status = self.status
        if status is None:
            return Text(self.trouble or f"Waiting for a run in {self._directory}.", style="dim")
        evaluations = evaluations_in_words(status.evaluations)
        room = max(4, self._console.height - _OTHER_ROWS - len(evaluations))
        parts = [self._head(status), self._bar(status), self._workers(status, room)]
        parts += [Text(words, no_wrap=True, overflow="ellipsis") for words in evaluations]
        parts.append(Text(footer(status), "dim"))
        if self.trouble:
            parts.append(Text(self.trouble, "red"))
        return Group(*parts)

    def _head(self, status: Status) -> RenderableType:
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
        head.add_column(justify="right", overflow="ellipsis", no_wrap=True)
        words = [w for w in (rule_in_words(status.settings), clock(status.elapsed)) if w]
        right = Text("  ·  ".join(words))
        room = self._console.width - right.cell_len - 1
        head.add_row(Text(_end_of(str(status.directory), room), "bold"), right)
        return head

    def _bar(self, status: Status) -> RenderableType:
        total, done = status.total, sum(worker.step for worker in status.workers)
        words = [many(done, "step")]
        bar = ProgressBar(total=None, pulse=not status.over, pulse_style="cyan")
        if total and status.workers:
            whole = whole_steps(status, total)
            bar = ProgressBar(
                total=whole, completed=done, complete_style="cyan", finished_style="green"
            )
            width = len(f"{whole:,}")  # the bar keeps its length
            words = [f"{math.floor(100 * done / whole):3} %", f"{done:{width},} of {whole:,} steps"]
            left = seconds_left(status, total)
            if not status.over:
                words.append(f"{'-:--:--' if left is None else clock(left)} left")
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(ratio=1)
        row.add_column(justify="right", overflow="ellipsis", no_wrap=True)
        row.add_row(bar, Text("  ".join(words)))
        return Group(row, "")

    def _workers(self, status: Status, room: int) -> RenderableType:
        shown = status.workers if len(status.workers) <= room else status.workers[: room - 1]
        rows = [_cells(worker) for worker in shown]
        measured = any(worker.distance is not None for worker in shown)
        shows = _fitting(rows, self._console.width, set() if measured else {"distance"})
        table = Table(
            box=SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            header_style="dim",
        )
        for name, width in compress(_COLUMNS.items(), shows):
            justify: JustifyMethod = "left" if name == "state" else "right"
            table.add_column(
                name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=width
            )
        for row in rows:
            table.add_row(*compress(row, shows))
        others = Counter(worker.state for worker in status.workers[len(shown) :])
        words = ", ".join(f"{count} {state}" for state, count in others.items())
        return Group(table, Text(f"… and {words}" if words else "", "dim"))


def _end_of(path: str, room: int) -> str:
    """Cut a path that is too long at its beginning: runs differ at the end."""
    if cell_len(path) <= room:
        return path
    while path and cell_len(path) > room - 1:
        path = path[1:]
    return f"…{path}"


def seconds_left(status: Status, total: int) -> float | None:
    """Estimate when the slowest worker has made its steps; None if that is not known.

    A worker that is starting is taken to be as fast as the others.
    """
    at_work = [w for w in status.workers if w.state in ("starting", "running", "restarting")]
    rates = [worker.rate for worker in at_work if worker.rate is not None]
    if not rates or not all(rates):
        return None
    mean = sum(rates) / len(rates)
    return max(max(0, total - w.step) / (w.rate or mean) for w in at_work)


def _fitting(rows: list[list[Text]], width: int, empty: set[str]) -> list[bool]:
    """Return which columns to show: what is empty or does not fit is left out, not cut."""
    wide = {
        name: max(least, *(row[k].cell_len for row in rows), 0)
        for k, (name, least) in enumerate(_COLUMNS.items())
    }
    left_out = set(empty)
    for name in _SPARE:
        kept = [size for column, size in wide.items() if column not in left_out]
        if sum(kept) + _GAP * (len(kept) - 1) > width:
            left_out.add(name)
    return [name not in left_out for name in _COLUMNS]


def _cells(worker: WorkerStatus) -> list[Text]:
    loss = loss_in_words(worker.loss)
    rate = "-" if worker.rate is None else f"{worker.rate:,.1f}"
    sign, style = _STATES[worker.state]
    return [
        Text(str(worker.rank)),
        Text(f"{worker.step:,}"),
        Text(rate, style="yellow" if worker.rate == 0 else ""),
        Text(loss, style="bold red" if loss == "NaN/Inf" else ""),
        Text("-" if worker.exchanges is None else f"{worker.exchanges:,}"),
        Text(_milliseconds(worker.milliseconds)),
        Text("-" if worker.distance is None else f"{worker.distance:.2g}"),
        Text(str(worker.restarts), style="yellow" if worker.restarts else ""),
        Text(f"{sign} {worker.state}", style=style),
    ]


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}"
