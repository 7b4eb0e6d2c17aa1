"""One run of one system: its processes on hosts behind a link, and what came of it."""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from links_network import Link, hosts, slow_links
from systems import SYSTEMS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRAINER = HERE / "trainer.py"
ON_HEAD = ("--resources", '{"springline-center": 1}')  # where Ray puts a center's shards
STRAGGLER, KILLED = "straggler", "killed"
SLOWER = 4.0  # times, the straggler
AWAY = 20.0  # seconds that a killed worker is away
COPIES = 20  # of what would be saved, in a run
LIGHTHOUSE = 29510  # its port
PATIENCE = 1800.0  # seconds for a run


class Case(NamedTuple):
    """One run."""

    system: str
    period: int
    outer: tuple[float, float] | None
    moving_rate: float | None
    rate: float  # the learning rate's peak
    workers: int
    link: str  # its name; "" for one process
    steps: int  # of each worker; the schedule is as long
    seed: int = 0
    fault: str = ""
    stop_at: int = 0  # steps, where only the time is measured

    @property
    def what(self) -> str:
        """Name it in a few words."""
        τ = f", τ = {self.period}" if self.period else ""
        parts = [f"{SYSTEMS[self.system].title}{τ}", self.link, self.fault]
        return ", ".join([*filter(None, parts), f"{self.steps} steps, seed {self.seed}"])


@dataclass(frozen=True)
class Outcome:
    """What came of a run. Bytes are those that the first worker's host sent and received."""

    seconds: list[float]  # when the copies were made
    sent: list[float]
    losses: list[float]
    others: float  # seconds until the first worker had made its steps
    wall: float  # seconds until all had
    spent: float  # seconds that the run took in all
    load: float  # of the machine, in the last minute of the run

    @property
    def final(self) -> float:
        """The loss at the end; infinite if the run diverged."""
        return self.losses[-1]

    def at(self, second: float) -> float:
        """Return the loss of the last copy until then."""
        known = [loss for t, loss in zip(self.seconds, self.losses, strict=True) if t <= second]
        return known[-1] if known else math.inf

    def reached(self, target: float, what: str = "seconds") -> float:
        """Return when, or after how many bytes, the loss was first so low; between two copies."""
        before = (0.0, math.inf)
        for at, loss in zip(getattr(self, what), self.losses, strict=True):
            if loss <= target:
                start, above = before
                share = 1.0 if math.isinf(above) else (above - target) / (above - loss)
                return float(start + share * (at - start))
            before = (at, loss)
        return math.inf


@dataclass(frozen=True)
class Model:
    """What is trained."""

    seconds: float  # that a step lasts at least
    sizes: dict[str, int]


@dataclass
class Field:
    """Hosts behind links, a first one and one for each worker; or none, for one process."""

    cluster: Any
    python: str  # the interpreter

    def start(self, number: int, words: list[str], given: dict[str, str], log: Path) -> Any:
        """Start a process on a host."""
        paths = (ROOT / "src", ROOT / "examples", HERE.parent, HERE)
        own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        environment = os.environ | own | given | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        with log.open("a") as file:
            options: dict[str, Any] = {"env": environment, "stdout": file, "stderr": file}
            if self.cluster is None:
                return subprocess.Popen([self.python, *words], **options)
            return self.cluster.all[number].start(self.python, *words, **options)


@contextmanager
def hosts_behind(link: Link | None, workers: int, ray: bool, python: str) -> Iterator[Field]:
    """Make the hosts of some cases; without a link there are none."""
    if link is None:
        yield Field(None, python)
        return
    with ExitStack() as held:
        if ray:
            cluster = held.enter_context(hosts.Hosts(1, head_options=ON_HEAD))
            for _ in range(workers):
                cluster.add()
        else:
            cluster = held.enter_context(hosts.Hosts(workers + 1, ray=False))
        held.enter_context(slow_links(cluster, link))
        yield Field(cluster, python)


class _Run:
    """The processes of one run."""

    def __init__(self, hosts: Field, case: Case, model: Model, folder: Path) -> None:
        self._hosts, self._case, self._folder = hosts, case, folder
        self._meets = SYSTEMS[case.system].meets
        addresses = [host.address for host in hosts.cluster.all] if hosts.cluster else [""] * 2
        self._head, self._first = addresses[:2]
        self._addresses = addresses[1:]
        faulty = case.fault == KILLED
        copies, τ = max(1, case.steps // COPIES), max(1, case.period)
        arguments: dict[str, Any] = {
            **case._asdict(),
            **model.sizes,
            "lr": case.rate,
            "folder": str(folder),
            "every": max(1, copies // τ) * τ,
            "seconds": model.seconds if hosts.cluster else 0.0,
            "straggler": SLOWER if case.fault == STRAGGLER else 0.0,
            "overlap": SYSTEMS[case.system].overlap,
            "lighthouse": f"http://{self._head}:{LIGHTHOUSE}",
            "save_steps": 50 if faulty else 0,
            "save_seconds": 50 * model.seconds if faulty else 0.0,
        }
        if case.system == "whole":
            arguments["batch"] *= case.workers
        self._number = arguments["workers"] = 1 if self._meets == "alone" else case.workers
        self._arguments = json.dumps(arguments)
        self._token, self._port = secrets.token_hex(16), str(29500 + secrets.randbelow(400))

    def outcome(self) -> Outcome:
        """Start all, wait for all, and tell what came of it."""
        began = time.monotonic()
        helpers = list(self._helpers())
        workers = [self._worker(rank) for rank in range(self._number)]
        if self._case.fault == KILLED:
            workers[-1] = self._kill_and_restart(workers)
        for process in workers:
            self._end_of(process, began)
        (self._folder / "over").touch()
        if self._meets == "ray":
            self._end_of(helpers[0], began)
        for process in helpers:
            if process.poll() is None:
                self._hosts.cluster.all[0].end(process)
        return self._read(time.monotonic() - began)

    def _helpers(self) -> Iterator[Any]:
        """Start what is on the first host."""
        log = self._folder / "log-head"
        if self._meets == "torchft":
            lighthouse = Path(self._hosts.python).with_name("torchft_lighthouse")
            options = "--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000"
            words = [str(lighthouse), *options.split(), "--bind", f"0.0.0.0:{LIGHTHOUSE}"]
            yield self._hosts.start(0, words, {}, log)
        if self._meets == "ray":
            words = [str(TRAINER), "watch", self._arguments]
            yield self._hosts.start(0, words, self._environment(0), log)

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the environment in which a worker finds the others."""
        count = str(self._number)
        run = {"SPRINGLINE_RUN": str(self._folder / "run")}
        if self._meets == "group":
            port = {"MASTER_ADDR": self._first, "MASTER_PORT": self._port}
            torchs = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            if self._case.fault == KILLED:
                return run | torchs
            return run | port | {"RANK": str(rank), "WORLD_SIZE": count}
        ours = {"SPRINGLINE_RANK": str(rank), "SPRINGLINE_WORKERS": count}
        if self._meets == "ray":
            where = {"ADDRESS": f"{self._head}:{hosts.PORT}", "CENTER": f"c{self._token}"}
            where |= {"TOKEN": self._token, "SHARDS": "2"}
            ours |= run | {f"SPRINGLINE_{name}": value for name, value in where.items()}
        return ours

    def _worker(self, rank: int) -> Any:
        words = [str(TRAINER), "train", self._arguments]
        if self._meets == "group" and self._case.fault == KILLED:
            meeting = f"--rdzv-backend c10d --rdzv-endpoint {self._first}:{self._port}"
            here = f"--rdzv-conf is_host={int(rank == 0)} --local-addr {self._addresses[rank]}"
            nodes = f"--nnodes {self._number} --nproc-per-node 1 --max-restarts 3"
            words = ["-m", "torch.distributed.run", *f"{nodes} {meeting} {here}".split(), *words]
        log = self._folder / f"log-{rank}"
        return self._hosts.start(rank + 1, words, self._environment(rank), log)

    def _kill_and_restart(self, workers: list[Any]) -> Any:
        """Kill the last worker at a third of the way, with its `torchrun`; start it again later."""
        rank = self._number - 1
        while not (self._folder / f"third-{rank}").exists():
            if any(process.poll() is not None for process in workers):
                raise self._failed("A worker has ended before it was to be killed")
            time.sleep(0.02)
        host = self._hosts.cluster.all[rank + 1]
        if self._meets == "ray":
            host.end(workers[-1])
        else:
            host.crash()
            workers[-1].wait()
        time.sleep(AWAY)
        return self._worker(rank)

    def _end_of(self, process: Any, began: float) -> None:
        try:
            if process.wait(max(1.0, began + PATIENCE - time.monotonic())):
                raise self._failed("A worker has ended")
        except subprocess.TimeoutExpired:
            raise self._failed(f"A worker has not ended in {PATIENCE:.0f} s") from None

    def _failed(self, what: str) -> RuntimeError:
        logs = [log.read_text("utf-8")[-2500:] for log in sorted(self._folder.glob("log-*"))]
        return RuntimeError("\n".join([f"{self._case.what}: {what}.", *logs]))

    def _read(self, spent: float) -> Outcome:
        traces = []
        for rank in range(self._number):
            lines = (self._folder / f"trace-{rank}.jsonl").read_text("utf-8").splitlines()
            traces.append(np.array([json.loads(line) for line in lines]))
        first = traces[0]
        start, ends = float(first[0, 0]), [float(trace[-1, 0]) for trace in traces]
        *curve, (_, last) = json.loads((self._folder / "curve.json").read_text("utf-8"))
        curve = [point for point in curve if point[0] < max(ends)] + [(max(ends), last)]
        seconds = [at - start for at, _ in curve]
        sent = np.interp(seconds, first[:, 0] - start, first[:, 2] - first[0, 2])
        losses = [math.inf if loss is None else loss for _, loss in curve]
        walls = ends[0] - start, max(ends) - start
        return Outcome(seconds, sent.tolist(), losses, *walls, spent, os.getloadavg()[0])


def run(hosts: Field, case: Case, model: Model) -> Outcome:
    """Make a run."""
    with tempfile.TemporaryDirectory(prefix="springline-peers-") as folder:
        return _Run(hosts, case, model, Path(folder)).outcome()
