"""Checkpoints: one safetensors file whose header carries the JSON, written atomically.

    center/NAME       the center
    outer/KEY/NAME    the outer optimizer's state
    header            settings, the outer optimizer's kind, version, steps of each rank

Tensors and JSON are in one file so that they cannot disagree: it is written under a temporary name,
flushed and renamed, and the one before it is kept as `NAME-previous`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from springline import files, sealed
from springline.center.layout import Bytes
from springline.center.plan import Plan, check_saved_settings, differences
from springline.errors import CheckpointError
from springline.typed import Count, build

_HEADER, _CENTER = "springline", "center/"
_FORMAT = 3
_log = logging.getLogger("springline")
_warned: set[str] = set()  # what this process has warned of


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds beside its tensors."""

    format: int
    version: Count
    steps: list[Count]
    settings: dict[str, Any]
    outer: dict[str, Any]  # what defines the outer optimizer's state; see `Plan`
    layout: list[Any]


def previous(path: Path) -> Path:
    """Return where the checkpoint before `path` is kept."""
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def write(
    path: Path, plan: Plan, center: Bytes, state: Bytes, version: int, steps: list[int]
) -> None:
    """Write a checkpoint and keep the one before it."""
    saved = Saved(_FORMAT, version, steps, plan.settings, plan.outer, plan.layout.to_json())
    header = {_HEADER: json.dumps(asdict(saved))}
    try:  # a damaged one must not take the place of the good one before it
        good = newest(path, whole=False) == path  # whose data would be read before each checkpoint
    except CheckpointError:
        good = False
    write_tensors(path, _tensors(plan, center, state), header, keep=good)


def write_tensors(
    path: Path,
    tensors: Mapping[str, NDArray[Any]],
    header: dict[str, str] | None = None,
    keep: bool = False,
) -> None:
    """Write a safetensors file; see `write_file`."""
    write_file(path, lambda file: sealed.write_tensors(file, tensors, header), keep)


def write_file(path: Path, write: files.Write, keep: bool = False) -> None:
    """Write a file atomically, for its owner only.

    Args:
        path: where.
        write: writes to the file that it is given.
        keep: whether to keep the file that is there as `previous(path)`.
    """
    try:
        files.replace(path, write, previous(path) if keep else None)
    except OSError as error:
        raise CheckpointError(
            f"Could not write {path}: {error}. Is there room, and may you write there? "
            "What was saved before is untouched."
        ) from error


def newest(path: Path, whole: bool = True) -> Path | None:
    """Return `path`, or the one before it if `path` is missing or damaged; None without either.

    Args:
        path: the newer one.
        whole: whether to look at all the data; else at the header only.

    Raises:
        CheckpointError: what there is, is damaged.
    """
    refused: CheckpointError | None = None
    for candidate in (path, previous(path)):
        try:
            _look(candidate, whole)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except CheckpointError as error:
            refused = refused or error
            if str(error) not in _warned:
                _warned.add(str(error))
                _log.warning("%s", error)
            continue
        return candidate
    if refused:
        raise refused
    return None


def describe(path: Path) -> Saved:
    """Read a checkpoint's header."""
    return _look(path, whole=False)


def read(path: Path, plan: Plan, center: Bytes, state: Bytes) -> Saved:
    """Read a checkpoint into a new center's memory; every mismatch is named, then refused."""
    wanted = _tensors(plan, center, state)
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint {path}.")
    with _reading(path):
        file = sealed.open_tensors(path.resolve())  # a link of the user's is followed
        saved, found = _header(path, file), file.tensors()
        wrong = [f"missing: {name}" for name in wanted if name not in found]
        wrong += [f"extra: {name}" for name in sorted(found.keys() - wanted.keys())]
        for name in sorted(found.keys() & wanted.keys()):
            its, ours = found[name], wanted[name]
            if its.shape != ours.shape:
                wrong.append(f"{name}: shape {its.shape}, wanted {ours.shape}")
            elif its.dtype != ours.dtype:
                wrong.append(f"{name}: dtype {its.dtype}, wanted {ours.dtype}")
        if saved.outer and plan.outer:
            pairs = differences(saved.outer, plan.outer)
            wrong += [f"outer optimizer: {key}={a!r}, wanted {b!r}" for key, a, b in pairs]
        if wrong:
            raise CheckpointError(
                f"{path} belongs to another model or rule: {'; '.join(wrong)}. "
                "Nothing was restored."
            )
        _check_numbers(found)
        for name, array in wanted.items():
            np.copyto(array, found[name])
    return saved


def read_center(path: Path) -> dict[str, NDArray[Any]]:
    """Return the center of a checkpoint, by the model's own names."""
    with _reading(path):
        tensors = sealed.open_tensors(path).tensors()
        _check_numbers(tensors)
    return {n.removeprefix(_CENTER): t for n, t in tensors.items() if n.startswith(_CENTER)}


def _tensors(plan: Plan, center: Bytes, state: Bytes) -> dict[str, NDArray[Any]]:
    tensors = {f"{_CENTER}{name}": array for name, array in plan.layout.views(center).items()}
    for s in plan.state:
        name = plan.layout.entries[s.parameter].name
        tensors[f"outer/{s.key}/{name}"] = s.view(state)
    return tensors


def _check_numbers(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Refuse NaN, and Inf in the center: an outer optimizer's sum of squares may overflow."""
    for name, array in tensors.items():
        ends = array.min(initial=0), array.max(initial=0)  # a NaN is both
        if np.isnan(ends).any() or (name.startswith(_CENTER) and np.isinf(ends).any()):
            raise ValueError(f"{name} has NaN or Inf")


def _look(path: Path, whole: bool) -> Saved:
    with _reading(path):
        file = sealed.open_tensors(path)
        if whole:
            file.tensors()
        return _header(path, file)


def _header(path: Path, file: sealed.TensorFile) -> Saved:
    if _HEADER not in file.metadata:
        raise CheckpointError(f"{path} is a safetensors file, but not a center's checkpoint.")
    header = json.loads(file.metadata[_HEADER])
    found = int(header["format"])
    if found != _FORMAT:
        advice = "Update springline." if found > _FORMAT else "Use the one that wrote it."
        raise CheckpointError(
            f"{path} has format {found}, this springline reads format {_FORMAT}. {advice}"
        )
    saved = build(Saved, header)
    check_saved_settings(saved.settings)
    return saved


def _reading(path: Path) -> AbstractContextManager[None]:
    advice = f"Restore {previous(path).name} instead, if it is there."
    return sealed.reading(path, advice, CheckpointError)
