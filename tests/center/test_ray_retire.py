"""How a center on a Ray cluster is ended, whatever its head does meanwhile."""

from unittest import mock

import pytest

from springline.center import CenterError
from springline.center.ray import retire
from springline.center.remote.peer import NotHereError, PeerLostError
from springline.errors import EndedError


@pytest.fixture
def head(monkeypatch):
    """The head of the center that is retired, wherever it is looked for."""
    head = mock.Mock()
    head.name = "the center's head"
    monkeypatch.setattr("springline.center.ray.find", lambda name: None)
    monkeypatch.setattr("springline.center.ray.head_peer", lambda name, handle, token: head)
    return head


@pytest.fixture
def retire_with(head):
    """`retire_with(*answers)` has the head answer so; returns how often it was asked."""

    def retire_with(*answers):
        head.ask.return_value.result.side_effect = answers
        retire("digits", "token")
        return head.ask.call_count

    return retire_with


@pytest.mark.parametrize("last", [None, EndedError("It is gone for good.")])
def test_a_head_that_is_slow_or_lost_is_asked_again_until_it_has_ended(
    monkeypatch, retire_with, last
):
    monkeypatch.setattr("springline.center.remote.peer._PAUSE", 0.0)
    assert retire_with(NotHereError(), PeerLostError(), NotHereError(), last) == 2


def test_a_center_that_does_not_end_in_time_is_said(monkeypatch, retire_with):
    monkeypatch.setattr("springline.center.ray._RETIRING", -1.0)
    with pytest.raises(CenterError, match="The center 'digits' could not be saved and ended in ti"):
        retire_with(NotHereError())


def test_a_process_that_has_left_the_cluster_says_so(head):
    head.ask.side_effect = EndedError("This process has left the Ray cluster.")
    with pytest.raises(EndedError, match="has left"):
        retire("digits", "token")


def test_a_center_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr("springline.center.ray.find", mock.Mock(side_effect=ValueError))
    with pytest.raises(CenterError, match=r"There is no center 'digits' on"):
        retire("digits", "token")


def test_a_storage_that_is_behind_is_said(retire_with, caplog):
    retire_with(["digits/shard-0: no space left", "digits/shard-1: no space left"])
    assert caplog.messages[0].endswith(
        "no final checkpoint of digits/shard-0: no space left (and of 1 more)"
    )
