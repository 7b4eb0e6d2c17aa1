"""The exchange benchmark runs, on small models, and writes its table and its plot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RULES = ("elastic", "averaging", "AGN, SGD", "DiLoCo")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "exchange.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, out


def rows(text):
    """The cells of the page's last table."""
    lines = [line for line in text.split("\n\n")[-1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_case_has_a_row(run):
    _, out = run
    table = rows((out / "exchange.md").read_text("utf-8"))
    cases = {(size, rule, lock, workers) for size, rule, lock, workers, *_ in table}
    flat = {
        (size, rule, lock, workers)
        for size in ("0.1 M", "1 M")
        for rule in RULES
        for lock in (("yes",) if rule == "DiLoCo" else ("yes", "no"))
        for workers in ("1", "2")
    }
    many = {("1 M (150)", rule, "yes", "1") for rule in RULES}
    fragments = {("1 M (8)", f"DiLoCo{more}", "yes", "1") for more in ("", ", 4 fragments")}
    assert cases == flat | many | fragments
    assert len(table) == len(cases)
    for _, rule, _, workers, ms, alone, _, by_all, models, n in table:
        assert min(float(ms), float(alone), float(by_all)) > 0
        if rule.startswith("DiLoCo"):  # a momentum, slots and a journal
            assert float(models) > 2 + int(workers)
        else:
            slots = int(workers) * (rule == "averaging")
            assert float(models) == pytest.approx(1 + slots, abs=0.05)
        assert int(n) == 12 * int(workers)


def test_the_plot_is_svg(run):
    _, out = run
    assert "<svg" in (out / "exchange.svg").read_text("utf-8")
    assert "(exchange.svg)" in (out / "exchange.md").read_text("utf-8")


def test_what_does_not_depend_on_the_clock_is_met(run):
    printed, _ = run
    assert "✓ allocated in an exchange after the first" in printed
    assert printed.count("✓ memory of a center") == 5
    assert printed.count("? ") == 5  # the targets at 25 M were not measured


def test_the_page_names_no_path(run):
    _, out = run
    page = (out / "exchange.md").read_text("utf-8")
    assert str(out) not in page
    assert str(SCRIPT.parents[1]) not in page
