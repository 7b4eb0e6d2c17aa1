"""A worker's script for the tests of Keras in a run: `keras_run.py WHAT [WORDS…]`."""

import sys
import time

import keras
import numpy as np

import springline
import springline.keras as front

STEPS, BATCH = 13, 8  # of an epoch


def data(rank):
    """A worker's own, for a line."""
    random = np.random.default_rng(rank)
    x = random.normal(size=(STEPS * BATCH, 4)).astype(np.float32)
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32) + rank
    return x, y


def line():
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


class Watch(keras.callbacks.Callback):
    """Makes steps slow, and prints what happens."""

    def __init__(self, pause):
        super().__init__()
        self.pause = pause

    def on_epoch_begin(self, epoch, logs=None):
        print(f"epoch {epoch}", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.pause)


def fit(callback, epochs, *others, model=None, pause=0.0, **options):
    model = model or line()
    x, y = data(springline.rank())
    callbacks = [callback, *others, Watch(pause)]
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)
    print(f"made {callback.worker.local_step} final {callback.final}", flush=True)
    return model


def numbers():
    """Two rules, each with a center of its own."""
    run = springline.directory()
    first = fit(front.ModelAverage(period=5), 2)
    second = fit(front.DiLoCo(period=5, center=run / "second"), 2)
    kept = {"average": first.get_weights(), "diloco": second.get_weights()}
    flat = {name: np.concatenate([w.ravel() for w in ws]) for name, ws in kept.items()}
    np.savez(run / f"numbers-{springline.rank()}.npz", **flat)


def epochs(rule, count, pause):
    """Epochs, to be killed in."""
    if rule == "AGN":
        callback, model = front.AGN(keras.optimizers.SGD(0.05), period=5), line()
        model.compile(callback.optimizer, "mse")
        fit(callback, int(count), model=model, pause=float(pause))
    else:
        fit(getattr(front, rule)(period=5), int(count), pause=float(pause))


def endless(count, pause):
    """The same with data of which Keras does not know the length."""
    x, y = data(springline.rank())

    def batches():
        while True:
            for k in range(STEPS):
                yield x[k * BATCH : (k + 1) * BATCH], y[k * BATCH : (k + 1) * BATCH]

    model, callback = line(), front.ElasticAverage(period=5)
    watch = Watch(float(pause))
    options = {"epochs": int(count), "steps_per_epoch": STEPS, "callbacks": [callback, watch]}
    model.fit(batches(), verbose=0, **options)
    print(f"made {callback.worker.local_step} final {callback.final}", flush=True)


def unknown(count, pause):
    """The same with data that end, of which Keras does not know where."""
    from torch.utils.data import DataLoader, IterableDataset

    x, y = data(springline.rank())

    class Rows(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    callback = front.ElasticAverage(period=5)
    options = {"epochs": int(count), "shuffle": False, "verbose": 0}
    line().fit(DataLoader(Rows(), BATCH), callbacks=[callback, Watch(float(pause))], **options)
    print(f"made {callback.worker.local_step} final {callback.final}", flush=True)


def backup(first, count, pause):
    """With Keras' own backup, before our callback or after it."""
    folder = f"backup-{springline.rank()}"
    keeper, callback = keras.callbacks.BackupAndRestore(folder), front.ElasticAverage(period=5)
    order = [keeper, callback] if first == "before" else [callback, keeper]
    x, y = data(springline.rank())
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": int(count)}
    line().fit(x, y, callbacks=[*order, Watch(float(pause))], **options)
    print(f"made {callback.worker.local_step} final {callback.final}", flush=True)


def twice(count, pause):
    """Two calls of `fit` with one callback."""
    callback = front.ModelAverage(period=5)
    model = fit(callback, int(count))
    print("between", flush=True)
    fit(callback, int(count), model=model, pause=float(pause))


def stopped(pause):
    class Ask(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7 and springline.rank() == 0:
                springline.stop()

    fit(front.ElasticAverage(period=5), 1000, Ask(), pause=float(pause))


def early(pause):
    """Rank 0 stops after two epochs, the other makes all."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training |= springline.rank() == 0 and epoch == 1

    model = fit(front.ElasticAverage(period=5), 5, Stop(), pause=springline.rank() * float(pause))
    flat = np.concatenate([w.ravel() for w in model.get_weights()])
    np.save(springline.directory() / f"model-{springline.rank()}.npy", flat)


def initial():
    fit(front.ElasticAverage(period=5), 5, initial_epoch=2)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
