"""A worker behind a slow link: what takes long on its way arrives all the same."""

import subprocess
import sys

import pytest

from hosts import Hosts, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SCRIPT = """
import sys
import numpy as np
from springline import ElasticAverage, Worker
from springline.center import Layout
from springline.center.ray import RayCenter, connect

connect(sys.argv[1])
rule = ElasticAverage(period=1, moving_rate=0.5)
values = {"w": np.zeros(5_000_000, np.float32)}
given = "far", Layout.of(values), rule, values
center = RayCenter.create_or_join(*given, shards=1, token="of both hosts")
if sys.argv[2] == "train":
    worker = Worker(values, rule, center, timeout=None if sys.argv[3] == "None" else 20)
    for _ in range(2):
        worker.parameters["w"][:] = 8
        worker.exchange()
    print(worker.parameters["w"][0], center.values()["w"][0])
    worker.finish()
"""


@pytest.mark.parametrize("timeout", [None, 20], ids=["looks every second", "looks more often"])
def test_an_answer_takes_longer_than_we_look(timeout, tmp_path):
    """20 MB over 50 Mbit/s: 3 seconds each way."""
    with Hosts(1) as cluster:

        def run(host, *words):
            command = (sys.executable, "-c", SCRIPT, cluster.address, *words)
            process = host.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said.decode()
            return said.decode()

        run(cluster[0], "make")  # while it is the only host
        far = cluster.add()
        for host in cluster.all:
            host.shape("50mbit")
        assert run(far, "train", str(timeout)).splitlines()[-1] == "6.0 6.0"
