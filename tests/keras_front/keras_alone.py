"""One worker: `fit` comes to the same as without us, with all that it has."""

import logging

import keras
import numpy as np
import pytest
from keras_models import BACKEND, FOLDER, X, Y, arrays, fit, network, refused, same

import springline
import springline.keras as front
from springline.keras.weights import Weights


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


def check_any_metrics():
    def pair(y, scores):
        return keras.ops.mean(scores)

    named = [keras.metrics.MeanMetricWrapper(pair, name=name) for name in ("time", "step")]
    alike(front.ModelAverage(period=3), metrics=named)


def check_eager():
    alike(front.ModelAverage(period=3), run_eagerly=True)


def check_compiled():
    if BACKEND == "tensorflow":  # JAX always does
        alike(front.ModelAverage(period=3), jit_compile=True)


def check_half_precision():
    keras.config.set_dtype_policy("bfloat16")
    alike(front.ElasticAverage(period=3))
    keras.config.set_dtype_policy("float32")


def check_only_exchanges_copy():
    model, callback = network(), front.DiLoCo(period=5)
    counts, steps = {"read": 0, "write": 0, "sync": 0}, set()

    def counted(owner, method, name):
        original = getattr(owner, method)

        def call(*args, **options):
            counts[name] += 1
            steps.add(callback.worker.local_step if callback.worker else 0)
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
    assert steps == {0, 5, 10, 13}
    assert counts["sync"] or BACKEND != "jax"


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


def check_data_of_unknown_length():
    from torch.utils.data import DataLoader, IterableDataset

    class Rows(IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    def trained(*callbacks):
        model = network()
        options = {"epochs": 2, "verbose": 0, "shuffle": False, "callbacks": [*callbacks]}
        history = model.fit(DataLoader(Rows(), 8), **options).history
        return model.get_weights(), history

    plain, history = trained()
    callback = front.ElasticAverage(period=5)
    ours, found = trained(callback)
    assert found == history
    assert same(ours, plain)
    assert callback.worker.local_step == 26


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


def check_stop():
    class Ask(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            springline.stop()

    callback = front.ElasticAverage()
    with pytest.MonkeyPatch.context() as patch:  # for this check only
        patch.setattr("springline.run._alone", {"stop": False})
        fit(network(), callback, Ask(), epochs=9)
    assert callback.worker.local_step < 9 * 13
    assert not springline.stopping()
