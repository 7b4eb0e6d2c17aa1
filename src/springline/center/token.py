"""A center's token: a secret, made with the center, that every call to its head or a shard carries.

    RUN/token    that of a run's center, for its owner only

The head signs with it what it gives out (incarnations, leases, closed rounds), so that a shard
knows what is the head's without asking, also after a restart of either.
"""

from __future__ import annotations

import hmac
import secrets
import time
from pathlib import Path

from springline.errors import TokenError
from springline.files import write_text

NAME = "token"
_BITS = 64  # of a signature


def new_token() -> str:
    """Return a token for a new center."""
    return secrets.token_hex()


def read_token(run: str | Path) -> str:
    """Return the token of the center of a run.

    Raises:
        TokenError: the run's directory has none.
    """
    try:
        return (Path(run) / NAME).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise TokenError(
            f"Cannot read {Path(run) / NAME}, the token of the run's center: {why}. "
            "Give the run's directory, on the machine where `springline run --address` was started."
        ) from error


def write_token(run: Path, token: str) -> None:
    """Keep a token in a run's directory."""
    write_text(run / NAME, f"{token}\n")


def is_same(given: object, token: str) -> bool:
    """Whether what a caller has given is the token, found out in the same time whatever it is."""
    if not isinstance(given, str):
        return False
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def sign(token: str, *what: object) -> int:
    """Return the signature of what a head gives out."""
    digest = hmac.digest(token.encode(), repr(what).encode(), "sha256")
    return int.from_bytes(digest[: _BITS // 8], "little")


def issue(token: str, what: str, after: int = 0) -> int:
    """Return a number with its signature in it: the time, and larger than the one before.

    >>> first = issue("secret", "rank 0")
    >>> is_issued("secret", "rank 0", first), is_issued("secret", "rank 1", first)
    (True, False)
    >>> issue("secret", "rank 0", after=first) > first
    True
    """
    now = max(time.time_ns(), (after >> _BITS) + 1)
    return now << _BITS | sign(token, what, now)


def is_issued(token: str, what: str, number: int) -> bool:
    """Whether a number is from `issue`."""
    return number == number >> _BITS << _BITS | sign(token, what, number >> _BITS)
