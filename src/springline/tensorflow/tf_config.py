"""`TF_CONFIG`: the tasks of a cluster, and which of them this process is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

JOBS = ("chief", "worker", "ps")


class Task(NamedTuple):
    """A task, and the cluster that it is of."""

    jobs: Mapping[str, Any]  # addresses, by job; none is empty
    job: str
    number: int  # in the job
    address: str


def read(text: str) -> Task:
    """Return what a `TF_CONFIG` says.

    >>> read('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}')[1:]
    ('worker', 1, 'b:1')

    Raises:
        ValueError: it says something else; the message has which part of it is wrong.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _wrong(f"it is not JSON: {error}", text) from error
    if not isinstance(config, dict):
        raise _wrong("it is not an object", text)
    jobs, task = config.get("cluster"), config.get("task")
    if not isinstance(jobs, dict) or not all(map(_is_tasks, jobs.values())):
        raise _wrong("'cluster' must have a list of addresses for each job", text)
    jobs = {name: tasks for name, tasks in jobs.items() if tasks}
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        raise _wrong("'task' must have the 'type' and the 'index' of this process", text)
    job, addresses = task["type"], _numbered(jobs.get(str(task["type"]), ()))
    if job not in JOBS or not addresses:
        raise _wrong(
            f"the task's 'type' is {job!r}, but the cluster has {_listed(jobs)}. Only a chief, "
            "workers and parameter servers (ps) take part in training; to evaluate beside it, "
            "restore what `swapping_saver` saves, in a script without `cluster()`",
            text,
        )
    index = str(task["index"])
    if not index.isdecimal() or int(index) not in addresses:
        raise _wrong(
            f"the task's 'index' is {task['index']!r}, but {job!r} has "
            f"{', '.join(map(str, addresses))}",
            text,
        )
    return Task(jobs, job, int(index), addresses[int(index)])


def has_chief() -> bool:
    """Whether the cluster of `TF_CONFIG` has a chief beside its workers."""
    try:
        return bool(json.loads(os.environ["TF_CONFIG"])["cluster"]["chief"])
    except (ValueError, KeyError, TypeError):
        return False


def _is_tasks(tasks: Any) -> bool:
    """Whether these are addresses: a list, or some by their number, as TensorFlow takes them."""
    if isinstance(tasks, dict):
        return all(str(k).isdecimal() and isinstance(a, str) for k, a in tasks.items())
    return isinstance(tasks, list) and all(isinstance(address, str) for address in tasks)


def _numbered(tasks: Any) -> dict[int, str]:
    pairs = tasks.items() if isinstance(tasks, dict) else enumerate(tasks)
    return {int(number): address for number, address in pairs}


def _listed(jobs: Mapping[str, Any]) -> str:
    return ", ".join(jobs) or "no tasks"


def _wrong(what: str, text: str) -> ValueError:
    return ValueError(f"TF_CONFIG cannot be used: {what}. Received: TF_CONFIG={text!r}.")
