"""What can go wrong with a center, each with a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Collection


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


class CheckpointError(CenterError, ValueError):
    """A checkpoint is damaged or belongs to another model."""


def rank_in_use(rank: int, members: Collection[int]) -> RankError:
    """Return the error for a rank that a live worker has."""
    return RankError(
        f"Rank {rank} is in use by a live worker. Give every worker a rank of its own; "
        f"in use: {sorted(members)}."
    )
