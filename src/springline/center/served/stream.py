"""Exchanges with the shards of this machine: through memory, a few blocks at a time.

Such a piece is still in cache when the shard merges it and when the worker adopts the answer, and
while the shard has it the worker makes the next one ready. So an exchange goes through `x` and `c`
about once, where a message and its reply are written and read once more each.

It is for rules without an outer optimizer: that counts its steps per parameter, not per piece.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from springline.center.errors import NonFiniteError
from springline.center.layout import Bytes, Run
from springline.center.served.messages import Message
from springline.center.served.near import POSSIBLE, SLOT, SLOTS, Piece, Ring, pieces
from springline.center.served.peer import Call, Peer, Pending
from springline.rules.rule import Rule

# Adopts a piece: the shard, the piece, the slot, the answer. Returns what is wrong, if a block was
# refused.
Adopt = Callable[[int, Piece, Bytes, int], NonFiniteError | None]
_LOOK = 0.2  # seconds without a word from any shard after which we look whether they are there
_NOTHING = np.empty(0, np.uint8)


class Streams:
    """Exchanges with those shards that are on this machine, as far as is known.

    Args:
        rule: the worker's.
        shards: the blocks of each.
    """

    def __init__(self, rule: Rule, shards: Sequence[Sequence[Run]]) -> None:
        self._before = rule.keeps_copy
        fits = rule.adopts_message and rule.reads_center and rule.outer is None
        self._pieces = [pieces(runs) for runs in shards]
        self._rings: dict[int, Ring] = {
            k: Ring()
            for k, runs in enumerate(shards)
            if POSSIBLE and fits and runs[-1].stop - runs[0].start > SLOT * SLOTS
        }
        self._elsewhere: set[int] = set()

    @property
    def near(self) -> set[int]:
        """The shards that may be here."""
        return set(self._rings) - self._elsewhere

    def look_again(self, shard: int) -> None:
        """Take it that a shard that was started again may be here now."""
        self._elsewhere.discard(shard)

    def exchange(
        self,
        shards: Mapping[int, tuple[Peer, Message]],
        adopt: Adopt,
        timeout: float | None,
    ) -> tuple[NonFiniteError | None, set[int]]:
        """Exchange with these shards.

        Returns:
            The error if a block was refused, and those shards that are not here.
        """
        try:
            streams = {
                k: Stream(
                    peer,
                    message,
                    self._before,
                    self._rings[k],
                    self._pieces[k],
                    partial(adopt, k),
                    timeout,
                )
                for k, (peer, message) in shards.items()
            }
            _finish(list(streams.values()))
        except BaseException:
            for k in shards:  # whose pieces are still under way
                self._rings[k].renew()
            raise
        far = {k for k, stream in streams.items() if stream.far}
        self._elsewhere |= far
        for k in shards:
            self._rings[k].hang_up()
        for k in far:
            self._rings[k].renew()  # gives back the memory that was filled
        refused = [stream.refused for stream in streams.values() if stream.refused]
        return refused[-1] if refused else None, far

    def close(self) -> None:
        """Let go of the memory."""
        for ring in self._rings.values():
            ring.close()
        self._rings = {}


class Stream(Call):
    """An exchange with a shard, piece by piece.

    Args:
        peer: the shard.
        message: what is sent to it.
        before: whether the answer is to be `c` as it was.
        ring: through which.
        pieces: of it.
        adopt: what is done with an answer: piece, slot and answer.
        timeout: as of any call.
    """

    def __init__(
        self,
        peer: Peer,
        message: Message,
        before: bool,
        ring: Ring,
        pieces: Sequence[Piece],
        adopt: Callable[[Piece, Bytes, int], NonFiniteError | None],
        timeout: float | None,
    ) -> None:
        self._x = message.data
        self._ring = ring
        self._pieces = pieces
        self._adopt = adopt
        self._filled = self._adopted = 0
        self.far = False
        self.refused: NonFiniteError | None = None
        bare = replace(message, data=_NOTHING)
        super().__init__(peer, "stream", bare, before, timeout=timeout)

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more."""
        return self.far or self.refused is not None or self._adopted == len(self._pieces)

    def fill(self) -> None:
        """Fill a slot, if one is free."""
        if self._filled < min(len(self._pieces), self._adopted + SLOTS):
            data = self._x[self._pieces[self._filled].place]
            np.copyto(self._ring.slots[self._filled % SLOTS][: len(data)], data)
            self._filled += 1
            self._ring.say()

    def fileno(self) -> int:
        """Return what is readable when there are answers."""
        return self._ring.fileno()

    def advance(self) -> None:
        """Adopt the answers that are there, and send what comes next."""
        self.is_back()
        for answer in self._ring.hear():
            piece, slot = self._pieces[self._adopted], self._ring.slots[self._adopted % SLOTS]
            self.refused = self._adopt(piece, slot, answer)
            self._adopted += 1
            if self.refused:
                return
            self.fill()

    def check(self) -> None:
        """Look what became of the call, as nothing comes any more."""
        if self.look(0):
            self.far = self.answer is False
            if not (self.far or _ready([self], 0)):  # that was the answer to somebody else
                self._pending = self._ask()
        for _ in range(SLOTS if not self.far else 0):
            self.fill()

    def _ask(self) -> Pending:
        if self._filled:
            self._ring.renew()  # the old slots may still be written to
        self._filled = self._adopted
        return self._peer.ask(self._method, *self._arguments, self._ring.open(), self._adopted)


def _finish(streams: Sequence[Stream]) -> None:
    """Bring exchanges to their end, all at once."""
    for _ in range(SLOTS):
        for stream in streams:
            stream.fill()
    while streams := [stream for stream in streams if not stream.done]:
        ready = _ready(streams, _LOOK)
        for stream in streams:
            if stream.fileno() in ready:
                stream.advance()
            elif not ready:
                stream.check()


def _ready(streams: Sequence[Stream], seconds: float) -> set[int]:
    """Return where there are answers; wait for the first."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream, select.POLLIN)
    return {end for end, _ in poll.poll(seconds * 1000)}
