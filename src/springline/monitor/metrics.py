"""What the workers logged: `RUN/metrics/rank-K.jsonl`, a JSON object per line.

    {"time": 1700000000.0, "step": 120, "loss": 0.25, "accuracy": null}

`null` stands for NaN or Inf. A file holds all incarnations of its rank; a line without
values begins one (`springline.steps` writes it).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from springline.files import open_regular
from springline.sealed import reading
from springline.typed import Count, Seconds, convert

FOLDER = "metrics"
Floats = NDArray[np.float64]
_INFINITE = 1e100  # what is above cannot be drawn
_DEEP_OR_LARGE = AttributeError, OverflowError, RecursionError
_log = logging.getLogger("springline")


@dataclass(frozen=True)
class Line:
    """One line: when, at which step, which values. A value that was not finite is NaN."""

    time: float
    step: int
    values: dict[str, float]

    @classmethod
    def parse(cls, text: bytes) -> Line | None:
        """Read a line; None if it is none.

        A worker killed in the middle of a line leaves a part of it, and its restart writes on
        behind: the part is dropped.

        >>> Line.parse(b'{"time": 1, "step": 7, "lo{"time": 2, "step": 5, "loss": null}')
        Line(time=2.0, step=5, values={'loss': nan})
        """
        for start in (0, max(0, text.rfind(b'{"time"'))):
            with contextlib.suppress(ValueError, LookupError, TypeError, *_DEEP_OR_LARGE):
                values = json.loads(text[start:])
                time = convert(Seconds, values.pop("time"), "time")
                step = convert(Count, values.pop("step"), "step")
                return cls(time, step, {k: _number(v) for k, v in values.items() if _logged(v)})
        return None


@dataclass(frozen=True)
class Evaluation:
    """A value of the center or of a validation (`val_loss`); NaN if it was not finite."""

    time: float
    step: int
    value: float


@contextlib.contextmanager
def open_metrics(path: Path) -> Iterator[BinaryIO]:
    """Open one rank's file."""
    with reading(path, "Remove it."), open_regular(path) as file:
        yield file


class LineReader:
    """Reads what has been added to one rank's file since the last time.

    Args:
        path: the file, which may not be there yet.
        tail: how many bytes of the end to read at first; all by default.

    Attributes:
        bad: how many lines were skipped, since they are none.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self.path = path
        self.bad = 0
        self._tail = tail
        self._offset = 0

    def read(self) -> list[Line]:
        """Return the new lines that are complete."""
        try:
            with open_metrics(self.path) as file:
                size = file.seek(0, 2)
                if size < self._offset:  # another file under this name
                    self._offset = 0
                if size == self._offset:
                    return []
                cut = self._offset == 0 and self._tail is not None and size > self._tail
                if cut:
                    self._offset = size - (self._tail or 0)
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.split(b"\n")[1 if cut else 0 : -1]
        parsed = [line for line in map(Line.parse, lines) if line]
        self.bad += len(lines) - len(parsed)
        return parsed


@dataclass(frozen=True)
class Series:
    """All that one rank has logged, as arrays of one length.

    Attributes:
        rank: the worker's.
        time: seconds since the epoch, never going back.
        step: local steps; goes back where a restart repeats what was lost.
        values: by name; NaN where a line has no such value or it was not finite.
        begins: whether a line begins another incarnation of the worker.
    """

    rank: int
    time: Floats
    step: NDArray[np.int64]
    values: dict[str, Floats]
    begins: NDArray[np.bool_]

    @classmethod
    def of(cls, rank: int, lines: Iterable[Line]) -> Series:
        """Gather lines."""
        lines = list(lines)
        names = dict.fromkeys(name for line in lines for name in line.values)
        time = np.array([line.time for line in lines], float)
        step = np.array([line.step for line in lines], np.int64)
        begins = np.array([not line.values for line in lines], bool)
        begins[1:] |= np.diff(step) < 0
        begins[:1] = False
        values = {n: np.array([line.values.get(n, math.nan) for line in lines]) for n in names}
        return cls(rank, np.maximum.accumulate(time), step, values, begins)

    def with_starts(self, starts: Iterable[float]) -> Series:
        """Add the restarts that the launcher saw: not every script counts with `steps`."""
        at = np.searchsorted(self.time, np.array([*starts], float))
        begins = self.begins.copy()
        begins[at[(at > 0) & (at < len(begins))]] = True
        return replace(self, begins=begins)


def read_metrics(directory: Path) -> dict[int, Series]:
    """Read all of a run's metrics, by rank."""
    found = {}
    for path in (directory / FOLDER).glob("rank-*.jsonl"):
        rank = path.stem.removeprefix("rank-")
        reader = LineReader(path)
        lines = reader.read()
        if reader.bad:
            _log.warning("Bad lines of %s, left out: %d.", path, reader.bad)
        if rank.isdecimal() and lines:
            found[int(rank)] = Series.of(int(rank), lines)
    return dict(sorted(found.items()))


def is_center(name: str) -> bool:
    """Whether a name is one of the center's or of a validation, not of a worker's training.

    >>> [is_center(name) for name in ("loss", "value", "val_loss", "val", "center_accuracy")]
    [False, False, True, True, True]
    """
    return name.split("_")[0] in ("center", "val", "valid", "validation")


def training_loss(names: Iterable[str]) -> str | None:
    """Pick the worker's own loss.

    >>> training_loss(["val_loss", "train_loss", "lr"])
    'train_loss'
    """
    names = [name for name in names if not is_center(name)]
    return "loss" if "loss" in names else next((n for n in names if n.endswith("loss")), None)


def _logged(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: float | None) -> float:
    number = math.nan if value is None else float(value)
    return number if abs(number) < _INFINITE else math.nan
