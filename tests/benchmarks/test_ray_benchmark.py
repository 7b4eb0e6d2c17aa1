"""The Ray benchmarks run, on a small model, and write their tables and plots."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_torch_benchmarks import run, tables

from hosts import missing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ray_exchange.py"


@pytest.mark.slow
def test_every_case_has_a_row(tmp_path):
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "ray-exchange.md").read_text("utf-8")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:3] for row in rows] == [[r, "2", "2"] for r in ("elastic", "averaging", "AGN")]
    for _, _, _, memcpy, least, _, exchange, ratio, _, _ in rows:
        assert 0 < float(memcpy) < float(least)
        assert float(exchange) > 0
        assert float(ratio) > 0
    assert (tmp_path / "ray-exchange.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_an_exchange_between_two_hosts(tmp_path):
    run("two_hosts.py", "--quick", out=tmp_path)
    (rows,) = tables((tmp_path / "two-hosts.md").read_text("utf-8"))
    assert [what.split(",")[0] for _, _, what, *_ in rows] == [
        *["elastic on Ray"] * 2,
        "averaging in a process group",
        "elastic in a process group",
    ]
    for _, link, _, alone, exchange, ratio, _, _ in rows:
        assert link == "1 Gbit/s"
        assert min(map(float, (alone, exchange, ratio))) > 0
