"""Optimizers of others inside: schedule-free, Muon beside AdamW, Lion, LBFGS."""

import copy
import threading

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch_training import Lion, center, loss_of, near, network, same, weights

from springline.torch import wrap


def schedule_free(model):
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=3)
    optimizer.train()
    return [optimizer]


def muon(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


INNERS = {
    "schedule-free": schedule_free,
    "Muon": muon,
    "Lion": lambda model: [Lion(model.parameters(), lr=0.01)],
    "LBFGS": lambda model: [torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)],
}
RULES = ["average", "elastic", "diloco"]
RATE, MOMENTUM = 0.7, 0.5  # of DiLoCo, for a period this short

pytestmark = pytest.mark.parametrize("inner", INNERS)


def closure_of(model, step, worker):
    def closure():
        model.zero_grad()
        loss = loss_of(model, step, worker)
        loss.backward()
        return loss

    return closure


def train(model, opt, steps, worker=0):
    for step in steps:
        opt.step(closure_of(model, step, worker))


class Plain:
    """A worker without springline."""

    def __init__(self, inner, worker=0):
        self.model, self.worker = network(), worker
        self.optimizers = INNERS[inner](self.model)

    def step(self, step):
        closure = closure_of(self.model, step, self.worker)
        if len(self.optimizers) == 1:
            self.optimizers[0].step(closure)
        else:
            closure()
            for optimizer in self.optimizers:
                optimizer.step()


@pytest.mark.parametrize("rule", ["average", "elastic"])
def test_alone_it_is_plain_training(rule, inner):
    plain, model = Plain(inner), network()
    opt = wrap(rule, INNERS[inner](model), model=model, period=3)
    for step in range(8):
        plain.step(step)
        train(model, opt, [step])
        same(weights(model), weights(plain.model))
    opt.finish()
    same(center(opt), weights(plain.model))


@pytest.mark.parametrize("rule", RULES)
def test_saved_and_loaded_it_goes_on(rule, inner):
    model, again = network(), network()
    opt = wrap(rule, INNERS[inner](model), model=model, period=3)
    train(model, opt, range(5))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    other = wrap(rule, INNERS[inner](again), model=again, period=3)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for m, o in ((model, opt), (again, other)):
        train(m, o, range(5, 9))
    same(weights(again), weights(model))
    same(center(other), center(opt))


class Loop:
    """Two workers and a center, written out in plain torch."""

    def __init__(self, rule, inner):
        self.workers = [Plain(inner, rank) for rank in range(2)]
        self.c = [p.detach().clone() for p in network().parameters()]
        self.exchange = getattr(self, rule)
        self.outer = torch.optim.SGD(self.c, lr=RATE, momentum=MOMENTUM, nesterov=True)

    def step(self, step):
        for worker in self.workers:
            worker.step(step)
        if step % 3 == 2:
            with torch.no_grad():
                self.exchange([list(worker.model.parameters()) for worker in self.workers])

    def average(self, models):
        for c, *ps in zip(self.c, *models, strict=True):
            c.copy_(sum(ps) / 2)
            for p in ps:
                p.copy_(c)

    def elastic(self, models):
        for c, *ps in zip(self.c, *models, strict=True):
            for p in ps:
                δ = 0.45 * (p - c)
                c += δ
                p -= δ

    def diloco(self, models):
        for c, *ps in zip(self.c, *models, strict=True):
            c.grad = c - sum(ps) / 2
        self.outer.step()
        for c, *ps in zip(self.c, *models, strict=True):
            for p in ps:
                p.copy_(c)


@pytest.mark.parametrize("rule", RULES)
def test_two_workers_are_the_loop_written_out(rule, inner, team, directory):
    loop, models = Loop(rule, inner), [network(), network()]
    made = iter(models)

    def make():
        model = next(made)
        return wrap(rule, INNERS[inner](model), model=model, period=3, center=directory)

    opts = team(2, make)
    for step in range(9):
        loop.step(step)
        at_once = [
            threading.Thread(target=train, args=(model, opt, [step], rank))
            for rank, (model, opt) in enumerate(zip(models, opts, strict=True))
        ]
        for thread in at_once:
            thread.start()
            if rule == "elastic":  # in the order of ranks
                thread.join()
        for thread in at_once:
            thread.join()
        for model, worker in zip(models, loop.workers, strict=True):
            near(weights(model), weights(worker.model), atol=1e-4)
    assert opts[0].worker.exchanges == 3
    near(center(opts[0]), dict(zip(weights(models[0]), loop.c, strict=True)), atol=1e-4)


def test_as_an_outer_optimizer_it_works_or_is_refused_with_a_sentence(inner):
    words = {
        "schedule-free": r"AdamWScheduleFree keeps '\w+' in its groups.* Pass .*`outer=`",
        "Muon": r"cannot be like several \(Muon, AdamW\). Pass `outer=`",
        "LBFGS": r"LBFGS cannot be an outer optimizer",
    }
    model = network()
    if inner == "Lion":
        train(model, wrap("agn", INNERS[inner](model), model=model, period=2), range(4))
        return
    with pytest.raises(ValueError, match=words[inner]):
        wrap("agn", INNERS[inner](model), model=model)
