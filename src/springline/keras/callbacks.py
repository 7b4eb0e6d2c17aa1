"""The callbacks, one per rule."""

from __future__ import annotations

from typing import Any

from springline import rules
from springline.keras.callback import AnyCenter, CenterCallback
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
        use_locking: whether an exchange is atomic, per part of the center.
        synchronous: whether all workers wait for each other before the first step.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
        keep_own_weights: whether a worker goes on with weights that another callback has loaded
            when `fit` begins, where the center has others by then.

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
        use_locking: bool = True,
        synchronous: bool = False,
        center: AnyCenter = None,
        timeout: float | None = None,
        keep_own_weights: bool = False,
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
            center=center,
            timeout=timeout,
            overlap=overlap,
            use_locking=use_locking,
            synchronous=synchronous,
            keep_own_weights=keep_own_weights,
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
        use_locking: whether a shard is reduced under its lock.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
        keep_own_weights: whether a worker goes on with weights that another callback has loaded
            when `fit` begins, where the center has others by then.
    """

    def __init__(
        self,
        *,
        period: Period = 10,
        fragments: Fragments = 1,
        overlap: bool = False,
        use_locking: bool = True,
        center: AnyCenter = None,
        timeout: float | None = None,
        keep_own_weights: bool = False,
    ) -> None:
        super().__init__(
            lambda workers: ModelAverageRule(period=period, workers=workers, fragments=fragments),
            center=center,
            timeout=timeout,
            overlap=overlap,
            use_locking=use_locking,
            keep_own_weights=keep_own_weights,
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
        use_locking: whether a shard is reduced under its lock; False only without outer state.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
        keep_own_weights: whether a worker goes on with weights that another callback has loaded
            when `fit` begins, where the center has others by then.
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
        use_locking: bool = True,
        center: AnyCenter = None,
        timeout: float | None = None,
        keep_own_weights: bool = False,
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
            center=center,
            timeout=timeout,
            overlap=overlap,
            use_locking=use_locking,
            keep_own_weights=keep_own_weights,
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
        use_locking: whether an exchange is atomic, per part of the center; False only with `SGD` as
            the outer optimizer, since all others have state.
        synchronous: whether all workers wait for each other before the first step.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
        keep_own_weights: whether a worker goes on with weights that another callback has loaded
            when `fit` begins, where the center has others by then.
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
        use_locking: bool = True,
        synchronous: bool = False,
        center: AnyCenter = None,
        timeout: float | None = None,
        keep_own_weights: bool = False,
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
            center=center,
            timeout=timeout,
            overlap=overlap,
            use_locking=use_locking,
            synchronous=synchronous,
            keep_own_weights=keep_own_weights,
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
        use_locking: whether an exchange is atomic, per part of the center; False only with `SGD` as
            the outer optimizer, since all others have state.
        synchronous: whether all workers wait for each other before the first step.
        center: a center, or the directory of a shared one. By default that of the run the script
            was started in, else one of this worker's own.
        timeout: seconds after which waiting for other workers fails, naming them.
        keep_own_weights: whether a worker goes on with weights that another callback has loaded
            when `fit` begins, where the center has others by then.

    >>> callback = AGN("adam", period=5)  # model.compile(callback.optimizer, ...)
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        period: Period = 10,
        outer: Outer | None = None,
        fragments: Fragments = 1,
        use_locking: bool = True,
        synchronous: bool = False,
        center: AnyCenter = None,
        timeout: float | None = None,
        keep_own_weights: bool = False,
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
            center=center,
            timeout=timeout,
            use_locking=use_locking,
            synchronous=synchronous,
            keep_own_weights=keep_own_weights,
        )
        self.optimizer = around
