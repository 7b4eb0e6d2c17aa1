"""The CNN of TensorFlow 1's time, as processes on hosts that are given as flags."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from marks import slow
from network import private_network

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensorflow_cnn.py"
WORKERS = 2


def addresses(count):
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


@pytest.mark.parametrize("rule", ["elastic", *slow("average", "agn")])
def test_two_workers_learn(rule, tmp_path):
    with private_network(), ExitStack() as ends:
        ps, *workers = addresses(1 + WORKERS)

        def start(job, task):
            words = [f"--ps_hosts={ps}", f"--worker_hosts={','.join(workers)}", f"--rule={rule}"]
            words += [f"--job_name={job}", f"--task_index={task}", f"--train_dir={tmp_path}"]
            log = ends.enter_context((tmp_path / f"{job}{task}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, str(EXAMPLE), *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        server = start("ps", 0)
        processes = [start("worker", k) for k in range(WORKERS)]
        ended = [process.wait(timeout=200) for process in processes]
        assert server.poll() is None
    said = [(tmp_path / f"worker{k}.log").read_text() for k in range(WORKERS)]
    assert ended == [0] * WORKERS, said
    steps = [int(re.search(rf"Worker {k}: (\d+) steps", said[k])[1]) for k in range(WORKERS)]
    assert min(steps) > 0  # both took part
    (right,) = re.findall(rf"Accuracy of the center under {rule}: ([\d.]+)%", said[0])
    assert float(right) > 90
