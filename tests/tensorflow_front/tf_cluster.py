"""Clusters for the tests: real gRPC servers in this process, on a network of its own."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import tensorflow as tf

from springline.tensorflow import (
    AGNCustomGetter,
    AGNOptimizer,
    ElasticAverageCustomGetter,
    ElasticAverageOptimizer,
    ModelAverageCustomGetter,
    ModelAverageOptimizer,
)

v1 = tf.compat.v1
THREADS = 16  # the first remote call blocks one while its server, here, needs another
GETTERS = {
    "elastic": ElasticAverageCustomGetter,
    "average": ModelAverageCustomGetter,
    "agn": AGNCustomGetter,
}
PERIODS = {
    "elastic": "communication_period",
    "average": "interval_steps",
    "agn": "communication_period",
}
INNERS = {
    "sgd": v1.train.GradientDescentOptimizer,
    "momentum": lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
    "adagrad": v1.train.AdagradOptimizer,
    "adam": v1.train.AdamOptimizer,
}


def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Servers:
    """A cluster of so many servers and workers, all in this process, with nothing on them.

    TensorFlow cannot stop a server, and each has some 85 threads: those of an earlier test serve
    again, emptied. So a test has only one cluster of a size at a time.
    """

    running: ClassVar = {}  # by size

    def __init__(self, ps, workers):
        size = ps, workers
        if size not in self.running:
            self.running[size] = self._started(ps, workers)
        self.spec, self.servers = self.running[size]
        for k in range(workers):
            v1.Session.reset(self.servers["worker", k].target)

    @staticmethod
    def _started(ps, workers):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(ps + workers)]
        spec = tf.train.ClusterSpec({"ps": addresses[:ps], "worker": addresses[ps:]})
        tasks = [("ps", k) for k in range(ps)] + [("worker", k) for k in range(workers)]
        config = v1.ConfigProto(inter_op_parallelism_threads=THREADS)
        return spec, {
            (job, k): tf.distribute.Server(spec, job_name=job, task_index=k, config=config)
            for job, k in tasks
        }

    def session(self, worker, graph):
        filters = ["/job:ps", f"/job:worker/task:{worker}"]
        config = v1.ConfigProto(device_filters=filters)
        return v1.Session(self.servers["worker", worker].target, graph=graph, config=config)


def wrap(rule, opt, workers, getter, worker=0, **options):
    """The optimizer of a rule."""
    if rule == "average":
        return ModelAverageOptimizer(opt, workers, worker == 0, getter, **options)
    kind = {"elastic": ElasticAverageOptimizer, "agn": AGNOptimizer}[rule]
    return kind(opt, workers, getter, **options)


def hook_of(rule, opt, worker=0):
    if rule == "average":
        return opt.make_session_run_hook()
    return opt.make_session_run_hook(worker == 0, worker)


class Model:
    """A worker's graph: `build` makes the variables and returns the loss, or (gradient, variable)s.

    Args:
        servers: the cluster, or None for a plain local session.
        hook: whether the hook exchanges, or the operation alone.
        scope: makes the scope that the optimizer and its train operation are made in.
    """

    def __init__(
        self,
        servers,
        rule,
        worker,
        workers,
        inner,
        build,
        hook=False,
        resource=True,
        scope=contextlib.nullcontext,
        **options,
    ):
        self.worker, self.hooked = worker, hook
        self.graph = tf.Graph()
        device = f"/job:worker/task:{worker}" if servers else ""
        setter = ""
        if servers:
            setter = v1.train.replica_device_setter(
                worker_device=device, ps_device="/job:ps", cluster=servers.spec
            )
        with self.graph.as_default():
            v1.set_random_seed(worker)
            self.getter = GETTERS[rule](device)
            with v1.device(setter):
                self.global_step = v1.get_variable(
                    "global_step",
                    [],
                    tf.int64,
                    v1.zeros_initializer(),
                    trainable=False,
                    use_resource=resource,
                    collections=[v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.GLOBAL_STEP],
                )
                with v1.variable_scope("", custom_getter=self.getter, use_resource=resource):
                    made = build(self)
                with scope():
                    self.opt = wrap(rule, inner(), workers, self.getter, worker, **options)
                    if callable(made) or isinstance(made, tf.Tensor):
                        self.train = self.opt.minimize(made, self.global_step)
                    else:
                        self.train = self.opt.apply_gradients(made, self.global_step)
            self.hook = hook_of(rule, self.opt, worker) if hook else None
            self.init = None
            if not hook:
                self.init = (
                    self.opt.get_init_op() if rule == "average" else self.opt.get_init_op(worker)
                )
            self.trios = self.getter.trios()
            self.globals, self.locals = (
                v1.global_variables_initializer(),
                v1.local_variables_initializer(),
            )
        self.servers = servers
        self.session = None

    def start(self):
        """Open a session; worker 0 makes the center."""
        if self.hook:
            with self.graph.as_default():
                self.session = v1.train.MonitoredTrainingSession(
                    self.servers.servers["worker", self.worker].target,
                    is_chief=self.worker == 0,
                    hooks=[self.hook],
                    config=v1.ConfigProto(
                        device_filters=["/job:ps", f"/job:worker/task:{self.worker}"]
                    ),
                    save_checkpoint_secs=None,
                    save_summaries_steps=None,
                    save_summaries_secs=None,
                    log_step_count_steps=None,
                )
            return
        self.session = (
            self.servers.session(self.worker, self.graph)
            if self.servers
            else v1.Session(graph=self.graph)
        )
        if self.worker == 0:
            self.session.run(self.globals)
        self.session.run(self.locals)
        self.session.run(self.init)

    def step(self, feed=None):
        self.session.run(self.train, feed)

    def values(self):
        """What there is now: local, center, global_step."""
        raw = self.session
        if hasattr(raw, "run_step_fn"):
            raw = raw.run_step_fn(lambda step_context: step_context.session)
        local = {t.local.op.name: t.local for t in self.trios}
        center = {t.local.op.name: t.center for t in self.trios}
        return raw.run({"local": local, "center": center, "global_step": self.global_step})


@contextlib.contextmanager
def held(servers, shared_name, device):
    """Have the lock of this name on a server, so that whoever wants it waits."""
    has, let_go = threading.Event(), threading.Event()

    def wait():
        has.set()
        let_go.wait()
        return np.int32(0)

    with tf.Graph().as_default() as graph, v1.device(device):
        section = tf.CriticalSection(shared_name=shared_name)
        run = section.execute(lambda: tf.numpy_function(wait, [], tf.int32))
    with servers.session(0, graph) as session, ThreadPoolExecutor(1) as pool:
        holding = pool.submit(session.run, run)
        try:
            assert has.wait(30)
            yield
        finally:
            let_go.set()
            holding.result()


def together(models, feeds):
    """Let several workers step at the same time."""
    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(lambda pair: pair[0].step(pair[1]), zip(models, feeds, strict=True)))


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
