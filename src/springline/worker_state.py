"""A worker's part of an optimizer's saved state: plain values, and arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline.center import LayoutError, LocalCenter, SettingsError
from springline.center.plan import BASE, EXCHANGES
from springline.worker import Worker

Array = NDArray[Any]
State = dict[str, Any]


def save(worker: Worker, copy: Callable[[Array], Any] = np.copy) -> State:
    """Return the counters, `a` and `c̃`, and the center if it is this worker's own.

    Args:
        worker: whose they are.
        copy: makes of an array what is to be saved.
    """
    local, layout = worker.local, worker.layout
    state: State = {
        "layout": layout.to_json(),
        "settings": worker.center.settings,
        "local_step": worker.local_step,
        "start_step": worker.start_step,
        "exchanged_at": list(worker.exchanged_at),
        "due": worker.pace.due,
        "gradients": local.gradients.tolist(),
        "begun": worker.begun,
    }
    if local.a is not None:
        views = layout.views(local.a)
        state["a"] = {n: copy(views[n]) for n, i in layout.index.items() if local.seen[i]}
    if local.base is not None:
        state["copy"] = {n: copy(v) for n, v in layout.views(local.base).items()}
    if worker.background and (flight := worker.background.save(copy)):
        state["in_flight"] = flight
    if own := own_center(worker):
        state["center"] = {
            "version": own.version,
            "exchanges": int(own.memory.ranks[0, EXCHANGES]),
            "values": {n: copy(v) for n, v in own.values().items()},
            "outer": {
                layout.entries[i].name: {key: copy(v) for key, v in arrays.items()}
                for i, arrays in own.memory.state_of(own.plan).items()
            },
        }
    return state


def check(worker: Worker, state: State) -> None:
    """Refuse a state of another model or rule, before anything is changed."""
    for mine, its in zip_longest(worker.layout.to_json(), state["layout"]):
        if mine is None or its is None or mine[:2] != its[:2] or mine[3] != its[3]:
            raise LayoutError(
                f"The state belongs to another model: where it has {_describe(its)}, this one has "
                f"{_describe(mine)}. Nothing was loaded."
            )
    keys = ["rule", "fragments", *["outer"] * ("center" in state)]
    keys += ["delay"] * ("in_flight" in state)  # a message of this worker's is to be adopted then
    for key in keys:
        ours, its = worker.center.settings.get(key), state["settings"].get(key)
        if ours != its:
            raise SettingsError(
                f"The state was saved with {key}={its!r}, this optimizer has {key}={ours!r}. "
                "Make it with the settings of the one that was saved. Nothing was loaded."
            )


def load(worker: Worker, state: State) -> None:
    """Go back to what `save` returned. Arrays that it does not have stay as they are."""
    local, layout = worker.local, worker.layout
    # Whether the center is to take what the model has loaded: not if it is restored itself.
    worker.begun = state.get("begun", True) and "center" in state
    worker.local_step, worker.start_step = state["local_step"], state["start_step"]
    worker.exchanged_at, worker.missed = list(state["exchanged_at"]), False
    local.forget_gradients()
    local.gradients[:] = state["gradients"]
    if own := own_center(worker):
        _load_center(own, state.get("center"))
    if local.base is not None:
        _write(layout.views(local.base), {**worker.center.values(), **state.get("copy", {})})
    worker.plan_next()
    worker.pace.resume(worker.local_step)
    if state["settings"]["period"] == worker.center.settings["period"]:
        # Not for a schedule, in the middle of a period.
        worker.pace.due = state.get("due", worker.pace.due)
    if worker.background and "in_flight" in state:
        worker.background.load(state["in_flight"])
    if local.a is not None:
        _write(layout.views(local.a), state["a"])
        for name in state["a"]:
            local.seen[layout.index[name]] = True


def own_center(worker: Worker) -> LocalCenter | None:
    """Return the worker's center if it is in this process and of no other worker."""
    center = worker.center
    return center if isinstance(center, LocalCenter) and center.plan.workers == 1 else None


def _load_center(center: LocalCenter, state: State | None) -> None:
    if state is not None:
        center.memory.ranks[0, EXCHANGES] = state["exchanges"]
        center.memory.head[BASE] += state["version"] - center.version
        _write(center.layout.views(center.memory.center), state["values"])
        arrays = center.memory.state_of(center.plan)
        for name, values in state["outer"].items():
            _write(arrays[center.layout.index[name]], values)


def _write(arrays: Mapping[str, Array], saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        np.copyto(arrays[name], np.asarray(value))


def _describe(row: list[Any] | None) -> str:
    return "nothing" if row is None else f"{row[3]} {row[0]!r} of shape {tuple(row[1])}"
