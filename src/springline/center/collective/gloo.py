"""Process groups of gloo that torch does not know of.

Torch names a group after how many a process has, too, so that ranks that have made different
numbers of them never find each other in the next one; and it keeps every group to the end of the
process. When that comes, a thread of a group that has just been used may still want to let go of a
tensor, and ends the process with SIGABRT. So a group whose ranks have parted is dropped before.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, default_pg_timeout

_made: dict[tuple[int, ...], int] = {}  # how many groups of our own, of these ranks


def store_of(group: dist.ProcessGroup) -> Any:
    """Return a store for one more group of the same ranks; all of them must ask."""
    ranks = tuple(dist.get_process_group_ranks(group))
    _made[ranks] = _made.get(ranks, 0) + 1
    return PrefixStore(f"springline/{_made[ranks]}", group.get_group_store())


def make(store: Any, rank: int, size: int, timeout: float | None) -> Any:
    """Make a group: all of its ranks must, and those that are there wait for the others.

    Nobody but `drop` lets go of it: its threads are waited for then, and they may be waiting for a
    rank that never comes.
    """
    group = ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds(timeout)))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


def drop(group: Any) -> None:
    """Let go of a group all of whose communication has come to its end."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def seconds(timeout: float | None) -> float:
    """Return how long to wait for others: torch's own, 30 minutes, if nothing else is said."""
    return default_pg_timeout.total_seconds() if timeout is None else timeout
