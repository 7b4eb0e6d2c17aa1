"""Bad input: the documented exception, in a sentence that helps."""

import inspect

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import GETTERS, PERIODS, wrap

v1 = tf.compat.v1
rules = pytest.mark.parametrize("rule", GETTERS)


class Bench:
    """A model of one process, with an optimizer."""

    def __init__(self, rule, inner=None, getter=None, resource=True, **options):
        self.getter = GETTERS[rule]("")
        with v1.variable_scope("", custom_getter=self.getter, use_resource=resource):
            self.v = v1.get_variable("v", initializer=1.0)
        self.loss = tf.square(self.v)
        self.step = v1.train.get_or_create_global_step()
        inner = v1.train.GradientDescentOptimizer(0.1) if inner is None else inner
        self.opt = wrap(rule, inner, 1, getter or self.getter, **options)

    def apply(self, pairs):
        return self.opt.apply_gradients(pairs, self.step)


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default():
        yield


@rules
@pytest.mark.parametrize("pairs", ["one", [1, 2], [(None,)], 5], ids=str)
def test_malformed_pairs(rule, pairs):
    with pytest.raises(TypeError, match=r"list of \(gradient, variable\) pairs.*Received"):
        Bench(rule).apply(pairs)


@rules
def test_pairs_of_something_else(rule):
    bench = Bench(rule)
    with pytest.raises(TypeError, match=r"Received: .*'x'"):
        bench.apply([(tf.constant(1.0), "x")])
    with pytest.raises(TypeError, match=r"Received: .*'g'"):
        bench.apply([("g", bench.v)])


@rules
def test_messages_are_short(rule):
    """Of arrays they have the shape, not the numbers."""
    large = np.full((300, 2), 1.25)
    bench = Bench(rule)
    wrong = [5, [large], [(large, large)], [(large, tf.constant(large))], [(large, 3), (1, 2)]]
    for pairs in [*wrong, [({"g": large}, bench.v)], [(tf.constant(large), bench.v)]]:
        with pytest.raises(TypeError, match=r"Received: ") as caught:
            bench.apply(pairs)
        assert "1.25" not in str(caught.value)
        assert len(str(caught.value)) < 300
    with pytest.raises(TypeError, match=r"variable=ndarray of shape \(300, 2\) and dtype float64"):
        bench.apply([(large, large)])
    with pytest.raises(TypeError, match=r"optimizer must be .* ndarray of shape \(300, 2\)"):
        wrap(rule, large, 1, bench.getter)


@rules
def test_no_gradients(rule):
    bench = Bench(rule)
    with pytest.raises(ValueError, match=r"No variable has a gradient.*v:0"):
        bench.apply([(None, bench.v)])
    with pytest.raises(ValueError, match="No variable has a gradient"):
        bench.apply([])


@rules
def test_loss_that_depends_on_nothing(rule):
    bench = Bench(rule, **{"rho": 0.0} if rule == "elastic" else {})
    with pytest.raises(ValueError, match=r"v:0"):
        bench.opt.minimize(tf.constant(1.0), bench.step)


@rules
def test_stranger_is_named(rule):
    bench = Bench(rule)
    stranger = v1.Variable(1.0, name="stranger")
    with pytest.raises(ValueError, match=rf"'stranger:0'.*{GETTERS[rule].__name__}.*var_list"):
        bench.opt.minimize(bench.loss * stranger, bench.step)
    bench.opt.minimize(bench.loss * stranger, bench.step, var_list=[bench.v])


@rules
def test_variable_of_another_getter_is_named(rule):
    bench = Bench(rule)
    with v1.variable_scope("", custom_getter=GETTERS[rule]("")):
        other = v1.get_variable("other", initializer=1.0)
    said = rf"'other:0' was not made through this getter.*same instance of {GETTERS[rule].__name__}"
    with pytest.raises(ValueError, match=said):
        bench.apply([(tf.constant(1.0), other)])


@rules
def test_getter_of_another_kind(rule):
    for other in set(GETTERS) - {rule}:
        with (
            tf.Graph().as_default(),
            pytest.raises(TypeError, match=rf"needs the {GETTERS[rule].__name__}.*Received"),
        ):
            Bench(rule, getter=GETTERS[other](""))


@rules
def test_a_word_is_not_true_or_false(rule):
    with pytest.raises(TypeError, match=r"`use_locking` must be True or False.*'False'"):
        Bench(rule, use_locking="False")


@rules
def test_getter_without_a_device(rule):
    with pytest.raises(TypeError, match=r"worker_device.*/job:worker/task:0"):
        GETTERS[rule](None)


@rules
@pytest.mark.parametrize("period", [0, -1, 1.5, None, True], ids=str)
def test_period(rule, period):
    with pytest.raises(ValueError, match=rf"`{PERIODS[rule]}` must be an integer >= 1.*Received"):
        Bench(rule, **{PERIODS[rule]: period})


@rules
def test_number_of_workers(rule):
    getter = GETTERS[rule]("")
    for workers in (0, "2", None):
        with pytest.raises(ValueError, match=r"`num_worker` must be an integer >= 1"):
            wrap(rule, v1.train.GradientDescentOptimizer(0.1), workers, getter)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, np.nan, np.inf, "0.1"], ids=str)
def test_moving_rate(rate):
    with pytest.raises(ValueError, match=r"`moving_rate` must be in \(0, 1\].*Received"):
        Bench("elastic", moving_rate=rate)


def test_moving_rate_has_the_default_of_this_class():
    sgd, getter = v1.train.GradientDescentOptimizer(0.1), GETTERS["elastic"]("")
    with pytest.raises(ValueError, match=r"0.9/communication_period/num_worker = 0.09\."):
        wrap("elastic", sgd, 2, getter, communication_period=5, moving_rate=2.0)


@pytest.mark.parametrize("rho", [-0.1, np.nan, np.inf, "0", True], ids=str)
def test_rho(rho):
    with pytest.raises(ValueError, match=r"`rho` must be a finite number >= 0.*Received"):
        Bench("elastic", rho=rho)


def test_moving_rate_of_too_many_workers_warns():
    getter = GETTERS["elastic"]("")
    with pytest.warns(UserWarning, match=r"0.5 × 3"):
        wrap("elastic", v1.train.GradientDescentOptimizer(0.1), 3, getter, moving_rate=0.5)


@pytest.mark.parametrize("rule", ["elastic", "average"])
@pytest.mark.parametrize("timeout", [0, -1.0, "5", True])
def test_timeout(rule, timeout):
    with pytest.raises(ValueError, match=r"`timeout`.*Received"):
        Bench(rule, timeout=timeout)


@pytest.mark.parametrize("device", ["", "/job:worker", "/device:CPU:0"])
@pytest.mark.parametrize(("rule", "options"), [("average", {}), ("elastic", {"synchronous": True})])
def test_workers_that_wait_for_each_other_have_names(rule, options, device):
    sgd = v1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match=rf"`num_worker` is 2.*'/job:worker/task:0'.*{device!r}"):
        wrap(rule, sgd, 2, GETTERS[rule](device), **options)
    wrap(rule, sgd, 1, GETTERS[rule](device), **options)
    wrap(rule, sgd, 2, GETTERS[rule]("/job:worker/task:1"), **options)


BRANCHES = {
    "cond": lambda do: tf.cond(tf.constant(True), do, lambda: tf.constant(0)),
    "while_loop": lambda do: tf.while_loop(lambda i: i < 1, lambda i: i + 1 + do(), [0]),
    "function": lambda do: tf.function(do, autograph=False)(),
}


@rules
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
def test_not_inside_a_branch(rule, branch, v2):
    bench = Bench(rule, resource=v2)
    pairs = bench.opt.compute_gradients(bench.loss)

    def make():
        wrap(rule, v1.train.GradientDescentOptimizer(0.1), 1, bench.getter)

    def step():
        bench.apply(pairs)

    v1.enable_control_flow_v2() if v2 else v1.disable_control_flow_v2()
    try:
        for do in (make, step):
            with pytest.raises(RuntimeError, match=r"inside `tf.cond`.*`tf.function`.*outside"):
                BRANCHES[branch](do)
    finally:
        v1.enable_control_flow_v2()


def test_averaging_needs_a_global_step():
    bench = Bench("average")
    with pytest.raises(ValueError, match=r"global_step.*get_or_create_global_step"):
        bench.opt.minimize(bench.loss)


@pytest.mark.parametrize("rule", ["elastic", "agn"])
def test_others_do_without_a_global_step(rule):
    bench = Bench(rule, communication_period=1)
    train = bench.opt.minimize(bench.loss)
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(bench.opt.get_init_op(0))
        session.run(train)
        assert session.run(bench.getter.trio(bench.v).center) < 1


@rules
def test_keras_optimizer(rule):
    with pytest.raises(TypeError, match=r"tf.compat.v1.train.*Received.*springline.keras"):
        Bench(rule, inner=tf.keras.optimizers.SGD(0.1))


def test_optimizer_without_a_rate():
    class Rateless(v1.train.Optimizer):
        pass

    with pytest.raises(ValueError, match=r"Rateless.*Give `rho`"):
        Bench("elastic", inner=Rateless(False, "rateless"))
    with tf.Graph().as_default():
        Bench("elastic", inner=Rateless(False, "rateless"), rho=0.0)


@rules
def test_saver_before_the_model(rule):
    opt = wrap(rule, v1.train.GradientDescentOptimizer(0.1), 1, GETTERS[rule](""))
    with pytest.raises(RuntimeError, match=f"{GETTERS[rule].__name__}.*Make the model first"):
        opt.swapping_saver()


@rules
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_a_worker_that_was_not_set_to_the_center_is_warned_once(rule, resource, capfd):
    bench = Bench(rule, resource=resource, **{PERIODS[rule]: 1})
    train = bench.opt.minimize(bench.loss, bench.step)
    init = bench.opt.get_init_op() if rule == "average" else bench.opt.get_init_op(0)
    said = []
    for first in ([], [init]):
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(first)
            capfd.readouterr()
            for _ in range(3):
                session.run(train)
            said.append(capfd.readouterr().err.count("run what `get_init_op` returns"))
    assert said == [1, 0]


@rules
def test_a_meta_graph_is_saved_without_a_warning(rule, tmp_path, caplog):
    bench = Bench(rule)
    bench.opt.minimize(bench.loss, bench.step)
    saver = bench.opt.swapping_saver()
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        saver.save(session, str(tmp_path / "center"))
    assert (tmp_path / "center.meta").exists()
    assert caplog.text == ""


@rules
def test_help_is_our_own(rule):
    kind = type(Bench(rule).opt)
    for one in (kind, GETTERS[rule]):
        assert inspect.getdoc(one.__init__).endswith("the class has what the arguments mean.")
        assert "Args:" in "".join(inspect.getdoc(c) for c in one.__mro__[:2])


@rules
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_never_reaches_the_center(rule, bad):
    bench = Bench(rule, **{PERIODS[rule]: 1})
    center = bench.getter.trio(bench.v).center
    train = bench.apply([(tf.constant(bad), bench.v)])
    init = bench.opt.get_init_op() if rule == "average" else bench.opt.get_init_op(0)
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        session.run(init)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"'v' has NaN or Inf"):
            session.run(train)
        assert session.run([center, bench.step]) == [1.0, 0]
