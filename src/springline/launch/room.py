"""What a cluster has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from springline.launch.directory import LaunchError
from springline.launch.request import ClusterRequest


def room(asked: ClusterRequest) -> int:
    """Return for how many workers the cluster has room when nothing else runs there; at least 1."""
    return max(1, _room([node["Resources"] for node in nodes()], _resources(asked)) or 0)


def _room(machines: Sequence[Mapping[str, float]], each: Mapping[str, float]) -> int | None:
    """Return how many times `each` fits on the machines; None for any number of times.

    >>> _room([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 3.0}], {"CPU": 1.5})
    4
    >>> _room([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 3.0}], {"CPU": 1.5, "GPU": 1.0})
    1
    """
    if not each:
        return None
    tiny = 1e-6
    return sum(min(int(node.get(k, 0.0) / v + tiny) for k, v in each.items()) for node in machines)


def check_room(asked: ClusterRequest, workers: int) -> None:
    """Refuse workers that can never all be there."""
    machines = nodes()
    fits = _room([node["Resources"] for node in machines], _resources(asked))
    if fits is None or workers <= fits:
        return
    has = _amounts({name: _total(machines, name) for name in ("CPU", "GPU")})
    count = f"{len(machines)} machine" + "s" * (len(machines) != 1)
    raise LaunchError(
        f"{workers} workers with {needs(asked)} each do not fit on the cluster, which has {has} "
        f"on {count}: room for {fits}. Give each less with `--cpus` and `--gpus`, start fewer, "
        "or add machines."
    )


def nodes() -> list[dict[str, Any]]:
    """Return the machines of the cluster that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def _total(machines: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(node["Resources"].get(name, 0.0) for node in machines))


def _resources(asked: ClusterRequest) -> dict[str, float]:
    each = {"CPU": 1.0 if asked.cpus is None else asked.cpus, "GPU": asked.gpus or 0.0}
    return {name: amount for name, amount in each.items() if amount}


def needs(asked: ClusterRequest) -> str:
    """Say what each worker needs."""
    return _amounts(_resources(asked)) or "nothing"


def free(asked: ClusterRequest) -> str:
    """Say what the cluster has, and what of it is free."""
    try:
        left = ray.available_resources()
        names = _resources(asked) or ("CPU",)
        has = _amounts({name: _total(nodes(), name) for name in names})
        idle = _amounts({name: float(left.get(name, 0.0)) for name in names})
    except RayError:
        return "The cluster does not answer."
    return f"The cluster has {has}; free, on all machines together: {idle}."


def _amounts(amounts: Mapping[str, float]) -> str:
    """Say amounts of resources.

    >>> _amounts({"CPU": 1.0, "GPU": 0.5})
    '1 CPU and 0.5 GPUs'
    """
    return " and ".join(f"{v:g} {k}" + "s" * (v != 1) for k, v in amounts.items())
