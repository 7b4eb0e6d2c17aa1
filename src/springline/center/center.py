"""The contract of a center: where `c` lives, where steps run, and who is in a round.

A `Center` holds the parameters, the version (exchanges so far), the outer optimizer's state and
the members. `join` gives a `Member`, through which one worker exchanges. Every center passes the
suite in `tests/contracts/` for what it declares it can do.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from springline import checks
from springline.center.layout import Bytes, Layout
from springline.center.local import Local
from springline.center.plan import Plan, differences
from springline.errors import CenterError, LayoutError, NonFiniteError, RankError, SettingsError
from springline.rules.rule import Rule

_Self = TypeVar("_Self", bound="Center")


@dataclass(frozen=True)
class Progress:
    """How far a rank has come, across restarts."""

    steps: int  # local steps at its last exchange
    exchanges: int
    seconds: float  # spent exchanging


class Member(ABC):
    """One worker's place at a center."""

    rank: int
    start_step: int  # how far this rank had come when it joined; 0 in a new run
    was_sealed: bool  # whether the center was sealed when it joined
    left: bool  # whether it has given its rank back

    @property
    @abstractmethod
    def number(self) -> int:
        """The number of this worker's next exchange: in rounds the center's, else its rank's."""

    def fastest(self) -> float:
        """Return the steps per second of the fastest live worker; 0 if that is not known."""
        return 0.0

    @abstractmethod
    def exchange(self, local: Local) -> bool:
        """Exchange the next fragment with the center: contribute, reduce, step, adopt.

        Returns:
            False if nothing was exchanged, since this worker has missed a round: what it holds is
            not measured from the center any more. It is to `take` the center.

        Raises:
            NonFiniteError: `local` holds NaN or Inf. The block that does was not applied, the
                accumulated gradient is cleared, and no round waits for this worker.
            RoundTimeoutError: others did not come in time (synchronous rules).
        """

    @abstractmethod
    def take(self, out: Bytes) -> None:
        """Copy what a worker goes on from: `c`, or what the outer optimizer publishes for it.

        What it contributes to a round is measured from there.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait, once per center, until all configured workers have joined."""

    @abstractmethod
    def seal(self, x: Bytes, mark: int, changed: bool) -> int | None:
        """Give a new center a worker's values, if no worker has made a step from it yet.

        Args:
            x: the worker's parameters and buffers.
            mark: identifies its parameters.
            changed: whether they are others than when it joined.

        Returns:
            None if this worker has sealed the center. Else the mark of the one that has; 1 if that
            is not known.
        """

    def confirm_finished(self) -> None:
        """Report again that this worker has finished; idempotent. For a head that was restarted."""

    @abstractmethod
    def leave(self, finished: bool = False) -> None:
        """Give the rank back. No round waits for this worker any more.

        Args:
            finished: whether it has made all its steps, and does not come back.
        """


class Center(ABC):
    """The shared parameters."""

    plan: Plan
    process: int  # that has opened it
    in_a_child: ClassVar[str] = "Open it again in the child."
    closed = False

    @property
    def layout(self) -> Layout:
        """The model's layout."""
        return self.plan.layout

    @property
    def settings(self) -> dict[str, Any]:
        """What all its workers agree on: rule, period, workers, moving rate, ..."""
        return self.plan.settings

    @property
    @abstractmethod
    def version(self) -> int:
        """Exchanges so far (rounds, for the synchronous rules). It never goes back."""

    @abstractmethod
    def members(self) -> list[int]:
        """Return the ranks of the live members."""

    @abstractmethod
    def finished(self) -> list[int]:
        """Return the ranks that have made all their steps and left for good."""

    def given_up(self) -> list[int] | None:
        """Return the ranks that a launcher does not restart; None if it knows of none."""
        return None

    @abstractmethod
    def progress(self) -> list[Progress]:
        """Return how far each rank has come."""

    @abstractmethod
    def read(self, out: Bytes | None = None) -> Bytes:
        """Copy the center, consistent per part of it, into a flat buffer."""

    @abstractmethod
    def join(self, rank: int, rule: Rule, timeout: float | None = None) -> Member:
        """Become the worker of that rank.

        Args:
            rank: 0 to workers − 1; refused if a live worker has it.
            rule: the worker's; refused if it differs from the center's.
            timeout: seconds after which waiting for others fails and names them. Without it
                a warning names them every 30 seconds.
        """

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write a checkpoint: the center, its version, settings and outer state."""

    @abstractmethod
    def close(self) -> None:
        """Leave, with all members, and let go of the center in this process."""

    def check_process(self) -> None:
        """Refuse to be used when closed, or in a forked child, which holds no locks and calls."""
        if self.closed:
            raise CenterError("This center is closed. Open it again.")
        if os.getpid() != self.process:
            raise CenterError(
                f"This center was opened in process {self.process} and is used in its child "
                f"{os.getpid()}. {self.in_a_child}"
            )

    def check_join(self, rank: int, rule: Rule, timeout: float | None) -> None:
        """Refuse a worker with other settings than the center's, or a rank out of range."""
        use_locking = {"use_locking": self.settings["use_locking"]}  # the center's own
        check_settings(self.settings, rule.settings() | use_locking)
        checks.seconds(timeout)
        check_rank(rank, self.settings["workers"])

    def values(self) -> Mapping[str, NDArray[Any]]:
        """Return a copy of the center by name."""
        return self.layout.views(self.read())

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_plan(center: Plan, worker: Plan) -> None:
    """Refuse a worker with another model or other settings than the center's."""
    check_layout(center.layout, worker.layout)
    check_settings(center.settings, worker.settings)


def check_layout(center: Layout, worker: Layout) -> None:
    """Refuse a model that differs from the center's; name the first difference."""
    difference = center.difference(worker)
    if difference:
        raise LayoutError(
            f"The model differs from the center's: {difference}. Is it another model's run? "
            "Use the model that the run was started with, or start a new run."
        )


def check_rank(rank: Any, workers: float) -> None:
    """Refuse a rank out of range."""
    if not checks.is_whole(rank) or not 0 <= rank < workers:
        raise RankError(
            f"`rank` must be an integer from 0 to {workers - 1}, since the run is "
            f"configured for {workers} workers. Received: rank={rank!r}."
        )


def check_settings(center: Mapping[str, Any], worker: Mapping[str, Any]) -> None:
    """Refuse a worker whose rule or settings differ from the center's; name the difference."""
    for key, ours, its in differences(center, worker):
        raise SettingsError(
            f"The center was made with {key}={ours!r}, this worker comes with {key}={its!r}. "
            "Start it with the center's settings, or start a new run."
        )


def check_finite(layout: Layout, values: Mapping[str, Any]) -> None:
    """Refuse first values with a NaN or an Inf; name the tensor."""
    for entry in layout.entries:
        if not np.isfinite(values[entry.name]).all():
            raise NonFiniteError(
                f"{entry.kind.capitalize()} {entry.name!r} has NaN or Inf, so no center was "
                "made with it. Check how the model is initialised or loaded."
            )
