"""Looks at a center on Ray, in a process of its own, and answers lines in JSON.

    ray_watcher.py ADDRESS NAME

`actors`: of every actor of the center its process and its machine; `center`: of every shard the
smallest and the largest value, and what is known of every rank; `end`: ends the center's actors.
"""

import json
import os
import sys

import numpy as np
import ray

from springline.center.ray import NAMESPACE, RayCenter
from springline.center.remote.messages import span


def actors(center):
    names = ["head", *(f"shard-{k}" for k in range(len(center.shards)))]
    handles = {n: ray.get_actor(f"{center.name}/{n}", namespace=NAMESPACE) for n in names}
    asked = [handle.__ray_call__.remote(_place) for handle in handles.values()]
    return dict(zip(names, ray.get(asked), strict=True))


def _place(_):
    return os.getpid(), ray.util.get_node_ip_address()


def look(center):
    values = center.read().view(np.float64)
    parts = [values[start // 8 : stop // 8] for start, stop in map(span, center.parts)]
    return {
        "shards": [[float(part.min()), float(part.max())] for part in parts],
        "steps": [rank.steps for rank in center.progress()],
        "members": center.members(),
        "version": center.version,
    }


def end(center):
    for name in ["head", *(f"shard-{k}" for k in range(len(center.shards)))]:
        ray.kill(ray.get_actor(f"{center.name}/{name}", namespace=NAMESPACE))


def main(address, name):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray has things to say too
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # for the actors
    center = RayCenter.open(name, address, token=name)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        answer = {"actors": actors, "center": look, "end": end}[line.strip()](center)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
