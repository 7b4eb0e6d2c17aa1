"""One worker of the benchmark of slow links, in a process of its own on its host.

    python links_worker.py make SETTINGS          # make the centers, one for each period
    python links_worker.py serve SETTINGS RANK    # then do what stdin says, one line each

A line is a case. The worker says `ready` when it is warm, waits for a line, trains, says what it
measured, waits for another line, and leaves its center.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from links_pace import Pace, wait
from torch import Tensor, nn

from springline.center import Layout
from springline.center.ray import RayCenter, connect
from springline.rules import ElasticAverage
from springline.torch import ElasticAverageOptimizer, ModelAverageOptimizer
from springline.torch.optimizer import CenterOptimizer

LAYERS = 4
BATCH = 8
LINGER = 3600.0  # seconds for which a center waits for its next case
PORT = 29500
RAY, COLLECTIVE = "elastic, Ray", "averaging, gloo"
DDP, ALONE = "DistributedDataParallel", "no exchange"


class Settings(NamedTuple):
    """What all cases have in common."""

    address: str  # of the cluster
    meeting: str  # the host of rank 0
    workers: int
    shards: int
    width: int  # of the model's layers
    seconds: float  # of a step
    periods: list[int]

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return LAYERS * self.width * (self.width + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return 4 * self.parameters


class Case(NamedTuple):
    """One way to train, for so many steps."""

    kind: str
    period: int
    overlap: bool
    steps: int
    workers: int  # that take part; the others wait
    apart: bool = False  # they do not begin at the same moment, but evenly within a period

    @property
    def warm(self) -> int:
        """Steps before the first that is timed."""
        return min(self.period, 10)

    @property
    def title(self) -> str:
        """What it is called."""
        if self.kind in (ALONE, DDP):
            return self.kind
        return f"{self.who}, τ = {self.period}{', overlap' * self.overlap}"

    @property
    def who(self) -> str:
        """Who exchanges."""
        return self.kind + ", one worker" * (self.workers == 1) + ", apart" * self.apart


@dataclass
class Result:
    """What one worker measured."""

    wall: float  # seconds of all steps
    exchanges: int = 0
    exchanging: float = 0.0  # seconds of those, in the background or not


class Model(nn.Module):
    """Layers of the same size that take the same time; the last one's gradient is there first."""

    def __init__(self, width: int, pace: Pace) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self._pace = pace

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and wait in between as long as a larger layer would take."""
        for k, layer in enumerate(self.layers, 1):
            x = wait(torch.relu(layer(x)), self._pace, k, LAYERS)
        return x


Step = Callable[[], None]
_Made = tuple[Step, CenterOptimizer | None]


def step(model: nn.Module, opt: torch.optim.Optimizer, data: Tensor, pace: Pace) -> None:
    """One step of a training loop."""
    pace.begin()
    opt.zero_grad()
    model(data).square().mean().backward()
    opt.step()


def prepare(case: Case, settings: Settings, rank: int) -> _Made:
    """Return a step of the case, and its optimizer if that is one of ours."""
    torch.manual_seed(0)
    pace = Pace(settings.seconds)
    plain = Model(settings.width, pace)
    model: nn.Module = plain
    data = torch.randn(BATCH, settings.width)
    opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ours: CenterOptimizer | None = None
    if case.kind == DDP:
        megabytes = settings.nbytes / LAYERS / 2**20  # a layer: as soon as it has its gradient
        model = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=megabytes)
    elif case.kind == RAY:
        name = center_name(case.period)
        os.environ |= {"SPRINGLINE_RANK": str(rank), "SPRINGLINE_WORKERS": str(settings.workers)}
        ours = ElasticAverageOptimizer(
            opt,
            model=plain,
            period=case.period,
            overlap=case.overlap,
            center=RayCenter.open(name, token=name),
        )
    elif case.kind == COLLECTIVE:
        ours = ModelAverageOptimizer(
            opt,
            model=plain,
            period=case.period,
            overlap=case.overlap,
            center=dist.group.WORLD,
        )
    return partial(step, model, ours or opt, data, pace), ours


def center_name(period: int) -> str:
    """Return what the center of a period is called; here that is its token, too."""
    return f"links-{period}"


def make_centers(settings: Settings) -> None:
    """Make the centers, one for each period, on the host where this runs."""
    connect(settings.address)
    model = Model(settings.width, Pace(0))
    values = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for period in settings.periods:
        RayCenter.create_or_join(
            center_name(period),
            Layout.of(values),
            ElasticAverage(period=period, workers=settings.workers),
            values,
            shards=settings.shards,
            linger=LINGER,
            token=center_name(period),
        ).close()


def run(case: Case, settings: Settings, rank: int, say: Callable[[str], None]) -> None:
    """Train; say when warm and what was measured, and wait each time for the word to go on."""
    if rank >= case.workers:
        for answer in ("ready", "null"):
            say(answer)
            sys.stdin.readline()
        return
    once, ours = prepare(case, settings, rank)
    for _ in range(case.warm):
        once()
    if ours:
        ours.wait()
    say("ready")
    sys.stdin.readline()
    if case.apart:
        time.sleep(rank / case.workers * case.period * settings.seconds)
    before = (ours.worker.exchanges, ours.worker.exchange_seconds) if ours else (0, 0.0)
    start = time.perf_counter()
    for _ in range(case.steps):
        once()
    result = Result(time.perf_counter() - start)
    if ours:
        ours.wait()  # what began in time counts
        result.exchanges = ours.worker.exchanges - before[0]
        result.exchanging = ours.worker.exchange_seconds - before[1]
    say(json.dumps(asdict(result)))
    sys.stdin.readline()
    if ours:
        ours.finish()


def serve(settings: Settings, rank: int) -> None:
    """Do one case after the other."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    where = f"tcp://{settings.meeting}:{PORT}"
    dist.init_process_group("gloo", where, rank=rank, world_size=settings.workers)
    connect(settings.address)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    say = partial(print, file=answers, flush=True)
    for line in sys.stdin:
        run(Case(*json.loads(line)), settings, rank, say)


if __name__ == "__main__":
    given = Settings(*json.loads(sys.argv[2]))
    if sys.argv[1] == "make":
        make_centers(given)
    else:
        serve(given, int(sys.argv[3]))
