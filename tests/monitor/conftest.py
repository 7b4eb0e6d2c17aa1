"""A clock that tests set."""

from types import SimpleNamespace

import made
import pytest

from springline.monitor import status


@pytest.fixture
def clock(monkeypatch):
    """The time as the monitor sees it: `clock.now`, in seconds since `made.START`."""
    clock = SimpleNamespace(now=0.0, time=lambda: made.START + clock.now)
    monkeypatch.setattr(status, "time", clock)
    return clock
