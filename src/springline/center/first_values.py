"""The first values of a center, from any safetensors file with the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open

from springline.center.layout import Layout
from springline.errors import LayoutError

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_deserialize: Any = deserialize  # it has no types
_SHOWN = 8  # names in an error
# Of a model's file beside what the center holds: another name of that, or None for the rest.
OtherNames = Mapping[str, str | None]


class FirstValues:
    """A file to take a new center's values from."""

    def __init__(self, path: Path, other_names: OtherNames) -> None:
        self._path = path
        self._others = other_names

    def read(self, layout: Layout) -> dict[str, NDArray[Any]]:
        """Return the values of a model.

        Raises:
            LayoutError: the file does not fit the model; all that is wrong is named.
        """
        found = check_file(self._path)
        ties = {center: name for name, center in self._others.items() if center and name in found}
        source = {e.name: e.name if e.name in found else ties.get(e.name) for e in layout.entries}
        wrong = [f"{name!r} is missing" for name, its in source.items() if its is None]
        known = {*source, *self._others}
        wrong += [f"{name!r} is not in the model" for name in sorted(found.keys() - known)]
        for entry in layout.entries:
            if (its := source[entry.name]) is None:
                continue
            dtype, shape = found[its]
            if shape != tuple(entry.shape):
                wrong.append(f"{its!r} has shape {shape}, in the model {tuple(entry.shape)}")
            elif dtype not in _NUMPY:
                wrong.append(f"{its!r} has dtype {dtype}, in the model {entry.dtype}")
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise LayoutError(
                f"{self._path} (`--from`) does not fit the model: {'; '.join(wrong[:_SHOWN])}"
                f"{more}. Give a file with the model's own names, as `springline export` writes."
            )
        data = {name: spec["data"] for name, spec in _deserialize(self._path.read_bytes())}
        values = {}
        for entry in layout.entries:
            its = str(source[entry.name])
            raw = np.frombuffer(data[its], _NUMPY[found[its][0]]).reshape(found[its][1])
            if found[its][0] == "BF16":
                raw = (raw.astype(np.uint32) << 16).view(np.float32)
            with np.errstate(over="ignore"):
                values[entry.name] = raw.astype(entry.dtype)
            if not np.isfinite(values[entry.name]).all():
                raise LayoutError(f"{self._path} (`--from`) has NaN or Inf in {its!r}.")
        return values


def check_file(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtypes and shapes in a safetensors file, by name.

    Raises:
        LayoutError: it is none.
    """
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise LayoutError(
            f"`--from` must be a safetensors file, as `springline export` writes. Received: "
            f"{path} ({error})."
        ) from error
