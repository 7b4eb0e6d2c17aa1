"""A complete script of TensorFlow 1: a CNN on hosts that are given as flags.

    HOSTS="--ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224"
    python examples/tensorflow_cnn.py $HOSTS --job_name=ps --task_index=0 &
    python examples/tensorflow_cnn.py $HOSTS --job_name=worker --task_index=1 &
    python examples/tensorflow_cnn.py $HOSTS --job_name=worker --task_index=0

Layers with batch normalization and its UPDATE_OPS, `tf.data`, a schedule on the global step,
clipped gradients, `MonitoredTrainingSession`. Beside TensorFlow's own rename (`compat.v1`,
`disable_eager_execution`) two things are not as they were: where the optimizers are imported from,
and `TF_USE_LEGACY_KERAS`, which gives `tf.layers` back. That needs tf_keras; beside tensorflow-cpu
it is `pip install --no-deps tf_keras==2.21.0`.

A server stays until it is killed. TensorFlow's servers listen on all interfaces.
"""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

from springline.tensorflow import (
    AGNCustomGetter,
    AGNOptimizer,
    ElasticAverageCustomGetter,
    ElasticAverageOptimizer,
    ModelAverageCustomGetter,
    ModelAverageOptimizer,
)

tf.disable_eager_execution()
flags = tf.flags
flags.DEFINE_string("ps_hosts", "localhost:2222", "comma-separated addresses of the servers")
flags.DEFINE_string("worker_hosts", "localhost:2223", "comma-separated addresses of the workers")
flags.DEFINE_enum("job_name", None, ["ps", "worker"], "of this process")
flags.DEFINE_integer("task_index", 0, "of this process in its job")
flags.DEFINE_enum("rule", "elastic", ["elastic", "average", "agn"], "what workers do together")
flags.DEFINE_integer("period", 5, "local steps between two exchanges")
flags.DEFINE_integer("last_step", 120, "exchanges of all workers together; rounds of averaging")
flags.DEFINE_string("train_dir", "cnn", "where the chief saves")
flags.mark_flag_as_required("job_name")
FLAGS = flags.FLAGS
GETTERS = {
    "elastic": ElasticAverageCustomGetter,
    "average": ModelAverageCustomGetter,
    "agn": AGNCustomGetter,
}
TESTS = 500  # images that nobody learns from


def digits() -> tuple[Any, Any]:
    """1,797 images of 8×8 pixels from 0 to 1, and what they show; always in the same order."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order, :, :, None] / 16).astype(np.float32)
    return images, found.target[order].astype(np.int64)


def batches(workers: int) -> Any:
    """This worker's part of the images, for ever."""
    images, labels = (part[TESTS:] for part in digits())
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shard(workers, FLAGS.task_index)
    data = data.shuffle(1000, seed=FLAGS.task_index).repeat().batch(32)
    return tf.data.make_one_shot_iterator(data).get_next()


def network(images: Any, training: bool) -> Any:
    out = images
    for layer, filters in enumerate((16, 32)):
        out = tf.layers.conv2d(out, filters, 3, padding="same", use_bias=False, name=f"conv{layer}")
        out = tf.layers.batch_normalization(out, momentum=0.9, training=training, name=f"bn{layer}")
        out = tf.layers.max_pooling2d(tf.nn.relu(out), 2, 2)
    return tf.layers.dense(tf.layers.flatten(out), 10, name="logits")


def wrap(opt: Any, workers: int, getter: Any) -> tuple[Any, Any]:
    """Return the rule's optimizer and its hook."""
    is_chief, task = FLAGS.task_index == 0, FLAGS.task_index
    if FLAGS.rule == "average":
        average = ModelAverageOptimizer(opt, workers, is_chief, getter, FLAGS.period)
        return average, average.make_session_run_hook()
    if FLAGS.rule == "agn":
        agn = AGNOptimizer(opt, workers, getter, FLAGS.period)
        return agn, agn.make_session_run_hook(is_chief, task)
    elastic = ElasticAverageOptimizer(
        opt, workers, getter, FLAGS.period, moving_rate=0.9 / workers, rho=0.0
    )
    return elastic, elastic.make_session_run_hook(is_chief, task)


def train(cluster: Any, server: Any) -> None:
    workers, is_chief = cluster.num_tasks("worker"), FLAGS.task_index == 0
    device = f"/job:worker/task:{FLAGS.task_index}"
    getter = GETTERS[FLAGS.rule](device)
    with tf.device(tf.train.replica_device_setter(worker_device=device, cluster=cluster)):
        global_step = tf.train.get_or_create_global_step()  # counts exchanges
        images, labels = batches(workers)
        with tf.variable_scope("cnn", custom_getter=getter):
            logits = network(images, training=True)
        loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
        rate = tf.train.exponential_decay(0.05, global_step, 20, 0.9, staircase=True)
        opt, hook = wrap(tf.train.MomentumOptimizer(rate, 0.9), workers, getter)
        gradients, variables = zip(*opt.compute_gradients(loss), strict=True)
        gradients, _ = tf.clip_by_global_norm(gradients, 5.0)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = opt.apply_gradients(
                list(zip(gradients, variables, strict=True)), global_step=global_step
            )
    moving = [v for v in tf.global_variables() if "moving_" in v.name]
    saver = opt.swapping_saver(tf.trainable_variables() + moving)
    with tf.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=is_chief,
        checkpoint_dir=FLAGS.train_dir,
        hooks=[hook, tf.train.StopAtStepHook(last_step=FLAGS.last_step)],
        config=tf.ConfigProto(device_filters=["/job:ps", device]),
        log_step_count_steps=None,  # it would warn that no exchange is made in most steps
    ) as session:
        steps = 0
        while not session.should_stop():
            _, now = session.run([train_op, loss])
            steps += 1
        print(f"Worker {FLAGS.task_index}: {steps} steps, loss {now:.3f}", flush=True)
        if is_chief:
            saver.save(session, f"{FLAGS.train_dir}/center", write_meta_graph=False)


def evaluate(path: str) -> float:
    """Restore the saved center in a plain graph; return how many of the test images are right."""
    images, labels = (part[:TESTS] for part in digits())
    with tf.Graph().as_default(), tf.Session() as session:
        with tf.variable_scope("cnn"):
            guesses = tf.argmax(network(tf.constant(images), training=False), 1)
        tf.train.Saver().restore(session, path)
        return float(np.mean(session.run(guesses) == labels))


def main(_: list[str]) -> None:
    jobs = {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
    cluster = tf.train.ClusterSpec(jobs)
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
    train(cluster, server)
    if FLAGS.task_index == 0:
        right = evaluate(f"{FLAGS.train_dir}/center")
        print(f"Accuracy of the center under {FLAGS.rule}: {right:.2%}", flush=True)


if __name__ == "__main__":
    tf.app.run(main)
