"""Lightning: `Trainer(callbacks=[Springline("diloco", period=100)])` is all.

Under `springline run` each worker has a Trainer of its own, on one device. The callback

1. gives the worker its own part of the training data;
2. wraps the optimizer of `configure_optimizers`, and brings a restarted worker to its rank's step;
3. puts the center into the model to validate, to save and at the end of `fit`;
4. logs to the run's metrics, and stops when all workers are asked to.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from typing import TYPE_CHECKING, Any

from springline.center.waiting import wait_until
from springline.files import write_text
from springline.integrations.common import check_rule, report_restart, warn_of_nothing_left
from springline.integrations.lightning_strategy import OneOfMany, center_optimizer
from springline.progress import log_numbers, start_step
from springline.run import BEST, FIRST_STEP, Run, stopping
from springline.torch import wrap

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities import rank_zero_only
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.strategies import SingleDeviceStrategy
        from lightning.pytorch.utilities import rank_zero_only
    except ModuleNotFoundError:  # its older name
        from pytorch_lightning import Callback
        from pytorch_lightning.strategies import SingleDeviceStrategy
        from pytorch_lightning.utilities import rank_zero_only


class Springline(Callback):
    """Let a Trainer be one worker of many.

    Args:
        rule: "elastic", "average", "agn", "diloco", "async_diloco" or "slowmo"; None if
            `configure_optimizers` returns an optimizer of `springline.torch` itself.
        **options: those of the rule's optimizer in `springline.torch`.

    >>> Springline("diloco", period=100).options
    {'period': 100}
    """

    def __init__(self, rule: str | None = None, **options: Any) -> None:
        check_rule(rule, options)
        self.rule, self.options = rule, options
        self._run = Run.from_environment()
        self._trained = False  # whether there was a step to make
        self._first = 0  # the step that the run began with: that of a checkpoint
        self._behind: list[Any] = []  # groups and schedules that are to be brought to the step
        self._logged: dict[str, Any] = {}
        if self._run.workers > 1:
            setattr(rank_zero_only, "rank", self._run.rank)  # noqa: B010 - before loggers make files

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be one worker of many; let the Trainer know its rank."""
        strategy: Any = trainer.strategy
        if type(strategy) not in (SingleDeviceStrategy, OneOfMany):
            raise ValueError(
                "A worker has one device, and exchanges take the place of a distributed strategy: "
                "pass `Trainer(devices=1)` without `strategy`, and start more workers with "
                f"`springline run`. Received: {type(strategy).__name__}."
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "Springline needs automatic optimization with one optimizer, whose steps Lightning "
                f"counts. Received: automatic_optimization=False of {type(pl_module).__name__}."
            )
        strategy.__class__ = OneOfMany
        strategy.global_rank, strategy.world_size = self._run.rank, self._run.workers

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """In a run the rank's own step counts, and the checkpoint may be another worker's."""
        if trainer.training and self._run.directory:
            self._first = checkpoint["global_step"]
            checkpoint.pop("loops", None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the optimizer; go to the step that the rank had come to."""
        [optimizer] = trainer.optimizers
        if self.rule is not None:
            options = {"model": pl_module} | self.options
            trainer.strategy.optimizers = [wrap(self.rule, optimizer, **options)]
        if (wrapped := center_optimizer(trainer)) is None:
            raise ValueError(
                'Name a rule, `Springline("diloco")`, or return an optimizer of springline.torch '
                f"from `configure_optimizers`. Received: {type(optimizer).__name__}."
            )
        if self._run.directory is None:
            return
        if self._run.rank == 0:
            (self._run.directory / BEST).unlink(missing_ok=True)  # of an earlier launch
        done = start_step()
        if done and trainer.ckpt_path:
            report_restart(done, trainer.ckpt_path, wrapped.worker.center.version)
        done += self._first_step()
        if done:
            self._behind = [dict(group) for group in optimizer.param_groups]
            self._behind += [copy.deepcopy(c.scheduler.state_dict()) for c in _schedules(trainer)]
            _go_to(trainer, done)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring schedules to the step; report how many steps there are to make."""
        if self._behind:
            self._bring_schedules(trainer, pl_module)
        total = trainer.estimated_stepping_batches
        if 0 < total < math.inf:
            self._run.begin(start_step(), int(total) - self._first)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log; finish after the last step, so that what follows sees the center of all workers."""
        self._trained = True
        if trainer.global_step % trainer.log_every_n_steps == 0 and isinstance(outputs, dict):
            self._log_metrics(trainer, loss=outputs["loss"])
        if stopping():
            trainer.should_stop = True
        in_last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.global_step == trainer.max_steps or (in_last_epoch and trainer.is_last_batch):
            _finish(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the center into the model."""
        if trainer.state.fn == "fit" and (optimizer := center_optimizer(trainer)):
            optimizer.eval()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log, and take the center out of the model."""
        if trainer.state.fn == "fit":
            if not trainer.sanity_checking:
                self._log_metrics(trainer)
            _go_on(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for all workers. The model holds their center from here on."""
        _finish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do it here if the rank had made all its steps before it was restarted."""
        _finish(trainer)
        self._share_best(trainer)
        if trainer.ckpt_path and not (start_step() or self._trained):
            warn_of_nothing_left(trainer.ckpt_path)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Take the center out of the model."""
        _go_on(trainer)

    def _share_best(self, trainer: Trainer) -> None:
        """Let `ckpt_path="best"` be rank 0's on every rank: no other writes checkpoints."""
        run = self._run
        savers: list[Any] = [
            s for s in trainer.checkpoint_callbacks if hasattr(s, "best_model_path")
        ]
        if run.workers == 1 or run.directory is None or run.cluster or not savers:
            return
        path = run.directory / BEST
        if run.rank == 0:
            write_text(path, json.dumps([saver.best_model_path for saver in savers]))
            return
        optimizer = center_optimizer(trainer)

        def is_gone() -> bool:
            given_up = run.given_up()
            if given_up is None and optimizer:  # nobody restarts it
                return 0 not in optimizer.worker.center.finished()
            return 0 in (given_up or ())

        wait_until(
            lambda: path.exists() or is_gone(), lambda: ["rank 0"], None, "the last checkpoint"
        )
        if path.exists():
            for saver, best in zip(savers, json.loads(path.read_text("utf-8")), strict=False):
                saver.best_model_path = best

    def _first_step(self) -> int:
        """Return the step that the run began with; the first worker to come writes it down."""
        if self._run.directory is not None:
            path = self._run.directory / FIRST_STEP
            if not path.exists():
                write_text(path, f"{self._first}\n")
            self._first = int(path.read_text("utf-8"))
        return self._first

    def _bring_schedules(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Step schedules from their beginning as often as Lightning would have by now."""
        groups, each = trainer.optimizers[0].param_groups, trainer.num_training_batches
        for group, made in zip(groups, self._behind, strict=False):
            group.update({key: value for key, value in made.items() if key != "params"})
        epochs, ready = trainer.current_epoch, trainer.fit_loop.batch_idx + 1

        def calls(batches: float, frequency: int) -> int:
            accumulated = trainer.accumulate_grad_batches
            stepped = (n for n in range(1, int(batches) + 1) if n % accumulated == 0 or n == each)
            return sum(n % frequency == 0 for n in stepped)

        for config, state in zip(_schedules(trainer), self._behind[len(groups) :], strict=True):
            config.scheduler.load_state_dict(state)
            due = epochs // config.frequency
            if config.interval == "step":
                whole = epochs * calls(each, config.frequency) if epochs else 0
                due = whole + calls(ready, config.frequency)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a step before the optimizer's
                for _ in range(due):
                    pl_module.lr_scheduler_step(config.scheduler, None)
        self._behind = []

    def _log_metrics(self, trainer: Trainer, **values: Any) -> None:
        """Log what is new since the last time."""
        values |= trainer.callback_metrics
        new = {name: v for name, v in values.items() if v is not self._logged.get(name)}
        self._logged = values
        log_numbers({name.replace("/", "_"): v for name, v in new.items()})


def _go_to(trainer: Trainer, steps: int) -> None:
    """Let `fit` begin after so many steps, as from a checkpoint of that step."""
    loop: Any = trainer.fit_loop
    loop.setup_data()
    every, each = trainer.accumulate_grad_batches, trainer.num_training_batches
    epochs, rest = divmod(steps, math.ceil(each / every)) if each < math.inf else (0, steps)
    batches, within = rest * every, int(rest > 0)
    for count in (loop.epoch_progress.total, loop.epoch_progress.current):
        count.ready = count.started = epochs + within
        count.processed = count.completed = epochs
    progress = loop.epoch_loop.batch_progress
    before = int(epochs * each) if epochs else 0
    for count, n in ((progress.total, before + batches), (progress.current, batches)):
        count.ready = count.started = count.processed = n
        count.completed = n - within  # as in `on_train_batch_end`
    made = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    for count, n in ((made.total, steps), (made.current, rest)):
        count.ready = count.completed = n
    loop.epoch_loop.on_load_checkpoint({"_batches_that_stepped": steps - within})
    loop.restarting = bool(within)
    for part in getattr(trainer.strategy, "parts", ()):
        part.set_epoch(epochs)
        part.skip = batches
    iter(loop._data_fetcher)  # again, from there


def _schedules(trainer: Trainer) -> list[Any]:
    """Return the schedules that know the step; others depend on metrics."""
    return [config for config in trainer.lr_scheduler_configs if not config.reduce_on_plateau]


def _go_on(trainer: Trainer) -> None:
    """Take the center out of the model, unless the worker has finished."""
    if (optimizer := center_optimizer(trainer)) and not optimizer.worker.finished:
        optimizer.train()


def _finish(trainer: Trainer) -> None:
    """Wait for all workers, and leave their center in the model."""
    if (optimizer := center_optimizer(trainer)) and not optimizer.worker.finished:
        optimizer.final()
        optimizer.eval()
