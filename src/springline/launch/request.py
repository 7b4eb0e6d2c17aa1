"""The options of a launch, checked before anything is done."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from springline.center.first_values import check_file
from springline.errors import LayoutError
from springline.launch.directory import CENTER, LaunchError
from springline.launch_state import Asked, CenterStatus

NO_STORAGE = "none"
_LEAST = 0.0001  # of a CPU or a GPU: Ray counts no finer
_OPTIONS = {
    "shards": "--center-shards",
    "storage": "--storage",
    "cpus": "--cpus",
    "gpus": "--gpus",
    "working_dir": "--working-dir",
    "env": "--env",
}


@dataclass(frozen=True)
class ClusterRequest(Asked):
    """The options for a Ray cluster."""

    def check(self, ps: int | None) -> None:
        """Refuse options that contradict each other, or are out of range.

        Args:
            ps: how many parameter servers are asked for.
        """
        for name, option in _OPTIONS.items():
            if self.address is None and getattr(self, name) is not None:
                raise LaunchError(
                    f"`{option}` is for a run on a cluster. Give its address with `--address`, or "
                    "leave it out."
                )
        if self.address and ps:
            raise LaunchError(
                f"`--ps` starts parameter servers on this machine only. Received: --ps {ps} with "
                f"--address {self.address}. Leave one of them out."
            )
        if self.address and "://" in self.address:
            dashboard = " (the dashboard's)" if self.address.startswith("http") else ""
            raise LaunchError(
                f"`--address` must be `auto` or HOST:PORT, as HOST:6379, of a cluster that this "
                f"machine is part of. Received: {self.address}{dashboard}. From outside, use `ray "
                "job submit -- springline run --address auto ...`."
            )
        if self.shards is not None and self.shards < 1:
            raise LaunchError(
                f"`--center-shards` must be an integer >= 1. Received: {self.shards}."
            )
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value and not _LEAST <= value < float("inf"):
                raise LaunchError(
                    f"`--{name}` must be 0 or a number >= {_LEAST}. Received: {value:g}."
                )
        if self.gpus is not None and self.gpus > 1 and self.gpus % 1:
            raise LaunchError(
                f"`--gpus` above 1 must be a whole number. Received: {self.gpus:g}. A worker has a "
                "part of one GPU, or several of its own."
            )
        if self.working_dir is not None and not Path(self.working_dir).is_dir():
            raise LaunchError(f"`--working-dir` must be a directory. Received: {self.working_dir}.")

    def absolute(self) -> ClusterRequest:
        """Return the same with absolute paths."""
        given = asdict(self)
        if self.storage and self.storage != NO_STORAGE and "://" not in self.storage:
            given["storage"] = str(Path(self.storage).absolute())
        if self.working_dir:
            given["working_dir"] = str(Path(self.working_dir).absolute())
        return ClusterRequest(**given)

    def over(self, before: Asked | None, directory: Path) -> ClusterRequest:
        """Return this, completed with the options of an earlier launch here, if any."""
        given = {k: v for k, v in asdict(self).items() if v is not None}
        asked = asdict(before or Asked())
        made = before and CenterStatus.read(directory / CENTER)
        for name in ("storage", "shards") if made else ():
            if given.get(name, asked[name]) != asked[name]:
                option, was = _OPTIONS[name], asked[name]
                how = f"without `{option}`" if was is None else f"with `{option} {was}`"
                raise LaunchError(
                    f"The run in {directory} was started {how}, which is fixed. Received: "
                    f"`{option} {given[name]}`. Leave it out, or start a new run."
                )
        return ClusterRequest(**{**asked, **given})


@dataclass
class RestartPolicy:
    """So many restarts of each worker within a window: older ones do not count.

    Args:
        most: how many; −1 for no limit.
        window: in seconds.

    >>> policy = RestartPolicy(1)
    >>> policy.next("worker 0"), policy.next("worker 1"), policy.next("worker 0")
    ('1 of 1', '1 of 1', None)
    """

    most: int = 3
    window: float = 600.0
    _times: dict[str, list[float]] = field(default_factory=dict)  # by worker

    def check(self) -> None:
        """Refuse numbers that are out of range."""
        if self.most < -1:
            raise LaunchError(
                "`--max-restarts` must be an integer >= 0, or -1 for no limit. Received: "
                f"{self.most}."
            )
        if not self.window > 0:
            raise LaunchError(f"`--restart-window` must be seconds > 0. Received: {self.window:g}.")

    def next(self, name: str) -> str | None:
        """Count a restart of a worker; return which one it is, or None if there is none left."""
        now = time.monotonic()
        recent = [at for at in self._times.get(name, []) if now - at < self.window]
        if -1 < self.most <= len(recent):
            return None
        self._times[name] = [*recent, now]
        return f"{len(recent) + 1} of {self.most}" if self.most > -1 else f"{len(recent) + 1}"


def check_first_file(path: Path, address: str | None, ps: int | None) -> None:
    """Refuse a file that no center can begin with."""
    if address or ps:
        option = f"--address {address}" if address else f"--ps {ps}"
        raise LaunchError(
            f"`--from` is for a center on this machine. Received: --from {path} with {option}. "
            "Load the file in the script, on all workers."
        )
    try:
        check_file(path)
    except LayoutError as error:
        raise LaunchError(str(error)) from error


def check_numbers(workers: int | None, ps: int | None) -> None:
    """Refuse numbers that are too small."""
    if workers is not None and workers < 1:
        raise LaunchError(f"`--workers` must be an integer >= 1. Received: {workers}.")
    if ps is not None and ps < 0:
        raise LaunchError(f"`--ps` must be an integer >= 0. Received: {ps}.")
