"""Savers: one for the center under the model's own names, and the hook's."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from springline.tensorflow.given import variables
from springline.tensorflow.outer import OuterOptimizer
from springline.tensorflow.private import whole_name
from springline.tensorflow.trio import Variable, v1

_log = logging.getLogger("springline")


class SwappingSaver(v1.train.Saver):
    """Saves the center under the names of the model's own variables.

    Nothing is swapped, whatever it is called: each center is written under its variable's name.
    """

    def __init__(self, var_list: Any, centers: Mapping[Any, Variable], **kwargs: Any) -> None:
        if var_list is None:
            var_list = v1.trainable_variables()
        named = var_list.items() if isinstance(var_list, Mapping) else _by_name(var_list).items()
        super().__init__({name: _center(v, centers) for name, v in named}, **kwargs)

    def save(self, sess: Any, *args: Any, **kwargs: Any) -> Any:
        """Save; `sess` may be a monitored session."""
        return super().save(_plain(sess), *args, **kwargs)

    def restore(self, sess: Any, save_path: str) -> None:
        """Restore the center; `sess` may be a monitored session."""
        super().restore(_plain(sess), save_path)


class OlderSaver(v1.train.Saver):
    """Restores what older versions have saved, too.

    Args:
        outers: AGN's optimizers of the center. A checkpoint may have their state under older names,
            or not all of it, as those of TensorFlow 1; then they start from their initial values.
        **kwargs: of `tf.compat.v1.train.Saver`.
    """

    def __init__(self, outers: Sequence[OuterOptimizer], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        state = [v for outer in outers for v in outer.variables()]
        self._state = _by_name(state)
        self._renamed = [  # since older versions; slices had no name that could be found again
            (outer, v) for outer in outers for v in outer.variables() if whole_name(v) is None
        ]
        self._fresh = v1.variables_initializer(state)
        renamed = [v for _, v in self._renamed]
        self._but_renamed = _saver_without(renamed, **kwargs) if renamed else self
        self._but_state = _saver_without(state, **kwargs) if state else self

    def restore(self, sess: Any, save_path: str) -> None:
        """Restore, also a checkpoint whose names are older."""
        if not self._state or not v1.train.checkpoint_exists(save_path):
            super().restore(sess, save_path)
            return
        saved = tf.train.load_checkpoint(save_path)
        keys = saved.get_variable_to_shape_map().keys()
        missing = self._state.keys() - keys
        if not missing:
            super().restore(sess, save_path)
            return
        older = {v.op.name: self._older(saved, outer, v, keys) for outer, v in self._renamed}
        if missing <= older.keys() and all(value is not None for value in older.values()):
            self._but_renamed.restore(sess, save_path)
            for _, v in self._renamed:
                sess.run(v.initializer, {v.initial_value: older[v.op.name]})
        else:
            _log.warning(
                "%s is without %s: the center's optimizer starts from its initial values.",
                save_path,
                ", ".join(sorted(missing)),
            )
            self._but_state.restore(sess, save_path)
            sess.run(self._fresh)

    def _older(self, saved: Any, outer: Any, v: Variable, keys: Collection[str]) -> Any:
        """Return what a checkpoint has for a variable; None if its name is not unambiguous."""
        names = [v.op.name] if v.op.name in keys else outer.older_names(v.op.name, keys)
        values = [saved.get_tensor(name) for name in names]
        same = bool(values) and all((value == values[0]).all() for value in values)
        return values[0] if same else None


def _saver_without(left_out: Sequence[Variable], **kwargs: Any) -> Any:
    """Return a saver of all global variables but some."""
    refs = {v.ref() for v in left_out}
    return v1.train.Saver([v for v in v1.global_variables() if v.ref() not in refs], **kwargs)


def _by_name(var_list: Any) -> dict[str, Any]:
    """Name variables as a saver would; slices of one variable are one entry."""
    named: dict[str, Any] = {}
    for v in variables(var_list):
        whole = whole_name(v)
        if whole is None:
            named[v.op.name] = v
        else:
            named.setdefault(whole, []).append(v)
    return named


def _center(variable: Any, centers: Mapping[Any, Variable]) -> Any:
    """Return the center of a variable, or of its slices; itself where it has none."""
    if isinstance(variable, tf.Variable):
        return centers.get(variable.ref(), variable)
    return [_center(part, centers) for part in variable]


def _plain(session: Any) -> Any:
    """Return the session in a monitored one."""
    if hasattr(session, "run_step_fn"):
        return session.run_step_fn(lambda step_context: step_context.session)
    return session
