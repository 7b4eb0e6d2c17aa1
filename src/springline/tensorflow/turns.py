"""Locks on servers, which all workers share: whoever has one takes its turn alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from springline.tensorflow.getter import v1
from springline.tensorflow.shards import Body, Shard, Tensor

_COLLECTIONS = "critical_sections", "critical_section_executions"


class Turn:
    """A lock on a device.

    Args:
        device: where it is.
        name: of the lock, the same for every worker.
    """

    def __init__(self, device: str, name: str) -> None:
        with v1.device(device), _collections_kept():
            self._section = tf.CriticalSection(shared_name=f"springline/{name}")

    def take(self, do: Callable[[], Any]) -> Any:
        """Body: do something while nobody else does."""
        with _collections_kept():
            return self._section.execute(do, exclusive_resource_access=False)


class Turns:
    """A lock on each server.

    Args:
        name: of the locks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turns: dict[str, Turn] = {}  # by the shard's device

    def make(self, shards: Sequence[Shard]) -> None:
        """Make the locks of shards; where none is made `take` does without."""
        for device in [shard.device for shard in shards if shard.trios]:
            if device not in self._turns:
                place = device.strip("/").replace("/", "_")
                self._turns[device] = Turn(device, f"{self._name}/turn_{place}")

    def take(self, shard: Shard, do: Body, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Body: do something while nobody else does, once its inputs have come."""
        turn = self._turns.get(shard.device)
        if turn is None:
            return do(*inputs)
        with tf.control_dependencies(inputs):
            return list(turn.take(lambda: do(*inputs)))


@contextmanager
def _collections_kept() -> Iterator[None]:
    """TensorFlow collects its locks; a saver cannot write them in a meta graph, and would warn."""
    graph = v1.get_default_graph()
    before = {key: graph.get_collection(key) for key in _COLLECTIONS}
    yield
    for key, kept in before.items():
        graph.clear_collection(key)
        for one in kept:
            graph.add_to_collection(key, one)
