"""Resolve an optimizer's rank, number of workers and center from what the user gave."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from springline.center import Center
from springline.center.collective import Collective
from springline.progress import unfinished
from springline.run import Run
from springline.run_centers import center_of, check_name
from springline.torch.naming import Named
from springline.worker import MakeCenter

_log = logging.getLogger("springline")
AnyCenter = Center | MakeCenter | dist.ProcessGroup | str | Path | None


def resolve(
    center: AnyCenter, run: Run, name: str | None = None
) -> tuple[Run, Center | MakeCenter | str | Path | None]:
    """Return this worker's rank in its run or its process group, and the center.

    Args:
        center: what the user gave. By default the run's; under `torchrun` over several machines
            the process group of all ranks, if there is one.
        run: found in the environment.
        name: the optimizer's, which chooses among the run's centers.
    """
    check_name(name, None if isinstance(center, dist.ProcessGroup) else center)
    if center is None and _across_machines() and dist.is_initialized():
        center = dist.group.WORLD
    if isinstance(center, dist.ProcessGroup):
        run = replace(run, rank=center.rank(), workers=center.size())
        center = Collective(center, center_of(run, name))
        if center.directory is None and center.group.rank() == 0:
            _log.warning(
                "No checkpoints are kept, from which a restarted group could go on. Set "
                "SPRINGLINE_RUN to a directory, or pass `center=Collective(group, directory)`."
            )
    if isinstance(center, Collective):
        return replace(run, rank=center.group.rank(), workers=center.group.size()), center
    if center is None and (_across_machines() or (run.directory is None and run.workers > 1)):
        raise ValueError(
            f"This is worker {run.rank} of {run.workers}, but there is no run where they could "
            "meet. Start them with `springline run`, set SPRINGLINE_RUN to a directory that they "
            "share, or pass `center=`; on several machines under `torchrun`, call "
            "`torch.distributed.init_process_group()` before the optimizer is made."
        )
    return run, center_of(run, name) if center is None else center


def check_not_wrapped(named: Iterable[Named]) -> None:
    """Refuse parameters that another optimizer of this script exchanges."""
    theirs = {id(p) for other in unfinished() for p in other.binding.parameters.values()}
    for n in named:
        if id(n.parameter) in theirs:
            raise ValueError(
                f"Parameter {n.name!r} is in another wrapped optimizer of this script, which is "
                "not finished. Each parameter needs a center of its own: wrap it once. To begin a "
                "second phase, call `finish()` of the first optimizer before."
            )


def warn_of_replicas(parameters: Iterable[Tensor]) -> None:
    """Warn of parameters that DistributedDataParallel keeps the same on all ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    # By type: to ask an object for its class may call code of its own.
    modules = [m for m in gc.get_objects() if issubclass(type(m), DistributedDataParallel)]
    ours = {id(p) for p in parameters}
    if any(id(p) in ours for module in modules for p in module.parameters()):
        _log.warning(
            "The model is in DistributedDataParallel, which gives all ranks the same gradients: an "
            "exchange between them brings nothing. Use one of the two. A trainer that wraps the "
            "model under `torchrun` does not under `springline run`."
        )


def _across_machines() -> bool:
    """Whether `torchrun` has started workers on other machines, too."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" not in environment or "SPRINGLINE_WORKERS" in environment:
        return False
    return environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE")
