"""The centers of a run: one for each optimizer of its script.

RUN/center/         the run's own: that of the script's first optimizer
RUN/center-2/       that of the second, by the order in which the script makes them
RUN/center-critic/  that of one with `name="critic"`, unless it is the first
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from springline import checks
from springline.center import Center, Layout, LocalCenter, RankError, SharedCenter
from springline.center.center import check_layout
from springline.center.first_values import FirstValues, OtherNames
from springline.rules.rule import Rule
from springline.run import FROM, Run

if TYPE_CHECKING:
    from springline.worker import MakeCenter

_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
# By process, directory of the center and rank.
_workers: weakref.WeakValueDictionary[tuple[int, Path, int], Any] = weakref.WeakValueDictionary()
# By process and directory of a run: what the script's first optimizer is named.
_first: dict[tuple[int, Path], str | None] = {}


def check_name(name: str | None, center: object) -> None:
    """Refuse a name that cannot be part of a file's, or that nothing would have."""
    if name is None:
        return
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            "`name` must begin with a letter and have only letters, digits and any of `_.-`. "
            f"Received: name={name!r}."
        )
    if center is not None:
        raise ValueError(
            "`name` chooses one of the run's centers, and `center` gives another: leave one of "
            f"them out. Received: name={name!r}, center={center!r}."
        )


def center_of(run: Run, name: str | None) -> Path | None:
    """Return the directory of the center of the optimizer that is made next.

    Args:
        run: in which it is made.
        name: the optimizer's; by default the order in which they are made distinguishes them.
    """
    own = run.center_directory
    if own is None:
        return None
    first = _first.setdefault((os.getpid(), own.absolute()), name)
    if run.cluster:
        if name != first or _in_use(own, run.rank):
            raise RankError(
                f"Rank {run.rank} has an optimizer in this script already, and a run on a cluster "
                "has one center. Wrap one optimizer, or a list of them with one `model=`."
            )
        return own
    if name is None:
        directories = (own if n == 1 else own.with_name(f"{own.name}-{n}") for n in count(1))
        if first is not None:  # the run's own is that of a named one
            next(directories)
        return next(path for path in directories if not _in_use(path, run.rank))
    path = own if name == first else own.with_name(f"{own.name}-{name}")
    if _in_use(path, run.rank):
        raise RankError(f"Another optimizer of this script is named {name!r}. Choose another name.")
    return path


def note_center(worker: Any, center: object) -> None:
    """Note that a worker of this process has a rank in a directory, if it was given one."""
    if isinstance(center, str | Path):
        _workers[os.getpid(), Path(center).absolute(), worker.rank] = worker


def _in_use(directory: Path, rank: int) -> bool:
    other = _workers.get((os.getpid(), directory.absolute(), rank))
    return other is not None and not other.member.left


def open_center(
    given: Center | MakeCenter | str | Path | None,
    rank: int,
    layout: Layout,
    rule: Rule,
    values: Mapping[str, Any],
    use_locking: bool,
    timeout: float | None,
    other_names: OtherNames | None,
) -> Center:
    """Return the center that `Worker` is given as `center`; see there."""
    if given is None:
        return LocalCenter(layout, rule, values, use_locking=use_locking)
    if isinstance(given, Center):
        check_layout(given.layout, layout)
        return given
    if callable(given):
        return given(layout, rule, values, timeout)
    checks.directory(directory := given)
    run = Run.from_environment()
    if _in_use(Path(directory), rank):
        way = 'give this one `center=springline.directory() / "second"`, on all workers'
        if run.cluster:
            way = "a run on a cluster has one, so put all parameters into one optimizer"
        raise RankError(
            f"Rank {rank} is in use by another optimizer of this script, in {directory}. Each "
            f"optimizer needs a center of its own: {way}."
        )
    if run.cluster and Path(directory) == run.center_directory:
        return run.cluster.create_or_join(layout, rule, values, use_locking)
    if run.cluster and run.directory in Path(directory).parents:
        raise ValueError(
            f"On a cluster {run.directory} is this worker's own: no other could join a "
            "center there. Leave `center` out; a run on a cluster has one center. Received: "
            f"center={str(directory)!r}."
        )
    file = os.environ.get(FROM) if Path(directory) == run.center_directory else None
    return SharedCenter.create_or_join(
        directory,
        layout,
        rule,
        values,
        use_locking=use_locking,
        first=FirstValues(Path(file), other_names or {}) if file else None,
        timeout=timeout,
    )
