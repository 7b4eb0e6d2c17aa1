"""Eager mode: no graph and no parameter servers, a center of springline's own holds `c`.

A step is written once, for eager mode and for `tf.function`. The variables stay TensorFlow's: only
when an exchange is due do their values go to the worker's buffers and back. Inside `tf.function`
Python is called then, and only then.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from springline import progress
from springline import run as runs
from springline.center import Center, LocalCenter
from springline.center.checkpoint import write_tensors
from springline.tensorflow.eager_state import EagerState, beside_views
from springline.tensorflow.given import brief, check_run, first_value, unique_names, variables_of
from springline.tensorflow.private import learning_rate_of
from springline.tensorflow.trio import Trio, Variable
from springline.worker import Worker

if TYPE_CHECKING:
    from springline.tensorflow.optimizer import CenterOptimizer

Array = NDArray[Any]
Pairs = list[tuple[Any, Variable]]
# XLA cannot compile this operation, and says so by its name.
_CALLS_PYTHON = "springline_exchange_calls_Python_so_leave_out_jit_compile"


class EagerCenter:
    """The variables of an optimizer and their worker, made when the variables are known.

    Args:
        optimizer: whose they are; its `_core_rule` says what an exchange does.
        num_worker: how many workers there are; the run must have as many.
    """

    def __init__(self, optimizer: CenterOptimizer, num_worker: int) -> None:
        self._optimizer = optimizer
        self._run = runs.Run.from_environment()
        check_run(self._run, num_worker)
        self._process = os.getpid()
        self._worker: Worker | None = None
        self._trios: dict[str, Trio] = {}  # by the parameter's name
        self._names: dict[Any, str] = {}  # by the variable
        self._seen: Any = None  # which variables had a gradient since the last exchange
        self.state = EagerState(self, optimizer._opt)

    @property
    def worker(self) -> Worker:
        """The worker; there is one after the first gradients."""
        if self._worker is None:
            raise RuntimeError(
                "There is no center yet: the first `minimize` or `compute_gradients` makes it."
            )
        return self._worker

    @property
    def center(self) -> Center:
        """The worker's center."""
        return self.worker.center

    @property
    def local_step(self) -> int:
        """Local steps so far."""
        return int(self._optimizer._local_step.numpy())

    @property
    def start_step(self) -> int:
        """Steps of this rank before its restart."""
        return self.worker.start_step

    @property
    def joined(self) -> bool:
        """Whether there is a worker."""
        return self._worker is not None

    @property
    def variables(self) -> dict[str, Variable]:
        """The variables in the center, by name."""
        return {name: trio.local for name, trio in self._trios.items()}

    def trio(self, variable: Variable) -> Trio:
        """Return what belongs to a variable. Its center is not TensorFlow's: None."""
        return self._trios[self._names[variable.ref()]]

    # Before the first step.

    def attach(self, variables: Iterable[Any]) -> bool:
        """Make the worker of these variables, once; return whether that gave them other values."""
        new = {v.ref(): v for v in variables if v.ref() not in self._names}
        if not new:
            return False
        if self._worker is not None:
            raise ValueError(
                f"{next(iter(new.values())).name!r} is not in the center, which was made with the "
                f"variables of the first step: {', '.join(self._trios)}. Let the first `minimize` "
                "or `compute_gradients` see all variables."
            )
        with tf.init_scope():  # now, even while a function is being traced
            return self._join(unique_names(new.values()))

    def _join(self, variables: dict[str, Variable]) -> bool:
        values = {name: first_value(v) for name, v in variables.items()}
        optimizer = self._optimizer
        rule = optimizer._core_rule()
        self._worker = worker = Worker(
            values,
            rule,
            self._run.center_directory,
            self._run.rank,
            use_locking=optimizer._locking or not rule.outer.stateless,  # old code may say False
            synchronous=optimizer._synchronous,
            timeout=optimizer._timeout,
        )
        progress.note_worker(self)  # it knows the local step between exchanges, the worker does not
        progress.note_first_step(worker)
        if not isinstance(worker.center, LocalCenter):
            atexit.register(self._at_exit)
        views = beside_views(worker)
        for name, v in variables.items():
            beside = None
            if name in views:  # c̃ = c, a = 0
                beside = tf.Variable(views[name].astype(values[name].dtype), trainable=False)
            self._trios[name] = Trio(v, None, beside)
            self._names[v.ref()] = name
        if worker.rule.accumulates:
            self._seen = tf.Variable(tf.zeros([len(variables)], tf.bool), trainable=False)
        changed = any(not np.array_equal(values[n], x) for n, x in worker.parameters.items())
        if changed:
            self._write()
        self.state.restore()
        return changed

    def gradients(self, loss: Any, var_list: Any, **others: Any) -> Pairs:
        """Return the gradients of `loss`, at the center if this is the first step."""
        if not callable(loss):
            raise RuntimeError(  # noqa: TRY004 - as documented
                "In eager mode `loss` must be a callable without arguments that returns the value "
                f"to minimize, such as `lambda: model_loss(x, y)`. Received: {brief(loss)}."
            )
        if var_list is not None:
            self.attach(var_list)
        compute = self._optimizer._opt.compute_gradients
        pairs: Pairs = compute(loss, var_list=var_list, **others)
        if not pairs:
            raise ValueError("The loss reads no trainable variable, and `var_list` has none.")
        if self.attach(v for _, v in pairs) and tf.executing_eagerly():
            pairs = compute(loss, var_list=var_list, **others)  # elsewhere, so again
        return pairs

    # A step.

    def step(self, trained: Sequence[tuple[Any, Trio]], global_step: Any) -> Any:
        """Take a local step; return whether an exchange was due, and so was made."""
        optimizer = self._optimizer
        optimizer._opt.apply_gradients([(g, trio.local) for g, trio in trained])
        optimizer._observe(trained)
        if self._seen is not None:
            have = {self._names[trio.local.ref()] for _, trio in trained}
            self._seen.assign(self._seen | [name in have for name in self._trios])
        count = tf.identity(optimizer._local_step.assign_add(1))
        due = tf.equal(count % optimizer._period, 0)
        return tf.cond(due, lambda: self._exchange(count, global_step), lambda: tf.constant(False))

    def _exchange(self, count: Any, global_step: Any) -> Any:
        into, sent = self._received(), [count, *self._sent()]
        if tf.executing_eagerly():
            version, *values = self._swap(*(tensor.numpy() for tensor in sent))
        else:
            dtypes = [tf.int64, *(v.dtype for v in into)]
            version, *values = tf.numpy_function(self._swap, sent, dtypes, name=_CALLS_PYTHON)
        for v, value in zip(into, values, strict=True):
            v.assign(tf.ensure_shape(value, v.shape))
        self._forget()
        if global_step is not None:  # it counts the others' exchanges, too
            now = tf.cast(version, global_step.dtype)
            global_step.assign(tf.maximum(global_step + 1, now))
        return tf.constant(True)

    def _sent(self) -> list[Any]:
        """What an exchange needs: all `x`; for AGN all `a`, which of them count, and the rate."""
        trios = self._trios.values()
        sent = [trio.local.read_value() for trio in trios]
        if self._seen is not None:
            sent += [trio.beside.read_value() for trio in trios]
            rate = tf.convert_to_tensor(learning_rate_of(self._optimizer._opt))
            sent += [self._seen.read_value(), rate]
        return sent

    def _received(self) -> list[Variable]:
        """Where what comes back goes: all `x`; all `c̃`, if there are any."""
        trios = self._trios.values()
        copies = [trio.beside for trio in trios] if self.worker.local.base is not None else []
        return [*(trio.local for trio in trios), *copies]

    def take_worker(self) -> None:
        """Set the local step, and `c̃` or `a`, to what the worker has."""
        self._optimizer._local_step.assign(self.worker.local_step)
        for name, view in beside_views(self.worker).items():
            beside = self._trios[name].beside
            beside.assign(view.astype(beside.dtype.as_numpy_dtype))
        if self._seen is not None:
            self._seen.assign(self.worker.local.seen.astype(bool))

    def _forget(self) -> None:
        """`a ← 0`."""
        if self._seen is not None:
            for trio in self._trios.values():
                trio.beside.assign(tf.zeros_like(trio.beside))
            self._seen.assign(tf.zeros_like(self._seen))

    # Between TensorFlow and the worker, in numpy.

    def _swap(self, count: Any, *sent: Array) -> list[Array]:
        self._fill(int(count), sent)
        try:
            self.worker.exchange()
        except BaseException:
            self._write()  # other variables may have been exchanged
            raise
        return [np.array(self.worker.center.version, np.int64), *self._results()]

    def _fill(self, count: int, sent: Sequence[Array]) -> None:
        """Bring what is sent into the worker's buffers."""
        worker, n = self.worker, len(self._trios)
        worker.local_step = count
        for name, x in zip(self._trios, sent, strict=False):
            worker.parameters[name] = x
        if worker.local.a is not None:
            *sums, seen, rate = sent[n:]
            views = worker.layout.views(worker.local.a)
            for name, a in zip(self._trios, sums, strict=True):
                np.copyto(views[name], a)
            worker.local.seen[:] = seen
            worker.local.gradients[:] = count - worker.exchanged_at[0]
            worker.set_learning_rate(float(rate))

    def _results(self) -> list[Array]:
        """Return what `_received` takes: copies, for TensorFlow may keep what it is given."""
        worker, names = self.worker, self._trios
        results = [worker.parameters[name].copy() for name in names]
        if worker.local.base is not None:
            views = worker.layout.views(worker.local.base)
            results += [views[name].astype(x.dtype) for name, x in zip(names, results, strict=True)]
        return results

    def _write(self) -> None:
        for v, value in zip(self._received(), self._results(), strict=True):
            v.assign(value)
        self._forget()

    # The end.

    def gather(self) -> None:
        """Bring what there is now into the worker's buffers."""
        self._fill(self.local_step, [tensor.numpy() for tensor in self._sent()])

    def finish(self) -> None:
        """Exchange what the last period left over, and leave the center."""
        if self._worker is None or self._worker.finished:
            return
        atexit.unregister(self._at_exit)
        try:
            with self._worker:  # exchanges at the end of the block, and leaves in any case
                self.gather()
        finally:
            self._write()

    def final(self, timeout: float | None) -> bool:
        """Finish, wait for all others; whether this worker is to report."""
        self.finish()
        return self.worker.final(timeout)

    def _at_exit(self) -> None:
        self.worker.for_good = False  # it may have ended early, and be restarted
        progress.finish_at_exit(self.finish, self._process)

    def save_center(self, path: str | Path, model: Any) -> None:
        """Write the center as safetensors, under the variables' names; the rest is the model's."""
        values = dict(self.worker.center.values())
        others = [] if model is None else variables_of(model)
        named = unique_names({v.ref(): v for v in [*self.variables.values(), *others]}.values())
        values |= {name: v.numpy() for name, v in named.items() if name not in values}
        write_tensors(Path(path), values, {})
