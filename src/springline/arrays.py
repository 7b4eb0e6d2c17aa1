"""What a worker holds: its parameters by name, and what the rule keeps beside them."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline import checks
from springline.center.layout import Bytes, Layout
from springline.center.local import Local
from springline.rules.rule import Rule

Array = NDArray[Any]


class InPlace(MutableMapping[str, Array]):
    """Arrays by name. Assigning to a name writes into its array: an exchange knows no other."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = dict(arrays)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __setitem__(self, name: str, value: Array) -> None:
        array = self._arrays[name]
        if value is not array:
            if np.shape(value) != array.shape:
                raise ValueError(
                    f"{name!r} has shape {array.shape}. Received: shape {np.shape(value)}."
                )
            np.copyto(array, value, casting="same_kind")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"A worker keeps all its parameters; {name!r} cannot be removed.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return repr(self._arrays)


class WorkerArrays:
    """A worker's flat buffers, and the arrays in them that a training loop uses."""

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        values: Mapping[str, Array],
        allocate: Callable[[int], Bytes],
    ) -> None:
        self.rule = rule
        self.layout = layout
        self.local = Local(layout, rule, allocate)
        wide = self._x = layout.views(self.local.x)
        narrow = {e.name: e.dtype for e in layout.entries if e.dtype != e.center_dtype}
        # float16 parameters train in their own dtype and are widened for an exchange.
        self._narrow = {name: (np.empty_like(values[name]), wide[name]) for name in narrow}
        arrays = {n: self._narrow[n][0] if n in self._narrow else wide[n] for n in wide}
        kinds = {e.name: e.kind for e in layout.entries}
        self.parameters = InPlace({n: a for n, a in arrays.items() if kinds[n] == "parameter"})
        self.buffers = InPlace({n: a for n, a in arrays.items() if kinds[n] == "buffer"})
        self._a = layout.views(self.local.a) if self.local.a is not None else {}
        self._base = layout.views(self.local.base) if self.local.base is not None else {}
        self._work = np.empty(0, np.uint8)
        self._hooks: tuple[Callable[[], Any], Callable[[], Any]] = (lambda: None, lambda: None)
        if rule.own_rates:
            self.set_learning_rate({name: rule.outer.rate(name, 0) for name in self.parameters})

    def bind(self, gather: Callable[[], Any], scatter: Callable[[], Any]) -> None:
        """Let a front end bring what it holds elsewhere into `x`, and back.

        Args:
            gather: called before `x` is read. The worker does not keep the method's object alive.
            scatter: called after `x` was written.
        """
        before, after = weakref.WeakMethod(gather), weakref.WeakMethod(scatter)

        def call(method: weakref.WeakMethod[Any]) -> None:
            if bound := method():
                bound()

        self._hooks = partial(call, before), partial(call, after)

    def gather(self) -> None:
        """Bring what is held elsewhere into `x`."""
        self._hooks[0]()
        for narrow, wide in self._narrow.values():
            np.copyto(wide, narrow)

    def scatter(self) -> None:
        """Bring `x` to where it is used."""
        for name, (narrow, wide) in self._narrow.items():
            np.copyto(narrow, wide, casting="same_kind")
            self.note_rounded(name, narrow)
        self._hooks[1]()

    def note_rounded(self, name: str, held: Array) -> None:
        """Take what is left of the worker's `x` in half precision: rounding is no step of its own.

        A rule that measures from `base` would take it for one, and the center could not leave the
        values that half precision has.
        """
        if self.rule.measures_from_base and name in self.parameters:
            x = self._x[name]
            with np.errstate(all="ignore"):
                lost = held - x
            lost[~np.isfinite(lost)] = 0  # that is refused when it is sent
            self._base[name] += lost
            np.copyto(x, held)

    def observe(self, gradients: MutableMapping[str, Array]) -> None:
        """Show the rule this step's gradients, before the inner optimizer uses them.

        Elastic averaging with ρ > 0 adds `ρ(x − c̃)` to them, in place, and an entry for each
        parameter that is not among them. AGN accumulates them; a parameter that is not among them
        had no gradient in this step.
        """
        if self.rule.penalizes or self._a:
            checks.gradients(gradients, self.parameters)
        if self.rule.penalizes:
            for name, base in self._base.items():
                x = self.parameters[name]
                if name not in gradients:
                    gradients[name] = np.zeros_like(x)
                self.rule.penalize(gradients[name], x, base, self._room_like(base))
        if self._a:
            local, index = self.local, self.layout.index
            for name, g in gradients.items():
                entry, a = index[name], self._a[name]
                if local.seen[entry]:
                    np.add(a, g, out=a)
                else:
                    np.copyto(a, g)
                    local.seen[entry] = True
            local.gradients += 1

    def set_learning_rate(self, rate: float | Mapping[str, float]) -> None:
        """Set the rate that goes with the messages of AGN and SlowMo: one, or one per parameter.

        For SlowMo it is the mean of the steps since the last exchange.
        """
        rates = rate if isinstance(rate, Mapping) else dict.fromkeys(self.parameters, rate)
        for name, value in rates.items():
            checks.parameter(name, self.parameters)
            if not (checks.is_number(value) and 0 <= value < math.inf):
                raise ValueError(
                    f"A learning rate must be a finite number >= 0. Received: {value!r} "
                    f"for {name!r}."
                )
            self.local.rates[self.layout.index[name]] = value

    def fingerprint(self) -> int:
        """Return a number that identifies the parameters; more than 1."""
        self.gather()
        found = 0
        for entry in self.layout.entries:
            if entry.kind == "parameter":
                found = zlib.crc32(entry.view(self.local.x).data, found)
        return found + 2

    def check_observed(self, fragment: int) -> None:
        """Refuse an exchange for which the rule was not shown what it sends."""
        if self.rule.accumulates and not self.local.gradients[fragment]:
            raise RuntimeError(
                f"The rule {self.rule.name!r} sends gradients, but `observe` has not been called "
                "since the last exchange. Call `worker.observe(gradients)` in every step."
            )
        rates = self.local.rates
        if self.rule.sends_rates and any(rates[self.layout.index[n]] < 0 for n in self.parameters):
            raise RuntimeError(
                f"The rule {self.rule.name!r} needs the inner learning rate. Call "
                "`worker.set_learning_rate(rate)` before the first exchange."
            )

    def _room_like(self, array: Array) -> Array:
        if self._work.nbytes < array.nbytes:
            self._work = np.empty(array.nbytes, np.uint8)
        return self._work[: array.nbytes].view(array.dtype).reshape(array.shape)
