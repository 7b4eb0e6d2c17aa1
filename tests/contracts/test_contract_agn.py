"""AGN's outer optimizer lives in the center: whole parameters, own rates, skipped ones."""

import numpy as np
import pytest
from centers import model, on
from safetensors.numpy import load_file

from springline import AGN, SettingsError
from springline.rules import SGD, Adam, Outer
from springline.rules.reference import Twin


@on("asynchronous")
def test_a_parameter_without_gradient_is_skipped_but_adopted(place, tmp_path):
    rule = AGN(workers=2, period=1, outer=Adam(0.1))
    one, two = place.workers(model(v=[1, 2], w=[[3, 4]]), rule)
    path = tmp_path / "center.safetensors"

    def exchange(worker, **gradients):
        worker.observe(model(**gradients))
        worker.exchange()
        worker.center.save(path)
        return load_file(path)

    before = exchange(one, v=[1, 1], w=[[1, 1]])
    two.parameters["w"][:] = 9
    after = exchange(two, v=[1, 1])
    moved = {name for name in after if not np.array_equal(before[name], after[name])}
    assert moved == {"center/v", "outer/m/v", "outer/v/v", "outer/t/v"}
    assert (after["outer/t/v"], after["outer/t/w"]) == (2, 1)
    np.testing.assert_array_equal(two.parameters["w"], after["center/w"])


@on("asynchronous")
def test_a_gradient_seen_in_some_steps_is_divided_by_all(place):
    worker = place.worker(model(v=[0], w=[0]), AGN(period=2, outer=SGD(1.0)))
    worker.observe(model(v=[4], w=[4]))
    worker.step()
    worker.observe(model(v=[4]))
    worker.step()
    assert {k: float(c[0]) for k, c in worker.center.values().items()} == {"v": -4, "w": -2}


@on("asynchronous")
def test_learning_rates_travel_with_the_message(place):
    rule = AGN(workers=2, period=1, outer=SGD(1.0))
    one, two = place.workers(model(v=[0], w=[0]), rule)
    one.set_learning_rate({"v": 0.5, "w": 0.25})
    for worker, expected in ((one, (-0.5, -0.25)), (two, (-1.5, -1.25))):
        worker.observe(model(v=[1], w=[1]))
        worker.step()
        assert tuple(float(c[0]) for c in worker.center.values().values()) == expected
    one.set_learning_rate(0)
    one.observe(model(v=[1], w=[1]))
    one.step()
    assert float(one.parameters["v"][0]) == -1.5


@on("asynchronous")
def test_workers_step_with_their_own_outer_rates(place):
    """Wherever the step is made, and also if nobody sets the rate."""
    c = 0.0
    for rank, rate in enumerate((0.5, 0.25)):
        rule = AGN(workers=2, period=1, outer=SGD(rate))
        worker = place.worker(model(v=[0]), rule, rank)
        worker.observe(model(v=[1]))
        worker.step()
        c -= rate
        assert float(worker.center.values()["v"][0]) == c
        assert worker.outer_rate() == rate


@on("asynchronous")
def test_a_rate_by_number_is_the_same_for_all(place):
    """It is the center that counts exchanges, so that no worker can send it."""
    rules = [
        AGN(workers=2, period=1, outer=SGD(lambda n, first=first: first / (n + 1)))
        for first in (1.0, 0.5)
    ]
    worker = place.worker(model(v=[0]), rules[0], 0)
    with pytest.raises(SettingsError, match=r"'learning_rate': \[1\.0, 0\.5.*\[0\.5, 0\.25"):
        place.worker(model(v=[0]), rules[1], 1)
    for c in (-1.0, -1.5):
        worker.observe(model(v=[1]))
        worker.step()
        assert float(worker.center.values()["v"][0]) == c
    assert worker.outer_rate() == 0.5


class Normalised(Outer):
    """`c ← c − ηg/‖g‖` over the whole parameter, and a sum of `g` per row."""

    kind = "normalised"
    stateless = False
    whole = True
    learning_rate = 1.0

    def settings(self):
        return {"kind": self.kind}

    def state(self, name, shape):
        return {"rows": (shape[:1], 0.0)}

    def step(self, now, g, exchange, then):
        np.add(now.state["rows"], g.sum(axis=1), out=then.state["rows"])
        np.multiply(g, exchange.rate / np.linalg.norm(g), out=then.c)
        np.subtract(now.c, then.c, out=then.c)


@on("asynchronous")
def test_an_outer_optimizer_gets_whole_parameters_in_their_own_shape(place, tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"large": (300, 400), "small": (2, 3), "double": (400, 300)}  # large: several blocks
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    values = {n: v if n == "double" else v.astype(np.float32) for n, v in values.items()}
    gradients = [{n: v * (k + 1) + k for n, v in values.items()} for k in range(4)]
    rule = AGN(workers=2, period=1, outer=Normalised())
    twin = Twin(rule, values, SGD(0.1), lambda rank, step, x: gradients[2 * step + rank])
    workers = place.workers(values, rule)
    for k, (rank,) in enumerate(twin.run([0, 1, 0, 1])):
        workers[rank].observe(gradients[k])
        workers[rank].step()
        for name, c in workers[rank].center.values().items():
            np.testing.assert_allclose(c, twin.c[name], rtol=0, atol=1e-6)
    path = tmp_path / "center.safetensors"
    workers[0].center.save(path)
    for name in values:
        rows = twin.outer.state[name]["rows"]
        np.testing.assert_allclose(load_file(path)[f"outer/rows/{name}"], rows, rtol=1e-5)
