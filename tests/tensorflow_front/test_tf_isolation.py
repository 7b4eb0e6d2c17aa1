"""The exchange's own run has nothing of the step that it follows but that step's values.

So the numbers are the same with the hook, which exchanges in a run of its own, and without it.
"""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from tf_cluster import GETTERS, INNERS, PERIODS, Model, Servers, close

from marks import slow

v1 = tf.compat.v1
train = v1.train
ways = pytest.mark.parametrize("hook", [*slow(False), True], ids=["op", "hook"])
kinds = pytest.mark.parametrize("resource", [True, *slow(False)], ids=["resource", "reference"])
rules = pytest.mark.parametrize("rule", GETTERS)


def update_ops():
    """The idiom of TensorFlow's documents for batch normalization."""
    return tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS))


def normalized(source):
    """A loss of batches 1, 2, 3, …, with a moving average of them that UPDATE_OPS keep."""

    def build(model):
        if source == "fed":
            model.batch = v1.placeholder(tf.float32, [])
        else:
            with v1.device(model.getter.worker_device):
                data = tf.data.Dataset.range(1, 1000)
                model.batch = tf.cast(v1.data.make_one_shot_iterator(data).get_next(), tf.float32)
        moving = v1.get_variable("moving", [], trainable=False, initializer=v1.zeros_initializer())
        update = v1.assign(moving, 0.9 * moving + 0.1 * model.batch)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
        model.moving = moving
        v = v1.get_variable("v", [2], initializer=v1.ones_initializer())
        return tf.reduce_sum(tf.square(v) * model.batch / 100)

    return build


def constant(model):
    return 0.1, {}


def fed(model):
    model.rate = v1.placeholder(tf.float32, [])
    return model.rate, {model.rate: lambda n: 0.1 / n}


def fed_over_a_default(model):
    rate = v1.placeholder_with_default(0.5, [])
    return rate, {rate: lambda n: 0.1}


def computed_from_a_feed(model):
    half = v1.placeholder(tf.float32, [])
    return (lambda: 2 * half), {half: lambda n: 0.05 / n}


def schedule(model):
    return train.exponential_decay(0.2, model.global_step, 1, 0.5), {}


def called_schedule(model):
    return (lambda: train.exponential_decay(0.2, model.global_step, 1, 0.5)), {}


def variable(model):
    return v1.Variable(0.1, trainable=False, name="rate"), {}


def from_the_batch(model):
    return 0.1 / model.batch, {}


RATES = {
    rate.__name__: rate
    for rate in (
        constant,
        fed,
        fed_over_a_default,
        computed_from_a_feed,
        schedule,
        called_schedule,
        variable,
        from_the_batch,
    )
}

MORE = {
    "dual averaging": lambda rate: train.AdagradDAOptimizer(rate, train.get_global_step()),
    "rmsprop": train.RMSPropOptimizer,
    "scaled": lambda rate: v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
        train.MomentumOptimizer(rate, 0.9), "dynamic"
    ),
}


class Script:
    """A script with that rate, that source of batches and UPDATE_OPS."""

    def __init__(self, rule, inner, rate, source, hook, period=2, ps=1, **options):
        self.source, self.feeds = source, {}
        build, self.hook = normalized(source), hook

        def built(model):
            self.model = model
            return build(model)

        def optimizer():
            value, self.feeds = RATES[rate](self.model)
            return (INNERS | MORE)[inner](value)

        options |= {PERIODS[rule]: period} | ({"rho": 0.3} if rule == "elastic" else {})
        Model(Servers(ps, 1), rule, 0, 1, optimizer, built, hook, scope=update_ops, **options)
        self.model.start()

    def rows(self, steps):
        """What there is after each step, and the batch that would come next."""
        model, rows = self.model, []
        for n in range(1, steps + 1):
            feed = {tensor: value(n) for tensor, value in self.feeds.items()}
            if self.source == "fed":
                feed[model.batch] = float(n)
            model.step(feed)
            rows.append({**model.values(), "moving": self.raw.run(model.moving)})
        return rows

    @property
    def raw(self):
        session = self.model.session
        return (
            session.run_step_fn(lambda step_context: step_context.session) if self.hook else session
        )

    def next_batch(self):
        return self.raw.run(self.model.batch)


@ways
@kinds
@rules
@pytest.mark.parametrize("source", ["fed", "tf.data"])
def test_update_ops_run_once_a_step(rule, resource, hook, source):
    script = Script(rule, "sgd", "constant", source, hook, resource=resource)
    row = script.rows(6)[-1]
    assert row["global_step"] == 3
    moving = 0.0
    for n in range(1, 7):
        moving = 0.9 * moving + 0.1 * n
    close(row["moving"], moving)
    if source == "tf.data":
        assert script.next_batch() == 7


@ways
@kinds
@pytest.mark.parametrize("rate", ["fed", "fed_over_a_default", "from_the_batch"])
def test_agn_steps_the_center_at_the_rate_of_the_step(rate, resource, hook):
    script = Script("agn", "sgd", rate, "tf.data", hook, period=1, resource=resource)
    rates = {"fed_over_a_default": lambda n: 0.1}.get(rate, lambda n: 0.1 / n)
    c = 1.0
    for n, row in enumerate(script.rows(3), 1):
        c -= rates(n) * 2 * c * n / 100
        close(row["center"]["v"], [c, c])


@pytest.mark.parametrize("examples", [10, *slow(60)])
def test_the_same_numbers_with_the_hook_and_without(examples):
    # Shrinking takes so many runs that the time limit would hide what failed.
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    checks = list(HealthCheck)
    settings(max_examples=examples, deadline=None, phases=phases, suppress_health_check=checks)(
        compare
    )()


@given(
    rule=st.sampled_from(sorted(GETTERS)),
    inner=st.sampled_from(sorted(INNERS | MORE)),
    rate=st.sampled_from(sorted(RATES)),
    source=st.sampled_from(["fed", "tf.data"]),
    resource=st.booleans(),
    period=st.integers(1, 3),
    ps=st.integers(1, 2),
)
def compare(rule, inner, rate, source, resource, period, ps):
    """With the hook and without it a script has the same numbers."""
    assume(inner != "dual averaging" or rate not in ("computed_from_a_feed", "called_schedule"))
    assume(inner != "scaled" or resource)  # TensorFlow's has a `tf.cond`
    make = partial(Script, rule, inner, rate, source, period=period, ps=ps, resource=resource)
    with_hook = make(True).rows(5)
    without = make(False).rows(5)
    for one, other in zip(with_hook, without, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@kinds
def test_each_train_operation_has_the_rate_of_its_own_step(resource):
    """As for a generator and its critic: a run of one needs nothing of the other."""
    rates = []

    def rate():
        rates.append(v1.placeholder(tf.float32, []))  # a new one for each `apply_gradients`
        return rates[-1]

    def build(model):
        model.u = v1.get_variable("u", [], initializer=v1.zeros_initializer())
        return [(tf.constant(-1.0), v1.get_variable("v", [], initializer=v1.zeros_initializer()))]

    options = {"resource": resource, "communication_period": 1}
    sgd = partial(INNERS["sgd"], rate)
    model = Model(Servers(1, 1), "agn", 0, 1, sgd, build, True, **options)
    of_v = list(rates)
    with model.graph.as_default():
        other = model.opt.apply_gradients([(tf.constant(-1.0), model.u)], model.global_step)
    of_u = rates[len(of_v) :]
    model.start()
    model.session.run(model.train, dict.fromkeys(of_v, 0.1))
    model.session.run(other, dict.fromkeys(of_u, 0.3))
    model.session.run(model.train, dict.fromkeys(of_v, 0.2))
    close([model.values()["center"][name] for name in "vu"], [0.1 + 0.2, 0.3])


@kinds
@pytest.mark.parametrize("hook", [True, *slow(False)], ids=["hook", "op"])
def test_the_powers_of_adam_start_from_tensors(resource, hook):
    """With the hook, the exchange's own run is built first, from placeholders."""

    def center(beta):
        def inner():
            given = v1.placeholder_with_default(0.8, []) if beta is None else beta
            return train.AdamOptimizer(0.1, beta1=given)

        options = {"resource": resource, "communication_period": 2}
        model = Model(Servers(1, 1), "agn", 0, 1, inner, ones, hook, **options)
        model.start()
        for _ in range(4):
            model.step()
        return model.values()["center"]["v"]

    close(center(None), center(0.8), 1e-6)


def ones(model):
    return tf.reduce_sum(tf.square(v1.get_variable("v", [2], initializer=v1.ones_initializer())))


class Hyper(train.GradientDescentOptimizer):
    """It reads its learning rate from a dictionary as it applies gradients."""

    def __init__(self, rate):
        super().__init__(1.0)
        self.hyper = {"rate": rate}

    def _resource_apply_dense(self, grad, handle):
        return super()._resource_apply_dense(grad * self.hyper["rate"], handle)


def test_an_exchange_that_needs_what_is_fed_is_made_in_the_step():
    """Not in a run of its own, which would silently have the placeholder's default."""
    found = []
    for hook in (True, False):
        made = []

        def inner(made=made):
            made.append(v1.placeholder_with_default(0.5, []))
            return Hyper(made[0])

        model = Model(Servers(1, 1), "agn", 0, 1, inner, ones, hook, communication_period=2)
        model.start()
        for _ in range(4):
            model.step({made[0]: 0.1})
        found.append(model.values())
        assert found[-1]["global_step"] == 2
        assert not hook or model.hook.local_step == 4
    close(found[0]["center"]["v"], found[1]["center"]["v"], 1e-6)
