"""Finds the place of a run: this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from springline.center import CenterError
from springline.launch.directory import LaunchError, RunDirectory
from springline.launch.keeper import Keeper
from springline.launch.machine import Machine, Place, Say
from springline.launch.process import cores
from springline.launch.request import ClusterRequest
from springline.launch.state import LaunchState


def connect(address: str) -> None:
    """Connect to a Ray cluster.

    Raises:
        LaunchError: there is none, or no Ray.
    """
    try:
        from springline.center.ray import connect as connect_to

        connect_to(address)
    except (CenterError, ImportError) as error:
        raise LaunchError(str(error)) from error


def find_place(
    claim: RunDirectory,
    script: Path,
    arguments: Sequence[str],
    workers: int | None,
    ps: int | None,
    asked: ClusterRequest,
    every: float,
    say: Say,
) -> tuple[Place, ClusterRequest]:
    """Return a run's place, and what is asked of a cluster; see `Launcher` for the rest.

    What was not said is as in the last launch in the directory.

    Raises:
        LaunchError: the run cannot be there.
    """
    directory, before = claim.path, LaunchState.last(claim.path)
    asked = asked.absolute().over(before.cluster if before else None, directory)
    if before and ps is None:
        ps = len(before.ps)
    if before and workers is None and (before.cluster or (before.ps and ps)):
        workers = len(before.workers)
    if before and before.ps and ps and workers != len(before.workers):
        raise LaunchError(
            f"The run in {directory} has {len(before.workers)} workers, for good. Received: "
            f"--workers {workers}. Leave it out, or start a new run."
        )
    if not asked.address:
        workers = _number(claim, workers, max(2, cores()))
        keeper = Keeper(directory, every, say)
        command = [str(script), *arguments]
        return Machine(command, directory, workers, ps or 0, keeper), asked
    asked.check(ps)
    connect(asked.address)
    from springline.launch.machines import Machines, connect_with  # Ray is there
    from springline.launch.room import room

    if asked.working_dir:
        connect_with(asked.address, asked.working_dir, directory)
    workers = _number(claim, workers, room(asked))
    place = Machines(str(script), list(arguments), directory, workers, asked, every, say)
    return place, asked


def _number(claim: RunDirectory, workers: int | None, default: int) -> int:
    """Return how many workers there are to be."""
    configured = claim.configured_workers()
    if workers is None:
        return configured or default
    if configured not in (None, workers):
        raise LaunchError(
            f"The run in {claim.path} has {configured} workers, for good. Received: "
            f"--workers {workers}. Leave it out, or start a new run."
        )
    return workers
