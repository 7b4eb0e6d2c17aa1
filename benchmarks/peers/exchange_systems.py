"""One worker of the comparison with peers: every system, an exchange of each in every round.

    python exchange_systems.py RANK CASE DIRECTORY    # prints its seconds as JSON

A system that keeps nothing shares the plain model; the others have one each.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from springline.outer import SGD, Nesterov
from springline.torch import (
    AGNOptimizer,
    AsyncDiLoCoOptimizer,
    DiLoCoOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
)

NEVER = 10**12  # a period: the benchmark calls `exchange` itself
AVERAGING = ("PostLocalSGD", "torchft LocalSGD")  # and ours
TIMEOUT = timedelta(seconds=300)  # the machine may be busy
Exchange = Callable[[], object]


class Case(NamedTuple):
    """How much is measured."""

    workers: int
    rounds: int
    layers: int  # square ones, with a bias
    width: int
    torchft: bool

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.width * (self.width + 1)


class System(NamedTuple):
    """Something that exchanges: what precedes it in training, which is not timed, and itself."""

    exchange: Exchange
    before: Exchange
    parameters: list[Tensor]
    committed: Callable[[], int] | None = None  # how many exchanges it counts itself
    end: Exchange = lambda: None


def model_of(case: Case) -> nn.Sequential:
    """Return a model, the same on all workers."""
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(case.width, case.width) for _ in range(case.layers)))


def set_gradients(parameters: list[Tensor]) -> None:
    """Give every parameter a gradient."""
    for p in parameters:
        p.grad = torch.full_like(p, 1e-4)


def ours(case: Case, directory: Path) -> Iterator[tuple[str, System]]:
    """Yield springline's rules: on the center of this machine, and two on a process group."""
    nesterov: dict[str, Any] = {"outer": Nesterov(0.7, 0.9)}
    group = {"center": dist.group.WORLD}
    kinds: dict[str, tuple[type[Any], dict[str, Any]]] = {
        "elastic": (ElasticAverageOptimizer, {}),
        "averaging": (ModelAverageOptimizer, {}),
        "AGN, SGD": (AGNOptimizer, {"outer": SGD(0.01)}),
        "DiLoCo": (DiLoCoOptimizer, nesterov),
        "async DiLoCo": (AsyncDiLoCoOptimizer, {}),
        "averaging, process group": (ModelAverageOptimizer, group),
        "DiLoCo, process group": (DiLoCoOptimizer, nesterov | group),
    }
    for name, (kind, options) in kinds.items():
        model = model_of(case)
        parameters: list[Tensor] = list(model.parameters())
        inner = torch.optim.SGD(parameters, lr=1e-4)
        given = {"center": directory / name.replace(" ", "-"), "period": NEVER, "timeout": 300}
        optimizer = kind(inner, model=model, **{**given, **options})
        if kind is AGNOptimizer:  # the others exchange no gradients
            set_gradients(parameters)
        yield (
            f"springline {name}",
            System(optimizer.worker.exchange, optimizer.step, parameters, end=optimizer.finish),
        )


def torchs(model: nn.Module) -> Iterator[tuple[str, System]]:
    """Yield what torch has: an all-reduce of one flat buffer, and the model averager."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    parameters: list[Tensor] = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    rank = dist.get_rank()
    yield (
        "gloo all-reduce",
        System(lambda: dist.all_reduce(flat), lambda: flat.fill_(1 + rank), [flat]),
    )
    with warnings.catch_warnings(action="ignore"):  # it advises against a period of 1
        averager = PeriodicModelAverager(period=1)
    yield (
        "PostLocalSGD",
        System(
            lambda: averager.average_parameters(model.parameters()),
            lambda: set_gradients(parameters),  # it leaves out a parameter without one
            parameters,
        ),
    )


class DataParallel:
    """What DistributedDataParallel adds to a forward and backward pass."""

    name = "DistributedDataParallel"

    def __init__(self, case: Case) -> None:
        self._model = nn.parallel.DistributedDataParallel(model_of(case))
        self._x = torch.randn(1, case.width)

    def seconds(self) -> float:
        """Time a pass with its all-reduce and one without."""
        with self._model.no_sync():
            alone = timed(self._pass)
        return timed(self._pass) - alone

    def _pass(self) -> None:
        self._model(self._x).sum().backward()
        self._model.zero_grad()


def torchfts(model: nn.Module, workers: int) -> Iterator[tuple[str, System]]:
    """Yield torchft's, each with a lighthouse and managers of its own."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    parameters: list[Tensor] = list(model.parameters())

    manager = manager_of(workers)
    inner = torch.optim.SGD(parameters, lr=1e-4)
    local = LocalSGD(manager, model, inner, sync_every=NEVER)
    yield (
        "torchft LocalSGD",
        System(local.sync, model.zero_grad, parameters, manager.current_step),
    )
    for more, buckets in (("", False), (", buckets", True)):
        manager = manager_of(workers)
        inner = torch.optim.SGD(parameters, lr=1e-4)
        outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
        DiLoCo(
            manager, [model], inner, outer, sync_every=1, use_bucketization=buckets
        ).__enter__()  # from here on its hooks are in the inner step
        # Without gradients an inner step is only its hooks, of which one exchanges.
        yield (
            f"torchft DiLoCo{more}",
            System(inner.step, model.zero_grad, parameters, manager.current_step),
        )


def manager_of(workers: int) -> Any:
    """Return this worker's manager, a replica group of its own, under a lighthouse on rank 0."""
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, port = dist.get_rank(), [""]
    if rank == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=workers)
        KEPT.append(lighthouse)
        port = [lighthouse.address().rsplit(":", 1)[1]]
    dist.broadcast_object_list(port)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    KEPT.append(store)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,  # nobody joins later: there is nothing to heal
        state_dict=dict,
        min_replica_size=workers,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port[0]}",
        replica_id=f"worker{rank}",
        hostname="127.0.0.1",
        init_sync=False,  # all have the same weights
    )
    KEPT.append(manager)
    return manager


KEPT: list[Any] = []  # servers, until the process ends


def timed(call: Exchange) -> float:
    """Time a call that all workers begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def exchanged(system: System) -> float:
    """Let a worker differ from the others, as training does, and time an exchange."""
    torch._foreach_add_(system.parameters, 1e-3 * (1 + dist.get_rank()))
    system.before()
    with torch.enable_grad():
        return timed(system.exchange)


@torch.no_grad()
def check(name: str, system: System, rounds: int) -> None:
    """Refuse a system that has not exchanged, or that averages and has not found the mean."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    for p in system.parameters:
        p.fill_(1.0 + rank)
    system.before()
    with torch.enable_grad():
        timed(system.exchange)
    found = system.parameters[-1].flatten()[-1].item()
    counted = system.committed() if system.committed else rounds
    averages = name in AVERAGING or "averaging" in name
    wrong = found != (1 + workers) / 2 if averages else found == 1 + rank
    if wrong or counted < rounds:
        raise RuntimeError(
            f"{name} has made {found} of {1 + rank}, in {counted} of {rounds} rounds."
        )


def measure(case: Case, directory: Path) -> dict[str, list[float]]:
    """Time a memcpy alone and by all, and an exchange of each system, in every round."""
    plain, parallel = model_of(case), DataParallel(case)
    source, target = torch.ones(2, case.parameters)
    systems = dict([*ours(case, directory), *torchs(plain)])
    if case.torchft:
        systems |= torchfts(plain, case.workers)
    found: dict[str, list[float]] = {"memcpy alone": [], "memcpy by all": []}
    found |= {name: [] for name in [*systems, parallel.name]}
    for system in systems.values():  # all begin with the same weights
        system.before()
        timed(system.exchange)
    names = list(found)
    for k in range(-1, case.rounds):  # the first touches memory
        for name in (*names[k % len(names) :], *names[: k % len(names)]):
            if name == parallel.name:
                seconds = parallel.seconds()
            elif name == "memcpy alone":
                seconds = timed(lambda: target.copy_(source) if dist.get_rank() == 0 else None)
            elif name == "memcpy by all":
                seconds = timed(lambda: target.copy_(source))
            else:
                seconds = exchanged(systems[name])
            if k >= 0:
                found[name].append(seconds)
        if dist.get_rank() == 0:
            print(f"round {k + 1} of {case.rounds}", file=sys.stderr, flush=True)
    for name, system in systems.items():
        check(name, system, case.rounds)
        system.end()
    dist.barrier()
    return found


def main(rank: str, given: str, directory: str) -> None:
    """Be a worker."""
    torch.set_num_threads(1)
    case, store = Case(*json.loads(given)), f"file://{directory}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=int(rank), world_size=case.workers, timeout=TIMEOUT
    )
    try:
        print(json.dumps(measure(case, Path(directory))), flush=True)
    except Exception:  # not to wait for the others, who notice
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without what servers and centers do at an exit


if __name__ == "__main__":
    main(*sys.argv[1:])
