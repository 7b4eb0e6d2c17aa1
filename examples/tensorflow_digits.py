"""TensorFlow on parameter servers: the sketch in `tf.contrib.opt`'s documents, made whole.

    springline run --ps 1 --workers 2 examples/tensorflow_digits.py    two workers, one server
    python examples/tensorflow_digits.py                               one process alone

The same script runs on a cluster whose scheduler sets `TF_CONFIG`. Each worker learns from its own
part of scikit-learn's handwritten digits; the chief saves the center under the model's own names,
and a plain graph that knows nothing of workers restores it and is evaluated.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import springline
from springline.tensorflow import (
    AGNCustomGetter,
    AGNOptimizer,
    Cluster,
    ElasticAverageCustomGetter,
    ElasticAverageOptimizer,
    ModelAverageCustomGetter,
    ModelAverageOptimizer,
    cluster,
)

v1 = tf.compat.v1
Images = NDArray[np.float32]
Labels = NDArray[np.int64]
GETTERS = {
    "elastic": ElasticAverageCustomGetter,
    "average": ModelAverageCustomGetter,
    "agn": AGNCustomGetter,
}
TESTS = 500  # images that nobody learns from
HIDDEN = 64
SAVED = "saved/center"  # in the run's directory


def digits() -> tuple[Images, Labels]:
    """1,797 images of 8×8 pixels from 0 to 1, and what they show; always in the same order."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.data[order] / 16).astype(np.float32), found.target[order].astype(np.int64)


def network(images: Any) -> Any:
    """Made with `get_variable`, so that a custom getter sees its variables."""
    before, out = images, images
    for layer, width in enumerate((HIDDEN, 10)):
        scale = v1.random_normal_initializer(stddev=float(before.shape[1]) ** -0.5, seed=layer)
        w = v1.get_variable(f"w{layer}", [before.shape[1], width], initializer=scale)
        b = v1.get_variable(f"b{layer}", [width], initializer=v1.zeros_initializer())
        out = tf.matmul(before, w) + b
        before = tf.nn.relu(out)
    return out


def wrap(args: argparse.Namespace, place: Cluster, getter: Any) -> tuple[Any, Any]:
    """Return the rule's optimizer and its hook."""
    sgd = v1.train.MomentumOptimizer(args.rate, 0.9)
    workers, period = place.num_worker, args.period
    if args.rule == "average":
        opt = ModelAverageOptimizer(sgd, workers, place.is_chief, getter, interval_steps=period)
        return opt, opt.make_session_run_hook()
    if args.rule == "agn":
        opt = AGNOptimizer(sgd, workers, getter, communication_period=period)
    else:
        opt = ElasticAverageOptimizer(
            sgd, workers, getter, period, moving_rate=0.9 / workers, rho=0.0
        )
    return opt, opt.make_session_run_hook(place.is_chief, place.task)


def train(args: argparse.Namespace, place: Cluster, folder: Path) -> None:
    """Train until all workers together have made their exchanges; the chief saves the center."""
    images, labels = (part[TESTS:][place.rank :: place.num_worker] for part in digits())
    getter = GETTERS[args.rule](place.device)
    with v1.device(place.setter):
        global_step = v1.train.get_or_create_global_step()  # counts exchanges
        x = v1.placeholder(tf.float32, [None, images.shape[1]])
        y = v1.placeholder(tf.int64, [None])
        with v1.variable_scope("", custom_getter=getter):
            logits = network(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(losses)
        opt, hook = wrap(args, place, getter)
        step = opt.minimize(loss, global_step)
    saver = opt.swapping_saver()
    # A round of averaging counts once for all workers.
    exchanges = args.steps // args.period * (1 if args.rule == "average" else place.num_worker)
    random = np.random.default_rng([args.seed, place.rank])
    with v1.train.MonitoredTrainingSession(
        master=place.target,
        is_chief=place.is_chief,
        checkpoint_dir=str(folder / "checkpoints"),
        hooks=[hook, v1.train.StopAtStepHook(last_step=max(1, exchanges))],
        config=place.config,
        save_checkpoint_secs=600,
        log_step_count_steps=None,
    ) as session:
        while not session.should_stop():
            rows = random.choice(len(images), args.batch)
            _, now = session.run([step, loss], {x: images[rows], y: labels[rows]})
            springline.log(loss=now)
        if place.is_chief:
            saver.save(session, str(folder / SAVED), write_meta_graph=False)


def evaluate(path: Path) -> float:
    """Restore a saved center in a plain graph; return how many of the test images are right."""
    images, labels = (part[:TESTS] for part in digits())
    with tf.Graph().as_default(), v1.Session() as session:
        guesses = tf.argmax(network(tf.constant(images)), 1)
        v1.train.Saver().restore(session, str(path))
        return float(np.mean(session.run(guesses) == labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--rule", choices=GETTERS, default="elastic")
    add("--steps", type=int, default=1000, help="of each worker")
    add("--period", type=int, default=10, help="τ, local steps between two exchanges")
    add("--batch", type=int, default=32, help="images in a step")
    add("--rate", type=float, default=0.05, help="the learning rate")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    place = cluster()  # a parameter server stays here
    folder = springline.directory() or Path(tempfile.mkdtemp())
    with tf.Graph().as_default():
        train(args, place, folder)
    if place.is_chief:
        right = evaluate(folder / SAVED)
        springline.report(f"Accuracy of the center under {args.rule}: {right:.2%}")


if __name__ == "__main__":
    main()
