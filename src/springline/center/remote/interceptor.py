"""What is checked of every call to a head or a shard, before anything is touched.

A parameter means the same in every call, so each name has one check: a type, a least integer, or
the method of that name. Non-finite values of an exchange are found block by block as it is applied
(`steps.py`).
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from springline.center.center import check_rank, check_settings
from springline.center.layout import ByteRange
from springline.center.local import NO_RATE
from springline.center.plan import Plan
from springline.center.remote.messages import (
    ClosedRound,
    Message,
    RankProgress,
    Sender,
    of_fragment,
    span,
)
from springline.center.state import nbytes_of
from springline.center.token import is_issued, is_same, sign
from springline.checks import is_whole
from springline.errors import (
    AFTER_NAN,
    CenterError,
    LayoutError,
    NonFiniteError,
    RankError,
    TokenError,
)
from springline.rules.rule import Rule, is_finite

_LONGEST = 60.0  # seconds that a call may ask a head to wait
# Which calls are for rules with rounds, and which for the others.
_ROUNDS = {"exchange": False} | dict.fromkeys(("begin", "contribute", "withdraw", "reduce"), True)
_TYPES = {"finished": bool, "changed": bool, "description": dict, "parts": list}
_LEAST = {"number": 1, "mark": 0, "incarnation": 1, "steps": 0, "local_steps": 0, "exchanges": 0}


class Target(Protocol):
    """A head or a shard."""

    calls: ClassVar[tuple[str, ...]]  # the methods that may be called

    @property
    def plan(self) -> Plan | None:
        """The center's; None before it is made."""


class Interceptor:
    """Checks the calls to a head or a shard."""

    def __init__(self, target: Target, token: str, ranges: Sequence[ByteRange] = ()) -> None:
        self._target = target
        self._key = token
        self._ranges = ranges  # what a shard holds of the layout
        self._span = span(ranges)

    def admit(self, token: object, method: str, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the method that is called, if it may be.

        Raises:
            TokenError: the call has another token.
            CenterError: it has other arguments than the method takes.
        """
        if not is_same(token, self._key):
            raise TokenError(
                f"The call {reprlib.repr(method)} came without the token of this center, which "
                "was made with it. Pass `token=center.token`, or `token=read_token(RUN)` (of "
                "springline.center.token) for the center of a run, or set SPRINGLINE_TOKEN."
            )
        plan = self._target.plan
        known = method in self._target.calls
        if not known or (plan and _ROUNDS.get(method, plan.rounds) != plan.rounds):
            raise CenterError(f"This center has no call {reprlib.repr(method)}.")
        call: Callable[..., Any] = getattr(self._target, method)
        try:
            given = inspect.signature(call).bind(*arguments).arguments
        except TypeError as error:
            raise CenterError(f"The call {method!r} has the wrong arguments: {error}.") from error
        for name, value in given.items():
            if name in _TYPES:
                _typed(name, value, _TYPES[name])
            elif hasattr(self, f"_{name}"):
                getattr(self, f"_{name}")(value)
            else:
                _whole(value, name)
        if given.get("incarnation") is not None:
            self._issued(given["rank"], given["incarnation"])
        return call

    # One check for each parameter.

    def _rank(self, rank: Any) -> None:
        plan = self._target.plan
        check_rank(rank, plan.workers if plan else math.inf)

    def _incarnation(self, incarnation: Any) -> None:
        if incarnation is not None:  # None: whichever has the rank
            _whole(incarnation, "incarnation")

    def _issued(self, rank: int, incarnation: int) -> None:
        if not is_issued(self._key, f"rank {rank}", incarnation):
            raise RankError(
                f"The head has not given incarnation {incarnation} to rank {rank}. Join the center "
                "to be given one."
            )

    def _seconds(self, seconds: Any) -> None:
        _finite("seconds", seconds, _LONGEST)

    def _lease(self, lease: Any) -> None:
        _whole(lease, "number")
        if not is_issued(self._key, "lease", lease):
            raise CenterError(f"The head has not granted lease {lease}. Ask it for one.")

    def _held(self, held: Any) -> None:
        _whole(held, "number", 0)
        if held:
            self._lease(held)

    def _given_up(self, given_up: Any) -> None:
        self._ranks("given_up", [] if given_up is None else given_up)

    def _without(self, without: Any) -> None:
        self._ranks("without", without)

    def _ranks(self, name: str, ranks: Any) -> None:
        _typed(name, ranks, list)
        for rank in ranks:
            self._rank(rank)
        if len({*ranks}) < len(ranks):
            raise RankError(f"`{name}` must not repeat a rank. Received: {reprlib.repr(ranks)}.")

    def _row(self, row: Any) -> None:
        _typed("row", row, RankProgress)
        for name in ("incarnation", "number", "steps", "exchanges"):
            _whole(getattr(row, name), name, 0)
        _finite("seconds", row.seconds)
        _finite("speed", row.speed)

    def _sender(self, sender: Any) -> None:
        _typed("sender", sender, Sender)
        self._rank(sender.rank)
        _whole(sender.others, "others", 0)
        self._row(sender.row)
        _whole(sender.row.number, "number")
        self._issued(sender.rank, sender.row.incarnation)

    def _message(self, message: Any) -> None:
        _typed("message", message, Message)
        self._sender(message.sender)
        plan = self._target.plan
        entries = len(plan.layout.entries) if plan else 0
        _whole(message.fragment, "fragment", 0)
        if plan and message.fragment >= plan.layout.fragments:
            raise CenterError(f"There is no fragment {message.fragment} of this center.")
        ranges = of_fragment(self._ranges, message.fragment)
        start, stop = span(ranges)
        _array("data", message.data, np.uint8, stop - start)
        _array("seen", message.seen, np.bool_, entries)
        _array("rates", message.rates, np.float64, entries)
        rates = message.rates
        if not (np.isfinite(rates).all() and ((rates >= 0) | (rates == NO_RATE)).all()):
            raise NonFiniteError(
                f"The learning rates of rank {message.sender.rank} must be finite numbers >= 0. "
                f"Received: {rates.min()} to {rates.max()}. Check its scheduler."
            )
        if plan and plan.rounds:  # else they are looked for as the exchange is applied
            self._values(message.data, f"What rank {message.sender.rank} has sent", ranges)

    def _closed(self, closed: Any) -> None:
        _typed("closed", closed, ClosedRound)
        _whole(closed.number, "number")
        self._ranks("contributors", closed.contributors)
        if closed.signature != sign(self._key, closed.number, closed.contributors):
            raise CenterError(
                f"The head has not closed round {closed.number} with the contributors "
                f"{closed.contributors}. Contribute to it at the head first."
            )

    def _center(self, center: Any) -> None:
        _array("center", center, np.uint8, self._span[1] - self._span[0])
        self._values(center, "What is to be the center's first values", self._ranges)

    def _state(self, state: Any) -> None:
        plan = self._target.plan
        entries = plan.state_within(*self._span) if plan else ()
        _array("state", state, np.uint8, nbytes_of(entries))
        if not all(np.isfinite(entry.view(state)).all() for entry in entries):
            raise NonFiniteError("The outer optimizer's state has NaN or Inf. Restore another.")

    def _steps(self, steps: Any) -> None:
        _typed("steps", steps, list)
        for n in steps:
            _whole(n, "steps")
        plan = self._target.plan
        if plan and len(steps) != plan.workers:
            raise CenterError(
                f"`steps` must have {plan.workers} numbers, one per rank. Received: {len(steps)}."
            )

    def _rule(self, rule: Any) -> None:
        _typed("rule", rule, Rule)
        if plan := self._target.plan:
            check_settings(plan.settings, rule.settings() | {"use_locking": plan.use_locking})

    def _values(self, data: Any, what: str, ranges: Sequence[ByteRange]) -> None:
        """Refuse values that are not finite."""
        start, _ = span(ranges)
        for range_ in ranges:
            with np.errstate(all="ignore"):
                finite = is_finite(
                    data[range_.start - start : range_.stop - start].view(range_.dtype)
                )
            if not finite:
                raise NonFiniteError(f"{what} has NaN or Inf, so it was not taken. {AFTER_NAN}")


def _typed(name: str, value: Any, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise CenterError(
            f"`{name}` must be a {wanted.__name__}. Received: {reprlib.repr(value)}, a "
            f"{type(value).__name__}."
        )


def _whole(value: Any, name: str, least: int | None = None) -> None:
    least = _LEAST[name] if least is None else least
    if not is_whole(value) or value < least:
        raise CenterError(
            f"`{name}` must be an integer >= {least}. Received: {reprlib.repr(value)}."
        )


def _finite(name: str, value: Any, most: float = math.inf) -> None:
    is_number = isinstance(value, float | int | np.number) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and 0 <= value <= most):
        below = "" if most == math.inf else f" and <= {most:g}"
        raise CenterError(
            f"`{name}` must be a finite number >= 0{below}. Received: {reprlib.repr(value)}."
        )


def _array(name: str, value: Any, dtype: type, size: int) -> None:
    """Refuse all but a flat array of one size: numpy would broadcast it."""
    _typed(name, value, np.ndarray)
    if value.dtype != dtype or value.shape != (size,) or not value.flags.c_contiguous:
        raise LayoutError(
            f"`{name}` must be {size} elements of {np.dtype(dtype)}. Received: an array "
            f"of shape {value.shape} of {value.dtype}. Is it another model's?"
        )
