"""A Ray cluster of several nodes on this machine, on a network of its own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray

from network import private_network
from springline.center.ray import connect

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # whatever token this machine has
NODE = {"num_cpus": 2, "object_store_memory": 300_000_000}


class RayNodes:
    """The nodes of a cluster. Each is named, and has one of a resource of its name."""

    def __init__(self, nodes, head, **node):
        script = Path(__file__).with_name("ray_nodes.py")
        self._process = subprocess.Popen(
            [sys.executable, script, json.dumps(NODE | node), json.dumps(head)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.address = self._read()
        for number in range(1, nodes):
            self.add(f"node{number}")

    def add(self, name):
        self._tell("add", name)

    def kill(self, name):
        """Kill a node: its raylet, and with it all that runs there."""
        self._tell("kill", name)

    def remove(self, name):
        """Let a node end, and the others know."""
        self._tell("end", name)

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _tell(self, *words):
        print(*words, file=self._process.stdin, flush=True)
        self._read()

    def _read(self):
        line = self._process.stdout.readline().strip()
        assert line, "the cluster has ended"
        return line


@contextlib.contextmanager
def ray_cluster(nodes=2, head=(), **node):
    """Start a cluster, connect this process to it, and end it."""
    with private_network(), environment("RAY_ADDRESS"):
        cluster = RayNodes(nodes, dict(head), **node)
        try:
            os.environ["RAY_ADDRESS"] = cluster.address
            connect(cluster.address)
            known = {f"node{number}" for number in range(1, nodes)}
            while not known <= set(ray.available_resources()):  # what each has is told a bit later
                time.sleep(0.05)
            yield cluster
        finally:
            ray.shutdown()
            cluster.end()


@contextlib.contextmanager
def environment(name):
    """Put a variable of the environment back to what it was."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def actors_of(name):
    """The actors of a center, by name."""
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(f"{name}/"):
            with contextlib.suppress(ValueError):
                handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
                found[actor["name"].removeprefix(f"{name}/")] = handle
    return found


def end_center(name):
    for handle in actors_of(name).values():
        ray.kill(handle)


def pid_of(handle):
    """The process of an actor."""
    return ray.get(handle.__ray_call__.remote(lambda _: os.getpid()))
