"""Keras: `model.fit` as it is, with one callback more.

    python examples/keras_digits.py                        one worker
    springline run --workers 2 examples/keras_digits.py    two workers, half of the data each

KERAS_BACKEND chooses tensorflow (the default), torch or jax. Each worker learns from its own part
of scikit-learn's handwritten digits; validation is of the center, and so is what is saved.
"""

from __future__ import annotations

import argparse

import keras  # type: ignore[import-untyped]
import numpy as np
from sklearn.datasets import load_digits

import springline
import springline.keras

TESTS = 500  # images that nobody learns from


def build() -> keras.Model:
    layers = [
        keras.layers.Dense(64, "relu"),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Dense(10, "softmax"),
    ]
    return keras.Sequential([keras.Input([64]), *layers])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rule", choices=springline.keras.__all__, default="ElasticAverage")
    parser.add_argument("--save", default="digits.keras", help="where the center's model goes")
    args = parser.parse_args()
    rank, workers = springline.rank(), springline.workers()
    keras.utils.set_random_seed(rank)
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images, labels = (found.data[order] / 16).astype(np.float32), found.target[order]
    tests = images[:TESTS], labels[:TESTS]
    own = slice(TESTS + rank, None, workers)

    model = build()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    callback = getattr(springline.keras, args.rule)(period=10)
    model.fit(
        images[own],
        labels[own],
        epochs=args.epochs,
        validation_data=tests,
        callbacks=[callback],
        verbose=0,
    )
    if callback.final:  # on one worker; the model holds the center of them all
        _, accuracy = model.evaluate(*tests, verbose=0)
        model.save(args.save)
        springline.report(f"Accuracy of the center: {accuracy:.2%}")


if __name__ == "__main__":
    main()
