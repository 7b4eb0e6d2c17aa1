"""NaN and Inf never reach the center, and nobody waits for the worker that had them."""

import numpy as np
import pytest
from centers import RULES, each, exchange_all, model, on
from safetensors.numpy import load_file

from springline import AGN, ElasticAverage
from springline.center import NonFiniteError
from springline.rules import SGD, Adagrad, Adam, Momentum

# Several shards, however they are cut, and several blocks in each.
SIZES = {"first": 300_000, "middle": 700_000, "last": 300_000, "running": 200_000}
VALUES = {name: np.arange(size, dtype=np.float32) % 7 for name, size in SIZES.items()}
BUFFERS = {"running": VALUES.pop("running")}
BAD = [("first", 0), ("middle", 350_321), ("last", 299_999), ("running", 90_000)]


def prepare(workers):
    """Give every worker something finite to send."""
    for worker in workers:
        for x in (*worker.parameters.values(), *worker.buffers.values()):
            x += 1
        worker.observe({name: np.ones_like(x) for name, x in VALUES.items()})


def poison(worker, name, index, value):
    if worker.rule.accumulates and name in VALUES:
        gradient = np.zeros_like(VALUES[name])
        gradient[index] = value
        worker.observe({name: gradient})
    else:
        {**worker.parameters, **worker.buffers}[name][index] = value


@pytest.mark.parametrize(("tensor", "index"), BAD)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@each("elastic", "average", "agn-sgd", "agn-adam", fixed=("average",))
def test_a_bad_block_is_not_applied(place, name, value, tensor, index, together):
    workers = bad, good = place.workers(VALUES, RULES[name](workers=2), buffers=BUFFERS)
    prepare(workers)
    poison(bad, tensor, index, value)

    def refused():
        kind = "Buffer" if tensor in BUFFERS else "Parameter"
        words = rf"{kind} '{tensor}' of rank 0 has NaN or Inf.*`opt\.take_center\(\)`"
        with pytest.raises(NonFiniteError, match=words):
            bad.exchange()

    before = good.center.values()
    if good.rule.rounds:
        together(refused, good.exchange)
        expected = {**good.parameters, **good.buffers}
        assert expected["first"][0] == VALUES["first"][0] + 1
        for key, c in good.center.values().items():
            np.testing.assert_array_equal(c, expected[key])
    else:
        refused()
        after = good.center.values()
        assert all(np.isfinite(c).all() for c in after.values())
        near = slice(max(index - 50, 0), index + 50)
        np.testing.assert_array_equal(after[tensor][near], before[tensor][near])
    assert bad.local.gradients == 0
    assert not bad.local.seen.any()
    assert good.center.version == int(good.rule.rounds)

    bad.take_center()
    prepare(workers)
    exchange_all(workers, together)
    for c in good.center.values().values():
        assert np.isfinite(c).all()


@each("elastic", "agn-sgd")
def test_steps_that_were_refused_are_made_again(place, name):
    """Whoever takes the rank's place goes on from its last exchange that was whole."""
    one = place.worker(VALUES, RULES[name](period=2), buffers=BUFFERS)
    prepare([one])
    one.step()
    one.step()
    prepare([one])
    one.step()
    poison(one, "last", 3, np.nan)
    with pytest.raises(NonFiniteError):
        one.step()
    one.member.leave()
    assert place.worker(VALUES, RULES[name](period=2), buffers=BUFFERS).start_step == 2


@each("average", fixed=("average",))
def test_a_round_from_which_all_withdraw_is_tried_again(place, name, together):
    workers = place.workers(model(v=[1, 2]), RULES[name](workers=2), timeout=5)
    for worker in workers:
        worker.parameters["v"][1] = np.nan

    def refused(worker):
        with pytest.raises(NonFiniteError):
            worker.exchange()
        worker.take_center()

    together(*[lambda w=w: refused(w) for w in workers])
    together(*[worker.exchange for worker in workers])
    np.testing.assert_array_equal(workers[0].center.values()["v"], [1, 2])


HUGE = {"elastic": 1.3125e38, "average": 3e38, "agn-sgd": 3e38}


@each(*HUGE, fixed=("average",))
def test_huge_values_are_taken_where_the_result_is_finite(place, name, together):
    workers = place.workers(model(v=[0, 0]), RULES[name](workers=2))
    for worker in workers:
        worker.parameters["v"][:] = 3e38
        worker.observe(model(v=[-3e38, -3e38]))
    exchange_all(workers, together)
    np.testing.assert_allclose(workers[0].center.values()["v"], HUGE[name], rtol=1e-6)


@each("elastic", fixed=("elastic",))
def test_a_difference_that_overflows_is_refused(place, name):
    worker = place.worker(model(u=[1], v=[-3e38]), RULES[name]())
    worker.parameters["v"][:] = 3e38
    with pytest.raises(NonFiniteError, match="'v'"):
        worker.exchange()
    np.testing.assert_array_equal(worker.center.values()["v"], np.float32(-3e38))


@pytest.mark.parametrize(
    ("outer", "g", "taken"),
    [
        (SGD, 3e38, 1),
        (lambda _: SGD(1e20), 3e18, 1),
        (Momentum, 3e38, 1),
        (Adagrad, 1e30, 0),
        (Adam, 1e30, 0),
    ],
)
@on("asynchronous")
def test_an_outer_step_that_overflows_is_refused(place, outer, g, taken, tmp_path):
    worker = place.worker(model(u=[1], v=[0, 0]), AGN(outer=outer(1.0)))
    path = tmp_path / "center.safetensors"
    for _ in range(taken):
        worker.observe(model(v=[-g, 1]))
        worker.exchange()
    worker.center.save(path)
    before = load_file(path)
    worker.observe(model(v=[-g, 1]))
    with pytest.raises(NonFiniteError, match=r"Parameter 'v' of rank 0 .*overflow the center"):
        worker.exchange()
    worker.center.save(path)
    for name, after in load_file(path).items():
        assert np.isfinite(after).all()
        if not name.startswith("outer/t/"):
            np.testing.assert_array_equal(after, before[name])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@on("asynchronous")
def test_what_was_exchanged_before_a_bad_block_stays_with_both(place, dtype):
    """`x + c` is conserved, also where the worker's own parameters are narrower than the center."""
    values = {name: np.zeros(200_000, dtype) for name in "ab"}
    worker = place.worker(values, ElasticAverage(period=1, moving_rate=0.25))
    worker.parameters["a"][:] = 4
    worker.parameters["b"][-1] = np.nan
    with pytest.raises(NonFiniteError, match="Parameter 'b'"):
        worker.exchange()
    moved = 1 if place.steps_here else 0  # else nothing was sent
    np.testing.assert_array_equal(worker.center.values()["a"], moved)
    np.testing.assert_array_equal(worker.parameters["a"], 4 - moved)
