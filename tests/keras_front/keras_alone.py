"""What holds in one process, for the backend that KERAS_BACKEND names: `keras_alone.py DIRECTORY`.

Each function whose name begins with `check_` is called, and its name printed.
"""

import logging
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import springline
import springline.keras as front
from springline.center import Layout
from springline.keras.weights import Weights
from springline.keras.weights import arrays as values_of
from springline.rules import Nesterov
from springline.rules.reference import Twin

BACKEND = keras.backend.backend()
FOLDER = Path(sys.argv[1])
random = np.random.default_rng(0)
X = random.normal(size=(100, 4)).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5, 3.0] > 0).astype(np.int32)


def network(**options):
    """A model with all kinds of weights, always the same."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(6)
    frozen.trainable = False
    layers = [frozen, keras.layers.Dense(6), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.2), keras.layers.Dense(2, "softmax")]
    model = keras.Sequential([keras.Input([4]), *layers])
    options = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"]} | options
    model.compile(loss="sparse_categorical_crossentropy", **options)
    return model


def fit(model, *callbacks, epochs=2, **options):  # of 13 steps
    options = {"validation_data": (X, Y), "batch_size": 8, "verbose": 0} | options
    return model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options).history


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def refused(kind, words, call, *args, **options):
    with pytest.raises(kind, match=re.escape(words)):
        call(*args, **options)


def arrays(model):
    weights = Weights(model)
    return values_of(weights.trained | weights.statistics)


def check_alone_is_plain_training():
    plain = network()
    history = fit(plain)
    for callback in (front.ElasticAverage(period=5), front.ModelAverage(period=4, fragments=2)):
        model = network()
        assert fit(model, callback) == history
        assert same(model.get_weights(), plain.get_weights())
        assert callback.final
        assert callback.worker.local_step == 26


def alike(callback, **options):
    """Train with a callback and without; check that it comes to the same, and return the model."""
    plain = network(**options)
    history = fit(plain, epochs=1)
    model = network(**options)
    assert fit(model, callback, epochs=1) == history
    pairs = zip(arrays(model).values(), arrays(plain).values(), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert callback.worker.local_step == 13
    return model


def check_executions_of_several_steps():
    if BACKEND == "torch":
        return  # Keras refuses them there
    model = alike(front.ElasticAverage(period=4), steps_per_execution=3)
    words = "steps between two exchanges (period/fragments), 2. Received: steps_per_execution=3"
    refused(ValueError, words, fit, model, front.ElasticAverage(period=4, fragments=2))


def check_eager():
    alike(front.ModelAverage(period=3), run_eagerly=True)


def check_compiled():
    if BACKEND == "tensorflow":  # JAX always does
        alike(front.ModelAverage(period=3), jit_compile=True)


def check_half_precision():
    keras.config.set_dtype_policy("bfloat16")
    alike(front.ElasticAverage(period=3))
    keras.config.set_dtype_policy("float32")


def back(worker):
    """Wait until the center has what the worker has sent: two threads would race there."""
    if worker.background:
        worker.background.save()


class Other(keras.callbacks.Callback):
    """A second worker of the same center, which takes a step after each step of the first.

    It also notes what the model holds, and when.
    """

    def __init__(self, callback, center, rule, move):
        super().__init__()
        self.callback, self.center, self.rule, self.move = callback, center, rule, move
        self.seen = {"test": [], "epoch": [], "begin": [], "end": []}

    def on_train_begin(self, logs=None):
        weights = Weights(self.model)
        values, buffers = values_of(weights.trained), values_of(weights.statistics)
        self.worker = springline.Worker(values, self.rule, self.center, 1, buffers=buffers)

    def on_train_batch_begin(self, batch, logs=None):
        if not self.worker.begun:
            self.worker.begin()
        if not batch:  # JAX has not taken them yet
            self.seen["begin"].append(arrays(self.model))

    def on_train_batch_end(self, batch, logs=None):
        back(self.callback.worker)
        for x in self.worker.parameters.values():
            x += self.move
        self.worker.step()
        back(self.worker)
        if BACKEND == "jax" and batch == 12:
            self.model.jax_state_sync()
        if batch == 12:
            self.seen["end"].append(arrays(self.model))

    def on_test_begin(self, logs=None):
        self.seen["test"].append((arrays(self.model), self.center.values()))

    def on_epoch_end(self, epoch, logs=None):
        self.seen["epoch"].append((arrays(self.model), self.center.values()))


class Ends(keras.callbacks.Callback):
    """Finishes the other worker, before ours waits for it."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def on_train_end(self, logs=None):
        self.other.worker.finish()


def shared_center(model, rule):
    weights = Weights(model)
    parameters, buffers = values_of(weights.trained), values_of(weights.statistics)
    layout = Layout.of(parameters, buffers, rule.fragments)
    return springline.LocalCenter(layout, rule, parameters | buffers)


def check_two_workers_are_the_twin():
    for kind, settings in (
        ("ElasticAverage", {"moving_rate": 0.3}),
        ("AsyncDiLoCo", {"outer": Nesterov(0.5, 0.5)}),
        ("AsyncDiLoCo", {"delay": 2, "mixing": 0.25}),
    ):
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        start = arrays(model)
        rule = getattr(springline, kind)(period=5, workers=2, **settings)
        center = shared_center(model, rule)
        callback = getattr(front, kind)(period=5, center=center, **settings)
        other = Other(callback, center, rule, move=0.01)
        fit(model, Ends(other), callback, other, shuffle=False, validation_data=None)

        def gradient(rank, step, x, names=tuple(start)):
            kernel, bias = names
            if rank == 1:
                return {name: np.full_like(x[name], -0.01 / 0.05) for name in names}
            rows = slice(step % 13 * 8, step % 13 * 8 + 8)
            error = X[rows] @ x[kernel] + x[bias] - Y[rows, None].astype(np.float32)
            return {kernel: 2 * X[rows].T @ error / len(error), bias: 2 * error.mean(0)}

        twin = Twin(rule, start, springline.outer.SGD(0.05), gradient)
        for _ in twin.run([0, 1] * 26):
            pass
        for rank in (1, 0):  # what the last period has left over
            twin.exchange([rank])
        for name, c in arrays(model).items():
            np.testing.assert_allclose(c, twin.c[name], rtol=1e-4, atol=1e-6)


def check_validation_and_epoch_end_see_the_center():
    rule = springline.ElasticAverage(period=5, workers=2, moving_rate=0.3)
    model = network()
    center = shared_center(model, rule)
    path = FOLDER / "epoch-{epoch}.weights.h5"
    saver = keras.callbacks.ModelCheckpoint(str(path), save_weights_only=True)
    callback = front.ElasticAverage(period=5, moving_rate=0.3, center=center)
    other = Other(callback, center, rule, move=0.1)
    fit(model, Ends(other), callback, saver, other, epochs=3)
    for moment in ("test", "epoch"):
        for held, values in other.seen[moment]:
            assert held.keys() == values.keys()
            assert all(np.array_equal(held[name], values[name]) for name in held)
    for end, begin in zip(other.seen["end"], other.seen["begin"][1:], strict=False):
        assert all(np.array_equal(end[name], begin[name]) for name in end)  # its own again
        assert any(not np.array_equal(end[n], other.seen["epoch"][0][0][n]) for n in end)
    loaded = network()
    loaded.load_weights(FOLDER / "epoch-3.weights.h5")
    last = other.seen["epoch"][-1][1]
    assert same(arrays(loaded).values(), [last[name] for name in arrays(loaded)])


def check_only_exchanges_copy():
    model, callback = network(), front.DiLoCo(period=5)
    counts = {"read": 0, "write": 0, "sync": 0}

    def counted(owner, method, name):
        original = getattr(owner, method)

        def call(*args, **options):
            counts[name] += 1
            return original(*args, **options)

        setattr(owner, method, call)
        return lambda: setattr(owner, method, original)

    undo = [counted(Weights, "read", "read"), counted(Weights, "write", "write")]
    if BACKEND == "jax":
        counted(model, "jax_state_sync", "sync")
    try:
        fit(model, callback, epochs=1, validation_data=None)
    finally:
        [back() for back in undo]
    exchanges = callback.worker.exchanges
    assert exchanges == 3  # after 5, 10 and 13 steps
    # Joining and beginning, two exchanges in the epoch, its end.
    assert counts["read"] <= 2 + 2 + 1, counts
    assert counts["write"] <= 1 + 2 + 1 + 1, counts
    # Keras' own two, and before each of the others.
    assert counts["sync"] <= 2 + counts["read"] + counts["write"], counts


def check_fit_again_and_save():
    model, callback = network(), front.DiLoCo(period=5)
    fit(model, callback)
    first = model.evaluate(X, Y, verbose=0)
    fit(model, callback, epochs=4, initial_epoch=2)
    assert callback.worker.local_step == 26
    assert model.evaluate(X, Y, verbose=0, callbacks=[callback]) != first
    center = callback.worker.center.values()
    assert same(arrays(model).values(), [center[name] for name in arrays(model)])
    model.save(FOLDER / "model.keras")
    loaded = keras.saving.load_model(FOLDER / "model.keras")
    assert loaded.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)


def check_a_fit_that_was_interrupted():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                raise KeyboardInterrupt("now")

    model, callback = network(), front.ModelAverage(center=FOLDER / "interrupted")
    refused(KeyboardInterrupt, "now", fit, model, callback, Stop())
    fit(model, callback)
    assert callback.final
    callback.worker.center.retire()


def check_early_stopping_restores_the_best_center():
    stopper = keras.callbacks.EarlyStopping(
        "val_loss", patience=0, mode="max", restore_best_weights=True
    )
    model, callback = network(), front.DiLoCo(period=5)
    history = fit(model, callback, stopper, epochs=9)
    assert 2 <= len(history["val_loss"]) < 9
    loss = model.evaluate(X, Y, verbose=0, batch_size=8)[0]
    assert np.isclose(loss, max(history["val_loss"]), rtol=1e-5)


def check_an_epoch_without_an_exchange_is_reported():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("springline").addHandler(handler)
    fit(network(), front.DiLoCo(period=20))
    logging.getLogger("springline").removeHandler(handler)
    (record,) = records
    assert "Rank 0 has made 13 steps and not exchanged yet" in record.getMessage()


def check_what_is_in_the_center():
    model, callback = network(), front.ElasticAverage()
    fit(model, callback, epochs=1)
    weights = Weights(model)
    assert len(weights.trained) == 6
    assert [n.rpartition("/")[2] for n in weights.statistics] == ["moving_mean", "moving_variance"]
    assert [n.rpartition("/")[2] for n in weights.others] == ["kernel", "bias"]  # frozen
    assert callback.worker.center.values().keys() == arrays(model).keys()


def check_refused():
    words = "`period` must be an integer >= 1."
    refused(ValueError, words, front.ElasticAverage, period=0)
    refused(ValueError, "`moving_rate` must be in (0, 1]", front.ElasticAverage, moving_rate=2)
    refused(TypeError, "`outer` must be one of `springline.outer`", front.DiLoCo, outer="sgd")
    refused(ValueError, "`timeout` must be seconds >= 0", front.ModelAverage, timeout=-1)
    words = "`use_locking` must be True or False"
    refused(TypeError, words, front.ModelAverage, use_locking="no")
    refused(ValueError, "`rho` must be 0 in springline.keras", front.ElasticAverage, rho=0.1)
    for name in ("AGN", "AGNOptimizer", "SlowMo"):
        refused(ImportError, f"springline.keras has no {name}", getattr, front, name)
    ema = network(optimizer=keras.optimizers.Adam(use_ema=True))
    refused(ValueError, "`use_ema=True`", fit, ema, front.ElasticAverage())
    if BACKEND == "tensorflow":
        import tensorflow as tf

        unbuilt = keras.Sequential([keras.layers.Dense(2, "softmax")])
        unbuilt.compile("sgd", "sparse_categorical_crossentropy")
        refused(ValueError, "not built yet", fit, unbuilt, front.ElasticAverage())
        with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
            mirrored = keras.Sequential([keras.Input([4]), keras.layers.Dense(2, "softmax")])
            mirrored.compile("sgd", "sparse_categorical_crossentropy")
        words = "tf.distribute.MirroredStrategy"
        refused(ValueError, words, fit, mirrored, front.ElasticAverage())
    if BACKEND == "jax":
        model = network()  # which clears the session
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        words = "keras.distribution.DataParallel"
        refused(ValueError, words, fit, model, front.ElasticAverage())
        keras.distribution.set_distribution(None)


def check_stop():
    class Ask(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            springline.stop()

    callback = front.ElasticAverage()
    fit(network(), callback, Ask(), epochs=9)
    assert callback.worker.local_step < 9 * 13


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            print(name, flush=True)
            check()
