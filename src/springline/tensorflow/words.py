"""What messages say of things that they have received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

_MOST = 3  # elements of a list
_LONGEST = 80  # characters of anything


def brief(value: Any) -> str:
    """Describe a value in a few words: of what holds numbers, its kind, name, shape and dtype.

    >>> brief([(np.zeros((200, 2)), "x")])
    "[(ndarray of shape (200, 2) and dtype float64, 'x')]"
    """
    if isinstance(value, tf.IndexedSlices):
        return f"IndexedSlices of {brief(value.values)}"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        name = _name(value)
        dtype = getattr(value.dtype, "name", value.dtype)
        return f"{type(value).__name__}{name} of shape {value.shape} and dtype {dtype}"
    if isinstance(value, list | tuple):
        parts = [brief(part) for part in value[:_MOST]]
        parts += ["…"] if len(value) > _MOST else []
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(parts)}{right}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _name(value: Any) -> str:
    """Return a variable's or a graph tensor's name in quotes; eager tensors have none."""
    try:
        name = value.name
    except AttributeError:
        return ""
    return f" {name!r}" if isinstance(name, str) else ""
