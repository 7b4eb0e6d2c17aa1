"""The Ray benchmark runs, on a small model, and writes its table and its plot."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ray_exchange.py"


@pytest.mark.slow
def test_every_case_has_a_row(tmp_path):
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "ray-exchange.md").read_text("utf-8")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "2"]]
    for _, _, memcpy, least, exchange, ratio, _ in rows:
        assert 0 < float(memcpy) < float(least)
        assert float(exchange) > 0
        assert float(ratio) > 0
    assert (tmp_path / "ray-exchange.png").read_bytes().startswith(b"\x89PNG")
