"""What the torch benchmark says: the targets, a table and a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exchange_report import TARGETS, Check, Quartiles
from pages import facts, markdown
from rich.table import Table
from torch_step_cases import BATCH, PERIOD, Case, Times

TARGET_SIZE = 25_000_000
STEP, TRAINING, MICROSECONDS = 1.02, 1.05, 5.0  # the targets
MEMCPYS = {rule: TARGETS[rule, 1] for rule in ("elastic", "averaging")}  # AGN has torch's optimizer
TITLES = {
    "step": "a step that does not exchange",
    "tiny step": "the same, tiny model",
    "exchange": "an exchange",
    "training": f"a training step, τ = {PERIOD}",
}
COLUMNS = ("what", "rule", "optimizer", "threads", "bare, ms", "springline, ms", "", "quartiles")


@dataclass(frozen=True)
class Row:
    """The result of a case."""

    case: Case
    bare: Quartiles  # ms; of memcpys for an exchange
    ours: Quartiles  # ms
    figure: Quartiles  # what the target is about: a ratio, or µs more for the tiny model

    @classmethod
    def of(cls, case: Case, times: Times) -> Row:
        """Compare pair by pair. AGN may add one pass over the gradient, which counts as bare."""
        passes = times.passes or [0.0] * len(times.bare)
        allowed = [b + a for b, a in zip(times.bare, passes, strict=True)]
        pairs = list(zip(times.ours, allowed, strict=True))
        if case.kind == "tiny step":
            figure = Quartiles.of(1e6 * (ours - bare) for ours, bare in pairs)
        else:
            figure = Quartiles.of(ours / bare for ours, bare in pairs)
        bare, ours = ([1e3 * seconds for seconds in t] for t in (times.bare, times.ours))
        return cls(case, Quartiles.of(bare), Quartiles.of(ours), figure)

    @property
    def target(self) -> tuple[float, str]:
        """The most that the figure may be, and in words."""
        case = self.case
        if case.kind == "exchange":
            most = MEMCPYS[case.rule]
            return most, f"at most {most:g} memcpys of the model"
        than = "the bare one and one `a += g`" if case.rule == "AGN" else "the bare one"
        if case.kind == "tiny step":
            return MICROSECONDS, f"at most {MICROSECONDS:g} µs more than {than}"
        most = TRAINING if case.kind == "training" else STEP
        return most, f"at most {most:g} times {than}"

    @property
    def check(self) -> Check:
        """Compare with the target."""
        case, (most, words) = self.case, self.target
        hidden = case.in_background or "no overlap" * (case.kind == "training")
        how = ", ".join(word for word in (case.rule, hidden, case.optimizer) if word)
        what = f"{TITLES[case.kind]}: {how}"
        for_us = case.kind == "tiny step" or case.parameters >= TARGET_SIZE
        return Check(what, words, self.measured, self.figure.median <= most if for_us else None)

    @property
    def measured(self) -> str:
        """The figure and its quartiles."""
        return f"{self.figure.median:{self._form}} ({self._spread})"

    @property
    def _form(self) -> str:
        return ".3f" if self.case.kind in ("step", "training") else ".2f"

    @property
    def _spread(self) -> str:
        return f"{self.figure.low:{self._form}} to {self.figure.high:{self._form}}"

    def cells(self) -> list[str]:
        """Return what stands under `COLUMNS`."""
        case = self.case
        unit = {"tiny step": " µs more", "exchange": " memcpys"}.get(case.kind, " times")
        tiny = case.kind == "tiny step"
        return [
            ", ".join(word for word in (case.kind, case.in_background) if word),
            case.rule,
            case.optimizer,
            str(case.threads),
            f"{self.bare.median:.4f}" if tiny else str(self.bare),
            f"{self.ours.median:.4f}" if tiny else str(self.ours),
            f"{self.figure.median:{self._form}}{unit}",
            self._spread,
        ]


def targets(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that the targets are about: one thread, training with the exchange hidden."""
    return [
        r
        for r in rows
        if r.case.threads == 1
        and (r.case.kind != "training" or r.case.in_background)
        and (r.case.kind != "exchange" or r.case.rule in MEMCPYS)
    ]


def table(rows: Sequence[Row]) -> Table:
    """Return the table for a terminal."""
    out = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        out.add_column(name)
    for row in rows:
        out.add_row(*row.cells())
    return out


def page(rows: Sequence[Row], command: str) -> str:
    """Return the page for the docs."""
    case = next(r.case for r in rows if r.case.kind == "training")
    tiny = next(r.case for r in rows if r.case.kind == "tiny step")
    model = (
        f"The model is {case.layers} linear layers of {case.width}×{case.width} with ReLU, "
        f"{case.parameters / 1e6:.1f} M parameters; the tiny one has {tiny.layers} of "
        f"{tiny.width}×{tiny.width}. Training is on a batch of {BATCH}."
    )
    checks = (row.check for row in targets(rows))
    return "\n".join(
        [
            "# What springline adds to a training step",
            "",
            f"Made by `{command}`. {facts()} {model}",
            "",
            "![A step and an exchange with each rule, and their targets](torch-step.svg)",
            "",
            _READING,
            "",
            "## The targets, with one thread",
            "",
            *markdown(
                ("", "what", "target", "measured"),
                ([c.mark, c.what, c.target, c.measured] for c in checks),
            ),
            "",
            "## All figures",
            "",
            *markdown(COLUMNS, (row.cells() for row in rows)),
            "",
        ]
    )


_READING = f"""\
There is one worker, with a shared center. The bare optimizer is the one that is wrapped: it and
ours step the same tensors in one process, one after the other, and who is first changes with every
pair; figures are medians (quartiles) over the pairs. An exchange is compared with a memcpy of as
many bytes between two private buffers; it comes right after a step, as in training. AGN adds the
gradient up in every step: that one pass, `a += g`, is measured beside it and added to the bare step
before they are compared.
A training step is forward, backward and the optimizer's step; it is the mean over whole periods of
{PERIOD} steps, each with one exchange, whatever of it runs in the background included.

*threads* is `torch.set_num_threads`. With 1, which `springline run` sets for as many workers as
there are cores, the background of `overlap=True` has a core to itself here. With 2 torch uses every
core of a machine with two, and the background takes its share of them away. The exchange itself is
numpy and uses one thread in any case; AGN's outer optimizer is torch."""
