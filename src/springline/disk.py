"""What training can do without: a full disk costs metrics, and no worker."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from springline.errors import CheckpointError

_log = logging.getLogger("springline")
_missing: set[str] = set()  # what this process has warned of


@contextlib.contextmanager
def can_do_without(what: str) -> Iterator[None]:
    """Warn once where something cannot be written, and go on. Also a decorator.

    Args:
        what: is missing then.
    """
    try:
        yield
    except (OSError, CheckpointError) as error:
        if not _missing:
            atexit.register(_drop_output)
        if what not in _missing:
            _missing.add(what)
            _log.warning("%s cannot be written, training goes on without: %s", what, error)


def _drop_output() -> None:
    """Drop what was printed and cannot be written: Python would end with an error for that."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # there is none, or it is closed
            pass
