"""What the tasks of test_tf_processes.py run: `w` and `v` are to become `BEST`.

Worker k sees number k of each alone, and only the center of all workers can have all three right.
The metrics tell the test how far each worker is: a line at the start of a session with the center
as it was found, then one per step.
"""

import argparse
import os
import signal
import time

import tensorflow as tf

import springline
from springline.tensorflow import (
    AGNCustomGetter,
    AGNOptimizer,
    ElasticAverageCustomGetter,
    ElasticAverageOptimizer,
    ModelAverageCustomGetter,
    ModelAverageOptimizer,
    cluster,
)

v1 = tf.compat.v1
BEST = [1.0, -2.0, 3.0]
GETTERS = {
    "elastic": ElasticAverageCustomGetter,
    "average": ModelAverageCustomGetter,
    "agn": AGNCustomGetter,
}


def wrap(args, sgd, place, getter):
    n, period = place.num_worker, args.period
    if args.rule == "average":
        opt = ModelAverageOptimizer(
            sgd, n, place.is_chief, getter, interval_steps=period, timeout=args.timeout
        )
        return opt, opt.make_session_run_hook()
    if args.rule == "agn":
        opt = AGNOptimizer(sgd, n, getter, communication_period=period)
    else:
        opt = ElasticAverageOptimizer(
            sgd,
            n,
            getter,
            communication_period=period,
            moving_rate=0.3,
            rho=0.0,
            synchronous=args.synchronous,
        )
    return opt, opt.make_session_run_hook(place.is_chief, place.task)


class Found(v1.train.SessionRunHook):
    """Tells what a new session finds, before any hook after this one."""

    def __init__(self, step, center):
        self._see = {"found_step": step, "found_center": center}

    def after_create_session(self, session, coord):
        seen = session.run(self._see)
        springline.log(found_step=seen["found_step"], found_center=seen["found_center"][0])


def train(args, place):
    getter = GETTERS[args.rule](place.device)
    with v1.device(place.setter):
        global_step = v1.train.get_or_create_global_step()
        with v1.variable_scope("", custom_getter=getter):
            both = [v1.get_variable(name, [3], initializer=v1.zeros_initializer()) for name in "wv"]
        loss = sum((x[place.task] - BEST[place.task]) ** 2 for x in both)
        opt, hook = wrap(args, v1.train.GradientDescentOptimizer(0.2), place, getter)
        step = opt.minimize(loss, global_step)
    centers = [v for v in v1.global_variables() if "center" in v.name]
    hooks = [Found(global_step, centers[0]), hook]
    if args.last_step:
        hooks.append(v1.train.StopAtStepHook(last_step=args.last_step))
    with v1.train.MonitoredTrainingSession(
        place.target,
        place.is_chief,
        str(args.run / "checkpoints"),
        hooks=hooks,
        config=place.config,
        save_checkpoint_steps=args.save_every,
        save_checkpoint_secs=None,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
    ) as session:
        for _ in springline.steps(10**6):
            _, count = session.run([step, global_step])
            springline.log(global_step=count)
            if place.task == 1 and count >= args.dies_at and not (args.run / "died").exists():
                (args.run / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            ends = place.task == place.num_worker - 1 and count >= args.ends_at
            if ends or session.should_stop():
                break
            time.sleep(args.pause)


def main():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("rule", choices=GETTERS)
    add("--period", type=int, default=2)
    add("--last-step", type=int, help="without it until RUN/stop")
    add("--pause", type=float, default=0.02, help="after each step: others have to start meanwhile")
    add("--save-every", type=int, default=1_000_000, help="global steps from save to save")
    add("--synchronous", action="store_true")
    add("--timeout", type=float)
    add("--ps-timeout", type=float, default=60.0)
    add("--last-waits", action="store_true", help="the last worker waits for RUN/come")
    add("--last-leaves", action="store_true", help="the last worker does nothing")
    add("--dies-at", type=float, default=float("inf"), help="worker 1 once, at this global step")
    add("--ends-at", type=float, default=float("inf"), help="the last worker, at this global step")
    args = parser.parse_args()
    args.run = springline.directory()
    place = cluster(ps_timeout=args.ps_timeout)
    if place.task == place.num_worker - 1:
        while args.last_waits and not (args.run / "come").exists():
            time.sleep(0.02)
        springline.log(came=1)
        if args.last_leaves:
            return
    with tf.Graph().as_default():
        train(args, place)


if __name__ == "__main__":
    main()
