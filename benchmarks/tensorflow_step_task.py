"""One task of the TensorFlow benchmark's cluster; prints its times as JSON.

`TF_CONFIG` says which task; the arguments are the model's variables, their size, and the rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from springline.tensorflow import (
    Cluster,
    ElasticAverageCustomGetter,
    ElasticAverageOptimizer,
    cluster,
)

v1 = tf.compat.v1
QUIET = {
    "save_checkpoint_secs": None,
    "save_summaries_steps": None,
    "save_summaries_secs": None,
    "log_step_count_steps": None,
}


def measure(here: Cluster, variables: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Time everything, one after the other, in every round."""
    runs = {
        **_raw(here, variables, size),
        **_bare(here, variables, size),
        **_ours(here, variables, size),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds + 3):  # the first ones fault pages in
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if n >= 3:
                times[name].append(time.perf_counter() - start)
    return times


def _raw(here: Cluster, variables: int, size: int) -> dict[str, Callable[[], Any]]:
    """A pull and a push of as many bytes, by TensorFlow itself."""
    graph = tf.Graph()
    with graph.as_default():
        with v1.device("/job:ps/task:0"):
            remote = [_variable(f"raw_{here.task}/c{i}", size) for i in range(variables)]
        with v1.device(here.device):
            local = [_variable(f"raw/x{i}", size) for i in range(variables)]
            pull = tf.group(*(x.assign(c) for x, c in zip(local, remote, strict=True)))
            values = [x.read_value() for x in local]
        with v1.device("/job:ps/task:0"):
            push = tf.group(*(c.assign_add(v) for c, v in zip(remote, values, strict=True)))
        session = v1.Session(here.target, config=here.config)
        session.run(v1.global_variables_initializer())
    return {"raw pull": lambda: session.run(pull), "raw push": lambda: session.run(push)}


def _bare(here: Cluster, variables: int, size: int) -> dict[str, Callable[[], Any]]:
    """The optimizer that is wrapped, by itself."""
    graph = tf.Graph()
    with graph.as_default(), v1.device(here.device):
        model = [_variable(f"bare/x{i}", size, True) for i in range(variables)]
        gradients = [_variable(f"bare/g{i}", size) for i in range(variables)]
        pairs = [(g.read_value(), x) for g, x in zip(gradients, model, strict=True)]
        step = v1.train.GradientDescentOptimizer(1e-3).apply_gradients(pairs)
        v1.add_to_collection(v1.GraphKeys.READY_OP, tf.zeros([0], tf.string))
        init = v1.global_variables_initializer()
        plain = v1.Session(here.target, config=here.config)
        plain.run(init)
        creator = v1.train.ChiefSessionCreator(
            v1.train.Scaffold(init_op=tf.no_op()), here.target, here.config
        )
        monitored = v1.train.MonitoredSession(creator)
    return {"bare": lambda: monitored.run(step), "bare, plain": lambda: plain.run(step)}


def _ours(here: Cluster, variables: int, size: int) -> dict[str, Callable[[], Any]]:
    """Elastic averaging with τ = 2: a step that does not exchange, and one that does."""
    graph = tf.Graph()
    with graph.as_default():
        getter = ElasticAverageCustomGetter(here.device)
        with v1.device(here.setter):
            global_step = v1.train.get_or_create_global_step()
            with v1.variable_scope("", custom_getter=getter):
                model = [
                    v1.get_variable(f"x{i}", [size], initializer=v1.zeros_initializer())
                    for i in range(variables)
                ]
        with v1.device(here.device):
            key = v1.GraphKeys.LOCAL_VARIABLES
            gradients = [_variable(f"g{i}", size, collections=[key]) for i in range(variables)]
            pairs = [(g.read_value(), x) for g, x in zip(gradients, model, strict=True)]
            opt = ElasticAverageOptimizer(
                v1.train.GradientDescentOptimizer(1e-3),
                here.num_worker,
                getter,
                communication_period=2,
                rho=0.0,
            )
            step = opt.apply_gradients(pairs, global_step)
        hook = opt.make_session_run_hook(here.is_chief, here.task)
        session = v1.train.MonitoredTrainingSession(
            here.target, here.is_chief, hooks=[hook], config=here.config, **QUIET
        )
        plain = session.run_step_fn(lambda step_context: step_context.session)
    return {
        "local": lambda: session.run(step),
        "exchanging": lambda: session.run(step),
        "local, plain": lambda: plain.run(step),
        "exchanging, plain": lambda: plain.run(step),
    }


def _variable(name: str, size: int, trainable: bool = False, **options: Any) -> Any:
    return v1.get_variable(
        name, [size], initializer=v1.zeros_initializer(), trainable=trainable, **options
    )


def main() -> None:
    """Be a task."""
    print(json.dumps(measure(cluster(), *map(int, sys.argv[1:4]))), flush=True)
    os._exit(0)  # nobody waits for this server to end


if __name__ == "__main__":
    main()
