"""The callbacks, one per rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from springline import rules
from springline.keras.callback import CenterCallback, Options
from springline.keras.observed import Observed, outer_like
from springline.keras.refused import check_outer
from springline.rules import AsyncDiLoCo as AsyncDiLoCoRule
from springline.rules import DiLoCo as DiLoCoRule
from springline.rules import ElasticAverage as ElasticAverageRule
from springline.rules import ModelAverage as ModelAverageRule
from springline.rules import Outer
from springline.rules.diloco import Staleness
from springline.rules.fragments import Fragments
from springline.rules.period import Period

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ElasticAverage(CenterCallback):
    """Elastic averaging: every few steps worker and center are pulled towards each other.

    Args:
        period: τ, local steps between two exchanges of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        moving_rate: α in (0, 1], by default 0.9 / workers.
        rho: ρ, the exploration penalty: the loss gains `ρ·½‖x − c̃‖²`, with `c̃` the center as it
            was at the last exchange. It needs `optimizer`.
        optimizer: with `rho`, any of Keras' or its name. The model is compiled with
            `callback.optimizer`, which is around it.
        fragments: into how many parts the model is cut, or lists of their weights' paths (or the
            beginnings of paths); one is exchanged every period/fragments steps.
        overlap: exchange in the background, and keep the steps that are made meanwhile.
        synchronous: whether all workers wait for each other before the first step.
        **options: those of all callbacks; see `Options`.

    >>> callback = ElasticAverage(period=20)  # model.fit(..., callbacks=[callback])
    """

    def __init__(
        self,
        *,
        period: Period = 10,
        moving_rate: float | None = None,
        rho: float = 0.0,
        optimizer: Any = None,
        fragments: Fragments = 1,
        overlap: bool = False,
        synchronous: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if bool(rho) != (optimizer is not None):
            raise ValueError(
                "`rho` adds to every step's gradients, and needs `optimizer=`; without `rho` leave "
                "it out. Compile the model with `callback.optimizer`. Received: "
                f"rho={rho!r}, optimizer={optimizer!r}."
            )
        super().__init__(
            lambda workers: ElasticAverageRule(
                period=period,
                workers=workers,
                fragments=fragments,
                moving_rate=moving_rate,
                rho=rho,
            ),
            {"overlap": overlap, "synchronous": synchronous},
            **options,
        )
        if rho:
            self.optimizer = Observed(optimizer, rho)


class ModelAverage(CenterCallback):
    """Model averaging: every few steps all workers meet and go on from their mean.

    Args:
        period: τ, local steps between two rounds of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        fragments: into how many parts the model is cut, or lists of their weights' paths (or the
            beginnings of paths); one is exchanged every period/fragments steps.
        overlap: meet in the background, until the next round is due.
        **options: those of all callbacks; see `Options`.
    """

    def __init__(
        self,
        *,
        period: Period = 10,
        fragments: Fragments = 1,
        overlap: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            lambda workers: ModelAverageRule(period=period, workers=workers, fragments=fragments),
            {"overlap": overlap},
            **options,
        )


class DiLoCo(CenterCallback):
    """DiLoCo: every few steps an outer optimizer takes a step with how far workers have come.

    Args:
        period: τ, local steps between two rounds of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        outer: the outer optimizer, one of `springline.outer`. By default Nesterov momentum that
            fits the period.
        fragments: into how many parts the model is cut, or lists of their weights' paths (or the
            beginnings of paths); one is exchanged every period/fragments steps.
        delay: steps from making a message to adopting the center; they are made while the exchange
            is under way, and are lost but for what `mixing` keeps.
        mixing: the share of a worker's own way, in [0, 1), that it keeps when it adopts the center.
        overlap: exchange in the background, and keep the steps that are made meanwhile.
        **options: those of all callbacks; see `Options`.
    """

    def __init__(
        self,
        *,
        period: Period = 10,
        outer: Outer | None = None,
        fragments: Fragments = 1,
        delay: int = 0,
        mixing: float = 0.0,
        overlap: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {} if outer is None else {"outer": check_outer(outer)}
        super().__init__(
            lambda workers: DiLoCoRule(
                period=period,
                workers=workers,
                fragments=fragments,
                delay=delay,
                mixing=mixing,
                **own,
            ),
            {"overlap": overlap},
            **options,
        )


class AsyncDiLoCo(CenterCallback):
    """Asynchronous DiLoCo: every worker's message is a step of its own, without waiting.

    Args:
        period: τ, local steps between two exchanges of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        outer: the outer optimizer, one of `springline.outer`. By default `DelayedNesterov` over as
            many pushes as there are workers.
        staleness: how a message counts that missed s exchanges of others: "inverse" 1/(s + 1),
            "sqrt" 1/√(s + 1); None for no difference.
        dynamic_steps: whether a slower worker makes fewer steps in a period, in proportion to its
            steps per second.
        fragments: into how many parts the model is cut, or lists of their weights' paths (or the
            beginnings of paths); one is exchanged every period/fragments steps.
        delay: steps from making a message to adopting the center; they are made while the exchange
            is under way, and are lost but for what `mixing` keeps.
        mixing: the share of a worker's own way, in [0, 1), that it keeps when it adopts the center.
        overlap: exchange in the background, and keep the steps that are made meanwhile.
        synchronous: whether all workers wait for each other before the first step.
        **options: those of all callbacks; see `Options`.
    """

    def __init__(
        self,
        *,
        period: Period = 10,
        outer: Outer | None = None,
        staleness: Staleness | None = None,
        dynamic_steps: bool = False,
        fragments: Fragments = 1,
        delay: int = 0,
        mixing: float = 0.0,
        overlap: bool = False,
        synchronous: bool = False,
        **options: Unpack[Options],
    ) -> None:
        own = {} if outer is None else {"outer": check_outer(outer)}
        super().__init__(
            lambda workers: AsyncDiLoCoRule(
                period=period,
                workers=workers,
                fragments=fragments,
                delay=delay,
                mixing=mixing,
                staleness=staleness,
                dynamic_steps=dynamic_steps,
                **own,
            ),
            {"overlap": overlap, "synchronous": synchronous},
            **options,
        )


class AGN(CenterCallback):
    """AGN: every few steps the mean gradient takes one step of an outer optimizer on the center.

    The model is compiled with `callback.optimizer`, which is around the one given here.

    Args:
        optimizer: any of Keras', or its name.
        period: τ, local steps between two exchanges of the whole model: a number, one of
            `springline.schedule`, or a function of the step.
        outer: the outer optimizer, one of `springline.outer`, with a learning rate of its own. By
            default it is like `optimizer`, where that is SGD or Adam, and follows its rate.
        fragments: into how many parts the model is cut, or lists of their weights' paths (or the
            beginnings of paths); one is exchanged every period/fragments steps.
        synchronous: whether all workers wait for each other before the first step.
        **options: those of all callbacks; see `Options`.

    >>> callback = AGN("adam", period=5)  # model.compile(callback.optimizer, ...)
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        period: Period = 10,
        outer: Outer | None = None,
        fragments: Fragments = 1,
        synchronous: bool = False,
        **options: Unpack[Options],
    ) -> None:
        around = Observed(optimizer)
        own = outer_like(around.inner_optimizer) if outer is None else check_outer(outer)
        super().__init__(
            lambda workers: rules.AGN(
                period=period,
                workers=workers,
                fragments=fragments,
                outer=own,
                fixed_rate=outer is not None,
            ),
            {"synchronous": synchronous},
            **options,
        )
        self.optimizer = around
