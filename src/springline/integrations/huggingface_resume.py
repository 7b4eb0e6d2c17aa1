"""Hugging Face's Trainer: the checkpoint from which a restarted worker goes on."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

_NAME = re.compile(r"checkpoint-(\d+)")  # as a Trainer makes them


def complete(given: str | bool | None, own: Path, shared: Path) -> str | None:
    """Return a checkpoint for this worker that no kill has cut short; None if there is none.

    One that the script names and that is not there is returned, if there is no other.

    Args:
        given: what the script wants to resume from.
        own: the directory of this worker's checkpoints.
        shared: that of rank 0's.
    """
    if not given:
        return None
    of_rank_0 = isinstance(given, str) and Path(given).parent == shared != own
    if isinstance(given, str) and _state_of(Path(given)) and not of_rank_0:
        return given
    of_steps = {path: _NAME.fullmatch(path.name) for path in own.glob("checkpoint-*")}
    found = {int(name[1]): path for path, name in of_steps.items() if name and _state_of(path)}
    if found:
        return str(found[max(found)])
    missing = isinstance(given, str) and not of_rank_0 and not Path(given).exists()
    return str(given) if missing else None  # which the Trainer refuses


def checkpoint_at(step: int, path: Path, checkpoint: str | None, trainer: Trainer) -> None:
    """Write a checkpoint for the step that this rank had reached, of another or of nothing."""
    args = trainer.args
    state = TrainerState(train_batch_size=args.train_batch_size)
    state.compute_steps(args, max(1, args.max_steps))  # type: ignore[no-untyped-call]
    if checkpoint is None:
        trainer.save_model(str(path))
    else:
        state = _state_of(Path(checkpoint)) or state
        for file in Path(checkpoint).absolute().iterdir():
            if file.name != TRAINER_STATE_NAME:
                (path / file.name).symlink_to(file)
    state.global_step = step
    state.save_to_json(str(path / TRAINER_STATE_NAME))


def bring_to(step: int, scheduler: Any) -> None:
    """Bring a schedule of learning rates to a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet
        if isinstance(scheduler, LambdaLR):  # all that the Trainer makes itself
            scheduler.last_epoch = step - 1
            scheduler.step()
        elif isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            while scheduler.last_epoch < step:
                scheduler.step()


def _state_of(checkpoint: Path) -> TrainerState | None:
    """Return what a Trainer writes last into a checkpoint; None if it did not come to that."""
    try:
        state: TrainerState = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    except (OSError, ValueError):
        return None
    return state
