"""What several trainers need."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from springline.run import PROCESS_GROUP, Run, rank
from springline.torch import by_name

_log = logging.getLogger("springline")


def local(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let a trainer take this process for the only one, also under `torchrun`.

    To be called before the trainer, its arguments or its accelerator are made. The worker stays
    what it is: its rank, the number of workers and the run are kept under springline's own names.

    >>> started = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    >>> started |= {"RANK": "1", "WORLD_SIZE": "2", "SPRINGLINE_RUN": "runs/a"}
    >>> local(started)
    >>> sorted(started.items())[:3]
    [('SPRINGLINE_RANK', '1'), ('SPRINGLINE_RUN', 'runs/a'), ('SPRINGLINE_WORKERS', '2')]
    """
    if not any(name in environment for name in PROCESS_GROUP):
        return
    run = Run.from_environment(environment)
    run.check_meeting("on several machines with `springline run --address`")
    environment["SPRINGLINE_RANK"] = str(run.rank)
    environment["SPRINGLINE_WORKERS"] = str(run.workers)
    if run.directory:
        environment["SPRINGLINE_RUN"] = str(run.directory)
    for name in PROCESS_GROUP:
        environment.pop(name, None)


def check_rule(rule: str | None, options: Mapping[str, Any]) -> None:
    """Refuse what is not the name of a rule, and options without one."""
    if rule is not None:
        by_name.check_rule(rule)
    elif options:
        raise ValueError(
            "Options need a rule; without one, give them to the optimizer that you wrap yourself. "
            f"Received: {', '.join(options)}, and no rule."
        )


def report_restart(step: int, checkpoint: object, version: int) -> None:
    """Report with what a restarted worker goes on that was given a checkpoint."""
    _log.warning(
        "After its restart, rank %d goes on at step %d with the optimizer's state of %s and the "
        "center's values (version %d), as it should: the weights in the checkpoint are older.",
        rank(),
        step,
        checkpoint,
        version,
    )


def warn_of_nothing_left(checkpoint: object) -> None:
    """Warn of a checkpoint with which a run begins, and after which there is no step to make."""
    _log.warning(
        "Nothing was trained: %s is of the last step. Raise the number of steps or epochs to train "
        "on, or leave the checkpoint out.",
        checkpoint,
    )
