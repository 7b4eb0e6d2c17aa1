"""What the benchmark of slow links says: a table beside the formula, and a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from links_formula import TRIPS, Setup, all_reduce
from links_network import Link, Measured
from links_pace import FORWARD
from links_worker import ALONE, COLLECTIVE, DDP, LAYERS, RAY, Case, Result, Settings
from pages import facts, markdown

COLUMNS = (
    "who exchanges",
    "τ",
    "overlap",
    "steps/s",
    "computing",
    "formula",
    "exchange, s",
    "formula",
    "steps between",
    "formula",
    "a worker sends, MB/s",
    "center receives, MB/s",
)
Moved = Sequence[tuple[int, int]]  # bytes received and sent, by host; the first has the center


@dataclass(frozen=True)
class Row:
    """How a case went; means over its workers."""

    case: Case
    rate: float  # steps per second
    exchange: float  # seconds of one; 0 if there are none
    between: float  # steps between two of a worker
    sent: float  # bytes per second, by a worker's host
    center: float  # bytes per second, to the center's host

    @classmethod
    def of(cls, case: Case, results: Sequence[Result], moved: Moved) -> Row:
        """Put together what workers and links say."""
        wall = sum(result.wall for result in results) / len(results)
        exchanges = sum(result.exchanges for result in results)
        exchanging = sum(result.exchanging for result in results)
        sent = sum(sent for _, sent in moved[1 : 1 + case.workers]) / case.workers
        return cls(
            case,
            rate=case.steps / wall,
            exchange=exchanging / exchanges if exchanges else 0.0,
            between=case.steps * case.workers / exchanges if exchanges else 0.0,
            sent=sent / wall,
            center=moved[0][0] / wall,
        )


@dataclass(frozen=True)
class Expected:
    """What the formula says of a case; 0 where it has nothing to say."""

    share: float
    exchange: float = 0.0
    between: float = 0.0

    @classmethod
    def of(cls, case: Case, settings: Settings, link: Measured) -> Expected:
        """Ask the formula about a link as it was measured."""
        step, wire = settings.seconds, (link.bytes_per_second, link.round_trip)
        reduce = all_reduce(settings.nbytes, *wire, settings.workers)
        computing = case.period * step
        if case.kind == RAY:
            setup = Setup(settings.nbytes, *wire, step, case.period, case.workers)
            o = case.overlap
            return cls(setup.share(o), setup.exchange(o), setup.steps_between(o))
        if case.kind == COLLECTIVE:  # all meet, and so all wait
            between = max(computing, reduce) if case.overlap else computing + reduce
            return cls(computing / between, reduce, case.period)
        if case.kind == DDP:  # it begins with the last layer's gradient
            first = step * (FORWARD + (1 - FORWARD) / LAYERS)
            return cls(step / max(step, first + reduce), reduce)
        return cls(1.0)


class Findings:
    """All rows of a run.

    Args:
        rows: of all cases.
        settings: what they have in common.
        link: as it was measured.
    """

    def __init__(self, rows: Sequence[Row], settings: Settings, link: Measured) -> None:
        self.rows = list(rows)
        self.settings, self.link = settings, link

    def share(self, row: Row) -> float:
        """Return the share of the time that a worker computes."""
        return row.rate * self.settings.seconds

    def expected(self, row: Row) -> Expected:
        """Return what the formula says."""
        return Expected.of(row.case, self.settings, self.link)

    @property
    def trips(self) -> float:
        """Round trips in an exchange of one worker, beyond the time of its bytes."""
        one = next(row for row in self.rows if row.case.kind == RAY and row.case.workers == 1)
        bytes_alone = 2 * self.settings.nbytes / self.link.bytes_per_second
        return (one.exchange - bytes_alone) / self.link.round_trip

    def cells(self, row: Row) -> list[str]:
        """Return what stands under `COLUMNS`."""
        case, expected = row.case, self.expected(row)
        rounds = case.kind in (RAY, COLLECTIVE)
        return [
            case.who,
            str(case.period) if rounds else "",
            ("yes" if case.overlap else "no") if rounds else "",
            f"{row.rate:.2f}",
            _percent(self.share(row)),
            "" if case.kind == ALONE else _percent(expected.share),
            f"{row.exchange:.2f}" if rounds else "",
            f"{expected.exchange:.2f}" if expected.exchange else "",
            f"{row.between:.0f}" if rounds else "",
            f"{expected.between:.0f}" if expected.between else "",
            f"{row.sent / 1e6:.2f}",
            f"{row.center / 1e6:.2f}" if case.kind == RAY else "",
        ]


def page(found: Findings, link: Link, command: str, load: float) -> str:
    """Return the page for the docs."""
    settings, measured = found.settings, found.link
    size = f"{settings.parameters / 1e6:.3g} M float32 parameters ({settings.nbytes / 1e6:.3g} MB)"
    return "\n".join(
        [
            "# Training over slow links",
            "",
            f"Made by `{command}`. {facts()} The load before it began was {load:.1f} (of "
            f"{os.cpu_count()} cores). {settings.workers} workers, {size}, a step of "
            f"{1e3 * settings.seconds:g} ms.",
            "",
            "![Share of the time spent computing, and bytes sent, by τ](links.svg)",
            "",
            _READING,
            "",
            "## The links",
            "",
            f"{_LINKS} {measured.how}",
            "",
            *markdown(
                ("", "asked for", "measured"),
                [
                    ["round trip", _ms(link.round_trip), _ms(measured.round_trip)],
                    [
                        "stream, each way",
                        f"{link.mbits:g} Mbit/s with all headers",
                        f"{8e-6 * measured.bytes_per_second:.1f} Mbit/s without",
                    ],
                ],
            ),
            "",
            "## All cases",
            "",
            *markdown(COLUMNS, map(found.cells, found.rows)),
            "",
            _COLUMNS,
            "",
            _trips(found),
            "",
        ]
    )


def _trips(found: Findings) -> str:
    settings, link = found.settings, found.link
    wire = link.bytes_per_second, link.round_trip
    together = Setup(settings.nbytes, *wire, settings.seconds, 1, settings.workers).together
    return (
        "Beside its bytes, the exchange of one worker alone took the time of "
        f"{found.trips:.1f} round trips; the formula has {TRIPS:g}. The formula supposes that "
        f"workers come evenly. Two that always meet need up to {together:.2f} s for an exchange: "
        "those that begin together and have the same τ often do. In the row *apart* the second "
        "worker begins half a period later."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


_READING = """\
Three hosts are network namespaces of this machine, each with a Ray node. The first has the center
(head and two shards) and nothing else; each of the others has one worker. *elastic, Ray* is
`ElasticAverageOptimizer` with a `RayCenter`, *averaging, gloo* is `ModelAverageOptimizer` over a
process group, and `DistributedDataParallel` averages gradients over the same group at every step,
a bucket for every layer. Both workers begin at the same moment, but in the row *apart*.

A step is a real forward and backward pass of a model of four layers, made to last by waiting in
every layer, as a step on an accelerator does, since all hosts have to share these cores: a third of
the time in the forward pass, the rest in the backward pass, where `DistributedDataParallel` sends
one layer's gradients while those of the next are being made. So what is compared is the time on the
links, and hardly that on the cores.

*Computing* is the share of the time that a worker computes: its steps, times what a step is made to
last, over all its time. Workers that exchange nothing, the first row, come as near to 100 % as
these cores let them. *The formula* is that of [choosing-the-period.md](choosing-the-period.md),
with the link as measured below. With overlap a Ray center's workers wait for nothing, whatever τ
is: an exchange that is due while another is in flight is left out, so that the period becomes what
the link can carry (*steps between*). Rounds of averaging cannot be left out; there the loop waits
until the last one is over."""

_LINKS = """\
Every host's link is limited in both directions. 20 ms is the delay from one host to another, on top
of what the limit costs, so that a round trip takes 40 ms. Measured between the two workers' hosts
before they begin."""

_COLUMNS = """\
*Exchange* is from when it is due (or handed to the background) until the worker has the reply; of
`DistributedDataParallel` the formula's all-reduce is given. What is sent is counted by the hosts'
interfaces, with all headers, and includes what the workers' hosts send for Ray."""
