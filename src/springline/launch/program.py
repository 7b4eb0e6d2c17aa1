"""What the workers of a run run: a script, or a module as with `python -m`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from springline.launch.directory import LaunchError
from springline.launch_state import LaunchState


@dataclass(frozen=True)
class Program:
    """What every worker runs.

    Args:
        name: of a script, or of a module.
        arguments: its own.
        is_module: whether it is run as with `python -m`.
    """

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    @property
    def command(self) -> list[str]:
        """What follows `python`."""
        return [*["-m"] * self.is_module, self.name, *self.arguments]

    @property
    def identity(self) -> str:
        """What distinguishes it from others, from any directory."""
        return f"-m {self.name}" if self.is_module else str(Path(self.name).absolute())

    def is_another(self, identity: str) -> bool:
        """Whether it is not the one of that identity, nor that one moved."""
        was, now = Path(identity), Path(self.identity)
        if was.exists() and now.exists():
            return not was.samefile(now)
        return was != now and (was.name != now.name or was.exists())

    def check(self) -> None:
        """Refuse what cannot be run."""
        if sys.platform != "linux":
            raise LaunchError(f"`springline run` needs Linux; this is {sys.platform}.")
        if self.is_module:
            _check_module(self.name)
        else:
            _check_script(Path(self.name))


def check_same(program: Program, directory: Path, confirm: Callable[[str], bool]) -> None:
    """Refuse to go on with another program than a run was started with, unless it is confirmed."""
    before = LaunchState.read(directory)
    if before and program.is_another(before.script):
        differs = f"The run in {directory} was started with {before.script}"
        if not confirm(f"{differs}. Go on with {program.identity}?"):
            raise LaunchError(
                f"{differs}. Received: {program.identity}. To go on with it anyway, give `--yes`; "
                "otherwise start a new run."
            )


def _check_module(name: str) -> None:
    """Refuse a module that is not there, without importing its packages."""
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [str(Path.cwd())])
    if spec is None and top != "__main__":  # which has none
        spec = find_spec(top)
    for part in [*rest, "__main__"]:
        if spec is None or (part == "__main__" and not spec.submodule_search_locations):
            break
        # By its last name: else a namespace package looks for its parent among imported modules.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    if spec is None:
        raise LaunchError(
            f"There is no module {name} that `python -m {name}` could run from here. Received: "
            f"-m {name}."
        )


def _check_script(script: Path) -> None:
    """Refuse a path that is not a readable script."""
    if script.is_dir():
        raise LaunchError(f"The script must be a Python file. Received: {script}, a directory.")
    if not script.exists():
        raise LaunchError(f"There is no script {script}.")
    if not os.access(script, os.R_OK):
        raise LaunchError(f"The script {script} cannot be read: check its permissions.")
