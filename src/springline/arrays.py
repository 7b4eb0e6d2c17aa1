"""A worker's parameters by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class InPlace(MutableMapping[str, Array]):
    """Arrays by name. Assigning to a name writes into its array: an exchange knows no other."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = dict(arrays)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __setitem__(self, name: str, value: Array) -> None:
        array = self._arrays[name]
        if value is not array:
            if np.shape(value) != array.shape:
                raise ValueError(
                    f"{name!r} has shape {array.shape}. Received: shape {np.shape(value)}."
                )
            np.copyto(array, value, casting="same_kind")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"A worker keeps all its parameters; {name!r} cannot be removed.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return repr(self._arrays)
