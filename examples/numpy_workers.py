"""Three processes train one model with plain numpy, under each of the three rules in turn.

The model is softmax regression on scikit-learn's handwritten digits. Every worker is a process with
its own part of the training data; workers meet only in the center, a directory that all of them
name. This process does not train: it opens the center from outside and watches it learn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from datetime import datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Annotated, Any

# The workers are what runs in parallel, so one thread each. Read when numpy is imported.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table
from safetensors.numpy import save_file

from springline import AGN, ElasticAverage, ModelAverage, SharedCenter, Worker
from springline.center import CenterError
from springline.rules import SGD, Rule

LEARNING_RATE = 0.1
BATCH = 64
READ_EVERY, LINE_EVERY = 0.025, 2.0  # seconds
LOOKS = {  # title, and a line that all eyes can tell from the others
    "elastic": ("elastic averaging", "#0072B2", "-"),
    "average": ("model averaging", "#D55E00", "--"),
    "agn": ("AGN", "#009E73", "-."),
}

Array = NDArray[Any]
Arrays = dict[str, Array]
Data = tuple[Array, Array]  # images, labels


def digits() -> tuple[Data, Data]:
    """1,437 images to train on and 360 to test with, always the same."""
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split, rows = model_selection.train_test_split, np.arange(len(labels))
    train, test = split(rows, test_size=360, stratify=labels, random_state=0)
    return (images[train], labels[train]), (images[test], labels[test])


def new_model() -> Arrays:
    return {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}


def gradients_of(model: Mapping[str, Array], images: Array, labels: Array) -> Arrays:
    """Gradients of the mean cross-entropy."""
    scores = images @ model["weight"] + model["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = scores / scores.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    return {"weight": images.T @ error, "bias": error.sum(axis=0)}


def accuracy_of(model: Arrays, images: Array, labels: Array) -> float:
    guesses = (images @ model["weight"] + model["bias"]).argmax(axis=1)
    return float((guesses == labels).mean())


def train(rank: int, rule: Rule, center: str, data: Data, steps: int, seed: int) -> None:
    """One worker. `synchronous`: all workers start together, so that times can be compared."""
    images, labels = data
    random = np.random.default_rng([seed, rank])
    with Worker(new_model(), rule, center=center, rank=rank, synchronous=True) as worker:
        for _ in range(steps):
            batch = random.integers(len(images), size=BATCH)
            gradients = gradients_of(worker.parameters, images[batch], labels[batch])
            worker.observe(gradients)
            for name, gradient in gradients.items():
                worker.parameters[name] -= LEARNING_RATE * gradient
            worker.step()


def worker_process(report: Connection, *arguments: Any) -> None:
    """Train, or tell the parent what went wrong."""
    try:
        train(*arguments)
    except Exception:
        report.send(traceback.format_exc())
        sys.exit(1)


class Team:
    """The workers of one rule, the directory of their center, and what was seen of it."""

    def __init__(self, rule: Rule, run: Path, data: Data, steps: int, seed: int) -> None:
        self.rule = rule
        self.start = 0.0  # the clock starts with the first exchange
        self.points: list[tuple[float, float]] = []  # seconds, accuracy of the center
        self.exchanges, self.nbytes, self.seconds = 0, 0, 0.0  # of all workers together
        self.directory = tempfile.TemporaryDirectory(prefix=f"{rule.name}-", dir=run)
        self.processes: list[SpawnProcess] = []
        self.reports: list[Connection] = []
        spawn = multiprocessing.get_context("spawn")
        # Ctrl-C reaches every process of a terminal: the workers leave it to this one.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for rank in range(rule.workers):
            images, labels = (array[rank :: rule.workers] for array in data)
            report, sender = spawn.Pipe(duplex=False)
            given = (sender, rank, rule, self.directory.name, (images, labels), steps, seed)
            self.processes.append(spawn.Process(target=worker_process, args=given, daemon=True))
            self.processes[-1].start()
            self.reports.append(report)
            sender.close()
        signal.signal(signal.SIGINT, handler)

    @property
    def accuracy(self) -> float:
        """The last that was seen."""
        return self.points[-1][1]

    def working(self) -> bool:
        """Wait a moment; then say whether any worker still works."""
        wait([p.sentinel for p in self.processes if p.exitcode is None], timeout=READ_EVERY)
        for rank, process in enumerate(self.processes):
            if process.exitcode:
                raise ChildProcessError(f"Worker {rank} {self._reason(rank, process.exitcode)}")
        return any(p.exitcode is None for p in self.processes)

    def _reason(self, rank: int, status: int) -> str:
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}."
        try:
            return f"failed:\n{self.reports[rank].recv()}"
        except EOFError:
            return f"ended with status {status} before it began."

    def find_center(self) -> SharedCenter:
        """Open the center as soon as the first worker has made it."""
        while True:
            working, self.start = self.working(), time.monotonic()
            try:
                return SharedCenter.open(self.directory.name)
            except CenterError:
                if not working:
                    raise

    def close(self) -> None:
        """End workers that still run, and free the center's memory."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
        with contextlib.suppress(CenterError):  # there is none if the workers did not get that far
            SharedCenter.open(self.directory.name).retire()
        self.directory.cleanup()


def watch(team: Team, steps: int, test: Data, screen: Screen) -> Arrays:
    """Read the center from outside until the work is done; return what it has become."""
    rule, working = team.rule, True
    total = steps * rule.workers
    team.points.append((0.0, accuracy_of(new_model(), *test)))
    task = screen.add_task(LOOKS[rule.name][0], total=1.0, accuracy=team.accuracy)
    with contextlib.closing(team.find_center()) as center:
        while working:
            working = team.working()
            now, ranks, model = time.monotonic(), center.progress(), dict(center.values())
            team.exchanges = sum(rank.exchanges for rank in ranks)
            team.seconds = sum(rank.seconds for rank in ranks)
            team.nbytes = 2 * center.layout.nbytes * team.exchanges  # there and back
            if team.exchanges == 0:
                team.start = now
            team.points.append((now - team.start, accuracy_of(model, *test)))
            screen.show(task, sum(rank.steps for rank in ranks) / total, team.accuracy, working)
    return model


class Screen(Progress):
    """A progress bar for each rule; without a terminal, a plain line now and then."""

    def __init__(self) -> None:
        console, left = Console(highlight=False), ("{task.description:<17}", BarColumn())
        right = ("accuracy {task.fields[accuracy]:5.1%}", TimeElapsedColumn())
        super().__init__(*left, *right, console=console, disable=not console.is_terminal)
        self._next_line = 0.0

    def show(self, task: TaskID, done: float, accuracy: float, working: bool) -> None:
        """Show how far a rule has come."""
        self.update(task, completed=done, accuracy=accuracy)
        if self.disable and (time.monotonic() > self._next_line or not working):
            title = self.tasks[task].description
            self.console.print(f"{title}: {done:.0%} done, accuracy of the center {accuracy:.1%}")
            self._next_line = time.monotonic() + LINE_EVERY


def table_of(teams: list[Team]) -> Table:
    table = Table(caption="Model averaging: an exchange waits for all workers.")
    table.add_column("rule", no_wrap=True)
    for header in ("accuracy of\nthe center", "exchanges", "bytes\nexchanged", "ms per\nexchange"):
        table.add_column(header, justify="right", no_wrap=True)
    for team in teams:
        each = f"{1000 * team.seconds / team.exchanges:.3f}"
        numbers = (f"{team.accuracy:.1%}", f"{team.exchanges:,}", decimal(team.nbytes), each)
        table.add_row(LOOKS[team.rule.name][0], *numbers)
    return table


def plot(teams: list[Team], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.axhline(95, color="0.4", linewidth=1, linestyle=":", label="95 %")
    for team in teams:
        title, color, style = LOOKS[team.rule.name]
        seconds, accuracies = np.array(team.points).T
        label = f"{title}: {team.accuracy:.1%} at the end"
        axes.plot(seconds, 100 * accuracies, style, color=color, label=label)
    rule = teams[0].rule
    axes.set_title(f"Digits, {rule.workers} workers, an exchange every {rule.period} steps")
    axes.set_xlabel("seconds since the first exchange")
    axes.set_ylabel("accuracy of the center on the test images, %")
    axes.set_xlim(left=0)
    axes.set_ylim(85 if min(t.accuracy for t in teams) > 0.9 else 0, 100)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def main(
    workers: Annotated[int, typer.Option(min=1, max=20, help="How many processes train.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Local steps of each worker.")] = 25_000,
    period: Annotated[int, typer.Option(min=1, help="Local steps between two exchanges.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Decides which images a step sees.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Results; default: runs/DATE-TIME.")] = None,
) -> None:
    """Train one model in several processes, under each of three rules in turn.

    Softmax regression on scikit-learn's digits, in plain numpy. Each worker
    has its own part of the training images; all exchange with one center, whose
    accuracy on the test images is shown. It leaves the center of each rule, as
    center-RULE.safetensors, and plot.png.
    """
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f"This example needs {package}: pip install {package}")
    run, screen = out or Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}", Screen()
    agn = AGN(period=period, workers=workers, outer=SGD(LEARNING_RATE))
    both = {"period": period, "workers": workers}
    rules = (ElasticAverage(**both), ModelAverage(**both), agn)
    teams = []
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(run.iterdir()):
            raise typer.BadParameter(f"{run} is not empty. Give a new one.", param_hint="--out")
        run.chmod(0o700)
        data, test = digits()
        with screen:
            for rule in rules:
                with contextlib.closing(Team(rule, run, data, steps, seed)) as team:
                    center = watch(team, steps, test, screen)
                save_file(center, run / f"center-{rule.name}.safetensors")
                teams.append(team)
        plot(teams, run / "plot.png")
    except (CenterError, OSError) as error:
        raise SystemExit(f"Stopped. {error}") from error
    except KeyboardInterrupt:
        screen.console.print(f"Stopped. What was finished is in {run}", soft_wrap=True)
        raise SystemExit(130) from None
    screen.console.print(table_of(teams))
    screen.console.print(f"The centers and plot.png are in {run}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
