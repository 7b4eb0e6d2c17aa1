"""All state of an optimizer in eager mode as bytes, which `tf.train.Checkpoint` saves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from springline import worker_state
from springline.tensorflow.trio import Variable
from springline.worker import Worker

if TYPE_CHECKING:
    from springline.tensorflow.eager import EagerCenter

Array = NDArray[Any]
State = dict[str, Any]
_HEAD = 8  # bytes of the length of what describes the arrays
_ARRAY = "\0"  # no variable has this name


class EagerState:
    """What is saved of an optimizer, and restored as soon as there is a worker.

    Args:
        center: the optimizer's variables and worker.
        opt: the wrapped optimizer.
    """

    def __init__(self, center: EagerCenter, opt: Any) -> None:
        self._center = center
        self._opt = opt
        self._saved = b""  # what is to be restored

    def save(self) -> bytes:
        """Return all state."""
        if not tf.executing_eagerly():  # the graph of a SavedModel is being made
            return b""
        if not self._center.joined:
            return self._saved
        self._center.gather()
        inner = save_inner(self._opt, self._center.variables)
        return pack({"worker": worker_state.save(self._center.worker), "inner": inner})

    def load(self, saved: bytes) -> None:
        """Go back to what `save` returned, now or later."""
        self._saved = saved
        if self._center.joined:
            self.restore()

    def restore(self) -> None:
        """Go back to what was loaded, if anything was."""
        if not self._saved:
            return
        worker = self._center.worker
        state, self._saved = _renamed(unpack(self._saved), worker.layout.to_json()), b""
        worker_state.check(worker, state["worker"])
        load_inner(self._opt, self._center.variables, state["inner"])
        if worker_state.own_center(worker):  # else it has the steps of others
            worker_state.load(worker, state["worker"])
            self._center.take_worker()


def _renamed(state: State, rows: list[list[Any]]) -> State:
    """Call the variables as this model does: Keras numbers its layers through a process."""
    worker, inner = state["worker"], state["inner"]
    names = {its[0]: own[0] for its, own in zip(worker["layout"], rows, strict=False)}

    def renamed(values: State) -> State:
        return {names.get(name, name): value for name, value in values.items()}

    worker["layout"] = [[names.get(name, name), *rest] for name, *rest in worker["layout"]]
    worker |= {key: renamed(worker[key]) for key in ("a", "copy") if key in worker}
    if "center" in worker:
        center = worker["center"]
        center |= {key: renamed(center[key]) for key in ("values", "outer")}
    inner["slots"] = {slot: renamed(those) for slot, those in inner["slots"].items()}
    return state


def beside_views(worker: Worker) -> dict[str, Array]:
    """Return the worker's `c̃` or `a` by name, if its rule has either."""
    kept = worker.local.base if worker.local.a is None else worker.local.a
    return {} if kept is None else worker.layout.views(kept)


def pack(state: State) -> bytes:
    """Return nested dictionaries of arrays, and of what JSON can hold, as bytes."""
    arrays: list[bytes] = []

    def describe(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: describe(part) for key, part in value.items()}
        if isinstance(value, np.ndarray | np.generic):
            arrays.append(value.tobytes())
            return {_ARRAY: [value.dtype.name, *value.shape]}
        return value

    head = json.dumps(describe(state)).encode()
    return b"".join([len(head).to_bytes(_HEAD, "little"), head, *arrays])


def unpack(data: bytes) -> State:
    """Return what was packed."""
    start = _HEAD + int.from_bytes(data[:_HEAD], "little")

    def value(described: Any) -> Any:
        nonlocal start
        if not isinstance(described, dict):
            return described
        if _ARRAY not in described:
            return {key: value(part) for key, part in described.items()}
        dtype, *shape = described[_ARRAY]
        array = np.frombuffer(data, np.dtype(dtype), math.prod(shape), start).reshape(shape)
        start += array.nbytes
        return array

    state: State = value(json.loads(data[_HEAD:start]))
    return state


def save_inner(opt: Any, variables: Mapping[str, Variable]) -> State:
    """Return the state of the wrapped optimizer: slots by name, and what it has beside them."""
    slots = _slots(opt, variables)
    others = _others(opt, slots)
    return {
        "slots": {
            name: {of: v.numpy() for of, v in those.items()} for name, those in slots.items()
        },
        "others": {str(k): v.numpy() for k, v in enumerate(others)},
    }


def load_inner(opt: Any, variables: Mapping[str, Variable], state: State) -> None:
    """Go back to what `save_inner` returned."""
    with_slots = {name for those in state["slots"].values() for name in those}
    if state["others"] or with_slots:
        _make_state(opt, [v for n, v in variables.items() if n in with_slots or not with_slots])
    slots = _slots(opt, variables)
    others = {str(k): v for k, v in enumerate(_others(opt, slots))}
    pairs = [(slots.get(name, {}), those) for name, those in state["slots"].items()]
    for made, saved in [*pairs, (others, state["others"])]:
        for key, value in saved.items():
            if key not in made or made[key].shape != value.shape:
                raise ValueError(
                    f"The checkpoint is of another optimizer than {type(opt).__name__}, or of one "
                    "with other settings. Wrap the one that was saved."
                )
            made[key].assign(value)


def _slots(opt: Any, variables: Mapping[str, Variable]) -> dict[str, dict[str, Variable]]:
    found = {
        slot: {name: opt.get_slot(v, slot) for name, v in variables.items()}
        for slot in opt.get_slot_names()
    }
    return {
        slot: {name: v for name, v in those.items() if v is not None}
        for slot, those in found.items()
    }


def _others(opt: Any, slots: Mapping[str, Mapping[str, Variable]]) -> list[Variable]:
    refs = {v.ref() for those in slots.values() for v in those.values()}
    return [v for v in opt.variables() if v.ref() not in refs]


def _make_state(opt: Any, variables: list[Variable]) -> None:
    """Let an optimizer make its variables, which it does in a step, and take that step back."""
    before = [v.read_value() for v in variables]
    opt.apply_gradients([(tf.zeros_like(v), v) for v in variables])
    for v, value in zip(variables, before, strict=True):
        v.assign(value)
