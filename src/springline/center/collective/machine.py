"""Which ranks are on one machine: those that can reach each other's memory, all of them.

Every rank says where its memory is, tries to reach that of the others, and says whose it could.
From this all compute the same machines. A rank that cannot reach others, or has no memory to lend,
counts as a machine of its own, and so does every rank if the model is small.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from springline.center import lent
from springline.center.collective.group import Group
from springline.center.layout import Bytes, aligned_zeros
from springline.center.lent import Address, Lent, borrow, touch

SMALL = 1024 * 1024  # bytes of a buffer: with fewer an all-reduce is over before ranks have met


def settle(group: Group, nbytes: int) -> list[Bytes]:
    """Divide a group into machines.

    Args:
        group: its ranks; all of them must.
        nbytes: of a buffer.

    Returns:
        The memory of each rank on this machine: two buffers of the first, one of the others.
    """
    if group.divisible and nbytes >= SMALL:
        with contextlib.ExitStack() as stack:
            mine = _lend(2 * nbytes)
            if mine is not None:
                stack.callback(mine.close)  # all who need it have it by then
            found = _meet(group, mine, nbytes)
            if len(group.mates) > 1:
                return [found[rank] for rank in group.mates]
    return [aligned_zeros(2 * nbytes)]


def divide(reached: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the machines, given whom each rank has reached.

    >>> divide([[0, 1, 3], [1, 0, 2], [2, 1, 3], [0, 2, 3]])
    [[0, 1], [2, 3]]
    """
    machines: list[list[int]] = []
    for rank, whom in enumerate(reached):
        for machine in machines:
            if all(mate in whom and rank in reached[mate] for mate in machine):
                machine.append(rank)
                break
        else:
            machines.append([rank])
    return machines


def _meet(group: Group, mine: Lent | None, nbytes: int) -> dict[int, Bytes]:
    """Agree with all ranks; return the memory of those that could be reached."""
    where = _tell(group, None if mine is None else asdict(mine.address))
    found: dict[int, Bytes] = {}
    for rank, address in enumerate(where):
        if mine is not None and address is not None:
            with contextlib.suppress(OSError):
                own = rank == group.rank
                found[rank] = mine.memory if own else borrow(Address(**address), populate=False)
    machines = divide(_tell(group, list(found)))
    (mates,) = (ranks for ranks in machines if group.rank in ranks)
    needed = {rank: nbytes if k else 2 * nbytes for k, rank in enumerate(mates) if len(mates) > 1}
    if all(_tell(group, _reserve(mine, needed.get(group.rank, 0)))):
        group.divide(machines)
        for rank, size in needed.items():
            touch(found[rank][:size])
    return found


def _tell(group: Group, what: Any) -> list[Any]:
    """Tell all ranks something; return what each tells."""
    return [json.loads(text) for text in group.gather(json.dumps(what))]


def _lend(size: int) -> Lent | None:
    """Return memory to lend, if others can find it."""
    with contextlib.suppress(OSError):
        return Lent(size) if lent.POSSIBLE else None
    return None


def _reserve(mine: Lent | None, size: int) -> bool:
    """Whether there is as much memory."""
    with contextlib.suppress(OSError):
        if mine is not None and size:
            mine.reserve(size)
        return True
    return False
