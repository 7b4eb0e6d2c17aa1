"""`overlap=True`: folded in as the formulas say, one at a time, errors and the end included."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch_training import (
    INNERS,
    RULES,
    center,
    loss_of,
    near,
    network,
    same,
    train,
    weights,
    wrap,
)

from springline.center import CenterError, NonFiniteError


class Gate:
    """In front of a worker's exchanges: each waits until the gate is opened for it."""

    def __init__(self, opt):
        self.opt = opt
        self.entered = threading.Semaphore(0)
        self.opened = threading.Semaphore(0)
        self.inside = self.most = self.passed = 0
        self._exchange = opt.worker.member.exchange
        opt.worker.member.exchange = self

    def __call__(self, local):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.release()
        assert self.opened.acquire(timeout=60)
        try:
            return self._exchange(local)
        finally:
            self.inside -= 1
            self.passed += 1

    def wait_entered(self):
        assert self.entered.acquire(timeout=60)

    def open(self):
        self.opened.release()

    def let_through(self):
        """Open the gate and wait until the exchange is done, but do not fold it in."""
        self.open()
        self.opt.worker.background._flight.exception(timeout=60)


def make(rule, inner="sgd", period=2, **options):
    model = network()
    if rule == "elastic":
        options = {"moving_rate": 0.4} | options
    opt = wrap(
        rule, INNERS[inner](model.parameters()), period, model=model, overlap=True, **options
    )
    return model, opt, Gate(opt)


def gradient(model, step):
    model.zero_grad()
    loss_of(model, step).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rule", RULES)
def test_folded_in_as_the_formulas_say(rule):
    """An exchange starts at step 4 and comes back after step 5, which is kept."""
    model, opt, gate = make(rule, period=4)
    c = center(opt)
    sums = {}
    for step in range(4):
        for name, g in gradient(model, step).items():
            sums[name] = sums.get(name, 0) + g
        opt.step()
    s = weights(model)
    gate.wait_entered()
    train(model, opt, [4])
    x = weights(model)
    same(center(opt), c)
    gate.let_through()
    opt.wait()
    if rule == "elastic":
        δ = {n: 0.4 * (s[n] - c[n]) for n in s}
        near(weights(model), {n: x[n] - δ[n] for n in s})
        near(center(opt), {n: c[n] + δ[n] for n in s})
    else:
        reply = s  # averaging, and SlowMo's first round
        if rule == "agn":
            reply = {n: c[n] - 0.05 * sums[n] / 4 for n in s}
        elif "diloco" in rule:
            reply = {n: c[n] - 0.7 * 1.5 * (c[n] - s[n]) for n in s}
        near(center(opt), reply)
        near(weights(model), {n: reply[n] + (x[n] - s[n]) for n in s})


@pytest.mark.parametrize("rule", RULES)
def test_folded_in_at_the_next_step_once_it_is_back(rule):
    model, opt, gate = make(rule, period=3)
    train(model, opt, range(3))
    train(model, opt, [3])
    assert opt.worker.background._flight is not None
    gate.let_through()
    train(model, opt, [4])
    assert opt.worker.background._flight is None
    assert opt.worker.center.version == 1


@pytest.mark.parametrize("rule", RULES)
def test_when_nothing_happened_meanwhile_it_is_an_exchange_like_any_other(rule):
    model, other = network(), network()
    options = {"rho": 0.5} if rule == "elastic" else {}
    opt = wrap(rule, INNERS["adam"](model.parameters()), 2, overlap=True, **options)
    like = wrap(rule, INNERS["adam"](other.parameters()), 2, **options)
    for step in range(7):
        train(model, opt, [step])
        opt.wait()
        train(other, like, [step])
        alike(weights(model), weights(other))
        alike(center(opt), center(like))


def alike(left, right):
    """The same but for rounding."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["elastic", "agn"])
def test_an_exchange_that_falls_due_in_flight_is_skipped(rule):
    model, opt, gate = make(rule)
    train(model, opt, range(6))  # due at 2, 4 and 6
    gate.wait_entered()
    assert (gate.most, gate.passed, opt.worker.exchanges) == (1, 0, 0)
    gate.let_through()
    train(model, opt, [6])
    assert opt.worker.center.version == 1
    train(model, opt, [7])
    gate.wait_entered()
    gate.let_through()
    opt.wait()
    assert (gate.most, gate.passed, opt.worker.center.version) == (1, 2, 2)


def test_agn_divides_by_the_gradients_it_holds():
    model, opt, gate = make("agn")
    train(model, opt, range(2))
    sums = {}
    for step in range(2, 5):  # due at 4, and skipped
        for name, g in gradient(model, step).items():
            sums[name] = sums.get(name, 0) + g
        opt.step()
    gate.let_through()
    opt.wait()
    c = center(opt)
    for name, g in gradient(model, 5).items():
        sums[name] += g
    opt.step()
    gate.let_through()
    opt.wait()
    near(center(opt), {n: c[n] - 0.05 * sums[n] / 4 for n in c})


def test_averaging_waits_when_the_next_is_due(background):
    model, opt, gate = make("average")
    train(model, opt, range(3))
    gate.wait_entered()
    waiting, wait = threading.Event(), opt.worker.background.wait

    def watched():
        waiting.set()
        return wait()

    opt.worker.background.wait = watched
    step = background(train, model, opt, [3])
    assert waiting.wait(60)
    assert not step.done()
    gate.open()
    step.result(60)
    gate.wait_entered()
    assert (gate.most, gate.passed) == (1, 1)
    gate.let_through()
    opt.wait()
    assert opt.worker.center.version == 2


@pytest.mark.parametrize("rule", RULES)
def test_an_error_of_the_background_is_raised_at_the_next_step(rule):
    model, opt, gate = make(rule, "adam")
    train(model, opt, [0])
    c = center(opt)
    gradient(model, 1)
    with torch.no_grad():
        model[2].bias[0] = float("nan")
        model[2].bias.grad[0] = float("nan")
    opt.step()
    gate.let_through()
    with pytest.raises(NonFiniteError, match=r"Parameter '2.bias'"):
        train(model, opt, [2])
    near({"2.bias": center(opt)["2.bias"]}, {"2.bias": c["2.bias"]}, atol=0)
    opt.take_center()
    train(model, opt, range(3, 5))
    gate.let_through()
    opt.wait()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert opt.worker.exchanges == 1


def test_take_center_forgets_what_is_in_flight():
    model, opt, gate = make("elastic")
    train(model, opt, range(3))
    gate.open()
    opt.take_center()
    same(weights(model), center(opt))
    opt.wait()
    same(weights(model), center(opt))


@pytest.mark.parametrize("rule", RULES)
def test_finish_waits_and_sends_the_rest(rule, background):
    model, opt, gate = make(rule)
    train(model, opt, range(3))
    gate.wait_entered()
    end = background(opt.finish)
    assert not end.done()
    gate.open()
    gate.wait_entered()  # what the last period left over
    gate.open()
    end.result(60)
    assert (gate.most, opt.worker.center.version) == (1, 2)
    assert opt.worker.center.members() == []
    if rule != "elastic":
        same(weights(model), center(opt))


def test_finish_leaves_the_center_after_an_error_of_the_background():
    model, opt, gate = make("agn")
    train(model, opt, [0])
    gradient(model, 1)
    model[2].bias.grad[0] = float("nan")
    opt.step()
    gate.open()
    with pytest.raises(NonFiniteError, match=r"'2.bias'"):
        opt.finish()
    assert opt.worker.center.members() == []


def test_half_precision():
    """Staged parameters are folded in as the others are."""
    model = network(torch.bfloat16)
    opt = wrap("average", INNERS["sgd"](model.parameters()), 2, model=model, overlap=True)
    gate = Gate(opt)
    train(model, opt, range(2))
    s = weights(model)
    train(model, opt, [2])
    x = weights(model)
    gate.let_through()
    opt.wait()
    same(center(opt), {n: t.float() for n, t in s.items()})
    same(weights(model), x)


def test_two_workers_average_in_the_background(directory, team, together):
    def make():
        model = network()
        inner = INNERS["sgd"](model.parameters())
        return wrap("average", inner, 2, model=model, overlap=True, center=directory, timeout=60)

    opts = team(2, make)

    def run(rank):
        train(opts[rank]._model, opts[rank], range(7), worker=rank)
        opts[rank].wait()

    together(*[lambda rank=rank: run(rank) for rank in range(2)])
    assert opts[0].worker.center.version == 3
    together(opts[0].finish, opts[1].finish)
    near(weights(opts[0]._model), weights(opts[1]._model))
    near(weights(opts[0]._model), center(opts[1]))


def test_an_optimizer_that_nobody_holds_goes():
    before, model = set(threading.enumerate()), network()
    opt = wrap("elastic", INNERS["sgd"](model.parameters()), 1, overlap=True)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    train(model, opt, [0])
    opt.wait()
    gone = weakref.ref(opt), weakref.ref(opt.worker)
    del opt
    deadline = time.monotonic() + 60  # for the thread to let go of its last exchange
    while any(reference() for reference in gone) and time.monotonic() < deadline:
        gc.collect()
    assert [reference() for reference in gone] == [None, None]
    thread.join(60)
    assert not thread.is_alive()


def test_what_changes_while_the_snapshot_is_taken_counts_once():
    """As clipped weights do, or an embedding with `max_norm` in its forward pass."""
    for trial in range(20):
        torch.manual_seed(trial)
        p = torch.nn.Parameter(torch.randn(1_000_000))
        opt = wrap("elastic", INNERS["sgd"]([p]), 1, overlap=True)
        first = p.detach().clone()
        p.grad = torch.zeros_like(p)
        opt.step()
        with torch.no_grad():
            p.mul_(0.25)
        opt.wait()
        (c,) = center(opt).values()
        torch.testing.assert_close(p.detach() + c, 1.25 * first)


def test_a_state_that_is_saved_has_what_changed_by_hand():
    model = network()
    opt = wrap("average", INNERS["sgd"](model.parameters()), 1, overlap=True)
    train(model, opt, [0])
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    opt.state_dict()
    for p in model.parameters():
        torch.testing.assert_close(p.detach(), torch.full_like(p, 3.0))


def test_a_forked_process_is_told():
    model = network()
    opt = wrap("elastic", INNERS["sgd"](model.parameters()), 1, overlap=True)
    opt.worker.background._process += 1  # as in a child
    with pytest.raises(CenterError, match="forked"):
        train(model, opt, [0])


def test_the_center_may_be_evaluated_before_a_delayed_snapshot_is_taken():
    """What is sent is the worker's own, not the center that the model holds for a while."""

    def trained(evaluate):
        model = network()
        opt = wrap("diloco", INNERS["sgd"](model.parameters()), 4, model=model, delay=2)
        busy = threading.Event()
        opt.worker.background._jobs.put(busy.wait)  # the background comes to it later
        train(model, opt, [0, 1])
        threading.Timer(0.2, busy.set).start()
        if evaluate:
            with opt.center_weights():
                opt.worker.background.settle()
        train(model, opt, [2, 3, 4])
        return weights(model)

    same(trained(evaluate=True), trained(evaluate=False))
