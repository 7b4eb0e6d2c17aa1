"""What can go wrong with a center; each message ends with what to do."""

from __future__ import annotations

from collections.abc import Collection

AFTER_NAN = (
    "Lower the learning rate, clip the gradients, or call `opt.take_center()` (of a Worker: "
    "`worker.take_center()`) to go on from the center."
)


class CenterError(RuntimeError):
    """Base of all errors of a center."""


class LayoutError(CenterError, ValueError):
    """A model cannot be laid out, or differs from the center's."""


class SettingsError(CenterError, ValueError):
    """A worker came with another rule or other settings than the center's."""


class RankError(CenterError, ValueError):
    """A rank is in use or out of range."""


class NonFiniteError(CenterError, ArithmeticError):
    """A worker tried to send NaN or Inf, or its message overflowed the center."""


class RoundTimeoutError(CenterError, TimeoutError):
    """Workers that others waited for did not come in time."""


class DamagedError(CenterError, ValueError):
    """A file of a run is damaged, or something else is in its place."""


class CheckpointError(CenterError, ValueError):
    """A checkpoint is damaged or belongs to another model."""


class FinishedError(CenterError):
    """A script trains on with a worker that it has finished."""


class EndedError(CenterError):
    """The center is gone, and does not come back by itself."""


class TakenOverError(CenterError):
    """Another worker has a member's rank."""


class TokenError(CenterError):
    """A call to a center came without its token."""


def rank_in_use(rank: int, members: Collection[int]) -> RankError:
    """Return the error for a rank that a live worker has."""
    return RankError(
        f"Rank {rank} is in use by a live worker. Give every worker a rank of its own; "
        f"in use: {sorted(members)}."
    )


def taken_over(rank: int) -> TakenOverError:
    """Return the error for a worker whose rank another has meanwhile."""
    return TakenOverError(
        f"Rank {rank} has been taken over by another worker: this one sent no heartbeat for "
        "too long. Start it again to rejoin."
    )


def forgotten(name: str = "The center") -> CenterError:
    """Return the error for a center whose head does not know it any more."""
    return CenterError(
        f"{name} has been trained, but its head restarted and has no record to "
        "go on from. Start a new run, with a storage (`--storage`) that all machines see."
    )
