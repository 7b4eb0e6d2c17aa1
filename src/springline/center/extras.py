"""What a model's own file has beside the center: other names of tied weights, tensors not in it.

A front end that knows the model writes them beside the center, so that `springline run` and
`springline export` can write a whole file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from springline import sealed
from springline.center.checkpoint import write_tensors
from springline.errors import CheckpointError
from springline.typed import convert

NAME = "extras.safetensors"
_ALIASES = "aliases"


def write_extras(
    directory: Path, tensors: Mapping[str, NDArray[Any]], aliases: Mapping[str, str]
) -> None:
    """Write them beside the center.

    Args:
        directory: the center's.
        tensors: by name, what the center does not hold (frozen parameters, integer buffers).
        aliases: other name → name in the center.
    """
    write_tensors(directory / NAME, tensors, {_ALIASES: json.dumps(dict(aliases))})


def with_extras(directory: Path, values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the center's values and what is written beside it: the model's whole state."""
    path = directory / NAME
    try:
        with sealed.reading(path, "Remove it, and do without.", CheckpointError):
            file = sealed.open_tensors(path)
            aliases = convert(dict[str, str], json.loads(file.metadata[_ALIASES]), _ALIASES)
            others = {alias: values[name].copy() for alias, name in aliases.items()}
            return {**values, **file.tensors(), **others}
    except (FileNotFoundError, NotADirectoryError):
        return dict(values)
