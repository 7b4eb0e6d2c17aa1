"""A process group of our own: sums and texts, and errors that name what happened and what to do.

Nothing else uses it, so that an exchange in the background meets no other communication of the
script, whatever that does meanwhile. Texts travel as bytes, never as pickles.

Missing ranks are found through the group's store: a rank that waits for long, or has failed,
writes there how many calls it has made. A rank that is behind is missing. The store is with
rank 0 or `torchrun`, and may be gone as well: a rank does not wait for it for long.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, default_pg_timeout

from springline.center.waiting import WARN_EVERY, wait_until
from springline.errors import CenterError, RoundTimeoutError
from springline.signals import deliver

REPORT_AFTER = 1.0  # seconds that a rank waits before it writes to the store
_SLICE = 1.0  # seconds: no signal interrupts torch's wait
_GRACE = 3.0  # seconds that others have to report, or to come to the end
_STORE_TIMEOUT = 2.0  # seconds in which the store has to answer
_PAUSE = 0.05
_ADVICE = (
    "A process group cannot go on without one of its ranks: end this process and start all of them "
    "again, as `torchrun --max-restarts` does; they go on from the last checkpoint."
)
_log = logging.getLogger("springline")
_made: dict[tuple[int, ...], int] = {}  # how many groups of our own, of these ranks
_T = TypeVar("_T")


class Group:
    """The ranks of a process group.

    Args:
        group: a process group that this process is in; another one of the same ranks is made for
            us. A bare backend is used as it is.
        timeout: seconds after which waiting for others fails; by default torch's own, which are
            30 minutes with gloo.
    """

    def __init__(self, group: dist.ProcessGroup | Any, timeout: float | None = None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.timeout = timeout
        self.broken = False
        self.device = torch.device("cpu")
        self._slice = timedelta(seconds=_SLICE if timeout is None else min(_SLICE, timeout / 4))
        self._calls = self._rounds = 0
        self._store: Any = None
        self._ours = False  # made by `_gloo`
        self._group: Any = group
        if isinstance(group, dist.ProcessGroup):
            self._group = self._call("the start", lambda: self._like(group))

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """A round; a rank that does not reach its end can take part in no other."""
        self.check()
        self._rounds += 1
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum over all ranks, with one all-reduce each."""
        self._call(
            f"round {self._rounds}", lambda: [self._group.allreduce([each]) for each in tensors]
        )

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a tensor by rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._call("the start", lambda: [self._group.broadcast([tensor], options)])

    def gather(self, text: str, what: str = "all workers to start") -> list[str]:
        """Return the text of every rank, which wait for `what` meanwhile."""
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(raw)
        lengths = lengths.to(self.device)
        self._call(what, lambda: [self._group.allreduce([lengths])])
        sizes = [int(n) for n in lengths]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(raw)] = raw
        mine = mine.to(self.device)
        rows = [torch.empty_like(mine) for _ in sizes]
        self._call(what, lambda: [self._group.allgather([rows], [mine])])
        return [r[:n].cpu().numpy().tobytes().decode() for r, n in zip(rows, sizes, strict=True)]

    def part(self) -> None:
        """Wait, for some seconds, until all ranks have received what was sent last; then close.

        Without it the end of one process may reset a connection that another is still reading.
        """
        if not self.broken:
            work = self._group.allreduce([torch.zeros(1, device=self.device)])
            with contextlib.suppress(RuntimeError):  # others have gone on: they have all of it, too
                work.wait(timedelta(seconds=_GRACE))
            if self._ours and work.is_completed():
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))  # see `_gloo`
            self._group = None
        self.close()

    def close(self) -> None:
        """Use the group no more."""
        self.broken = True

    def check(self) -> None:
        """Refuse a group that can be used no more."""
        if self.broken:
            raise CenterError(
                "This worker's process group has failed or was closed. End the process and start "
                "all of them again."
            )

    def _like(self, group: dist.ProcessGroup) -> Any:
        """Make a group of the same ranks and the same kind."""
        backends = dict(
            part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part
        )
        if backends.get("cpu") == "gloo":
            ranks = tuple(dist.get_process_group_ranks(group))
            _made[ranks] = _made.get(ranks, 0) + 1
            self._store = PrefixStore(f"springline/{_made[ranks]}", group.get_group_store())
            seconds = default_pg_timeout.total_seconds() if self.timeout is None else self.timeout
            self._meet(seconds)
            self._ours = True
            return _gloo(self._store, self.rank, self.size, seconds)
        if "cpu" not in backends:
            self.device = torch.device(
                next(iter(backends)), torch.accelerator.current_device_index()
            )
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=None if self.timeout is None else timedelta(seconds=self.timeout),
            backend=backends[self.device.type],
            use_local_synchronization=True,
        )
        assert isinstance(made, dist.ProcessGroup)  # noqa: S101 - all of its ranks are in it
        self._store = PrefixStore("springline", made.get_group_store())
        return made

    def _meet(self, timeout: float) -> None:
        """Wait until all ranks are there; gloo would not name the missing."""
        self._report()
        keys = [f"calls/{rank}" for rank in range(self.size)]
        missing = partial(self._behind, 1)
        wait_until(lambda: self._store.check(keys), missing, timeout, "the start")

    def _call(self, what: str, start: Callable[[], Any]) -> Any:
        """Start communication and wait for `what`; no other can follow one that fails."""
        self.check()
        self._calls += 1
        try:
            started = start()
            for work in started if isinstance(started, list) else ():
                self._wait(work, what)
        except BaseException as error:  # Ctrl-C, too, while others go on
            self.broken = True
            if isinstance(error, RuntimeError) and not isinstance(error, CenterError):
                raise self._failed(what, error) from error
            raise
        self.check()  # it may have been closed meanwhile
        return started

    def _wait(self, work: Any, what: str) -> None:
        if self.device.type != "cpu":
            work.wait()
            return
        since = time.monotonic()
        report_at, warn_at = since + REPORT_AFTER, since + WARN_EVERY
        while not self._is_done(work):
            deliver()
            now = time.monotonic()
            if now > report_at:
                report_at = float("inf")
                _within(_STORE_TIMEOUT, self._report)
            if self.timeout is None and now > warn_at:
                warn_at += WARN_EVERY
                words = self.rank, what, now - since, self._who(grace=0)
                _log.warning("Rank %d is still waiting for %s after %.0f s; %s.", *words)

    def _is_done(self, work: Any) -> bool:
        """Wait for a moment; return whether that was enough."""
        try:
            work.wait(self._slice)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises what is wrong, if it was not just in time
        return True

    def _failed(self, what: str, error: RuntimeError) -> CenterError:
        who, reason = self._who(_GRACE), str(error).strip().splitlines()[0]
        if "timed out" not in reason.lower() and "timeout" not in reason.lower():
            return CenterError(
                f"Rank {self.rank} could not complete {what}; {who}. {_ADVICE} Torch says: {reason}"
            )
        waited = "" if self.timeout is None else f"{self.timeout:g} s "
        return RoundTimeoutError(
            f"Rank {self.rank} waited {waited}for {what}; {who}. {_ADVICE} A larger `timeout` "
            f"waits longer. Torch says: {reason}"
        )

    def _who(self, grace: float) -> str:
        """Describe who is missing; others have `grace` seconds to report that they are not."""
        missing = _within(grace + _STORE_TIMEOUT, lambda: self._missing(grace))
        if missing is None:
            return "which of the other ranks are missing is not known"
        if missing:
            return "missing: " + ", ".join(f"rank {rank}" for rank in missing)
        return "all ranks had arrived, so one has died since, or a connection is broken or too slow"

    def _missing(self, grace: float) -> list[int] | None:
        """Return the ranks that have not come to where we are; None if there is no store."""
        if self._store is None:
            return None
        self._report()
        end = time.monotonic() + grace
        while (behind := self._behind(self._calls)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return behind

    def _report(self) -> None:
        """Write how many calls we have made."""
        if self._store is not None:
            self._store.set(f"calls/{self.rank}", str(self._calls))

    def _behind(self, calls: int) -> list[int]:
        """Return the ranks that have not reported so many calls."""
        keys = [f"calls/{rank}" for rank in range(self.size)]
        made = [int(self._store.get(key)) if self._store.check([key]) else 0 for key in keys]
        return [rank for rank, number in enumerate(made) if number < calls]


def _gloo(store: Any, rank: int, size: int, timeout: float) -> Any:
    """Make a group of gloo that torch does not know of.

    Torch names a group after how many a process has, too, so that ranks that have made different
    numbers of them would never meet in the next one. And it keeps every group to the end of the
    process, when a thread of a group that was just in use may still release a tensor, which ends
    the process with SIGABRT: so `part` releases it before. Nothing else does, as that waits for its
    threads, which may be waiting for a rank that never comes.
    """
    group = ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


def _within(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """Return what is answered in time; None if nothing is."""
    answers: list[_T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
