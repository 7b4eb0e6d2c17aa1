"""Eager mode: the end of a run, runs of real processes, and what is refused."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf
from safetensors.numpy import load_file
from tf_cluster import close
from tf_eager import MODES, Trainer, alone, check, sgd, team, v1

import springline
from marks import slow
from springline.center.checkpoint import describe
from springline.tensorflow import (
    AGNCustomGetter,
    AGNOptimizer,
    ElasticAverageOptimizer,
    ModelAverageCustomGetter,
    ModelAverageOptimizer,
)
from springline.tensorflow.eager import unique_names

__all__ = ["alone", "team"]


@MODES
def test_finish_exchanges_what_is_left(function, team):
    def make(rank):
        return Trainer(AGNOptimizer(sgd(1.0), 1, None, 2), {"v": 0.0}, function=function)

    (trainer,) = team(1, make)
    for _ in range(5):
        trainer.step()
    check(trainer, [3], [2])
    trainer.opt.finish()
    check(trainer, [3], [3])
    assert trainer.worker.center.members() == []
    assert [rank.steps for rank in trainer.worker.center.progress()] == [5]
    trainer.opt.finish()
    check(trainer, [3], [3])


def test_finish_before_the_first_step_does_nothing():
    AGNOptimizer(sgd(1.0), 1, None).finish()


def test_save_center(tmp_path):
    opt = ElasticAverageOptimizer(sgd(1.0), 1, None, 1, 0.5)
    trainer = Trainer(opt, {"layer/kernel": [[1.0, 2.0]], "layer/bias": 0.0})
    trainer.step()
    opt.save_center(tmp_path / "center.safetensors")
    saved = load_file(tmp_path / "center.safetensors")
    assert {name: value.tolist() for name, value in saved.items()} == {
        "layer/kernel": [[1.5, 2.5]],
        "layer/bias": 0.5,
    }


def test_save_center_with_the_statistics_of_batchnorm(tmp_path):
    """They are in no center; of a model that is given they are written too."""
    model = tf.keras.Sequential(
        [tf.keras.layers.BatchNormalization(), tf.keras.layers.Dropout(0.5)]
    )
    x = tf.constant([[1.0, 3.0], [3.0, 5.0]])
    model(x)
    opt = small(moving_rate=0.5, rho=0.0)
    opt.minimize(lambda: tf.reduce_sum(model(x, training=True)))
    opt.save_center(tmp_path / "center.safetensors")
    assert len(load_file(tmp_path / "center.safetensors")) == 2
    opt.save_center(tmp_path / "center.safetensors", model)
    saved = load_file(tmp_path / "center.safetensors")
    (mean,) = [value for name, value in saved.items() if name.endswith("moving_mean")]
    close(mean, [0.02, 0.04])  # a hundredth of the way from 0 to the mean of x
    assert [n.rpartition("/")[2] for n in saved if "seed" not in n] == [
        *("beta", "gamma", "moving_mean", "moving_variance")
    ]
    for name, value in opt._eager.center.values().items():
        close(saved[name], value)
    with pytest.raises(TypeError, match=r"`model` must be a Keras model"):
        opt.save_center(tmp_path / "center.safetensors", "model")


def test_variables_of_the_same_name():
    variables = [tf.Variable(0.0, name=name) for name in ("w", "w_1", "w", "w")]
    assert list(unique_names(variables)) == ["w", "w_1", "w_2", "w_3"]
    opt = ElasticAverageOptimizer(sgd(1.0), 1, None, 1, 0.5)
    opt.minimize(lambda: -tf.add_n([k * v for k, v in enumerate(variables)]))
    assert [v.numpy() for v in variables] == [0, 0.5, 1, 1.5]


def test_log_knows_the_step(team, directory):
    def make(rank):
        return Trainer(AGNOptimizer(sgd(1.0), 1, None, 5), {"v": 0.0}, function=True)

    (trainer,) = team(1, make)
    for _ in range(3):
        trainer.step()
    springline.log(loss=1.0)
    assert '"step": 3' in (directory / "metrics" / "rank-0.jsonl").read_text()


@MODES
def test_variables_of_keras(function):
    """With a tape, with `var_list`, and found by the loss."""
    dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    x = tf.constant([[1.0, 2.0]])
    dense(x)
    opt = small(moving_rate=0.5, rho=0.0)

    def tape():
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(dense(x))
        kernels = dense.trainable_variables
        opt.apply_gradients(zip(tape.gradient(loss, kernels), kernels, strict=True))

    def found():
        opt.minimize(lambda: -tf.reduce_sum(dense(x)))

    def named():
        opt.minimize(lambda: -tf.reduce_sum(dense(x)), var_list=dense.trainable_variables)

    for step, expected in ((tape, 0.5), (found, 1.0), (named, 1.5)):
        (tf.function(step) if function else step)()
        close(dense.kernel.numpy(), [[expected], [2 * expected]])


SCRIPT = """
import numpy as np, tensorflow as tf, springline
from springline.tensorflow import AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer

v1 = tf.compat.v1
rng = np.random.RandomState(springline.rank())
inputs = tf.constant(rng.randn(64, 2), tf.float32)
targets = inputs @ [[2.0], [-1.0]] + 0.5
w = tf.Variable(rng.randn(2, 1).astype("float32"), name="w")
b = tf.Variable([100.0 * springline.rank()], name="b")
global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
inner = v1.train.GradientDescentOptimizer(0.1)
opt = {optimizer}

@tf.function
def train():
    opt.minimize(lambda: tf.reduce_mean((inputs @ w + b - targets) ** 2), global_step)

if __name__ == "__main__":
    # Many: a worker may begin at 100 and be asleep until the other has made all its steps.
    for step in springline.steps(402):
        train()
    springline.log(b=float(b[0]))
"""
COMMAND = [sys.executable, "-m", "springline.cli", "run", "--workers", "2", "--no-live"]
OPTIMIZERS = {
    "elastic": "ElasticAverageOptimizer(inner, 2, None, 4, 0.45, rho=0.0, synchronous=True)",
    "average": "ModelAverageOptimizer(inner, 2, springline.rank() == 0, None, 4)",
    "agn": "AGNOptimizer(inner, springline.workers(), None, 4)",
}


@pytest.mark.parametrize("rule", ["elastic", *slow("average", "agn")])
def test_two_processes(rule, tmp_path):
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT.replace("{optimizer}", OPTIMIZERS[rule]))
    done = subprocess.run(
        [*COMMAND, "--run", run, script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    center = load_file(run / "center.safetensors")
    close(center["w"], [[2], [-1]], 0.02)
    close(center["b"], [0.5], 0.02)
    saved = describe(run / "center" / "checkpoint.safetensors")
    assert saved.steps == [402, 402]  # also what the last period left over


def small(**options):
    return ElasticAverageOptimizer(sgd(1.0), 1, None, 1, **options)


def test_the_run_must_have_as_many_workers(monkeypatch):
    with pytest.raises(ValueError, match=r"`num_worker` is 2, .* `springline run --workers 2"):
        ElasticAverageOptimizer(sgd(1.0), 2, None)
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    with pytest.raises(ValueError, match=r"`num_worker` is 1, .* run of 2"):
        AGNOptimizer(sgd(1.0), 1, None)
    with pytest.raises(ValueError, match="no run where they could meet"):
        ModelAverageOptimizer(sgd(1.0), 2, True, None)


def test_a_getter_is_checked_but_not_needed():
    with pytest.raises(TypeError, match="needs the AGNCustomGetter"):
        AGNOptimizer(sgd(1.0), 1, ModelAverageCustomGetter(""))
    with tf.Graph().as_default(), pytest.raises(TypeError, match="Received: None"):
        small()


def test_the_loss_must_be_callable():
    v = tf.Variable(1.0)
    for call in (small().compute_gradients, small().minimize):
        with pytest.raises(RuntimeError, match="must be a callable"):
            call(v * v)
    with pytest.raises(RuntimeError, match="must be a callable"):
        tf.function(lambda: small().minimize(v * v))()


def test_what_has_no_meaning_names_its_replacement():
    opt, mean = small(synchronous=True), ModelAverageOptimizer(sgd(1.0), 1, True, None)
    with pytest.raises(RuntimeError, match=r"`minimize` exchanges by itself.*`finish\(\)`"):
        opt.make_session_run_hook(True, 0)
    with pytest.raises(RuntimeError, match=r"`minimize` exchanges by itself.*`finish\(\)`"):
        mean.make_session_run_hook()
    with pytest.raises(RuntimeError, match=r"`save_center\(path\)`"):
        opt.swapping_saver()
    with pytest.raises(RuntimeError, match="the first `minimize`"):
        opt.get_init_op(0)
    with pytest.raises(RuntimeError, match="the first `minimize`"):
        mean.get_init_op()
    with pytest.raises(RuntimeError, match="no center yet"):
        opt.save_center("center.safetensors")


def test_it_is_used_where_it_was_made():
    opt = small()
    with tf.Graph().as_default():
        v = v1.get_variable("v", initializer=1.0)
        with pytest.raises(RuntimeError, match="made in eager mode and is used in a graph"):
            opt.minimize(v * v)
        inside = AGNOptimizer(sgd(1.0), 1, AGNCustomGetter(""))
    w = tf.Variable(1.0)
    with pytest.raises(RuntimeError, match="made in a graph and is used in eager mode"):
        inside.minimize(lambda: w * w)
    with pytest.raises(RuntimeError, match="`save_center` is for eager mode; in a graph"):
        inside.save_center("center.safetensors")


def test_variables_must_be_there_from_the_start():
    opt = small()
    v, late = tf.Variable(1.0, name="v"), tf.Variable(1.0, name="late")
    opt.minimize(lambda: v * v)
    with pytest.raises(ValueError, match=r"'late:0' is not in the center.*: v\."):
        opt.minimize(lambda: v * late)


def test_a_variable_made_inside_the_function():
    made = []

    @tf.function
    def train():
        if not made:
            made.append(tf.Variable(1.0, name="inner"))
        small_opt.minimize(lambda: made[0] ** 2)

    small_opt = small()
    with pytest.raises(ValueError, match=r"'inner:0' is made inside the tf\.function"):
        train()


def test_bad_arguments():
    v = tf.Variable(1.0)
    with pytest.raises(TypeError, match=r"`var_list` takes tf\.Variables"):
        small().compute_gradients(lambda: v * v, var_list=[1.0])
    with pytest.raises(RuntimeError, match=r"Received: EagerTensor of shape \(500,\) and dtype"):
        small().minimize(tf.zeros(500))
    with pytest.raises(ValueError, match="reads no trainable variable"):
        small().minimize(lambda: tf.constant(1.0))
    with pytest.raises(ValueError, match="No gradients provided"):
        small(rho=0.0).minimize(lambda: tf.constant(1.0), var_list=[v])
    with pytest.raises(ValueError, match="No variable has a gradient"):
        small().apply_gradients([(None, v)])
    with pytest.raises(TypeError, match="pairs"):
        small().apply_gradients([v])
    with pytest.raises(ValueError, match="needs a `global_step`"):
        ModelAverageOptimizer(sgd(1.0), 1, True, None).minimize(lambda: v * v)


@pytest.mark.parametrize(
    "inner",
    [v1.train.FtrlOptimizer(0.1), v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)],
    ids=["ftrl", "nesterov"],
)
def test_agn_knows_four_optimizers(inner):
    with pytest.raises(ValueError, match="GradientDescentOptimizer, MomentumOptimizer, Adagrad"):
        AGNOptimizer(inner, 1, None)
