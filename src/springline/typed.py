"""Dataclasses built from JSON values, checked against the types of their fields."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_MOST = 2**63  # what numpy and files can count
T = TypeVar("T")
Count = Annotated[int, "at least 0"]
Seconds = Annotated[float, "at least 0"]


def build(kind: type[T], values: Any) -> T:
    """Build a dataclass from a JSON object.

    >>> from dataclasses import dataclass
    >>> Point = dataclass(type("Point", (), {"__annotations__": {"x": Count, "names": list[str]}}))
    >>> build(Point, {"x": -1, "names": []})
    Traceback (most recent call last):
    ValueError: x is -1

    Raises:
        ValueError: a value is missing, unknown or of another type.
    """
    any_kind: Any = kind
    hints = _hints(any_kind)
    if not isinstance(values, dict):
        raise ValueError(f"{_brief(values)} is not an object")  # noqa: TRY004 - one kind
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise ValueError(f"{_brief(unknown[0])} is unknown")
    given = {name: convert(hints[name], value, name) for name, value in values.items()}
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{_missing(hints, given)} is missing") from error


def convert(hint: Any, value: Any, name: str) -> Any:
    """Convert a JSON value to a type: a list to a tuple, an object to a dataclass.

    Raises:
        ValueError: it is of another type, not finite, or too large.
    """
    if hint is Any:
        return value
    if hint is float and type(value) in (int, float) and abs(value) < _MOST:
        return float(value)
    if hint is type(value) and (hint in (str, bool) or (hint is int and abs(value) < _MOST)):
        return value
    origin, inner = _parts(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        for option in inner:
            with suppress(ValueError):
                return convert(option, value, name)
        return _refuse(name, value)
    if origin is Annotated:
        number = convert(inner[0], value, name)
        return number if number >= 0 else _refuse(name, value)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value)
    if origin in (list, tuple) and isinstance(value, list):
        hints = inner if origin is tuple else inner * len(value)
        if len(hints) != len(value):
            _refuse(name, value)
        return origin(convert(h, v, name) for h, v in zip(hints, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: convert(inner[1], v, f"{name}.{key}") for key, v in value.items()}
    if origin is Literal and isinstance(value, str) and value in inner:
        return value
    return _refuse(name, value)


@lru_cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _missing(hints: dict[str, Any], given: dict[str, Any]) -> str:
    return next((name for name in hints if name not in given), "a value")


def _refuse(name: str, value: Any) -> Any:
    raise ValueError(f"{name} is {_brief(value)}")


def _brief(value: Any) -> str:
    if isinstance(value, int) and not -_MOST < value < _MOST:
        return "too large"
    text = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
