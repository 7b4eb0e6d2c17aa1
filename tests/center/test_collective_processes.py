"""Real processes in a process group: one is killed or stopped, and the others notice."""

import logging
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from springline import ModelAverage, Worker
from springline.center import CenterError

WORKERS = 3
VALUES = {"w": np.zeros(1_000_000, np.float32)}


def live(pipe, rank, store, timeout, late=False):
    """Exchange as often as asked; say what came of it, and what was warned of."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from springline.center.collective import Collective, group

    group.REPORT_AFTER = 0.5
    if timeout is None:
        group.WARN_EVERY = 4.0
        handler = logging.Handler()
        handler.emit = lambda record: pipe.send(record.getMessage())
        logging.getLogger("springline").addHandler(handler)

    where = store if isinstance(store, str) else f"file://{store}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORKERS)
    rule = ModelAverage(workers=WORKERS, period=1)
    if late:
        pipe.recv()
    try:
        worker = Worker(VALUES, rule, Collective(dist.group.WORLD), rank, timeout=timeout)
    except CenterError as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send("ready")
    while pipe.recv() == "step":
        worker.parameters["w"] += rank
        try:
            worker.step()
            pipe.send(float(worker.parameters["w"][0]))
        except (CenterError, KeyboardInterrupt) as error:
            pipe.send(f"{type(error).__name__}: {error}")
    worker.finish()
    pipe.send("left")


def threads():
    """How many threads this process has."""
    return len(list(Path("/proc/self/task").iterdir()))


def come_and_go(pipe, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from springline.center.collective import Collective

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    before = None
    for _ in range(3):
        rule = ModelAverage(workers=1, period=1)
        worker = Worker(VALUES, rule, Collective(dist.group.WORLD), 0)
        worker.step()
        pipe.send(before is None or threads() > before)
        worker.finish()
        before = threads() if before is None else before  # with those that stay, once started
        deadline = time.monotonic() + 30
        while threads() > before and time.monotonic() < deadline:
            time.sleep(0.01)  # one that was joined is listed until the kernel is through with it
        pipe.send(threads() <= before)


def test_a_group_is_gone_when_all_have_finished(start, tmp_path):
    """A thread of it that is alive when the interpreter ends may end the process with SIGABRT."""
    process, pipe = start(come_and_go, tmp_path / "store")
    assert [pipe.recv() for _ in range(6)] == [True] * 6
    process.join(30)
    assert process.exitcode == 0


def test_who_does_not_come_is_named(start, tmp_path):
    """Though there is no group yet, and Ctrl-C is heard meanwhile."""
    lives = [start(live, rank, tmp_path / "store", 2, rank == 2) for rank in range(WORKERS)]
    pipes = [pipe for _, pipe in lives]
    for pipe in pipes[:2]:
        assert pipe.recv() == "RoundTimeoutError: Waited 2 s for the start; missing: rank 2. " + (
            "Are they running? A larger `timeout` waits longer."
        )


@pytest.mark.slow
def test_who_is_waited_for_is_named(start, tmp_path):
    lives = [start(live, rank, tmp_path / "store", None) for rank in range(WORKERS)]
    pipes = [pipe for _, pipe in lives]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * WORKERS
    os.kill(lives[2][0].pid, signal.SIGSTOP)
    for pipe in pipes:
        pipe.send("step")
    for rank, pipe in enumerate(pipes[:2]):
        said = pipe.recv()
        assert said.startswith(f"Rank {rank} is still waiting for the first step after "), said
        assert said.endswith(" s; missing: rank 2."), said
    os.kill(lives[2][0].pid, signal.SIGCONT)
    for pipe in pipes:
        while isinstance(said := pipe.recv(), str):
            continue  # another warning
        assert said == 1
        pipe.send("leave")
    assert [pipe.recv() for pipe in pipes] == ["left"] * WORKERS


@pytest.mark.slow
def test_that_one_dies_while_it_waits_is_noticed(start, tmp_path):
    """Which one, nobody knows: it had reported that it was there."""
    lives = [start(live, rank, tmp_path / "store", 30) for rank in range(WORKERS)]
    pipes = [pipe for _, pipe in lives]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * WORKERS
    for pipe in pipes[1:]:
        pipe.send("step")
    time.sleep(4)  # both have reported that they wait
    lives[2][0].kill()
    pipes[0].send("step")
    assert "all ranks had arrived, so one has died since" in (said := pipes[0].recv()), said
    assert "Error: Rank 1 " in pipes[1].recv()  # it may have asked before rank 0 came
    for pipe in pipes[:2]:
        pipe.send("leave")
    assert [pipe.recv() for pipe in pipes[:2]] == ["left"] * 2


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(signal.SIGKILL, "CenterError|RoundTimeoutError", id="killed"),
        pytest.param(signal.SIGSTOP, "RoundTimeoutError", id="stopped", marks=pytest.mark.slow),
    ],
)
def test_who_is_gone_is_noticed_and_named(start, tmp_path, number, kind):
    lives = [start(live, rank, tmp_path / "store", 6) for rank in range(WORKERS)]
    pipes = [pipe for _, pipe in lives]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * WORKERS
    for pipe in pipes:
        pipe.send("step")
    assert [pipe.recv() for pipe in pipes] == [1, 1, 1]
    os.kill(lives[2][0].pid, number)
    for pipe in pipes[:2]:
        pipe.send("step")
    said = [pipe.recv() for pipe in pipes[:2]]
    assert all(text.split(":")[0] in kind.split("|") for text in said), said
    assert all("missing: rank 2." in text for text in said), said
    for pipe in pipes[:2]:
        pipe.send("leave")
    assert [pipe.recv() for pipe in pipes[:2]] == ["left"] * 2


@pytest.mark.slow
def test_ctrl_c_is_heard_while_a_rank_waits(start, tmp_path):
    lives = [start(live, rank, tmp_path / "store", None) for rank in range(WORKERS)]
    pipes = [pipe for _, pipe in lives]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * WORKERS
    pipes[0].send("step")
    assert "Rank 0 is still waiting for the first step" in pipes[0].recv()
    os.kill(lives[0][0].pid, signal.SIGINT)
    while "is still waiting for the first step" in (said := pipes[0].recv()):
        continue  # another warning
    assert said.startswith("KeyboardInterrupt"), said
    pipes[0].send("step")
    assert "has failed or was closed" in pipes[0].recv()
    pipes[0].send("leave")
    assert pipes[0].recv() == "left"


@pytest.mark.slow
def test_nobody_waits_for_a_store_that_is_gone(start):
    """It is with rank 0 here, which is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    lives = [start(live, rank, store, 6) for rank in range(WORKERS)]
    pipes = [pipe for _, pipe in lives]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * WORKERS
    lives[0][0].kill()
    for pipe in pipes[1:]:
        pipe.send("step")
    for pipe in pipes[1:]:
        assert "which of the other ranks are missing is not known" in (said := pipe.recv()), said
