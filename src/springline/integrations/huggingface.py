"""Hugging Face's Trainer: a callback that makes it one worker of a run."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.training_args import ParallelMode

import springline
from springline.integrations.accelerate import shard, take_rank
from springline.integrations.common import (
    check_rule,
    local,
    report_restart,
    warn_of_nothing_left,
)
from springline.integrations.huggingface_resume import bring_to, checkpoint_at, complete
from springline.progress import log_numbers
from springline.torch import wrap
from springline.torch.optimizer import CenterOptimizer

__all__ = ["SpringlineCallback", "local"]
_SPEED = ("_runtime", "_per_second", "_time")  # ends of names that are no result of an evaluation


class SpringlineCallback(TrainerCallback):
    """Makes a Trainer one worker of a run. Pass it in `callbacks=` when the Trainer is made.

    - The Trainer's optimizer is wrapped; each worker trains on its own part of the data.
    - Evaluations, checkpoints and `save_model` are of the center. When `train` returns, all workers
      have finished and the model is their center.
    - Rank 0 writes to `output_dir`, prints and feeds the loggers; another rank has checkpoints of
      its own in `output_dir/worker-RANK`.
    - A worker that was restarted goes on at the step that its rank had reached.

    Args:
        rule: "elastic", "average", "agn", "diloco", "async_diloco" or "slowmo"; None if the
            optimizer in `optimizers=` is one of `springline.torch` already.
        shard: whether to give each worker its part of the training data; False if your dataset or
            loader does so.
        **options: those of the rule's optimizer: `period=100`, `outer=...`.
    """

    def __init__(self, rule: str | None = None, *, shard: bool = True, **options: Any) -> None:
        check_rule(rule, options)
        self.optimizer: CenterOptimizer | None = None  # once `train` has begun
        self._rule, self._shard, self._options = rule, shard, options
        self._found: str | None = None  # the checkpoint that a run goes on from
        self._steps: Iterator[int] = iter(())

    # What the Trainer is made to do.

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take part in what the Trainer does, now that it is made."""
        if hasattr(self, "_trainer"):
            raise ValueError("A SpringlineCallback is for one Trainer. Make another for this one.")
        trainer = self._trainer = _trainer_of(self)
        if args.parallel_mode != ParallelMode.NOT_PARALLEL:
            raise RuntimeError(
                f"The Trainer would train in parallel by itself ({args.parallel_mode.value}), and "
                "all workers would have the same gradients. Under `torchrun` call "
                "`springline.integrations.huggingface.local()` before TrainingArguments are made; "
                "with several GPUs let each worker see one (CUDA_VISIBLE_DEVICES)."
            )
        wrapped = isinstance(trainer.optimizer, CenterOptimizer)
        if wrapped == (self._rule is not None):
            raise ValueError(
                "Give the rule once: as `SpringlineCallback(rule)`, or as a wrapped optimizer in "
                f"`optimizers=` beside `SpringlineCallback()`. Received: rule={self._rule!r} and "
                f"{'a wrapped' if wrapped else 'no wrapped'} optimizer."
            )
        self._shared = self._own = Path(args.output_dir or ".")
        if springline.workers() > 1:
            take_rank()
            trainer.accelerator.dataloader_config.dispatch_batches = False  # rank 0 would read
        if springline.rank():
            self._own = self._shared / f"worker-{springline.rank()}"
            args.output_dir, args.save_on_each_node = str(self._own), True
        replace: dict[str, Callable[..., Any]] = {
            "train": self._train,
            "get_train_dataloader": self._get_train_dataloader,
            "create_optimizer": self._create_optimizer,
            "save_model": self._save_model,
        }
        for name, method in replace.items():
            setattr(trainer, name, partial(method, getattr(trainer, name)))

    def _get_train_dataloader(self, original: Callable[[], Any]) -> DataLoader[Any]:
        loader: DataLoader[Any] = original()
        if springline.workers() == 1 or not self._shard:
            return loader
        args = self._trainer.args
        return shard(loader, args.device, args.seed if args.data_seed is None else args.data_seed)

    def _create_optimizer(self, original: Callable[..., Any], *args: Any) -> Any:
        optimizer = original(*args)
        inside = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inside, CenterOptimizer):
            options = {"model": self._trainer.model} | self._options
            optimizer = self._trainer.optimizer = wrap(str(self._rule), optimizer, **options)
        elif inside.worker.finished:
            raise RuntimeError(
                "This worker has finished its training, and a run trains once. Make a new Trainer."
            )
        return optimizer

    def _save_model(
        self, original: Callable[..., None], output_dir: str | None = None, *rest: Any, **named: Any
    ) -> None:
        if springline.rank() and output_dir and self._own not in Path(output_dir).parents:
            return  # rank 0 writes it
        if self.optimizer is not None:
            self.optimizer.eval()  # until the next step
        original(output_dir, *rest, **named)

    def _train(
        self,
        original: Callable[..., TrainOutput],
        resume_from_checkpoint: str | bool | None = None,
        *rest: Any,
        **named: Any,
    ) -> TrainOutput:
        given, resumption = resume_from_checkpoint, None
        if springline.directory() is not None:
            given = self._found = complete(given, self._own, self._shared)
            if step := springline.start_step():
                self._own.mkdir(parents=True, exist_ok=True)
                resumption = tempfile.mkdtemp(prefix=".springline-resume-", dir=self._own)
                checkpoint_at(step, Path(resumption), given, self._trainer)
                given = resumption
        try:
            return original(given, *rest, **named)
        except _NothingLeftError:
            trainer = self._trainer
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            return TrainOutput(trainer.state.global_step, 0.0, {})
        finally:
            if resumption:
                shutil.rmtree(resumption, ignore_errors=True)

    # What happens while it trains.

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Begin where this rank is to go on."""
        self.optimizer = getattr(given["optimizer"], "optimizer", None)
        if not isinstance(self.optimizer, CenterOptimizer):
            raise TypeError(
                "SpringlineCallback must be there when the Trainer is made: as `callbacks=[...]`."
            )
        start, self._steps = springline.start_step(), springline.steps(state.max_steps)
        if start:
            state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
            bring_to(start, given["lr_scheduler"])
            if self._found:
                report_restart(start, self._found, self.optimizer.worker.center.version)
        elif state.global_step >= state.max_steps:
            warn_of_nothing_left("the checkpoint that this run begins with")
        for _ in range(start, state.global_step):  # made before this run
            next(self._steps, None)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Do not begin what was complete: the Trainer would make one more step."""
        if state.global_step >= state.max_steps:
            raise _NothingLeftError

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Count the step that begins."""
        next(self._steps, None)
        if self.optimizer is not None:
            self.optimizer.train()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop when all are asked to; after the last step wait for all workers."""
        if springline.stopping():
            control.should_training_stop = True
        if control.should_training_stop:
            self._finish()

    on_epoch_end = on_step_end  # an evaluation after the step may have ended the training

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Finish, however the training has ended."""
        self._finish()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Put the loss on the run's screen."""
        if logs and "loss" in logs:
            springline.log(loss=logs["loss"])

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Put what was found of the center there, too: `eval_loss` is `val_loss`."""
        found = {
            f"val_{name.removeprefix('eval_')}": value
            for name, value in (metrics or {}).items()
            if name.startswith("eval_") and not name.endswith(_SPEED)
        }
        if found and springline.rank() == 0:
            log_numbers(found)

    def _finish(self) -> None:
        """Wait for all workers, and leave their center in the model."""
        if self.optimizer is not None and not self.optimizer.worker.finished:
            next(self._steps, None)
            self.optimizer.final()
            self.optimizer.eval()


class _NothingLeftError(Exception):
    """All steps were made before this worker was restarted."""


def _trainer_of(callback: TrainerCallback) -> Trainer:
    """Return the Trainer that a callback belongs to."""
    # Events bring the model, the optimizer and the loaders, but nothing that leads to the Trainer.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Trainer):  # by type: see `warn_of_replicas`
            handler = getattr(candidate, "callback_handler", None)
            if handler is not None and any(c is callback for c in handler.callbacks):
                trainer: Trainer = candidate
                return trainer
    raise RuntimeError("SpringlineCallback is for a Trainer of transformers.")
