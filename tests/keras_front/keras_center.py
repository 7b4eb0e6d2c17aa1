"""A worker in `fit` and its center: checked against the twin, and against the formulas."""

import threading

import keras
import numpy as np
from keras_models import (
    BACKEND,
    FOLDER,
    arrays,
    fit,
    line,
    network,
    refused,
    same,
    shared_center,
    slopes,
)

import springline
import springline.keras as front
from springline.keras.weights import Weights
from springline.keras.weights import arrays as values_of
from springline.rules import Nesterov
from springline.rules.reference import Twin


def back(worker):
    """Wait until the center has what the worker has sent: two threads would race there."""
    if worker.background:
        worker.background.save()


class Other(keras.callbacks.Callback):
    """A second worker of the same center, which takes a step after each step of the first.

    It also notes what the model holds, and when.
    """

    RATE = 0.05

    def __init__(self, callback, center, rule, move):
        super().__init__()
        self.callback, self.center, self.rule = callback, center, rule
        self.slope = -move / self.RATE
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
        parameters = self.worker.parameters
        gradients = {name: np.full_like(x, self.slope) for name, x in parameters.items()}
        if self.rule.accumulates:
            self.worker.set_learning_rate(self.RATE)
        self.worker.observe(gradients)
        for name, x in parameters.items():
            x -= self.RATE * gradients[name]
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


def check_two_workers_are_the_twin():
    for kind, settings in (
        ("ElasticAverage", {"moving_rate": 0.3}),
        ("AsyncDiLoCo", {"outer": Nesterov(0.5, 0.5)}),
        ("AsyncDiLoCo", {"delay": 2, "mixing": 0.25}),
        ("ElasticAverage", {"moving_rate": 0.3, "rho": 0.5}),
        ("AGN", {}),
        ("AGN", {"fragments": 2, "period": 4}),
    ):
        settings = {"period": 5} | settings
        inner = keras.optimizers.SGD(0.05)
        given, outer = {}, {}
        if kind == "AGN" or "rho" in settings:
            given = {"optimizer": inner}
        if kind == "AGN":
            outer = {"outer": springline.outer.SGD(0.05)}
        model = line()
        start = arrays(model)
        rule = getattr(springline, kind)(workers=2, **settings, **outer)
        center = shared_center(model, rule)
        callback = getattr(front, kind)(center=center, **settings, **given)
        model.compile(callback.optimizer or inner, "mse")
        other = Other(callback, center, rule, move=0.01)
        fit(model, Ends(other), callback, other, shuffle=False, validation_data=None)

        def gradient(rank, step, x, names=tuple(start)):
            kernel, bias = names
            if rank == 1:
                return {name: np.full_like(x[name], -0.01 / 0.05) for name in names}
            return dict(zip(names, slopes(step, x[kernel], x[bias]), strict=True))

        twin = Twin(rule, start, springline.outer.SGD(0.05), gradient)
        for _ in twin.run([0, 1] * 26):
            pass
        for rank in (1, 0):  # what the last period has left over
            twin.exchange([rank])
        for name, c in arrays(model).items():
            np.testing.assert_allclose(c, twin.c[name], rtol=1e-4, atol=1e-6)


class Gate(keras.callbacks.Callback):
    """Lets each exchange come back two steps after it has begun, or at the end of an epoch."""

    def __init__(self, callback):
        super().__init__()
        self.callback, self.open = callback, threading.Event()

    def on_epoch_begin(self, epoch, logs=None):
        worker = self.callback.worker
        if not epoch:
            exchange = worker.exchange_with
            worker.exchange_with = lambda local: self.open.wait(60) and exchange(local)

    def on_train_batch_begin(self, batch, logs=None):
        if self.callback.worker.local_step % 5 == 4:  # the next exchange begins after this step
            self.open.clear()

    def on_train_batch_end(self, batch, logs=None):
        if self.callback.worker.local_step % 5 == 1:  # not yet with the step that has just ended
            self.let_through()

    def on_epoch_end(self, epoch, logs=None):
        self.let_through()

    def let_through(self):
        self.open.set()
        if flight := self.callback.worker.background._flight:
            flight.exception(timeout=60)


def check_overlap_keeps_the_steps_made_meanwhile():
    for kind, settings in (
        ("ElasticAverage", {"moving_rate": 0.3}),
        ("AsyncDiLoCo", {"outer": springline.outer.SGD(0.5)}),
    ):
        model = line()
        x = np.concatenate([v.ravel() for v in arrays(model).values()])
        callback = getattr(front, kind)(period=5, overlap=True, **settings)
        fit(model, Gate(callback), callback, shuffle=False, validation_data=None)

        c, base, move = x.copy(), x.copy(), None

        def exchanged(s, c, base, kind=kind):
            """Return s' − s and the next c."""
            if kind == "ElasticAverage":
                return -0.3 * (s - c), c + 0.3 * (s - c)
            c = c - 0.5 * (base - s)
            return c - s, c

        for step in range(26):
            x = x - 0.05 * np.concatenate(slopes(step, x[:4, None], x[4:]), axis=None)
            if move is not None and ((step + 1) % 5 == 2 or step == 25):
                x, base = x + move, c
            if (step + 1) % 5 == 0:
                move, c = exchanged(x, c, base)
        _, c = exchanged(x, c, base)
        found = np.concatenate([v.ravel() for v in arrays(model).values()])
        np.testing.assert_allclose(found, c, rtol=1e-4, atol=1e-6)
        assert callback.worker.exchanges == 6  # none was skipped, none was waited for


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


class First(keras.callbacks.Callback):
    """Notes what the model holds before its first step."""

    held = None

    def on_train_batch_begin(self, batch, logs=None):
        if self.held is None:
            self.held = arrays(self.model)


def check_the_center_wins_over_a_backup():
    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt("now")

    for ours_first in (False, True):
        folder = FOLDER / f"backup-{ours_first}"
        model, keeper = line(), keras.callbacks.BackupAndRestore(str(folder))
        refused(KeyboardInterrupt, "now", fit, model, keeper, Fail())
        kept, model = arrays(model), line()
        rule = springline.ElasticAverage(period=1, workers=2, moving_rate=0.5)
        center = shared_center(model, rule)
        weights = Weights(model)
        values, buffers = values_of(weights.trained), values_of(weights.statistics)
        with springline.Worker(values, rule, center, 1, buffers=buffers) as other:
            other.begin()
            for x in other.parameters.values():
                x += 1
            other.step()
        expected = center.values()
        callback, first = front.ElasticAverage(period=1, moving_rate=0.5, center=center), First()
        keeper = keras.callbacks.BackupAndRestore(str(folder))
        fit(model, *([callback, keeper] if ours_first else [keeper, callback]), first)
        assert callback.worker.local_step == 13  # the backup's epoch counts
        assert same([first.held[n] for n in expected], expected.values())
        assert not any(np.array_equal(kept[n], expected[n]) for n in weights.trained)
