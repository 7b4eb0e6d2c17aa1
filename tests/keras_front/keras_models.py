"""Models, data and what else the checks in one process share: `keras_checks.py` runs them."""

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import springline
from springline.center import Layout
from springline.keras.weights import Weights
from springline.keras.weights import arrays as values_of

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


def shared_center(model, rule):
    weights = Weights(model)
    parameters, buffers = values_of(weights.trained), values_of(weights.statistics)
    layout = Layout.of(parameters, buffers, rule.fragments)
    return springline.LocalCenter(layout, rule, parameters | buffers)


def line():
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def slopes(step, kernel, bias):
    """The gradients of the line's loss at a step."""
    rows = slice(step % 13 * 8, step % 13 * 8 + 8)
    error = X[rows] @ kernel + bias - Y[rows, None].astype(np.float32)
    return 2 * X[rows].T @ error / len(error), 2 * error.mean(0)
