"""Savers: one for the center under the model's own names, one that never harms a living center."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from springline.tensorflow.getter import Variable, v1

_log = logging.getLogger("springline")


class SwappingSaver(v1.train.Saver):
    """Saves the center under the names of the model's own variables.

    Nothing is swapped, whatever it is called: each center is written under its variable's name.

    Args:
        var_list: what to save, as for `tf.compat.v1.train.Saver`.
        centers: of the variables that have one.
        **kwargs: of `tf.compat.v1.train.Saver`.
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
    """Restores a checkpoint into a new center, and leaves a living one alone."""

    def __init__(self, alive: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._alive = alive

    def restore(self, sess: Any, save_path: str) -> None:
        """Restore, unless the servers hold an initialised center."""
        if sess.run(self._alive):
            _log.info("The servers hold a center: it is joined, %s is not restored.", save_path)
        else:
            super().restore(sess, save_path)


def _by_name(variables: Any) -> dict[str, Any]:
    """Name variables as a saver would; slices of one variable are one entry."""
    named: dict[str, Any] = {}
    for v in variables:
        info = getattr(v, "_save_slice_info", None)
        if info is None:
            named[getattr(v, "_shared_name", None) or v.op.name] = v
        else:
            named.setdefault(info.full_name, []).append(v)
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
