"""What is compared: how each system wraps a model and its optimizer, as its documentation says."""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import springline
from springline import outer
from springline.torch import (
    AsyncDiLoCoOptimizer,
    Collective,
    DiLoCoOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
)
from springline.torch.optimizer import CenterOptimizer

_OWN_NAME = 0x04000000  # CLONE_NEWUTS: the host name is this process's own from now on
NOTICE = 30.0  # seconds after which a peer that does not answer counts as dead


class System(NamedTuple):
    """One of those that are compared."""

    name: str
    title: str
    rule: str  # whose tuned settings it has, by its name in `time_to_loss.py`
    meets: str  # how its workers find each other: "alone", "group", "torchft" or "ray"
    overlap: bool = False

    @property
    def in_step(self) -> bool:
        """Whether the losses are the same whatever the link: all wait for each other."""
        return self.meets != "ray" and not self.overlap


SYSTEMS = {
    system.name: system
    for system in (
        System("alone", "one worker", "alone", "alone"),
        System("whole", "one process, the batches of all", "whole", "alone"),
        System("ddp", "DistributedDataParallel", "whole", "group"),
        System("postlocal", "torch PostLocalSGD", "average", "group"),
        System("torchft", "torchft DiLoCo", "diloco", "torchft"),
        System("average", "springline averaging", "average", "group"),
        System("average_overlap", "springline averaging, overlap", "average", "group", True),
        System("diloco", "springline DiLoCo", "diloco", "group"),
        System("diloco_overlap", "springline DiLoCo, overlap", "diloco", "group", True),
        System("diloco_ray", "springline DiLoCo on Ray", "diloco", "ray", overlap=True),
        System("elastic", "springline elastic", "elastic", "ray", overlap=True),
        System("async_diloco", "springline asynchronous DiLoCo", "async_diloco", "ray", True),
    )
}


def _nothing(*_: object) -> None:
    """Do nothing."""


@dataclass
class Wrapped:
    """A model in a system's hands."""

    loss: Callable[[Tensor], Tensor]  # of a batch
    opt: torch.optim.Optimizer
    steps: Callable[[], Iterator[int]]  # that are to be made, by number
    saved: Callable[[], Mapping[str, Any]]  # what would be saved
    after: Callable[[int], None] = field(default=_nothing)  # so many steps
    end: Callable[[], None] = field(default=_nothing)


Wrap = Callable[[Any, torch.optim.Optimizer, argparse.Namespace], Wrapped]


def _saved(model: nn.Module) -> Callable[[], Mapping[str, Any]]:
    return lambda: {name: value.clone() for name, value in model.state_dict().items()}


def alone(model: Any, opt: torch.optim.Optimizer, args: argparse.Namespace) -> Wrapped:
    """Nothing is exchanged."""
    return Wrapped(model.loss, opt, lambda: iter(range(args.steps)), _saved(model))


class _Loss(nn.Module):
    """`DistributedDataParallel` wraps what is called."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(windows)
        return loss


def ddp(model: Any, opt: torch.optim.Optimizer, args: argparse.Namespace) -> Wrapped:
    """Average gradients in every step."""
    _join_group()
    resumed = _Checkpoint(model, opt, args)
    loss = nn.parallel.DistributedDataParallel(_Loss(model))
    return Wrapped(loss, opt, resumed.steps, _saved(model), resumed.after, dist.barrier)


def postlocal(model: Any, opt: torch.optim.Optimizer, args: argparse.Namespace) -> Wrapped:
    """Average parameters after every `period` steps."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    _join_group()
    averager = PeriodicModelAverager(args.period, warmup_steps=args.period - 1)
    wrapped: Any = PostLocalSGDOptimizer(opt, averager)
    resumed = _Checkpoint(model, wrapped, args)
    return Wrapped(model.loss, wrapped, resumed.steps, _saved(model), resumed.after, dist.barrier)


class _Checkpoint:
    """What users of a process group write: rank 0 saves now and then, all restore what it saved."""

    def __init__(self, model: nn.Module, opt: Any, args: argparse.Namespace) -> None:
        self._model, self._opt, self._args = model, opt, args
        self._path = Path(args.folder) / "checkpoint.pt"
        self._first = 0
        if self._path.exists():
            held = torch.load(self._path)
            model.load_state_dict(held["model"])
            opt.load_state_dict(held["opt"])
            self._first = held["step"]

    def steps(self) -> Iterator[int]:
        """Count the steps that are left."""
        return iter(range(self._first, self._args.steps))

    def after(self, done: int) -> None:
        """Save, if it is time for it."""
        if self._args.save_steps and done % self._args.save_steps == 0 and dist.get_rank() == 0:
            state = {"model": self._model.state_dict(), "opt": self._opt.state_dict(), "step": done}
            torch.save(state, temporary := self._path.with_suffix(".new"))
            temporary.replace(self._path)


def _join_group() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def torchft(model: Any, opt: torch.optim.Optimizer, args: argparse.Namespace) -> Wrapped:
    """Average pseudo-gradients after every `period` steps; each worker is a replica group."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    own = _address(args.lighthouse)
    ctypes.CDLL(None).unshare(_OWN_NAME)
    socket.sethostname(own)  # a worker that is back fetches a peer's state by this name
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=NOTICE)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "opt": opt.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=NOTICE),
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"worker_{springline.rank()}",
        hostname=own,
        init_sync=False,  # all begin with the same values
    )
    rate, momentum = args.outer
    steps_outer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=True)
    diloco = DiLoCo(
        manager, [model], opt, steps_outer, args.period, use_bucketization=True, pin_memory=False
    )

    def steps() -> Iterator[int]:
        with diloco:
            while (rounds := manager.current_step()) * args.period < args.steps:
                for k in range(args.period):
                    yield rounds * args.period + k

    def end() -> None:
        manager.shutdown(wait=False)
        del store_held[:]

    store_held = [store]  # the manager needs it until the end
    return Wrapped(model.loss, opt, steps, _saved(model), end=end)


def _address(server: str) -> str:
    """Return the address that this host has on the way to a server, `http://HOST:PORT`."""
    host, _, port = server.rpartition("/")[2].rpartition(":")
    with socket.socket(type=socket.SOCK_DGRAM) as unused:  # nothing is sent
        unused.connect((host, int(port)))
        name: str = unused.getsockname()[0]
        return name


def ours(model: Any, opt: torch.optim.Optimizer, args: argparse.Namespace) -> Wrapped:
    """Wrap with one of springline's."""
    options: dict[str, Any] = {"model": model, "period": args.period, "overlap": args.overlap}
    if SYSTEMS[args.system].meets == "group":
        _join_group()
        directory = Path(os.environ["SPRINGLINE_RUN"]) / "center" if args.save_seconds else None
        options["center"] = Collective(dist.group.WORLD, directory, args.save_seconds or NOTICE)
        options["timeout"] = NOTICE
    rule = SYSTEMS[args.system].rule
    made: CenterOptimizer
    if rule == "average":
        made = ModelAverageOptimizer(opt, **options)
    elif rule == "diloco":
        made = DiLoCoOptimizer(opt, outer=outer.Nesterov(*args.outer), **options)
    elif rule == "async_diloco":
        made = AsyncDiLoCoOptimizer(opt, outer=outer.DelayedNesterov(*args.outer), **options)
    else:
        made = ElasticAverageOptimizer(opt, moving_rate=args.moving_rate, **options)
    return Wrapped(
        model.loss,
        made,
        lambda: springline.steps(args.steps),
        made.worker.center.values,
        end=made.finish,
    )


WRAPS: dict[str, Wrap] = {
    "alone": alone,
    "whole": alone,
    "ddp": ddp,
    "postlocal": postlocal,
    "torchft": torchft,
    **{name: ours for name in SYSTEMS if SYSTEMS[name].title.startswith("springline")},
}
