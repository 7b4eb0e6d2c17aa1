"""An optimizer that wraps another of TensorFlow's, with all that users know of the latter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from springline.tensorflow.eager import EagerCenter
from springline.tensorflow.given import (
    GradsAndVars,
    brief,
    check_mode,
    graph_loss,
    no_checkpoint,
    plain,
    scale_of,
    variables,
)
from springline.tensorflow.private import restore_slot
from springline.tensorflow.trio import Variable, v1


class WrappingOptimizer(v1.train.Optimizer, tf.train.experimental.PythonState):
    """Computes gradients and has the slots of the optimizer that it wraps."""

    _eager: EagerCenter | None  # in eager mode

    def __init__(self, opt: Any, use_locking: bool, name: str) -> None:
        super().__init__(use_locking, name)
        if not isinstance(opt, v1.train.Optimizer):
            raise TypeError(
                "The wrapped optimizer must be one of `tf.compat.v1.train`'s, such as "
                f"`tf.compat.v1.train.MomentumOptimizer`. Received: {brief(opt)}. With Keras' "
                "optimizers use `model.fit` and a callback of `springline.keras`."
            )
        self._opt = opt

    def minimize(
        self,
        loss: Any,
        global_step: Any = None,
        var_list: Sequence[Variable] | None = None,
        gate_gradients: int = v1.train.Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> Any:
        """Compute gradients of `loss`, and apply them.

        The arguments are those of `compute_gradients` and `apply_gradients`. In eager mode
        `grad_loss` is ignored.
        """
        return super().minimize(
            loss,
            global_step,
            var_list,
            gate_gradients,
            aggregation_method,
            colocate_gradients_with_ops,
            name,
            None if self._eager else grad_loss,
        )

    def compute_gradients(
        self,
        loss: Any,
        var_list: Sequence[Variable] | None = None,
        gate_gradients: int = v1.train.Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
        **kwargs: Any,
    ) -> list[tuple[Any, Variable]]:
        """Compute gradients of `loss`, for `apply_gradients`.

        Args:
            loss: a tensor, or a callable without arguments that returns one; in eager mode a
                callable.
            var_list: the variables; by default all trainable ones of the graph, in eager mode
                those that the loss reads.
            gate_gradients: `GATE_NONE`, `GATE_OP` or `GATE_GRAPH`; not in eager mode.
            aggregation_method: of `tf.AggregationMethod`, how gradient terms are added; not in
                eager mode.
            colocate_gradients_with_ops: whether gradients are computed where their operations are;
                not in eager mode.
            grad_loss: the gradient of `loss` itself, for instance a loss scale.
            **kwargs: what the wrapped optimizer's own `compute_gradients` takes beside that.

        Returns:
            (gradient, variable) pairs; a gradient is a tensor, an `IndexedSlices` or None.

        Raises:
            TypeError: `var_list` has something that is no variable.
            ValueError: another argument is wrong, or there are no variables.
            RuntimeError: in eager mode, `loss` is not callable.
        """
        check_mode(self._eager is not None)
        if var_list is not None:
            var_list = variables(var_list)
        if self._eager:
            found = self._eager.gradients(loss, var_list, grad_loss=grad_loss, **kwargs)
            return self._penalize(found, grad_loss)
        loss = graph_loss(loss)
        if grad_loss is not None:
            grad_loss = scale_of(loss, grad_loss)
        found = self._opt.compute_gradients(
            loss,
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
            **kwargs,
        )
        return self._penalize(found, grad_loss)

    def _penalize(self, gradients: GradsAndVars, grad_loss: Any) -> list[tuple[Any, Variable]]:
        """Add to the gradients what the rule adds to the loss."""
        return list(gradients)

    def get_slot(self, var: Variable, name: str) -> Any:
        """Return a slot of the wrapped optimizer, or None."""
        return self._opt.get_slot(plain(var), name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the wrapped optimizer's slots."""
        return list(self._opt.get_slot_names())

    def variables(self) -> list[Variable]:
        """Return all variables of the wrapped optimizer's state."""
        return list(self._opt.variables())

    # What `tf.train.Checkpoint` calls.

    def serialize(self) -> bytes:
        """Return all state; in eager mode."""
        if self._eager is None:
            raise no_checkpoint()
        return self._eager.state.save()

    def deserialize(self, string_value: bytes) -> None:
        """Go back to what `serialize` returned; in eager mode."""
        if self._eager is None:
            raise no_checkpoint()
        self._eager.state.load(string_value)

    def _create_or_restore_slot_variable(
        self, slot_variable_position: Any, slot_name: str, variable: Any
    ) -> None:
        restore_slot(self._opt, slot_variable_position, slot_name, plain(variable))
