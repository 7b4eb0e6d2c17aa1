"""DiLoCo and its relatives alone, against loops written out: SNOO, SlowMo, delays, new groups."""

import pytest
import torch
from torch import nn
from torch_training import INNERS, center, loss_of, near, network, same, train, weights, wrap

from springline import outer


class Snoo:
    """Outer Nesterov momentum on `base − x`, as in SNOO: plain torch, one worker."""

    def __init__(self, make, period, rate, momentum, delay=0, mixing=0.0):
        self.model = network()
        self.inner = make(self.model.parameters())
        self.period, self.delay, self.mixing = period, delay, mixing
        self.c = [p.detach().clone() for p in self.model.parameters()]
        self.base = [c.clone() for c in self.c]
        self.outer = torch.optim.SGD(self.c, lr=rate, momentum=momentum, nesterov=True)
        self.steps = 0

    @torch.no_grad()
    def step(self):
        with torch.enable_grad():
            train(self.model, self.inner, [self.steps])
        self.steps += 1
        if (self.steps + self.delay) % self.period == 0:
            for c, base, p in zip(self.c, self.base, self.model.parameters(), strict=True):
                c.grad = base - p
            self.outer.step()
        if self.steps % self.period == 0:
            for c, base, p in zip(self.c, self.base, self.model.parameters(), strict=True):
                p.copy_(c + self.mixing * (p - c))
                base.copy_(c)


@pytest.mark.parametrize("rule", ["diloco", "async_diloco"])
@pytest.mark.parametrize("inner", INNERS)
def test_alone_it_is_snoo(rule, inner):
    loop, model = Snoo(INNERS[inner], 3, 0.7, 0.5), network()
    opt = wrap(rule, INNERS[inner](model.parameters()), model=model)
    for step in range(10):
        loop.step()
        train(model, opt, [step])
        near(weights(model), weights(loop.model), atol=2e-6)
    near(center(opt), dict(zip(center(opt), loop.c, strict=True)), atol=2e-6)
    assert opt.worker.center.version == 3


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_delay_is_exact(mixing):
    loop, model = Snoo(INNERS["adamw"], 4, 0.7, 0.5, delay=2, mixing=mixing), network()
    inner = INNERS["adamw"](model.parameters())
    opt = wrap("diloco", inner, 4, model=model, delay=2, mixing=mixing)
    for step in range(13):
        loop.step()
        train(model, opt, [step])
        near(weights(model), weights(loop.model), atol=2e-6)


@pytest.mark.parametrize("steps", [3, 4])
def test_who_finishes_in_a_delay_sends_nothing_twice(steps):
    """The message is made at step 2 and adopted at 4, or at the end: nothing is left over then."""
    loop, model = Snoo(INNERS["sgd"], 4, 0.7, 0.5, delay=2), network()
    opt = wrap("diloco", INNERS["sgd"](model.parameters()), 4, model=model, delay=2)
    for step in range(steps):
        loop.step()
        train(model, opt, [step])
    opt.finish()
    near(center(opt), dict(zip(center(opt), loop.c, strict=True)), atol=2e-6)
    same(weights(model), center(opt))
    assert opt.worker.center.version == 1


def test_torchs_own_optimizer_outside_is_ours():
    models = [network(), network()]
    outers = (
        outer.Nesterov(0.7, 0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True),
    )
    for model, given in zip(models, outers, strict=True):
        inner = INNERS["adamw"](model.parameters())
        train(model, wrap("diloco", inner, model=model, outer=given), range(9))
    near(*map(weights, models), atol=2e-6)


@pytest.mark.parametrize("fragments", [1, [["0"], ["2"]]])
def test_slowmo_takes_the_mean_learning_rate_of_the_period(fragments):
    """`u ← βu + Δ/η̄`, `c ← c − η̄u`, with a rate that falls in every step, and is 0 at the end."""
    model, plain = network(), network()
    opt, inner = (INNERS["momentum"](m.parameters()) for m in (model, plain))
    opt = wrap("slowmo", opt, 4, model=model, fragments=fragments)
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 7) for o in (opt, inner)]
    base = weights(plain)
    u = {name: torch.zeros_like(c) for name, c in base.items()}
    rates = []
    for step in range(16):
        rates.append(inner.param_groups[0]["lr"])
        for m, o, scheduler in zip((model, plain), (opt, inner), schedulers, strict=True):
            train(m, o, [step])
            scheduler.step()
        η = sum(rates[-4:]) / len(rates[-4:])
        for name, p in plain.named_parameters():
            first = fragments != 1 and name.startswith("0")  # two steps before the other
            if step % 4 == (1 if first else 3):
                if η:
                    u[name] = 0.5 * u[name] + (base[name] - p.detach()) / η
                    p.data = base[name] - η * u[name]
                base[name] = p.detach().clone()
        near(weights(model), weights(plain), atol=2e-6)
    assert rates[-4:] == [0, 0, 0, 0]


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_group_that_comes_during_a_delay(fragments):
    model, other = network(), network()
    options = {"period": 4, "delay": 1, "fragments": fragments}
    opt = wrap("diloco", INNERS["adam"](model.parameters()), **options)
    like = wrap("diloco", INNERS["adam"](other.parameters()), **options)
    more = nn.Parameter(torch.zeros(0))  # so small that fragments stay where they are
    for step in range(10):
        if step == 7:  # in flight
            opt.add_param_group({"params": [more]})
        for m, o in ((model, opt), (other, like)):
            train(m, o, [step])
        same(weights(model), weights(other))
    assert opt.worker.center.version == like.worker.center.version == 5 * fragments // 2


def test_slowmo_finishes_with_a_group_that_has_made_no_step():
    model, more = network(), nn.Parameter(torch.ones(2))
    opt = wrap("slowmo", INNERS["sgd"](model.parameters()), 4)
    train(model, opt, range(3))
    trained = weights(model)
    opt.add_param_group({"params": [more], "lr": 0.01})
    opt.finish()
    near(weights(model), trained)  # the first step of slow momentum is averaging
    assert more.tolist() == [1, 1]
    assert opt.worker.center.version == 1


def test_closures_that_are_called_again_and_again():
    """LBFGS inside: a step is one step, however often it looks at the loss."""
    model = network()
    opt = wrap("slowmo", torch.optim.LBFGS(model.parameters(), max_iter=4), 2, model=model)

    def closure():
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    losses = [opt.step(closure).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert (opt.worker.local_step, opt.worker.center.version) == (4, 2)
