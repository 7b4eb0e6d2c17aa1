"""How a center on a Ray cluster is ended, whatever its head does meanwhile."""

from types import SimpleNamespace
from unittest import mock

import pytest

from springline.center import CenterError
from springline.center.errors import EndedError
from springline.center.ray import RayCenter
from springline.center.served.peer import NotHereError, PeerLostError


def retire(*answers):
    """Retire a center whose head answers so, one after the other; return how often it was asked."""
    head = mock.Mock()
    head.name = "the center's head"
    head.ask.return_value.result.side_effect = answers
    RayCenter.retire(SimpleNamespace(close=mock.Mock(), head=head, name="digits"))
    return head.ask.call_count


@pytest.mark.parametrize("last", [None, EndedError("It is gone for good.")])
def test_a_head_that_is_slow_or_lost_is_asked_again_until_it_has_ended(monkeypatch, last):
    monkeypatch.setattr("springline.center.served.peer._PAUSE", 0.0)
    assert retire(NotHereError(), PeerLostError(), NotHereError(), last) == 2


def test_a_center_that_does_not_end_in_time_is_said(monkeypatch):
    monkeypatch.setattr("springline.center.ray._RETIRING", -1.0)
    with pytest.raises(CenterError, match="The center 'digits' could not be saved and ended in ti"):
        retire(NotHereError())


def test_a_process_that_has_left_the_cluster_says_so():
    head = mock.Mock()
    head.ask.side_effect = EndedError("This process has left the Ray cluster.")
    with pytest.raises(EndedError, match="has left"):
        RayCenter.retire(SimpleNamespace(close=mock.Mock(), head=head, name="digits"))


def test_a_storage_that_is_behind_is_said(caplog):
    retire(["digits/shard-0: no space left", "digits/shard-1: no space left"])
    assert caplog.messages[0].endswith(
        "no last checkpoint of digits/shard-0: no space left (and of 1 more)"
    )
