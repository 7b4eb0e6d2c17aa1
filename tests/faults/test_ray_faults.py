"""Faults of a center on Ray, each with real processes and a run that ends right."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ray_drill import CASES, drill
from ray_scene import OneMachine

import hosts
from marks import slow
from ray_cluster import actors_of, end_center, pid_of
from springline import ElasticAverage, Worker
from springline.center import Layout
from springline.center.ray import RayCenter


@pytest.mark.parametrize("case", slow("worker/agn", "shard/agn"))
def test_a_process_is_killed(case, tmp_path, cluster):
    drill(case, tmp_path, OneMachine(cluster.address), grace=3.0)


@pytest.mark.slow
def test_a_worker_may_join_while_a_shard_is_started_again(tmp_path, cluster):
    values = {"w": np.arange(5.0)}
    rule = ElasticAverage(workers=2, period=1, moving_rate=0.5)
    options = {"shards": 1, "storage": str(tmp_path / "storage")}
    center = RayCenter.create_or_join(tmp_path.name, Layout.of(values), rule, values, **options)
    try:
        os.kill(pid_of(actors_of(tmp_path.name)["shard-0"]), signal.SIGKILL)
        with center, Worker(values, rule, center, 1) as late:
            late.exchange()
    finally:
        end_center(tmp_path.name)
    np.testing.assert_array_equal(late.parameters["w"], values["w"])


@pytest.fixture(scope="module")
def three():
    """Three hosts with a Ray node each."""
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    with hosts.Hosts() as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_faults_on_three_hosts(case, tmp_path, three):
    try:
        drill(case, tmp_path, three)
    except BaseException:
        three.restart()  # for the next
        raise


@pytest.mark.slow
def test_the_benchmark_writes_a_table(tmp_path):
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    script = Path(__file__).parents[2] / "benchmarks" / "ray_faults.py"
    kept = "| a link down for 10 s | AGN | 0.11 | 14.0 | nothing |"
    table = f"| what | rule | 1 | 2 | 3 |\n| --- | --- | --- | --- | --- |\n{kept}\n"
    (tmp_path / "faults.md").write_text(f"# Page\n\n{table}")
    command = [sys.executable, script, "--only", "late/agn", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "faults.md").read_text()
    assert "\n\nMade by `python benchmarks/ray_faults.py`. " in page
    assert f"\n{kept}\n" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| a worker joins late")]
    _, _, rule, usual, gap, lost, _ = map(str.strip, row.split("|"))
    assert (rule, lost) == ("AGN", "nothing")
    assert 0 < float(usual) <= float(gap)
