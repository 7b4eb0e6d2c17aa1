"""`tf.train.Checkpoint` of an optimizer in eager mode: all of it, to the same next step."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tf_cluster import INNERS, PERIODS, close, wrap
from tf_eager import MODES, Trainer, alone, check, sgd, team, v1

from marks import slow
from springline.center import LayoutError, SettingsError
from springline.tensorflow.eager_state import pack, unpack

__all__ = ["alone", "team"]
X = np.random.RandomState(0).randn(4, 3).astype("float32")
rules = pytest.mark.parametrize("rule", PERIODS)
whens = pytest.mark.parametrize("when", ["before the first step", "after some steps"])


class Training:
    """A model with a variable of Keras', one of TensorFlow's and one that is seldom trained."""

    def __init__(self, rule, inner="adam", function=False, rate=0.01, first=0.0, **options):
        options = {PERIODS[rule]: 3, **options}
        if rule == "elastic":
            options = {"moving_rate": 0.5, "rho": 0.2, **options}
        self.dense = tf.keras.layers.Dense(2, kernel_initializer="ones")
        self.dense(X)
        self.v = tf.Variable([1.0, 2.0], name="v")
        self.seldom = tf.Variable(first, name="seldom")
        self.opt = wrap(rule, INNERS[inner](rate), 1, None, **options)
        self.global_step = tf.Variable(0, dtype=tf.int64)
        self.made = 0
        self.step_with = {True: self._step, False: self._step}
        if function:
            self.step_with = {with_: tf.function(self._step) for with_ in (True, False)}
        self.saved = tf.train.Checkpoint(
            dense=self.dense, v=self.v, seldom=self.seldom, step=self.global_step, opt=self.opt
        )

    def _step(self, seldom):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.dense(X) * self.v - 1) ** 2)
            loss += (self.seldom - 3.0) ** 2 if seldom else 0.0
        variables = [self.dense.kernel, self.dense.bias, self.v, self.seldom]
        gradients = tape.gradient(loss, variables)
        self.opt.apply_gradients(zip(gradients, variables, strict=True), self.global_step)

    def steps(self, n):
        """Make steps; every fourth trains all variables."""
        for _ in range(n):
            all_ = self.made % 4 == 3
            self.step_with[all_](all_)
            self.made += 1
        return self

    def values(self):
        eager = self.opt._eager
        state = {name: v.numpy() for name, v in eager.variables.items()}
        state |= {f"c {name}": c for name, c in eager.center.values().items()}
        state |= {str(k): v.numpy() for k, v in enumerate(self.opt.variables())}
        state |= {"local_step": self.opt._local_step.numpy(), "step": self.global_step.numpy()}
        for name, trio in eager._trios.items():
            if trio.beside is not None:
                state[f"beside {name}"] = trio.beside.numpy()
        # Keras numbers its layers.
        return {re.sub(r"dense_\d+", "dense", name): value for name, value in state.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], name)


@whens
@MODES
@pytest.mark.parametrize("inner", ["adam", *slow("sgd", "momentum")])
@rules
def test_all_of_it(rule, inner, function, when, tmp_path):
    """Saved in the middle of a period; both then make the same steps to the bit."""
    first = Training(rule, inner, function).steps(7)
    path = first.saved.save(str(tmp_path / "model"))
    before = first.values()
    other = Training(rule, inner, function, first=5.0)
    if when == "after some steps":
        other.steps(4)
    other.saved.restore(path).assert_existing_objects_matched()
    other.made = first.made
    if when == "after some steps":
        same(other.values(), before)
    for n in (1, 1, 5):
        same(other.steps(n).values(), first.steps(n).values())


@rules
def test_the_optimizer_alone(rule, tmp_path):
    """The model is restored by other means."""
    first = Training(rule).steps(7)
    path = tf.train.Checkpoint(opt=first.opt).save(str(tmp_path / "model"))
    other = Training(rule)
    other.dense.set_weights(first.dense.get_weights())
    other.v.assign(first.v)
    other.seldom.assign(first.seldom)
    other.global_step.assign(first.global_step)
    tf.train.Checkpoint(opt=other.opt).restore(path).assert_existing_objects_matched()
    other.made = first.made
    same(other.steps(5).values(), first.steps(5).values())


@rules
def test_saved_again_before_the_first_step(rule, tmp_path):
    first = Training(rule).steps(7)
    second = Training(rule)
    second.saved.restore(first.saved.save(str(tmp_path / "first")))
    third = Training(rule)
    third.saved.restore(second.saved.save(str(tmp_path / "second")))
    third.made = first.made
    same(third.steps(3).values(), first.steps(3).values())


def test_nothing_is_saved_of_one_that_was_never_used(tmp_path):
    path = Training("agn").saved.save(str(tmp_path / "model"))
    other = Training("agn").steps(2)
    before = other.values()
    other.saved.restore(path)
    assert other.values()["local_step"] == before["local_step"] == 2


def test_other_models_and_settings_are_refused(tmp_path):
    path = tf.train.Checkpoint(opt=Training("elastic").steps(4).opt).save(str(tmp_path / "model"))

    def restore(opt):
        tf.train.Checkpoint(opt=opt).restore(path)

    v, opt = tf.Variable(1.0), wrap("elastic", sgd(0.1), 1, None, rho=0.0)
    opt.minimize(lambda: v * v)
    with pytest.raises(LayoutError, match="another model"):
        restore(opt)
    with pytest.raises(SettingsError, match="rule"):
        restore(Training("average").steps(4).opt)
    with pytest.raises(ValueError, match="another optimizer than MomentumOptimizer"):
        restore(Training("elastic", "momentum").steps(4).opt)


@rules
def test_saved_when_the_run_is_over(rule, tmp_path):
    first = Training(rule).steps(4)
    first.opt.finish()
    before = first.values()
    path = first.saved.save(str(tmp_path / "model"))
    same(first.values(), before)
    other = Training(rule).steps(1)
    other.saved.restore(path)
    same(other.values(), before)


def test_in_a_run_the_center_is_the_others(team, tmp_path):
    """A worker takes its wrapped optimizer from a checkpoint, and nothing else."""

    def make(rank):
        opt = wrap("elastic", INNERS["momentum"](1.0), 2, None, communication_period=2, rho=0.0)
        return Trainer(opt, {"v": 0.0})

    zero, one = team(2, make)
    zero.step()
    one.join()
    saved = tf.train.Checkpoint(opt=zero.opt).save(str(tmp_path / "model"))
    for _ in range(3):
        zero.step()
    x, c = zero.x()["v"], zero.c()["v"]
    tf.train.Checkpoint(opt=zero.opt).restore(saved)
    close(zero.opt.get_slot(zero.variables["v"], "momentum"), -1.0)
    check(zero, [x], [c])
    assert zero.opt._local_step.numpy() == 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_packed_arrays(dtype):
    state = {"a": {"array": np.arange(6).reshape(2, 3).astype(dtype)}, "n": [1, "x"], "none": {}}
    state |= {"scalar": np.ones([], dtype)[()], "empty": np.zeros([0, 3], dtype)}
    again = unpack(pack(state))
    assert again.keys() == state.keys()
    assert again["n"] == [1, "x"]
    for one, other in (
        (again["a"]["array"], state["a"]["array"]),
        (again["scalar"], state["scalar"]),
    ):
        assert one.dtype == other.dtype == dtype
        np.testing.assert_array_equal(one, other)
    assert again["empty"].shape == (0, 3)


def test_slots_of_keras_variables():
    training = Training("average", "momentum").steps(1)
    slot = training.opt.get_slot(training.dense.kernel, "momentum")
    assert slot is training.opt.get_slot(training.dense.kernel.value, "momentum")
    assert slot.shape == (3, 2)


def test_a_saved_model_may_hold_the_optimizer(tmp_path):
    training, module = Training("agn").steps(4), tf.Module()
    module.v, module.opt = training.v, training.opt
    tf.saved_model.save(module, str(tmp_path))
    saved = tf.train.load_checkpoint(str(tmp_path / "variables" / "variables"))
    close(saved.get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE"), training.v)


def test_a_checkpoint_in_a_graph(tmp_path):
    with tf.Graph().as_default():
        from springline.tensorflow import AGNCustomGetter

        opt = wrap("agn", sgd(0.1), 1, AGNCustomGetter(""))
        with (
            pytest.raises(RuntimeError, match=r"In a graph `tf\.train\.Checkpoint` does not save"),
            v1.Session(),
        ):
            tf.train.Checkpoint(opt=opt).save(str(tmp_path / "model"))


def test_jit_compile():
    """XLA cannot compile the exchange; its error has a name that says why."""
    v = tf.Variable(1.0)
    opt = wrap("agn", sgd(0.1), 1, None)
    step = tf.function(lambda: opt.minimize(lambda: v * v), jit_compile=True)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="exchange_calls_Python_so_leave_out_jit_compile"
    ):
        step()
    loss = tf.function(lambda: v * v, jit_compile=True)
    tf.function(lambda: opt.minimize(loss))()
    close(v.numpy(), 0.8)
