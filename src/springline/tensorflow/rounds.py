"""The rounds of averaging, as each server keeps them.

In a round every worker's variables are added to accumulators, and the last worker sets the
centers to the means. A table has, for each worker, the number of the last round that it took part
in. Rounds are numbered by the first server; a worker asks it, tells the others, and the first one
last. So a worker that was killed in between finds the same round open when it is back, takes part
where it had not, and no server is ever ahead of the others by more than that round.

A worker is entered in the table before its variables are added. Killed in between, and back in
time, it does not count twice: what was not added yet, of one round on one server, is missing in the
mean, which is then that of the others. Killed while it closes a round, it leaves that to
the next worker; the center of a variable whose mean it had taken and not yet set stays as it was
for that round.

A worker that was never there is waited for from the start. One that has left is not, however many
others leave or come back, until it comes back itself: when its next session starts, or by taking
part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from springline.tensorflow.members import Members, Table
from springline.tensorflow.shards import DeviceShard, Tensor, Turn, after, only_if
from springline.tensorflow.trio import v1

_raw = tf.raw_ops
# The last round that was closed, the one that is open, and the last that anything was added for:
_CLOSED, _OPEN, _ADDED = _OWN = "rounds closed", "round open", "round added to"
_LEFT = tf.int64.max  # took part in all rounds to come
_PER_SECOND = 2**20


def since_start(number: int) -> int:
    """Return the number of a round, counted from the start of the first server.

    Numbers begin with the time, so that a server that is new does not give old ones again.
    """
    return number % _PER_SECOND


class Rounds:
    """The rounds of one shard, under a name that all workers give; its methods are bodies."""

    def __init__(self, shard: DeviceShard, members: Members, name: str) -> None:
        self._shard = shard
        self._members = members
        self._table = Table(shard, f"{name}/rounds")
        self._turn = Turn(shard.device, f"{name}/turn")
        with v1.device(shard.device), tf.control_dependencies(None):
            self._sums = [
                _raw.ResourceConditionalAccumulator(
                    dtype=center.dtype.base_dtype,
                    shape=center.shape,
                    shared_name=f"springline/{name}/{center.op.name}",
                )
                for center in shard.centers
            ]

    def open(self) -> list[Tensor]:
        """Return the number of the round that is open, on the first server."""

        def number() -> Tensor:
            closed = self._table[_CLOSED]
            now = tf.cast(tf.timestamp(), tf.int64) * _PER_SECOND
            closed = tf.where(closed > 0, closed, now)
            with tf.control_dependencies([self._table.put(_CLOSED, closed)]):
                return closed + 1

        return [self._in_turn(number)]

    def contribute(self, number: Tensor, good: Tensor, *values: Tensor) -> list[Tensor]:
        """Take part in a round, once, and close it if all have; add the values if they are good."""
        with tf.control_dependencies([number, good, *values]):
            # So that nobody has the turn while they travel.
            number, good, *here = map(tf.identity, (number, good, *values))

        def enter() -> Tensor:
            with tf.control_dependencies([self._begin(number)]):
                entered = self._table.put(self._members.task, number)
            with tf.control_dependencies([entered]):
                return only_if(good, lambda: self._add(number, here))

        def take_part() -> Tensor:
            last = self._table[self._members.task]
            may = (number > self._table[_CLOSED]) & ((last < number) | tf.equal(last, _LEFT))
            with tf.control_dependencies([only_if(may, enter)]):
                return self._close_if_all(number)

        return [self._in_turn(take_part)]

    def leave(self) -> list[Tensor]:
        """Be no member until coming back, and close the round if all others are in it."""

        def go() -> Tensor:
            with tf.control_dependencies([self._table.put(self._members.task, _LEFT)]):
                return self._close_if_all(self._table[_OPEN])

        return [self._in_turn(go)]

    def come_back(self) -> list[Tensor]:
        """Be a member again, after having left."""
        task = self._members.task

        def come() -> Tensor:
            has_left = tf.equal(self._table[task], _LEFT)
            return only_if(has_left, lambda: after([self._table.put(task, 0)]))

        return [self._in_turn(come)]

    def look(self, number: Tensor) -> list[Tensor]:
        """Return whether a round is closed, and who is missing in it."""
        names, numbers = self._table.all()
        return [self._table[_CLOSED] >= number, self._members.missing(names, numbers, number)]

    def _in_turn(self, do: Callable[[], Tensor]) -> Tensor:
        return self._turn.take(do)

    def _begin(self, number: Tensor) -> Tensor:
        """Forget what was added for a round that will not be closed, as its numbers were lost."""

        def begin() -> Tensor:
            with tf.control_dependencies([after(self._take(lambda mean, _: mean))]):
                return after([self._table.put(_OPEN, number)])

        return only_if(self._table[_OPEN] < number, begin)

    def _add(self, number: Tensor, values: Sequence[Tensor]) -> Tensor:
        return after(
            [
                self._table.put(_ADDED, number),
                *(
                    _raw.ResourceAccumulatorApplyGradient(
                        handle=handle, local_step=tf.int64.max, gradient=value
                    )
                    for handle, value in zip(self._sums, values, strict=True)
                ),
            ]
        )

    def _take(self, do: Callable[[Tensor, Any], Any]) -> list[Tensor]:
        """Empty the accumulators that are not; do something with each mean and its center."""

        def emptied(handle: Tensor, center: Any) -> Tensor:
            def take() -> Tensor:
                mean = _raw.ResourceAccumulatorTakeGradient(
                    handle=handle, num_required=1, dtype=center.dtype.base_dtype
                )
                return after([do(mean, center)])

            return only_if(_raw.ResourceAccumulatorNumAccumulated(handle=handle) > 0, take)

        return list(map(emptied, self._sums, self._shard.centers))

    def _close_if_all(self, number: Tensor) -> Tensor:
        names, numbers = self._table.all()
        members = tf.reduce_all(tf.not_equal(names[:, None], tf.constant(_OWN)), 1)
        here = tf.reduce_sum(tf.cast(members & (numbers >= number), tf.int32))
        some = tf.reduce_any(members & tf.equal(numbers, number))
        all_ = some & (here >= self._members.workers) & (number > self._table[_CLOSED])

        def close() -> Tensor:
            means = self._take(lambda mean, center: center.assign(mean))
            counted = only_if(
                tf.equal(self._table[_ADDED], number), lambda: after(self._shard.count())
            )
            with tf.control_dependencies([*means, counted]):
                return after([self._table.put(_CLOSED, number)])

        return only_if(all_, close)
