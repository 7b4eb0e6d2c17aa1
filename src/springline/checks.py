"""Checks of what a user gives: each error says what it must be, and what was received."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_ADDRESS = re.compile(r"\w[\w+.-]+:/")  # `pathlib` makes `ray:/` of `ray://`
_COLUMNS = {"time", "step"}  # of the metrics, which are not a user's
_NO_NUMBER = TypeError, ValueError, RuntimeError, OverflowError


def is_number(value: Any) -> bool:
    """Whether it is one number: no string, no bool, no array of several.

    >>> [is_number(value) for value in (0.1, np.float32(1), np.array(2), "0.1", True, None, [1])]
    [True, True, True, False, False, False, False]
    """
    if isinstance(value, str | bytes | bool | np.bool_) or getattr(value, "shape", ()) != ():
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def is_whole(value: object) -> bool:
    """Whether it is an integer; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def at_least_one(name: str, value: Any, meaning: str) -> None:
    """Refuse anything that is not an integer of at least 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"`{name}` must be an integer >= 1. {meaning} Received: {name}={value!r}.")


def count(name: str, value: Any) -> None:
    """Refuse anything that is not an integer of at least 0."""
    if not is_whole(value) or value < 0:
        raise ValueError(f"`{name}` must be an integer >= 0. Received: {name}={value!r}.")


def true_or_false(name: str, value: object) -> None:
    """Refuse anything else: the string "False" is true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False. Received: {name}={value!r}.")


def seconds(timeout: Any) -> None:
    """Refuse a timeout that is no number of seconds."""
    if timeout is not None and not (is_number(timeout) and timeout >= 0):
        raise ValueError(f"`timeout` must be seconds >= 0, or None. Received: timeout={timeout!r}.")


def directory(center: object) -> None:
    """Refuse what is no directory of a center, an address above all."""
    if not isinstance(center, str | os.PathLike):
        raise TypeError(
            f"`center` must be a center or the directory of one. Received: center={center!r}."
        )
    if _ADDRESS.match(os.fspath(center)):
        raise ValueError(
            f"`center` must be a center or the directory of one. Received: center={center!r}. For "
            "a center on a Ray cluster leave `center` out and start the script with `springline "
            "run --address ADDRESS`, or set SPRINGLINE_ADDRESS and SPRINGLINE_CENTER."
        )


def gradients(given: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Refuse gradients of unknown parameters or of another shape: numpy would broadcast them."""
    for name, g in given.items():
        parameter(name, parameters)
        if np.shape(g) != parameters[name].shape:
            raise ValueError(
                f"Parameter {name!r} has shape {parameters[name].shape}. Received: a gradient of "
                f"shape {tuple(np.shape(g))}."
            )


def parameter(name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse the name of no parameter."""
    if name not in parameters:
        known = ", ".join(map(repr, [*parameters][:8])) + (", …" if len(parameters) > 8 else "")
        raise ValueError(f"The worker has no parameter {name!r}. It has: {known}.")


def metrics(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what is logged as plain numbers, None for NaN and Inf.

    >>> metrics({"loss": np.array(0.5), "accuracy": float("nan")})
    {'loss': 0.5, 'accuracy': None}
    """
    plain: dict[str, float | None] = {}
    for name, value in values.items():
        if name in _COLUMNS:
            raise ValueError(
                f"`{name}` is a column that `springline.log` fills in itself. Log yours under "
                f"another name. Received: {name}={_brief(value)}."
            )
        try:
            number = _number(value)
        except _NO_NUMBER as error:
            raise ValueError(
                f"`{name}` must be a number. Received: {name}={_brief(value)}."
            ) from error
        plain[name] = number if math.isfinite(number) else None
    return plain


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what `metrics` takes; a trainer's own metrics may be anything.

    >>> numbers({"loss": np.array(0.5), "confusion": [[1, 2], [3, 4]], "time": 3.0})
    {'loss': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        with contextlib.suppress(*_NO_NUMBER):
            found |= {} if name in _COLUMNS else {name: _number(value)}
    return found


def _number(value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value  # of a tensor or an array
    if isinstance(value, str | bytes):
        raise TypeError("A string is no number.")
    return float(value)


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", ())
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape else repr(value)
