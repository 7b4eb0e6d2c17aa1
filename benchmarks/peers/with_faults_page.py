"""What the comparison with faults says: a page and its plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import matplotlib as mpl
from campaign import Records
from matplotlib.figure import Figure
from over_links_page import COLOURS, PEERS, save
from pages import markdown
from races import AWAY, KILLED, SLOWER, STRAGGLER, Outcome
from systems import SYSTEMS

if TYPE_CHECKING:
    from with_faults import Plan

TITLES = {
    STRAGGLER: f"A worker that is {SLOWER:g} times slower",
    KILLED: f"A worker that is killed, and back {AWAY:.0f} s later",
}
COLUMNS = [
    *("system", "undisturbed", "the others end", "they lose", "all end", "all lose"),
    *("loss then", "nats lost", "loss when the others end"),
]


class Row(NamedTuple):
    """A system with a fault, beside itself undisturbed, over all seeds that were run."""

    system: str
    plain: list[Outcome]
    faulty: list[Outcome]

    @property
    def others(self) -> float:
        """Seconds that the other worker loses."""
        return statistics.median(
            f.others - p.others for p, f in zip(self.plain, self.faulty, strict=True)
        )

    @property
    def all(self) -> float:
        """Seconds by which the run ends later."""
        return statistics.median(
            f.wall - p.wall for p, f in zip(self.plain, self.faulty, strict=True)
        )

    @property
    def nats(self) -> list[float]:
        """By which the result is worse."""
        return [f.final - p.final for p, f in zip(self.plain, self.faulty, strict=True)]


def rows_of(plan: Plan, records: Records, fault: str) -> list[Row]:
    """Collect all systems, in the order of what the others lose."""
    found = []
    for system in plan.systems:
        pairs = []
        for seed in records.scale.seeds:
            cases = [plan.case(system, records.scale, f, seed) for f in ("", fault)]
            if all(case in records.runs for case in cases):
                pairs.append([records.runs[case] for case in cases])
        if pairs:
            plain, faulty = zip(*pairs, strict=True)
            found.append(Row(system, list(plain), list(faulty)))
    return sorted(found, key=lambda row: row.others)


def page(plan: Plan, records: Records, command: str) -> str:
    """Return the page for the docs."""
    scale = records.scale
    seconds, sizes = next((m.seconds, m.sizes) for m in scale.models.values())
    tables = {fault: rows for fault in TITLES if (rows := rows_of(plan, records, fault))}
    lines = [
        "# A straggler and a killed worker, beside the peers",
        "",
        f"Made by `{command}`: {records.facts()}",
        "",
        *(f"- {line}" for fault, rows in tables.items() for line in _verdicts(fault, rows)),
        "",
        "![What the others lose, and what the result loses](peers-faults.svg)",
        "",
        f"Two workers make {scale.steps} steps each, of {1e3 * seconds:.0f} ms at least, with the "
        f"GPT of `examples/shakespeare.py` ({sizes['layers']} layers, width {sizes['width']}), "
        "over a link of 1 Gbit/s with 1 ms. Figures are of "
        f"{records.seeds()}; with several, medians.",
        "",
        _READING,
        "",
    ]
    for fault, rows in tables.items():
        lines += [f"## {TITLES[fault]}", "", *markdown(COLUMNS, map(_cells, rows)), ""]
    return "\n".join(lines)


def _verdicts(fault: str, rows: list[Row]) -> Iterator[str]:
    """Say who loses least, in time and in nats, and how springline's best compares."""
    measures: dict[str, Callable[[Row], float]] = {
        "The others lose least time": lambda row: row.others,
        "The run ends least late": lambda row: row.all,
        "The result loses least": lambda row: statistics.median(row.nats),
    }
    for words, measure in measures.items():
        unit, how = ("nats", "+.3f") if "result" in words else ("s", "+.1f")
        ordered = sorted(rows, key=measure)
        first = ordered[0]
        peer = " (a peer)" if first.system in PEERS else ""
        others = [row for row in ordered if (row.system in PEERS) != (first.system in PEERS)]
        line = f"**{TITLES[fault]}.** {words} with {SYSTEMS[first.system].title}{peer}: "
        line += f"{measure(first):{how}} {unit}"
        if others:
            who = "springline's best" if peer else "the best peer"
            line += (
                f"; {who} is {SYSTEMS[others[0].system].title}: {measure(others[0]):{how}} {unit}"
            )
        yield line + "."


_READING = """\
*The others* are the worker that nothing happens to. It ends when it has made its steps and, under
rules with rounds, the rounds are over; *all end* when the slow or restarted one has made its own,
too. Under asynchronous rules nobody waits: the center as it was when the other worker ended is in
the last column. *Nats lost* is the final loss less that of the same system undisturbed, seed by
seed.

The killed worker dies by SIGKILL, with all that was started with it on its host (`torchrun`'s
agent), and is started again by the same command. `DistributedDataParallel`, PostLocalSGD and
springline on a process group run under `torchrun --max-restarts 3` and go on from a checkpoint that
is written every 50 steps, or as many seconds. torchft heals the restarted worker from the other
one; its peer trains on alone. On Ray springline's worker finds its rank and how far it had come."""


def _cells(row: Row) -> list[str]:
    plain, faulty = row.plain, row.faulty

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    return [
        SYSTEMS[row.system].title,
        f"{middle([p.wall for p in plain]):.1f} s, {middle([p.final for p in plain]):.4f}",
        f"{middle([f.others for f in faulty]):.1f} s",
        f"{row.others:+.1f} s",
        f"{middle([f.wall for f in faulty]):.1f} s",
        f"{row.all:+.1f} s",
        f"{middle([f.final for f in faulty]):.4f}",
        f"{middle(row.nats):+.4f} ({', '.join(f'{value:+.4f}' for value in row.nats)})",
        f"{middle([f.at(f.others) for f in faulty]):.4f}" if len(faulty[0].losses) > 1 else "",
    ]


def draw(plan: Plan, records: Records, path: Path) -> None:
    """Draw what the others lose against what the result loses, a panel for each fault."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.4, 4.2), layout="constrained")
        panels = figure.subplots(1, len(TITLES), squeeze=False)[0]
        for panel, (fault, title) in zip(panels, TITLES.items(), strict=True):
            for row in rows_of(plan, records, fault):
                panel.plot(
                    [f.others - p.others for p, f in zip(row.plain, row.faulty, strict=True)],
                    row.nats,
                    "o" if row.system not in PEERS else "s",
                    color=COLOURS[row.system],
                    label=SYSTEMS[row.system].title,
                )
            panel.axhline(0, color="#444444", linewidth=0.8)
            panel.set(title=title, xlabel="seconds that the others lose", ylabel="nats lost")
            panel.grid(color="#e4e4e4", linewidth=0.8)
        handles, labels = panels[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        save(figure, path)
