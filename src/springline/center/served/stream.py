"""Exchanges with the shards of this machine: through memory, a few blocks at a time.

Such a piece is still in cache when the shard merges it and when the worker adopts the answer, and
while the shard has it the worker makes the next one ready. So an exchange goes through `x` and `c`
about once, where a message and its reply are written and read once more each.

Pieces are made of whole blocks, which are whole parameters where an outer optimizer wants to see
these; if one of them is too large for a slot, the part goes as a message.
"""

from __future__ import annotations

import contextlib
import logging
import select
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from springline.center.errors import NonFiniteError
from springline.center.layout import Bytes
from springline.center.served import near
from springline.center.served.near import (
    AGAIN,
    LARGEST,
    POSSIBLE,
    SLOTS,
    Address,
    Ring,
)
from springline.center.served.peer import Call, NotHereError, Peer, Pending
from springline.center.served.pieces import Piece, slot_for

# Returns a request: after so many pieces that were adopted, through the memory at an address.
Pack = Callable[[int, Address], bytes]
Line = tuple[Ring, Pending | None]  # with the call by which the shard is at it, if it is
Fill = Callable[[int, Piece, Bytes], None]  # fills a slot: the shard, the piece, the slot
# Adopts a piece: the shard, the piece, the slot, the answer. Returns what is wrong, if a block was
# refused.
Adopt = Callable[[int, Piece, Bytes, int], NonFiniteError | None]
_LOOK = 0.2  # seconds without a word from any shard after which we look whether they are there
_log = logging.getLogger("springline")


class Streams:
    """Exchanges with those shards that are on this machine, as far as is known.

    Args:
        pieces: of each shard.
        check: as of any call.
    """

    def __init__(self, pieces: Sequence[Sequence[Piece]], check: Callable[[], None]) -> None:
        self._pieces = pieces
        self._check = check
        self._slots = [slot_for(shard) for shard in pieces]
        large = [k for k, shard in enumerate(pieces) if shard[-1].place.stop > near.SMALL]
        self._fits = {k for k in large if POSSIBLE and self._slots[k] <= LARGEST}
        self.near = set(self._fits)  # which may be here
        self._lines: dict[int, Line] = {}

    def look_again(self, shard: int) -> None:
        """Take it that a shard that was started again may be here now."""
        self.near |= self._fits & {shard}

    def exchange(
        self,
        shards: Mapping[int, tuple[Peer, Pack]],
        fill: Fill,
        adopt: Adopt,
        timeout: float | None,
    ) -> tuple[NonFiniteError | None, dict[int, int]]:
        """Exchange with these shards.

        Args:
            shards: which, and what each is asked.
            fill: fills a slot with a piece.
            adopt: what is done with an answer.
            timeout: as of any call.

        Returns:
            The error if a block was not finite, and ended the exchange with its shard; and of those
            shards that are not here, or cannot be reached like this, how many pieces were exchanged
            before.
        """
        streams: dict[int, Stream] = {}
        try:
            for k, (peer, pack) in shards.items():
                line = self._lines.pop(k, None)  # put back when nothing is under way any more
                make = partial(Ring, self._slots[k])
                own = line, make, self._pieces[k], partial(fill, k), partial(adopt, k)
                streams[k] = Stream(peer, pack, *own, timeout, self._check)
            _finish(list(streams.values()))
            far = {k: stream.adopted for k, stream in streams.items() if stream.far}
            self.near -= set(far)
            for k in shards.keys() - far.keys():
                self._lines[k] = streams[k].let_go()
        finally:
            for stream in streams.values():
                stream.close()
        problems = [stream.problem for stream in streams.values() if stream.problem]
        return problems[-1] if problems else None, far

    def close(self) -> None:
        """Let go of the memory; the shards leave."""
        while self._lines:
            ring, _ = self._lines.popitem()[1]
            ring.close()


class Stream(Call):
    """An exchange with a shard, piece by piece.

    A shard that has stayed since the last one is told of it, any other is called. If the call is
    lost, the pieces that were not answered are sent again, and of those that the shard had applied
    the worker takes the center.

    Args:
        peer: the shard.
        pack: what it is asked, with the pieces that were adopted and the address of the ring.
        line: through which, or None for a new one.
        make: makes a new ring.
        pieces: of the shard.
        fill: fills a slot with a piece.
        adopt: what is done with an answer: piece, slot and answer.
        timeout: as of any call.
        check: the same.
    """

    def __init__(
        self,
        peer: Peer,
        pack: Pack,
        line: Line | None,
        make: Callable[[], Ring],
        pieces: Sequence[Piece],
        fill: Callable[[Piece, Bytes], None],
        adopt: Callable[[Piece, Bytes, int], NonFiniteError | None],
        timeout: float | None,
        check: Callable[[], None],
    ) -> None:
        self._pack = pack
        self._ring: Ring | None
        self._visit: Pending | None  # the call by which the shard is at the ring
        self._ring, self._visit = line or (None, None)
        self._make = make
        self._pieces = pieces
        self._fill = fill
        self._adopt = adopt
        self._filled = self.adopted = 0
        self._forgotten = False
        self.far = False
        self.refused: NonFiniteError | None = None  # by the shard
        self._unfit: NonFiniteError | None = None  # to be sent: the piece after the last
        super().__init__(peer, "stream", timeout=timeout, check=check)

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more."""
        end = self._filled if self._unfit else len(self._pieces)
        return self.far or self.refused is not None or self.adopted == end

    @property
    def problem(self) -> NonFiniteError | None:
        """What was not finite, if a block was not exchanged for that."""
        return self.refused or self._unfit

    @property
    def ring(self) -> Ring:
        """The memory and the pipes; new ones if there are none."""
        if self._ring is None:
            self._ring = self._make()
        return self._ring

    def fill(self) -> None:
        """Fill a slot, if one is free."""
        room = self._filled < min(len(self._pieces), self.adopted + SLOTS)
        if room and not self.far and not self._unfit:
            try:
                self._fill(self._pieces[self._filled], self.ring.slots[self._filled % SLOTS])
            except NonFiniteError as error:
                self._unfit = error
                return
            self._filled += 1
            self.ring.say()

    def advance(self, more: bool = True) -> None:
        """Adopt the answers that are there, and send what comes next, if there is to be more."""
        self.heard()
        for answer in self.ring.hear():
            piece, slot = self._pieces[self.adopted], self.ring.slots[self.adopted % SLOTS]
            self.refused = self._adopt(piece, slot, answer)
            self.adopted += 1
            if answer == AGAIN and not self._forgotten:
                say_forgotten(self._peer)
                self._forgotten = True
            if self.refused:
                return
            if more:
                self.fill()

    def check(self) -> None:
        """Look what became of the call, as nothing comes any more."""
        if self.look(0):
            self.far = self.far or self.answer is False
            if not (self.far or _ready([self], 0)):  # the shard has left, or was here before
                self._pending = self._ask()
        for _ in range(SLOTS):
            self.fill()

    def let_go(self) -> Line:
        """Return the ring, for the next exchange; the shard stays if it expects one."""
        ring, self._ring = self.ring, None
        visit = None if self.problem else self._visit
        if visit is None:
            ring.hang_up()
        return ring, visit

    def close(self) -> None:
        """Let go of the ring, if it was not returned."""
        ring, self._ring = self._ring, None
        if ring:
            ring.close()

    def _ask(self) -> Pending:
        visit, self._visit = self._visit, None
        if self._filled:  # again
            while not self.done and _ready([self], 0):
                self.advance(more=False)  # what was answered all the same
            if self.done:
                return _Answered(True)
            self.close()  # its slots may still be written to
            visit = None
        try:
            if not (visit and self._tell(visit)):
                visit = None
                self.ring.open()
        except OSError:  # no more files, for instance
            self.far = True
            return _Answered(False)
        self._filled, self._unfit = self.adopted, None
        self._visit = visit or self._peer.ask("stream", self._request())
        return self._visit

    def _tell(self, visit: Pending) -> bool:
        """Tell the shard of this exchange, if it is still here and can be told so."""
        with contextlib.suppress(Exception):  # whatever it is, who calls it will learn of it
            try:
                visit.result(0)
            except NotHereError:
                return self.ring.ask(self._request())
        return False

    def _request(self) -> bytes:
        return self._pack(self.adopted, self.ring.address)


class _Answered:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def result(self, timeout: float) -> Any:
        return self._answer


def say_forgotten(peer: Peer) -> None:
    """Say that an exchange was applied, but not what the worker would have adopted."""
    _log.warning(
        "%s had this exchange already, but its answer is lost: going on from the center.", peer.name
    )


def _finish(streams: Sequence[Stream]) -> None:
    """Bring exchanges to their end, all at once."""
    for _ in range(SLOTS):
        for stream in streams:
            stream.fill()
    while streams := [stream for stream in streams if not stream.done]:
        ready = _ready(streams, _LOOK)
        for stream in streams:
            if stream.ring.fileno() in ready:
                stream.advance()
            elif not ready:
                stream.check()


def _ready(streams: Sequence[Stream], seconds: float) -> set[int]:
    """Return where there are answers; wait for the first."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream.ring, select.POLLIN)
    return {end for end, _ in poll.poll(seconds * 1000)}
