"""One worker of the benchmark of many: it exchanges as often as it can, and says what it holds.

    python scale_worker.py KIND WHERE WORKERS PARAMETERS RANK

It prints a line when it has joined, waits for one with the seconds that it has, prints what it
found, and waits for another before it leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

NEVER = 10**12  # a period: the benchmark calls `exchange` itself


def memory_of(process: int | str = "self") -> dict[str, int]:
    """Return a process's proportional share of its memory: its own, and what is shared."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text("ascii").splitlines()[1:]
    pss = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return {"own": pss["Pss_Anon"] + pss["Pss_File"], "shared": pss["Pss_Shmem"]}


def main(kind: str, where: str, *numbers: str) -> None:
    """Be a worker."""
    workers, parameters, rank = map(int, numbers)
    before = memory_of()["own"]  # an interpreter with numpy
    from springline import ElasticAverage, Worker

    values = {"w": np.random.default_rng(7).standard_normal(parameters, np.float32)}
    rule = ElasticAverage(period=NEVER, workers=workers)
    center: Any = Path(where)
    if kind == "ray":
        from springline.center import Layout
        from springline.center.ray import RayCenter, connect

        connect(where)
        before = memory_of()["own"]  # with Ray and its connection
        center = RayCenter.create_or_join(
            f"scale-{workers}", Layout.of(values), rule, values, shards=2, token="scale"
        )
    worker = Worker(values, rule, center, rank)
    del values
    worker.exchange()
    print("joined", flush=True)
    seconds = float(sys.stdin.readline())
    start, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        worker.exchange()
        count += 1
    now = memory_of()
    added = now["own"] - before - 4 * parameters  # any training holds its model
    print(json.dumps({"rate": count / spent, "added": added, "shared": now["shared"]}), flush=True)
    sys.stdin.readline()
    os._exit(0)  # nothing is to be saved


if __name__ == "__main__":
    main(*sys.argv[1:])
