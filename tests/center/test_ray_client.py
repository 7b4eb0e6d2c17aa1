"""A worker outside the cluster: a process that no node runs on, which joins by `ray://`."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ray_cluster import actors_of, end_center, environment, pid_of, ray_cluster
from springline import ElasticAverage, Worker
from springline.center import Layout
from springline.center.ray import RayCenter

pytestmark = pytest.mark.slow  # Ray's server for clients takes its time

PORT = 10001
SCRIPT = """
import numpy as np, springline
from springline import ElasticAverage, Worker, run

here = run.Run.from_environment()
rule = ElasticAverage(workers=2, period=1, moving_rate=0.25)
values = {"w": np.full(600_000, 7, np.float32)}
worker = Worker(values, rule, here.center_directory, here.rank)
print("joined at", worker.parameters["w"][0], flush=True)
for _ in range(40):
    worker.parameters["w"] += 1
    worker.step()
    print("step", flush=True)
worker.finish()
print("left with", worker.exchanges, "exchanges", flush=True)
"""
RULE = ElasticAverage(workers=2, period=1, moving_rate=0.25)
VALUES = {"w": np.zeros(600_000, np.float32)}


@pytest.fixture(scope="module")
def cluster():
    with environment("GRPC_ENABLE_FORK_SUPPORT"):
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # Ray's server forks beside gRPC's threads
        with ray_cluster(1, {"ray_client_server_port": PORT}) as cluster:
            yield cluster


@pytest.fixture
def center(cluster, tmp_path):
    made = RayCenter.create_or_join(
        *("outside", Layout.of(VALUES), RULE, VALUES),
        shards=2,
        storage=str(tmp_path),
        every=(1, 0.1),
    )
    yield made
    end_center("outside")


@pytest.fixture
def outside(center):
    told = {"ADDRESS": f"ray://127.0.0.1:{PORT}", "CENTER": "outside", "TOKEN": center.token}
    told |= {"RANK": "1", "WORKERS": "2"}
    environment = {f"SPRINGLINE_{key}": value for key, value in told.items()}
    inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def read_until(process, words):
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return seen
    raise AssertionError("".join(seen))


def test_it_trains_with_those_inside(center, outside):
    worker = Worker(VALUES, RULE, center, 0)
    worker.parameters["w"] += 4
    worker.step()  # c = 1
    assert "joined at 1.0" in "".join(read_until(outside, "joined"))
    read_until(outside, "step")
    worker.step()
    assert worker.center.version >= 3
    read_until(outside, "left with 40 exchanges")
    assert outside.wait(30) == 0
    assert center.progress()[1].steps == 40
    worker.member.leave()


def test_it_survives_a_shard(center, outside):
    read_until(outside, "step")
    os.kill(pid_of(actors_of("outside")["shard-1"]), signal.SIGKILL)
    rest = read_until(outside, "left with 40 exchanges")
    assert outside.wait(30) == 0
    assert any("Retrying" in line for line in rest), rest
    deadline = time.monotonic() + 10
    while center.progress()[1].steps != 40 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert center.progress()[1].steps == 40
