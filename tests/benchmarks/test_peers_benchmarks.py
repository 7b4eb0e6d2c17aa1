"""The benchmarks beside peers run, on small models and without torchft, and write their pages."""

import json

import pytest
from test_torch_benchmarks import BENCHMARKS, run, tables

RULES = ("elastic", "averaging", "AGN, SGD", "DiLoCo", "async DiLoCo")
GROUP = ("averaging, process group", "DiLoCo, process group")
THEIRS = ("gloo all-reduce", "PostLocalSGD", "DistributedDataParallel")


def written(out, name):
    page = (out / f"{name}.md").read_text("utf-8")
    assert (out / f"{name}.svg").read_text("utf-8").rstrip().endswith("</svg>")
    assert f"({name}.svg)" in page
    assert str(BENCHMARKS.parent) not in page
    lines = (out / f"{name}.jsonl").read_text("utf-8").splitlines()
    *_, table = tables(page)
    assert len(table) == len(lines)
    return page, table, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_an_exchange_is_compared_with_those_of_peers(tmp_path):
    run("peers/exchange_peers.py", "--quick", out=tmp_path)
    page, table, rows = written(tmp_path, "peers-exchange")
    systems = [f"springline {rule}" for rule in (*RULES, *GROUP)]
    assert [system for _, system, *_ in table] == [*systems, *THEIRS]
    assert "python benchmarks/peers/exchange_peers.py --quick" in page
    for row in rows:  # a pass of DistributedDataParallel less one without may be anything here
        if row["system"] != "DistributedDataParallel":
            assert 0 < row["by_all"][0] <= row["by_all"][1] <= row["by_all"][2]
    compared = {peer: rule for _, peer, rule, *_ in tables(page)[0]}
    assert compared["PostLocalSGD"] == "averaging"


@pytest.mark.slow
def test_exchanges_a_second_are_counted(tmp_path):
    run("peers/scale.py", "--quick", out=tmp_path)
    _, table, rows = written(tmp_path, "scale")
    assert [row[:3] for row in table] == [["shared memory", "0.1 M", p] for p in "12"]
    for row in rows:
        assert row["rate"] > 0
        assert 4 * row["parameters"] <= row["held"] < 5 * row["parameters"]  # and counters
        assert row["added"] > 0
