"""What the TensorFlow benchmark says: targets, a page and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exchange_report import Check, Quartiles
from pages import facts, markdown

if TYPE_CHECKING:
    from tensorflow_step import Case

EXCHANGE, LOCAL, SMALL = 1.3, 1.05, 1.5  # the targets
WAYS = {"": "hook", ", plain": "operation alone"}


@dataclass(frozen=True)
class Row:
    """The result of a case: milliseconds, of all workers together."""

    case: Case
    times: Mapping[str, Quartiles]

    @classmethod
    def of(cls, case: Case, workers: Sequence[Mapping[str, Sequence[float]]]) -> Row:
        """Put the workers' times together."""
        return cls(
            case,
            {
                name: Quartiles.of(1e3 * t for worker in workers for t in worker[name])
                for name in workers[0]
            },
        )

    @property
    def what(self) -> str:
        """Name it in a few words."""
        case = self.case
        words = f"{case.variables} × {case.size:,}, {case.workers} worker" + "s" * (
            case.workers > 1
        )
        return words + ("" if case.settings else ", default memory")

    def local(self, way: str) -> float:
        """A step that does not exchange, in bare steps."""
        return self.times["local" + way].median / self.times["bare" + way].median

    def exchange(self, way: str) -> float:
        """What an exchange adds to a step, in raw pulls and pushes."""
        raw = self.times["raw pull"].median + self.times["raw push"].median
        return (self.times["exchanging" + way].median - self.times["local" + way].median) / raw


def checks(rows: Sequence[Row]) -> Iterator[Check]:
    """Compare with the targets, which are about the hook and the memory settings."""
    for row in rows:
        if not row.case.settings:
            continue
        if row.case.model == "large":
            found = row.exchange("")
            target = f"at most {EXCHANGE} raw pulls and pushes"
            yield Check(f"an exchange, {row.what}", target, f"{found:.2f}", found <= EXCHANGE)
        most = LOCAL if row.case.model == "large" else SMALL
        found, target = row.local(""), f"at most {most} bare steps"
        yield Check(f"a local step, {row.what}", target, f"{found:.2f}", found <= most)


def page(rows: Sequence[Row], command: str) -> str:
    """Return the page for the docs."""
    columns = ("cluster", "way", "bare", "local", "÷ bare", "raw pull", "push")
    return "\n".join(
        [
            "# What springline adds to a TensorFlow step",
            "",
            f"Made by `{command}`. {facts('tensorflow-cpu')}",
            "",
            "![A local step and an exchange, and their targets](tensorflow-step.svg)",
            "",
            _READING,
            "",
            "## The targets",
            "",
            *markdown(
                ("", "what", "target", "measured"),
                ([c.mark, c.what, c.target, c.measured] for c in checks(rows)),
            ),
            "",
            "## All figures, in ms",
            "",
            *markdown((*columns, "an exchange more", "÷ raw"), _figures(rows)),
            "",
        ]
    )


_READING = """\
One server and one or two workers, each a process, on one machine. Elastic averaging with ρ = 0 and
τ = 2 around SGD: every other step exchanges. *local* is a step that does not, *bare* a step of SGD
by itself; *raw* is TensorFlow pulling as many bytes from the server and pushing as many to it,
nothing else. An exchange is what an exchanging step takes beyond a local one. *hook*: in a
`MonitoredTrainingSession` with the hook of `make_session_run_hook`, against bare SGD in a monitored
session. *operation alone*: what `apply_gradients` returns, run in a plain session, against SGD in
one. All are medians. The processes run with the memory settings that `springline run` sets
(`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=9999999999 MALLOC_ARENA_MAX=1`) unless it says *default
memory*."""


def _figures(rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        for way, name in WAYS.items():
            bare, local = row.times["bare" + way].median, row.times["local" + way].median
            more = row.times["exchanging" + way].median - local
            yield [
                row.what,
                name,
                f"{bare:.3g}",
                f"{local:.3g}",
                f"{row.local(way):.2f}",
                f"{row.times['raw pull'].median:.3g}",
                f"{row.times['raw push'].median:.3g}",
                f"{more:.3g}",
                f"{row.exchange(way):.2f}",
            ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw local steps and exchanges of both ways, with the targets as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    large = [row for row in rows if row.case.model == "large"]
    panels = (
        (left, rows, Row.local, "a step that does not exchange ÷ bare SGD", (LOCAL, SMALL)),
        (right, large, Row.exchange, "an exchange ÷ raw pull and push", (EXCHANGE,)),
    )
    for panel, shown, value, title, lines in panels:
        for shift, (way, name) in zip((-0.2, 0.2), WAYS.items(), strict=True):
            places = [n + shift for n in range(len(shown))]
            panel.barh(places, [value(row, way) for row in shown], 0.38, label=name)
        for line in lines:
            panel.axvline(line, color="#444444", linewidth=0.9, linestyle="--")
        panel.set_yticks(range(len(shown)), [row.what for row in shown], fontsize=8)
        panel.invert_yaxis()
        panel.set_title(title, fontsize=9.5)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path)
