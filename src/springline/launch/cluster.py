"""The addresses of a TensorFlow cluster on this machine, and what its tasks are told of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping

from springline.launch.task import Job


class LocalCluster:
    """A free port for every task, kept for as long as this lives.

    The ports are bound and not listened at, with `SO_REUSEADDR`, as TensorFlow's servers bind
    theirs: a task can then listen at its port, also when it is started again, and nobody is given
    the port by chance in between.

    Args:
        ps: how many parameter servers.
        workers: how many workers.
    """

    def __init__(self, ps: int, workers: int) -> None:
        self._held = [_hold() for _ in range(ps + workers)]
        addresses = [f"127.0.0.1:{held.getsockname()[1]}" for held in self._held]
        self.jobs: dict[Job, list[str]] = {"ps": addresses[:ps], "worker": addresses[ps:]}

    def environment(self, job: Job, task: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return what a task is told."""
        place = {"cluster": self.jobs, "task": {"type": job, "index": task}}
        level = inherited.get("TF_CPP_MIN_LOG_LEVEL", "1")  # warnings and errors
        return {"TF_CONFIG": json.dumps(place), "TF_CPP_MIN_LOG_LEVEL": level}

    def release(self) -> None:
        """Let others have the ports."""
        for held in self._held:
            held.close()


def _hold() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))  # TensorFlow's servers listen on all interfaces
    return held
