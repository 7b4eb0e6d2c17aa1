"""Hostile and confused callers: what is refused changes nothing, and spoils nobody's exchange."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from remote import TOKEN, LocalPeer, contributing, worker
from springline import AGN, ElasticAverage, ModelAverage
from springline.center import CenterError, LayoutError, NonFiniteError, RankError
from springline.center.ray_actors import RayHead
from springline.center.remote import interceptor
from springline.center.remote.head import Head
from springline.center.remote.interceptor import Interceptor
from springline.center.remote.messages import ClosedRound, Message, RankProgress, Sender
from springline.center.remote.peer import Call
from springline.center.remote.shard import Shard
from springline.center.token import issue, sign
from springline.errors import TakenOverError, TokenError
from springline.rules import Adam

VALUES = {"w": np.zeros(20, np.float32), "b": np.zeros(5, np.float32)}
AVERAGE = ModelAverage(workers=2, period=1)
ADAM = AGN(workers=2, period=1, outer=Adam(0.5))
NOT_WHOLE = [-1, 1.5, float("nan"), "1", [1], True, None]
RATES = [np.array([0.5, rate]) for rate in (np.nan, np.inf, -np.inf, -0.5)]
ROUNDS = ("begin", "contribute", "withdraw", "reduce")


class Scene:
    """Two workers, of which the first has exchanged, unless `fresh`, or waits in a round."""

    def __init__(self, serve, background, rule, fresh):
        self.service = serve(rule)
        self.peers = {"head": self.service.head, "shard": self.service.shards[0]}
        self.one, self.two = (worker(self.service, rule, rank) for rank in range(2))
        for one in (self.one, self.two):
            one.begin()
            one.parameters["w"][:] = 1 + 2 * one.rank
            one.observe({name: np.ones_like(value) for name, value in VALUES.items()})
        self._background, self._first = background, None
        if rule.rounds:
            self._begin()
            while 0 not in contributing(self.service):
                assert not self._first.done()
        elif not fresh:
            self._begin().result(20)

    def _begin(self):
        self._first = self._first or self._background(self.one.exchange)
        return self._first

    def call(self, peer, method, *arguments):
        return Call(self.peers[peer], method, *arguments).result()

    def good(self):
        """What would be taken from the second worker, by the parameter's name."""
        incarnation, shard = self.two.member._incarnation, self.service.shards[0].target
        sender = Sender(1, RankProgress(incarnation, 1, 1, 1))
        data = np.zeros(len(shard._center), np.uint8)
        return {
            **{"rank": 1, "incarnation": incarnation, "number": 1, "row": RankProgress()},
            **{"mark": 1, "seconds": 0.0, "held": 0, "finished": False, "changed": False},
            **{"given_up": [1], "without": [], "local_steps": 1},
            **{"sender": sender, "center": data, "state": np.zeros(len(shard._state), np.uint8)},
            **{"lease": issue(TOKEN, "lease"), "steps": [0, 0]},
            "message": Message(sender, 0, data, np.ones(2, bool), np.ones(2)),
            "closed": ClosedRound(1, [0, 1], sign(TOKEN, 1, [0, 1])),
        }

    def bad(self):
        """What must not be taken, by the parameter's name."""
        good = self.good()
        others = [1, good["incarnation"] + 1, self.one.member._incarnation]  # unknown, another's
        fields = {
            "rank": [*NOT_WHOLE, 2, 77, 10**30],
            "incarnation": [*NOT_WHOLE, 0, *others, 10**40],
            "number": [*NOT_WHOLE, 0],
            "steps": NOT_WHOLE,
            "exchanges": NOT_WHOLE,
            "seconds": [np.nan, np.inf, -1.0, "1", None],
        }
        sender = good["sender"]
        rows = vary(sender.row, {key: fields[key] for key in fields if key != "rank"})
        wrong = {"rank": fields["rank"], "others": NOT_WHOLE, "row": [None, *rows]}
        senders = [None, *vary(sender, wrong)]
        message = good["message"]
        parts = {
            "sender": senders,
            "data": of_size(message.data),
            "seen": of_size(message.seen),
            "rates": [*of_size(message.rates), *RATES],
        }
        closed = {
            "number": [*NOT_WHOLE, 0, 2, 10**9],
            "contributors": [None, [], [0], [1, 0], [0, 1, 1], [0, 77], "01"],
            "signature": [None, 0, "1"],
        }
        row = {key: fields[key] for key in ("steps", "exchanges", "seconds")}
        return fields | {
            "incarnation": [n for n in fields["incarnation"] if n is not None],
            "seconds": [*fields["seconds"], 1e9],
            "mark": NOT_WHOLE,
            "finished": ["False", 1, None],
            "changed": ["False", 1, None],
            "lease": [*NOT_WHOLE, 0, 7, 10**40],
            "held": [*NOT_WHOLE, 7, 10**40],
            "given_up": [1, [77], [-1], [1, 1], ["1"]],
            "without": [None, 1, [77], [-1], [1, 1], ["1"]],
            "local_steps": NOT_WHOLE,
            "steps": [None, [0], [0, 0, 0], [0, -1], [0, 1.5]],
            "center": [*of_size(good["center"]), *not_finite(good["center"])],
            "state": [*of_size(good["state"]), *not_finite(good["state"])],
            "row": [None, (0, 0), *vary(good["row"], row)],
            "sender": senders,
            "message": [None, good["sender"], *vary(message, parts)],
            "closed": [None, [0, 1], *vary(good["closed"], closed)],
        }

    def state(self):
        """All that a call may change."""
        head, shards = self.service.head.target, [p.target for p in self.service.shards]
        slots = [
            {
                (n, r): bytes(message.data)
                for n, kept in s._slots._kept.items()
                for r, message in kept.items()
            }
            for s in shards
        ]
        return repr(
            [
                [(bytes(s._center), bytes(s._state), s.rows(), s._lease, s._ready) for s in shards],
                [(slots, [*s._replies._kept]) for s in shards],
                {
                    r: (s.incarnation, s.settled, s.joined)
                    for r, s in head._membership.members.items()
                },
                (head._membership.closed, head._membership.contributors, head._membership._lease),
                (head.registration.description, head._finished, head._given_up, head._started),
                [(rank.steps, rank.exchanges) for rank in self.one.center.progress()],
                (self.one.center.version, self.one.center.members()),
            ]
        )

    def goes_on(self):
        """The others' exchanges come to the values that they would have come to alone."""
        first = self._begin()
        if not self.one.in_rounds:
            first.result(20)
        self.two.exchange()
        first.result(20)
        expected = 2 if self.one.in_rounds else -1  # the mean; two steps of Adam
        found = [self.two.parameters["w"], self.one.center.values()["w"]]
        for w in found + [self.one.parameters["w"]] * self.one.in_rounds:
            np.testing.assert_allclose(w, expected, rtol=1e-5)


def of_size(array):
    """The same of other sizes, shapes and types: numpy would broadcast some."""
    longer = np.concatenate([array, array[:4]])
    others = array[None], array.astype(np.int16), array.tolist(), None
    return [array[:-1], array[:1], array[:0], longer, *others]


def not_finite(data):
    found = []
    for value in (np.nan, np.inf, -np.inf):
        for where in (0, -1) if data.size else ():
            found.append(data.copy())
            found[-1].view(np.float32)[where] = value
    return found


def vary(value, wrong):
    return [replace(value, **{field: bad}) for field, bads in wrong.items() for bad in bads]


@pytest.fixture
def scene(serve, background):
    return lambda rule, fresh=False: Scene(serve, background, rule, fresh)


def names_of(kind, method):
    return [*inspect.signature(getattr(kind, method)).parameters][1:]


KINDS = {"head": Head, "shard": Shard}
CALLS = [(peer, method) for peer, kind in KINDS.items() for method in kind.calls]


@pytest.mark.parametrize(
    ("peer", "method", "parameter"),
    [(*call, name) for call in CALLS for name in names_of(KINDS[call[0]], call[1])],
)
def test_a_wrong_argument_is_refused(scene, peer, method, parameter):
    fresh = method in ("initialise", "seal")  # which come before the first exchange
    here = scene(AVERAGE if method in ROUNDS else ADAM, fresh)
    names = names_of(KINDS[peer], method)
    before, good = here.state(), here.good()
    for wrong in here.bad()[parameter]:
        given = [wrong if name == parameter else good[name] for name in names]
        with pytest.raises(CenterError):
            pytest.fail(f"{wrong!r} was taken: {here.call(peer, method, *given)}")
    assert here.state() == before
    here.goes_on()


def test_every_parameter_of_every_call_has_a_check():
    for kind in (Head, RayHead, Shard):
        for method in kind.calls:
            for name in names_of(kind, method):
                simple = {*interceptor._TYPES, *interceptor._LEAST}
                assert name in simple or hasattr(Interceptor, f"_{name}"), (method, name)


@pytest.mark.parametrize("token", [None, "", "another's", TOKEN.encode(), TOKEN + " ", 7])
@pytest.mark.parametrize("rule", [AVERAGE, ADAM])
def test_a_call_without_the_token_is_refused(scene, rule, token):
    here = scene(rule)
    before, good = here.state(), here.good()
    for peer, method in CALLS:
        given = [good[name] for name in names_of(KINDS[peer], method)]
        stranger = LocalPeer(peer, here.peers[peer].target, here.service.pool)
        stranger.token = token
        with pytest.raises(TokenError, match=r"without the token of this center.*`token=center\.t"):
            Call(stranger, method, *given).result()
    assert here.state() == before
    here.goes_on()


@pytest.mark.parametrize("rule", [AVERAGE, ADAM])
def test_there_are_no_other_calls(scene, rule):
    """Least of all those that are for another kind of rule."""
    here = scene(rule)
    before, good = here.state(), here.good()
    others = ["exchange"] if rule.rounds else ROUNDS
    given = [(peer, method) for peer, method in CALLS if method in others]
    assert given
    for peer, method in [*given, ("head", "publish"), ("shard", "_apply"), ("shard", 7)]:
        names = names_of(KINDS[peer], method) if method in KINDS[peer].calls else []
        with pytest.raises(CenterError, match="This center has no call"):
            here.call(peer, method, *[good[name] for name in names])
    for arguments in ([], [1, 2, 3, 4, 5, 6, 7]):
        with pytest.raises(CenterError, match="has the wrong arguments"):
            here.call("head", "seal", *arguments)
    assert here.state() == before
    here.goes_on()


@pytest.mark.parametrize("rule", [ADAM, ElasticAverage(workers=2, period=1, moving_rate=0.5)])
def test_no_block_of_an_exchange_is_applied_that_is_not_finite(scene, rule):
    """The reply says which it is; the worker then raises."""
    here = scene(rule)
    shard, message = here.peers["shard"].target, here.good()["message"]
    version = here.one.center.version
    bad = not_finite(message.data)
    for number, data in enumerate([*bad[::2], *bad[1::2]], start=1):  # in the first block, the last
        row, before = replace(message.sender.row, number=number), bytes(shard._center)
        sender = replace(message.sender, row=row)
        reply = here.call("shard", "exchange", replace(message, sender=sender, data=data))
        (at,) = reply.refused
        if number <= 3:
            assert at == 0
            assert bytes(shard._center)[:20] == before[:20]
        else:
            assert bytes(shard._center)[-20:] == before[-20:]
    assert np.isfinite(shard._center.view(np.float32)).all()
    assert here.one.center.version == version
    assert here.one.center.progress()[1].steps == 0


def test_a_contribution_that_is_not_finite_spoils_no_round(scene):
    here = scene(AVERAGE)
    before, message = here.state(), here.good()["message"]
    for data in not_finite(message.data):
        with pytest.raises(NonFiniteError, match="What rank 1 has sent has NaN or Inf"):
            here.call("shard", "contribute", replace(message, data=data), 1)
    assert here.state() == before
    here.goes_on()


@pytest.mark.parametrize("number", [2, 3, 10**9])
def test_a_round_that_is_not_open_is_refused(scene, number):
    here = scene(AVERAGE)
    before, good = here.state(), here.good()
    me = good["rank"], good["incarnation"]
    for call in (("contribute", *me, number, 0.0, 1), ("withdraw", *me, number)):
        with pytest.raises(CenterError, match=f"Round {number} is not open: this is round 1"):
            here.call("head", *call)
    assert here.state() == before
    here.call("shard", "contribute", good["message"], number)  # of no use to anybody
    here.goes_on()


def test_an_earlier_incarnation_is_refused(scene):
    here = scene(ADAM)
    old = here.good()
    here.two.member.leave()
    here.two = worker(here.service, ADAM, 1)
    here.two.observe({name: np.ones_like(value) for name, value in VALUES.items()})
    here.goes_on()
    before = here.state()
    with pytest.raises(TakenOverError):
        here.call("shard", "exchange", old["message"])
    with pytest.raises(RankError, match="Rank 1 is in use"):
        here.call("head", "join", 1, old["incarnation"])
    with pytest.raises(CenterError, match="does not know this member"):
        here.call("head", "seal", 1, old["incarnation"], 1, False, 0)
    assert here.call("head", "heartbeat", 1, old["incarnation"], RankProgress(steps=9)) is None
    assert here.state() == before


@pytest.mark.parametrize(
    ("peer", "method", "parameter", "wrong", "kind", "words"),
    [
        ("head", "join", "rank", 77, RankError, "from 0 to 1, since the run is configured for 2"),
        ("head", "heartbeat", "incarnation", 5, RankError, "not given incarnation 5 to rank 1. Jo"),
        ("shard", "seal", "lease", 7, CenterError, "The head has not granted lease 7"),
        ("shard", "seal", "center", np.zeros(4, np.uint8), LayoutError, r"Received: .*\(4,\) of u"),
        ("head", "barrier", "seconds", np.nan, CenterError, ">= 0 and <= 60. Received: nan"),
    ],
)
def test_what_is_wrong_is_said(scene, peer, method, parameter, wrong, kind, words):
    here = scene(ADAM)
    good = here.good() | {parameter: wrong}
    with pytest.raises(kind, match=words):
        here.call(peer, method, *[good[name] for name in names_of(KINDS[peer], method)])


def test_rates_that_are_not_finite_are_named(scene):
    here = scene(ADAM)
    here.two.local.rates[:] = np.nan  # as of a scheduler that divides by zero
    with pytest.raises(NonFiniteError, match=r"learning rates of rank 1 .*Received: nan to nan"):
        here.two.exchange()
    here.two.local.rates[:] = 0.5
    here.two.observe({name: np.ones_like(value) for name, value in VALUES.items()})
    here.goes_on()
