"""Checkpoints: one safetensors file whose header carries the JSON, written atomically.

    center/NAME       the center
    outer/KEY/NAME    the outer optimizer's state
    header            settings, version, steps of each rank

Tensors and JSON are in one file so that they cannot disagree: it is written under a temporary name,
flushed and renamed, and the one before it is kept as `NAME-previous`. Never pickle.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from springline import files
from springline.center.errors import CheckpointError
from springline.center.layout import Bytes
from springline.center.plan import Plan

_HEADER = "springline"
_FORMAT = 1
_log = logging.getLogger("springline")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says beside its tensors."""

    settings: dict[str, Any]
    version: int
    steps: list[int]


def previous(path: Path) -> Path:
    """Return where the checkpoint before `path` is kept."""
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def write(
    path: Path, plan: Plan, center: Bytes, state: Bytes, version: int, steps: list[int]
) -> None:
    """Write a checkpoint and keep the one before it."""
    header = {
        "format": _FORMAT,
        "version": version,
        "steps": steps,
        "settings": plan.settings,
        "layout": plan.layout.to_json(),
    }
    good = newest(path) == path  # a damaged one must not take the place of the good one before it
    write_tensors(path, _tensors(plan, center, state), {_HEADER: json.dumps(header)}, keep=good)


def write_tensors(
    path: Path,
    tensors: Mapping[str, NDArray[Any]],
    header: dict[str, str] | None = None,
    keep: bool = False,
) -> None:
    """Write a safetensors file; see `write_file`."""
    write_file(path, lambda file: files.write_tensors(file, tensors, header), keep)


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


def newest(path: Path) -> Path | None:
    """Return `path`, or the one before it if `path` is missing or damaged; None without either."""
    for candidate in (path, previous(path)):
        try:
            describe(candidate)
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            _log.warning("%s", error)
            continue
        return candidate
    return None


def describe(path: Path) -> Saved:
    """Read a checkpoint's header."""
    try:
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get(_HEADER)
    except SafetensorError as error:
        raise _damaged(path, error) from error
    except FileNotFoundError:
        raise
    except OSError as error:  # a directory, for instance
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if text is None:
        raise CheckpointError(f"{path} is a safetensors file but no checkpoint of a center.")
    try:
        header = json.loads(text)
        if header["format"] != _FORMAT:
            raise CheckpointError(
                f"{path} has format {header['format']}, this springline reads format {_FORMAT}. "
                "Update springline."
            )
        return Saved(header["settings"], header["version"], header["steps"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise _damaged(path, error) from error


def read(path: Path, plan: Plan, center: Bytes, state: Bytes) -> Saved:
    """Read a checkpoint into a new center's memory; every mismatch is named, then refused."""
    saved = describe(path)
    wanted = _tensors(plan, center, state)
    try:
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
            wrong = [f"missing: {name}" for name in wanted if name not in names]
            wrong += [f"extra: {name}" for name in sorted(names - set(wanted))]
            for name in sorted(names & set(wanted)):
                part = file.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if shape != wanted[name].shape:
                    wrong.append(f"{name}: shape {shape}, wanted {wanted[name].shape}")
                elif dtype != _DTYPES[str(wanted[name].dtype)]:
                    wrong.append(f"{name}: dtype {dtype}, wanted {wanted[name].dtype}")
            if wrong:
                raise CheckpointError(
                    f"{path} belongs to another model or rule: {'; '.join(wrong)}. "
                    "Nothing was restored."
                )
            for name, array in wanted.items():
                np.copyto(array, file.get_tensor(name))
    except SafetensorError as error:
        raise _damaged(path, error) from error
    return saved


_DTYPES = {"float32": "F32", "float64": "F64"}


def _tensors(plan: Plan, center: Bytes, state: Bytes) -> dict[str, NDArray[Any]]:
    tensors = {f"center/{name}": array for name, array in plan.layout.views(center).items()}
    for s in plan.state:
        name = plan.layout.entries[s.parameter].name
        tensors[f"outer/{s.key}/{name}"] = s.view(state)
    return tensors


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is cut short or damaged ({error}). Restore {previous(path).name} instead, "
        "if it is there."
    )
