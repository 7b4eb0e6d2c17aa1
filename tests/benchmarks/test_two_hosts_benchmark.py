"""The benchmark between two hosts runs, on a small model, and writes its table."""

import pytest
from test_torch_benchmarks import run, tables

from hosts import missing


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
