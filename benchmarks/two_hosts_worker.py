"""What runs on a host of the benchmark between two hosts; what it finds is printed as JSON.

make ADDRESS CASE          make what Ray's workers meet; on the host that is to hold it
ray ADDRESS CASE           be a worker of that
group RANK STORE CASE      be a rank of a process group
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict


def main(what: str, *given: str) -> None:
    """Do what is asked for."""
    *where, case = given
    if what == "group":
        import collective_worker as group

        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        rank, store = where
        found = group.measure(group.Case(*json.loads(case)), int(rank), store)
        print(json.dumps(asdict(found)), flush=True)
        return
    import ray
    import ray_exchange_worker as worker

    from springline.center.ray import connect

    connect(*where)
    asked = worker.Case(*json.loads(case))
    if what == "ray":
        print(json.dumps(asdict(worker.measure(asked, 0, threading.Barrier(1)))), flush=True)
        return
    ray.get([giver.__ray_ready__.remote() for giver in worker.make_givers(asked.shards)])
    worker.join(asked, 0).member.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
