"""Savers: one for the center under the model's own names, one that never harms a living center."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from springline.tensorflow.getter import Variable, v1

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


class JoiningSaver(v1.train.Saver):
    """Restores a checkpoint into a new center, and leaves a living one alone.

    Args:
        alive: a tensor, whether the servers hold a center.
        outer: the state of AGN's optimizer of the center. TensorFlow 1's checkpoints do not have
            all of it; then it starts from its initial values.
        **kwargs: of `tf.compat.v1.train.Saver`.
    """

    def __init__(self, alive: Any, outer: Sequence[Variable], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._alive = alive
        self._outer = _by_name(outer)
        self._fresh = v1.variables_initializer(outer)
        refs = {v.ref() for v in outer}
        rest = [v for v in v1.global_variables() if v.ref() not in refs]
        self._without = v1.train.Saver(rest, **kwargs) if outer else None

    def restore(self, sess: Any, save_path: str) -> None:
        """Restore, unless the servers hold an initialised center."""
        if sess.run(self._alive):
            _log.info("The servers hold a center: it is joined, %s is not restored.", save_path)
            return
        missing = self._missing(save_path)
        if missing and self._without:
            _log.warning(
                "%s is without %s: the center's optimizer starts from its initial values.",
                save_path,
                ", ".join(missing),
            )
            self._without.restore(sess, save_path)
            sess.run(self._fresh)
        else:
            super().restore(sess, save_path)

    def _missing(self, save_path: str) -> list[str]:
        """Return what a checkpoint does not have of the center's optimizer."""
        if not self._outer or not v1.train.checkpoint_exists(save_path):
            return []
        return sorted(
            self._outer.keys()
            - tf.train.load_checkpoint(save_path).get_variable_to_shape_map().keys()
        )


def _by_name(variables: Any) -> dict[str, Any]:
    """Name variables as a saver would; slices of one variable are one entry."""
    named: dict[str, Any] = {}
    parts = (part for v in variables for part in (v if _is_partitioned(v) else [v]))
    for v in parts:
        info = getattr(v, "_save_slice_info", None)
        if info is None:
            named[getattr(v, "_shared_name", None) or v.op.name] = v
        else:
            named.setdefault(info.full_name, []).append(v)
    return named


def _is_partitioned(variable: Any) -> bool:
    return not isinstance(variable, tf.Variable) and hasattr(variable, "as_tensor")


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
