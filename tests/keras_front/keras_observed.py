"""The optimizer around the model's own, with what Keras does to optimizers."""

import keras
import numpy as np
from keras_models import BACKEND, FOLDER, arrays, fit, line, network, same, slopes

import springline
import springline.keras as front


def agn(rate=1.0, **options):
    """A callback whose worker stays where the center is, and a model that was compiled with it."""
    outer = springline.outer.SGD(rate)
    callback = front.AGN(keras.optimizers.SGD(0.0), period=5, outer=outer)
    return callback, flat(callback.optimizer, **options)


def flat(optimizer, **options):
    """A line that is 0 everywhere."""
    model = line()
    model.set_weights([np.zeros(v.shape) for v in model.weights])
    model.compile(optimizer, "mse", **options)
    return model


def moved(callback, model, *others, **options):
    """Train for an epoch; return how far the center has come."""
    options = {"shuffle": False, "validation_data": None, "epochs": 1} | options
    fit(model, callback, *others, **options)
    return list(arrays(model).values())


def check_executions_of_several_steps():
    if BACKEND != "torch":  # Keras refuses them there
        callback, model = agn(steps_per_execution=5)
        center = moved(callback, model)
        assert callback.worker.exchanges == 3
        plain, single = agn()
        for one, other in zip(center, moved(plain, single), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Last(keras.callbacks.Callback):
    """Keeps what the worker has after its last step."""

    def on_train_batch_end(self, batch, logs=None):
        if BACKEND == "jax":
            self.model.jax_state_sync()
        self.held = [x.copy() for x in arrays(self.model).values()]


def check_the_worker_is_not_changed_by_what_is_accumulated():
    others, ours = Last(), Last()
    history = fit(network(optimizer=keras.optimizers.Adam(0.01)), others, epochs=1)
    callback = front.AGN(keras.optimizers.Adam(0.01), period=1000)
    found = fit(network(optimizer=callback.optimizer), callback, ours, epochs=1)
    assert found["loss"] == history["loss"]
    assert same(ours.held, others.held)


def check_a_schedule_moves_the_center():
    """The rate that another callback sets travels with the message."""
    callback = front.AGN(keras.optimizers.SGD(0.0), period=13)
    model = flat(callback.optimizer)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)
    assert not any(np.any(way) for way in moved(callback, model, schedule))
    callback = front.AGN(keras.optimizers.SGD(0.0), period=1)
    model = flat(callback.optimizer)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    assert all(np.any(way) for way in moved(callback, model, schedule))
    assert np.isclose(float(callback.optimizer.learning_rate), 0.1)


class Note(keras.callbacks.Callback):
    """Notes of each exchange how many gradients there are, and whether a weight has any."""

    def __init__(self, callback, seen):
        super().__init__()
        self.callback, self.seen = callback, seen

    def on_train_begin(self, logs=None):
        worker = self.callback.worker
        exchange = worker.exchange_with

        def noting(local):
            self.seen.append((int(local.gradients[0]), bool(local.seen.any())))
            return exchange(local)

        worker.exchange_with = noting


def check_a_scaled_loss():
    """Steps that the scaling leaves out are not accumulated, also if a period has no other."""
    for weight, expected in ((4.0, (1, 4)), (4000.0, (1, 1))):
        callback, _ = agn(rate=0.01 / weight)
        scaled = keras.optimizers.LossScaleOptimizer(callback.optimizer, initial_scale=2.0**127)
        model, seen = flat(scaled, loss_weights=weight), []

        way = moved(callback, model, Note(callback, seen), epochs=2)
        (first, has), *others = seen
        assert expected[0] <= first <= expected[1]
        assert has == (weight == 4.0)
        assert others[-2:] == [(5, True), (1, True)]
        assert all(np.all(np.isfinite(w)) and np.any(w) for w in way)


def check_weights_without_a_gradient_and_embeddings():
    """Under AGN the center leaves them; the penalty pulls all rows."""
    for rho in (0.0, 0.5):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        tokens = keras.Input([3], dtype="int32")
        table = keras.layers.Embedding(6, 2, name="table")
        unused = keras.layers.Dense(1, name="unused")
        unused.build([None, 2])
        hidden = keras.layers.Flatten()(table(tokens))
        model = keras.Model(tokens, keras.layers.Dense(1)(hidden))
        model.unused = unused
        if rho:
            callback = front.ElasticAverage(
                optimizer=keras.optimizers.SGD(0.1), rho=rho, moving_rate=0.5, period=2
            )
        else:
            callback = front.AGN(keras.optimizers.SGD(0.1), period=2)
        model.compile(callback.optimizer, "mse")
        before = {name: x.copy() for name, x in arrays(model).items()}
        ids = np.random.default_rng(0).integers(0, 4, (40, 3)).astype(np.int32)  # of 6 rows
        y = np.ones((40, 1), np.float32)
        model.fit(ids, y, batch_size=4, epochs=1, verbose=0, callbacks=[callback])
        after = arrays(model)
        for name in before:
            assert np.array_equal(before[name], after[name]) == name.startswith("unused"), name
        rows = next(name for name in before if name.startswith("table"))
        assert np.any(before[rows][:4] != after[rows][:4])
        assert np.allclose(before[rows][4:], after[rows][4:])


def check_a_saved_model_goes_on():
    callback, model = agn()
    fit(model, callback, epochs=1, validation_data=None)
    model.save(FOLDER / "observed.keras")
    loaded = keras.saving.load_model(FOLDER / "observed.keras")
    again = front.AGN(keras.optimizers.SGD(0.0), period=5, outer=springline.outer.SGD(1.0))
    options = {"epochs": 1, "validation_data": None, "shuffle": False}
    fit(loaded, again, **options)
    fit(model, callback, **options)
    assert same(loaded.get_weights(), model.get_weights())


def check_without_the_callback_it_is_the_inner_optimizer():
    optimizer = keras.optimizers.SGD(0.05)
    callback = front.ElasticAverage(optimizer=optimizer, rho=0.5, moving_rate=0.3, period=5)
    model = flat(callback.optimizer)
    options = {"epochs": 1, "validation_data": None, "shuffle": False}
    fit(model, callback, **options)
    plain = line()
    plain.set_weights(model.get_weights())
    fit(plain, **options)
    fit(model, **options)
    assert same(model.get_weights(), plain.get_weights())


def check_the_mean_gradient():
    ways = moved(*agn(), steps_per_epoch=5)
    gradients = [slopes(step, np.zeros((4, 1)), np.zeros(1)) for step in range(5)]
    for way, ones in zip(ways, zip(*gradients, strict=True), strict=True):
        np.testing.assert_allclose(way, -np.mean(ones, 0), rtol=1e-4, atol=1e-6)
