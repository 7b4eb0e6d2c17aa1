"""Calls to a peer that is away for a while."""

import logging
import re
import time

import numpy as np
import pytest

from remote import Service
from springline import AGN, Worker
from springline.center import Layout
from springline.center.remote import member, peer
from springline.center.remote.peer import Call, NotHereError, PeerLostError
from springline.rules import SGD


class Away:
    """A peer that is away for some questions: each takes a while to be lost."""

    name = "shard 0"

    def __init__(self, times):
        self.answers = iter([NotHereError(), PeerLostError("no route")] * times)

    def ask(self, method):
        return self

    def result(self, timeout):
        for error in self.answers:
            raise error
        return "here"


def test_that_it_is_away_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(peer, "_PAUSE", 0.001)
    with caplog.at_level(logging.WARNING, "springline"):
        assert Call(Away(5), "read").result() == "here"
    gone, back = caplog.messages
    assert gone == "shard 0 is gone. Retrying. (no route)"
    assert re.fullmatch(r"shard 0 is back after 0\.\d s\.", back)


def test_a_timeout_ends_it(monkeypatch):
    monkeypatch.setattr(peer, "_PAUSE", 0.001)
    with pytest.raises(peer.CenterError, match="shard 0 has not answered for"):
        Call(Away(10_000), "read", timeout=0.05).result()


def test_a_worker_is_a_member_again_however_long_the_head_was_away(monkeypatch):
    """Longer than its own timeout: nobody waited for the head meanwhile."""
    monkeypatch.setattr(member, "_RESTART", 0.0)
    monkeypatch.setattr(member, "HEARTBEAT", 0.01)
    values, rule = {"w": np.zeros(5)}, AGN(period=1, outer=SGD(1.0))
    service = Service(Layout.of(values), rule, values, use_locking=True, restore=None)
    away_until = time.monotonic() + 1.5

    def disturb(method):
        if method == "join" and time.monotonic() < away_until:
            raise PeerLostError("it starts")

    try:
        with Worker(values, rule, service.open(), timeout=0.2) as worker:
            service.head.disturb = disturb
            service.head.target = service.new_head()  # it knows nobody
            service.head.target.registration.description = service.description
            deadline = time.monotonic() + 30
            while worker.center.members() != [0]:
                assert time.monotonic() < deadline, "it has not joined again"
                time.sleep(0.01)
    finally:
        service.close()


class Slow(Away):
    """A peer whose own store is slow."""

    def result(self, timeout):
        raise TimeoutError("the store is slow")


def test_a_timeout_on_the_other_side_is_an_answer():
    """To ask again for the same answer would be for ever."""
    with pytest.raises(TimeoutError, match="the store is slow"):
        Call(Slow(0), "misses").result()
