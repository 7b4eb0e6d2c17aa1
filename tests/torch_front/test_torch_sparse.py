"""Sparse gradients stay sparse: embeddings with the optimizers that take them."""

import pytest
import torch
from torch import nn
from torch_training import RULES, center, near, same, weights, wrap

import penalty

INNERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse-adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}
ROWS = [[0, 2], [2, 2], [3, 5], [0, 0], [1, 2], [5, 4]]


@pytest.fixture(autouse=True)
def no_checks():
    """Torch's own optimizers make sparse tensors, and warn that they could be checked."""
    torch.sparse.check_sparse_tensor_invariants.disable()


def embedding(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Embedding(7, 3, sparse=True, dtype=dtype)


def step(model, opt, k):
    opt.zero_grad()
    model(torch.tensor(ROWS[k])).float().square().sum().backward()
    opt.step()


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "agn"])
def test_plain_training_until_the_exchange(rule, inner):
    plain, model = embedding(), embedding()
    plain_opt, opt = INNERS[inner](plain.parameters()), INNERS[inner](model.parameters())
    opt = wrap(rule, opt, 4, model=model)
    for k in range(3):
        step(plain, plain_opt, k)
        step(model, opt, k)
        assert model.weight.grad.is_sparse
    same(weights(model), weights(plain))
    step(plain, plain_opt, 3)
    step(model, opt, 3)
    if rule == "average":
        same(weights(model), weights(plain))
    assert opt.worker.center.version == 1


@pytest.mark.parametrize("inner", INNERS)
def test_agn(inner):
    """The sum of the rows' gradients moves the center as a dense gradient would."""
    plain, model = embedding(), embedding()
    outer_model = embedding()
    plain_opt, outer = INNERS[inner](plain.parameters()), INNERS[inner](outer_model.parameters())
    opt = wrap("agn", INNERS[inner](model.parameters()), 3, model=model)
    for _ in range(2):
        total = torch.zeros(7, 3)
        for k in range(3):
            step(plain, plain_opt, k)
            total += plain.weight.grad.to_dense()
            step(model, opt, k)
        g = total / 3
        outer_model.weight.grad = g.to_sparse(1) if inner == "sparse-adam" else g
        outer.step()
        plain.load_state_dict(outer_model.state_dict())
        near(center(opt), weights(outer_model))
        near(weights(model), weights(outer_model))
    untouched = [1, 4, 6]
    assert torch.equal(model.weight[untouched].detach(), embedding().weight[untouched].detach())


@pytest.mark.parametrize("inner", INNERS)
def test_the_penalty_pulls_all_rows(inner):
    """`g + ρ(x − c̃)`, for the loss gains that of the whole parameter; it stays sparse."""
    model = embedding()
    opt = wrap("elastic", INNERS[inner](model.parameters()), 9, model=model, rho=0.5)
    first = weights(model)["weight"]
    step(model, opt, 0)
    step(model, opt, 2)
    x = weights(model)["weight"]
    opt.zero_grad()
    model(torch.tensor([2, 3, 3])).square().sum().backward()
    g = model.weight.grad.to_dense()
    opt.step()
    assert model.weight.grad.is_sparse
    expected = g + 0.5 * (x - first)
    torch.testing.assert_close(model.weight.grad.to_dense(), expected)
    assert not torch.equal(x[2], first[2])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(rule, dtype):
    model = embedding(dtype)
    options = {"rho": 0.5} if rule == "elastic" else {}
    opt = wrap(rule, INNERS["sgd"](model.parameters()), 2, model=model, **options)
    for k in range(4):
        step(model, opt, k)
    assert opt.worker.center.version == 2
    assert model.weight.dtype == dtype
    assert not torch.equal(weights(model)["weight"], embedding(dtype).weight.detach())


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("inner", penalty.INNERS)
def test_the_penalty_is_that_of_the_twin(inner, sparse):
    """Of all rows, and of a parameter that has no gradient."""
    makers = INNERS | {
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, eps=0)
    }
    model = nn.Module()
    model.table = nn.Parameter(torch.tensor(penalty.START["table"]))
    model.idle = nn.Parameter(torch.tensor(penalty.START["idle"]))
    opt = wrap(
        "elastic",
        makers[inner](model.parameters()),
        penalty.PERIOD,
        model=model,
        rho=penalty.RHO,
        moving_rate=penalty.ALPHA,
    )
    for k, (x, c) in enumerate(penalty.twin_rows(inner)):
        opt.zero_grad()
        rows = nn.functional.embedding(torch.tensor(penalty.ROWS[k]), model.table, sparse=sparse)
        rows.square().sum().backward()
        opt.step()
        assert model.table.grad.is_sparse == sparse
        near(weights(model), {name: torch.from_numpy(value) for name, value in x.items()})
        near(center(opt), {name: torch.from_numpy(value) for name, value in c.items()})
        if k == 0:
            with torch.no_grad():
                model.idle.fill_(3)
