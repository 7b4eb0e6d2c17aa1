"""TensorFlow without a graph: a Keras model in a loop of one's own, `tf.function` around the step.

    springline run --workers 2 examples/tensorflow_eager.py    two workers, no parameter server
    python examples/tensorflow_eager.py                        one process alone

Each worker learns from its own part of scikit-learn's handwritten digits. The center is
springline's own, in shared memory: no `cluster()`, no getter, no hook.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

import springline
from springline.tensorflow import ElasticAverageOptimizer

TESTS = 500  # images that nobody learns from


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000, help="of each worker")
    args = parser.parse_args()
    rank, workers = springline.rank(), springline.workers()
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images, labels = (found.data[order] / 16).astype(np.float32), found.target[order]

    layers = [tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input([images.shape[1]]), *layers])
    sgd = tf.compat.v1.train.MomentumOptimizer(0.05, 0.9)
    opt = ElasticAverageOptimizer(sgd, workers, None, moving_rate=0.9 / workers, rho=0.0)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    train = tf.function(step)
    random = np.random.default_rng([0, rank])
    own = np.arange(TESTS, len(images))[rank::workers]
    for _ in springline.steps(args.steps):
        rows = random.choice(own, 32)
        springline.log(loss=float(train(images[rows], labels[rows])))
    if opt.final():  # after a last exchange, when all others have finished
        path = (springline.directory() or Path(tempfile.mkdtemp())) / "evaluated.safetensors"
        opt.save_center(path)
        center = load_file(path)
        for v in model.trainable_variables:
            v.assign(center[v.path])
        right = np.mean(np.argmax(model(images[:TESTS]), 1) == labels[:TESTS])
        springline.report(f"Accuracy of the center: {right:.2%}")


if __name__ == "__main__":
    main()
