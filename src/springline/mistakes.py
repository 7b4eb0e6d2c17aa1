"""A mistake in a script ends its run at once: every restart would end in the same way.

Under `springline run` a worker whose script fails before its first step with an error that
springline itself raises, over what it was given, ends with this status instead of 1. So does one
whose script trains on after it has finished.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from springline import progress
from springline.errors import CheckpointError, DamagedError, FinishedError, RankError

MISTAKE = 78  # EX_CONFIG of sysexits.h
_OURS = Path(__file__).parent
_PASSING = (CheckpointError, DamagedError, RankError)  # what may be gone the next time


def watch() -> None:
    """Let this process end with the status, if it is a worker of a launcher."""
    if {"SPRINGLINE_RUN", "SPRINGLINE_RANK"} <= os.environ.keys():
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            before(kind, error, trace)
            if is_mistake(error, trace):
                raise SystemExit(MISTAKE)

        sys.excepthook = hook


def is_mistake(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether no restart can mend an error that a script has not caught."""
    if isinstance(error, FinishedError):
        return True
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is None or progress.has_stepped():
        return False
    ours = _OURS in Path(trace.tb_frame.f_code.co_filename).parents
    return ours and isinstance(error, ValueError | TypeError) and not isinstance(error, _PASSING)
