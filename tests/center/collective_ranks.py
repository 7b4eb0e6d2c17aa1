"""What a rank of a process group does, in a process of its own."""

import os
import signal
import sys
import threading
import time
import warnings
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np

from springline import ElasticAverage, ModelAverage, Worker
from springline.center import CenterError, NonFiniteError

RULES = {"average": ModelAverage, "elastic": ElasticAverage}
VALUES = {"w": np.zeros((700, 431), np.float32), "d": np.ones(50_021)}  # several blocks each
TIMEOUT = 20.0


def start(rank, ranks, store, interface="lo"):
    """Make the process group."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def make(rank, ranks, rule, values=VALUES, timeout=TIMEOUT):
    import torch.distributed as dist

    from springline.center.collective import Collective

    return Worker(values, rule, Collective(dist.group.WORLD), rank, timeout=timeout)


def step(worker, rng, bad=False):
    """Move, and exchange; return what was wrong."""
    for x in worker.parameters.values():
        x += rng.standard_normal(x.shape)
    if bad:
        worker.parameters["d"][-1] = np.nan
    try:
        worker.step()
    except NonFiniteError as error:
        worker.take_center()
        return str(error)
    return ""


def trained(rank, ranks, name, bad=()):
    """Make four rounds; `bad` are the ranks that have NaN in the second."""
    rng, groups = np.random.default_rng(rank), _groups()
    worker = make(rank, ranks, RULES[name](workers=ranks, period=1))
    said = [step(worker, rng, bad=k == 1 and rank in bad) for k in range(4)]
    worker.finish()
    center = worker.center
    return {
        "said": said,
        "c": center.values(),
        "x": {n: x.copy() for n, x in worker.parameters.items()},
        "version": center.version,
        "exchanges": [progress.exchanges for progress in center.progress()],
        "groups": _groups() - groups,
    }


def overflowing(rank, ranks):
    """Two rounds that can be taken, and one between them that cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rate is meant to be too large
        rule = ElasticAverage(workers=ranks, period=1, moving_rate=1.0)
    worker, rng = make(rank, ranks, rule), np.random.default_rng(rank)
    said, versions, values = [], [], []
    for value in (1.0, 3e38, 2.0):
        worker.parameters["w"][-1, -1] = value
        said.append(step(worker, rng))
        versions.append(worker.center.version)
        values.append(worker.center.values())
    worker.finish()
    return {"said": said, "versions": versions, "values": values}


def scenes(rank, ranks, store, interface="lo"):
    """All that ends well."""
    start(rank, ranks, store, interface)
    found = {"overflow": overflowing(rank, ranks)}
    for name in RULES:
        found[name] = trained(rank, ranks, name)
        found[f"nan {name}"] = trained(rank, ranks, name, bad=(0, 1))
    return found


def dying(pipe, rank, ranks, store, timeout, interface="lo"):
    """Make a round and, if we are told so, end in the middle of the next; else say what came."""
    start(rank, ranks, store, interface)
    worker = make(rank, ranks, ModelAverage(workers=ranks, period=1), timeout=timeout)
    center, rng = worker.center, np.random.default_rng(rank)
    step(worker, rng)
    before = center.values()
    pipe.send("ready")
    how, where = pipe.recv()
    if how is not None:
        owner = center.replica if where == "add_up" else center
        setattr(owner, where, lambda *_, **__: _end(how))
    try:
        step(worker, rng)
        pipe.send("a round")
        step(worker, rng)
    except KeyboardInterrupt:
        pass
    except CenterError as error:
        pipe.send(f"{type(error).__name__}: {error}")
    try:
        worker.step()
    except CenterError as error:
        pipe.send(str(error))
    worker.finish()  # without waiting for anybody
    pipe.send([(center.values()[n] == c).all() for n, c in before.items()])


def closing(pipe, rank, ranks, store, folder):
    """Make a round; in the next one rank 0 is closed while it waits for the others."""
    import torch.distributed as dist

    from springline.center.collective import Collective

    start(rank, ranks, store)
    place = Collective(dist.group.WORLD, folder if rank == 0 else None, save_every=0.0)
    worker = Worker(VALUES, ModelAverage(workers=ranks, period=1), place, rank, timeout=TIMEOUT)
    center, plain = worker.center, worker.center.replica.add_up

    def close_first(group):
        if center.version > 0:
            center.close()
        plain(group)

    if rank == 0:
        center.replica.add_up = close_first
    said = []
    for value in (1, 2):
        for x in worker.parameters.values():
            x[:] = value
        try:
            worker.step()
        except CenterError as error:
            said.append(str(error))
            break
    pipe.send((said, center.version, [np.unique(c).tolist() for c in center.values().values()]))


def forking(pipe, rank, ranks, store):
    """Make a round; a child of rank 0 tries to read and to save the center."""
    start(rank, ranks, store)
    worker = make(rank, ranks, ModelAverage(workers=ranks, period=1))
    worker.step()
    said = []
    if rank == 0:
        child = os.fork()
        if child == 0:
            for use in (worker.center.read, lambda: worker.center.save("never.safetensors")):
                try:
                    use()
                except CenterError as error:
                    said.append(str(error))
            pipe.send(said)
            os._exit(0)
        os.waitpid(child, 0)
    else:
        pipe.send(said)
    worker.finish()


def reading(pipe, rank, ranks, store):
    """Make rounds while a thread reads the center slowly; say whether it changed meanwhile."""
    start(rank, ranks, store)
    worker = make(rank, ranks, ModelAverage(workers=ranks, period=1))
    center, changes, done = worker.center, [], threading.Event()

    def read_slowly():
        while not done.is_set():
            with center.turn:
                before = center.read()
                time.sleep(0.1)
                changes.append(bool((center.read() != before).any()))
            time.sleep(0.01)

    thread = threading.Thread(target=read_slowly)
    if rank == 1:
        thread.start()
    for _ in range(20):
        for x in worker.parameters.values():
            x += 1
        worker.step()
    if rank == 1:
        done.set()
        thread.join()
    worker.finish()
    pipe.send(changes)


def _end(how):
    if how == "interrupted":
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGKILL)


def _groups():
    """How many process groups torch knows of: their number is a part of the next one's name."""
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_names)


if __name__ == "__main__":  # on a host of its own: function, rank, ranks, folder
    function, rank, ranks, folder = sys.argv[1], *map(int, sys.argv[2:4]), Path(sys.argv[4])
    with Client(str(folder / f"pipe-{rank}"), "AF_UNIX") as pipe:
        if function == "scenes":
            pipe.send(scenes(rank, ranks, folder / "store", "eth0"))
        else:
            dying(pipe, rank, ranks, folder / "store", 8, "eth0")
