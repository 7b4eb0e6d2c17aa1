"""A process group of our own: sums and texts, and errors that say what happened and what to do.

Nothing else uses it, so that an exchange in the background meets no other communication of the
script, whatever that does meanwhile. Texts travel as bytes, never as pickles.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from springline.center.collective import gloo
from springline.center.collective.roll import Roll
from springline.center.errors import CenterError, RoundTimeoutError
from springline.center.waiting import WARN_EVERY

_SLICE = 1.0  # seconds: torch's wait hears no signal
TELL = 1.0  # seconds of waiting after which a rank says so; less than `GRACE`, see roll.py
_log = logging.getLogger("springline")


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
        self._slice = timedelta(seconds=_SLICE if timeout is None else min(_SLICE, timeout / 4))
        self.broken = False
        self._rounds = 0
        self._roll: Roll | None = None
        self.device = torch.device("cpu")
        self.machines = [[rank] for rank in range(self.size)]
        self._own: Any = group
        self._near: Any = None  # the ranks of this machine
        self._far: Any = group  # the speakers
        self._store: Any = None  # of a group of gloo
        if isinstance(group, dist.ProcessGroup):
            self._own = self._far = self._guard("the start", lambda: self._like(group))

    def _like(self, group: dist.ProcessGroup) -> Any:
        """Make a group of the same ranks and the same kind."""
        backends = dict(
            part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part
        )
        if backends.get("cpu") == "gloo":
            self._store = gloo.store_of(group)
            self._roll = Roll(self._store, self.rank, self.size)
            self._roll.meet(gloo.seconds(self.timeout))
            return gloo.make(self._store, self.rank, self.size, self.timeout)
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
        self._roll = Roll(made.get_group_store(), self.rank, self.size)
        return made

    @property
    def divisible(self) -> bool:
        """Whether parts of it can be groups of their own, and memory is what is added up."""
        return self._store is not None and self.size > 1

    @property
    def mates(self) -> list[int]:
        """The ranks of this machine; the first is its speaker."""
        return next(ranks for ranks in self.machines if self.rank in ranks)

    @property
    def speaks(self) -> bool:
        """Whether this rank is its machine's speaker."""
        return self.mates[0] == self.rank

    def divide(self, machines: list[list[int]]) -> None:
        """Let ranks meet by machine from now on; all ranks must, with the same ones."""
        self.machines = machines
        if len(machines) == 1:
            self._near, self._far = self._own, None
        elif len(machines) < self.size:
            speakers = [ranks[0] for ranks in machines]
            self._near = self._part_of(self.mates) if len(self.mates) > 1 else None
            self._far = self._part_of(speakers) if self.speaks else None

    def _part_of(self, ranks: list[int]) -> Any:
        """Make a process group of some of our ranks."""
        store = PrefixStore("part-" + "-".join(str(rank) for rank in ranks), self._store)
        given = store, ranks.index(self.rank), len(ranks), self.timeout
        return self._guard("the start", lambda: gloo.make(*given))

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """A round; who does not come to its end can take part in no other."""
        self.check()
        self._rounds += 1
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def meet(self, done: bool = True) -> bool:
        """Wait for all ranks of this machine; return whether all of them are done."""
        self.check()
        if self._near is None:
            return done
        size = 2 * len(self.mates)  # so many that each rank hears of both its neighbours
        undone = torch.full((size,), float(not done), device="cpu")
        self._guard(self._point, lambda: [self._near.allreduce([undone])], near=True)
        return not undone.any()

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum over all machines, with one all-reduce each.

        The speakers do. As it may take longer than a rank waits for another, theirs come to the
        ranks of their machine now and then, and say that they are not done.
        """
        start = partial(_all_reduce, self._far, tensors)
        self._guard(self._point, start, meanwhile=lambda: self.meet(done=False))

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a tensor by rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._guard("the start", lambda: [self._own.broadcast([tensor], options)])

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank."""
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(raw)
        lengths = lengths.to(self.device)
        self._guard("all workers to start", lambda: [self._own.allreduce([lengths])])
        sizes = [int(n) for n in lengths]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(raw)] = raw
        mine = mine.to(self.device)
        rows = [torch.empty_like(mine) for _ in sizes]
        self._guard("all workers to start", lambda: [self._own.allgather([rows], [mine])])
        return [r[:n].cpu().numpy().tobytes().decode() for r, n in zip(rows, sizes, strict=True)]

    def part(self) -> None:
        """Wait, for some seconds, until all ranks have received what was sent last; then close.

        Without it the end of one process may reset a connection that another is still reading.
        """
        if not self.broken and self._roll:
            self._roll.part()
            groups = {id(group): group for group in (self._own, self._near, self._far) if group}
            self._own = self._near = self._far = None
            while self._store is not None and groups:
                gloo.drop(groups.popitem()[1])
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

    def _guard(
        self,
        what: str,
        start: Callable[[], Any],
        near: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> Any:
        """Start communication and wait for it; no other can follow one that fails.

        Args:
            what: is waited for.
            start: returns what to wait for.
            near: whether it is between the ranks of this machine alone.
            meanwhile: is called now and then.
        """
        self.check()
        try:
            started = start()
            for work in started if isinstance(started, list) else ():
                self._wait(work, what, near, meanwhile)
        except CenterError:  # it says all that there is to say
            self.broken = True
            raise
        except RuntimeError as error:
            self.broken = True
            raise self._failed(what, error, near) from error
        except BaseException:  # Ctrl-C, while others go on
            self.broken = True
            raise
        return started

    def _wait(
        self, work: Any, what: str, near: bool, meanwhile: Callable[[], object] | None
    ) -> None:
        if self.device.type != "cpu":
            work.wait()
            return
        since = time.monotonic()
        warn_at = since + WARN_EVERY
        try:
            while not self._is_done(work):
                if meanwhile:
                    meanwhile()
                waited = time.monotonic() - since
                if self._roll and waited > TELL:
                    self._roll.wait_at(self._point)
                if self.timeout is None and time.monotonic() > warn_at:
                    warn_at += WARN_EVERY
                    words = self.rank, what, waited, self._who(near, failed=False)
                    _log.warning("Rank %d waits for %s since %.0f s; %s.", *words)
        finally:
            if self._roll:
                self._roll.go_on()

    def _is_done(self, work: Any) -> bool:
        """Wait for a moment; return whether that was enough."""
        try:
            work.wait(self._slice)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # raises what is wrong, if it was not just in time
        return True

    def _failed(self, what: str, error: RuntimeError, near: bool) -> CenterError:
        reason = str(error).strip().splitlines()[0]
        late = "timed out" in reason.lower() or "timeout" in reason.lower()
        who = self._who(near, failed=True)
        advice = (
            "A process group cannot go on without one of its ranks: end this process and start all "
            "of them again, as `torchrun --max-restarts` does; they go on from the last checkpoint."
        )
        if late:
            waited = "" if self.timeout is None else f"{self.timeout:g} s "
            text = f"Rank {self.rank} waited {waited}for {what}; {who}."
            return RoundTimeoutError(
                f"{text} {advice} A larger `timeout` waits longer. Torch says: {reason}"
            )
        return CenterError(f"Rank {self.rank} lost {what}; {who}. {advice} Torch says: {reason}")

    @property
    def _point(self) -> str:
        return f"round {self._rounds}" if self._rounds else "the start"

    def _who(self, near: bool, failed: bool) -> str:
        """Name those who give no sign that they are waiting, too.

        Where the ranks of a machine meet, one of them; others are named if all of these are there.
        """
        missing = self._roll.missing(self._point, failed) if self._roll else None
        if missing is None:
            return "which of the other ranks is missing cannot be known"
        if near:
            missing = [rank for rank in missing if rank in self.mates] or missing
        if missing:
            return "missing: " + ", ".join(f"rank {rank}" for rank in missing)
        return "all ranks are there, so that it is the connection between them"


def _all_reduce(group: Any, tensors: Sequence[Tensor]) -> list[Any]:
    return [group.allreduce([tensor]) for tensor in tensors]
