"""Workers in eager mode, for the tests: several of one run in this process."""

import pytest
import tensorflow as tf
from tf_cluster import close

v1 = tf.compat.v1
RUN = ("SPRINGLINE_RUN", "SPRINGLINE_RANK", "SPRINGLINE_WORKERS", "TORCHELASTIC_RUN_ID")
MODES = pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
sgd = v1.train.GradientDescentOptimizer
# Several workers in one process wait for each other inside functions; by default there are as many
# threads for that as cores.
tf.config.threading.set_inter_op_parallelism_threads(8)


class Trainer:
    """A worker: `loss(variables, *inputs)`, or a constant gradient if there is none."""

    def __init__(self, opt, first, loss=None, *, given=-1.0, function=False):
        self.opt, self.loss, self.given = opt, loss, given
        self.variables = {name: tf.Variable(value, name=name) for name, value in first.items()}
        self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._step = tf.function(self._plain) if function else self._plain

    def _plain(self, *inputs):
        if self.loss:
            return self.opt.minimize(lambda: self.loss(self.variables, *inputs), self.global_step)
        pairs = [(tf.fill(v.shape, self.given), v) for v in self.variables.values()]
        return self.opt.apply_gradients(pairs, self.global_step)

    def join(self):
        """Join the center, without a step."""
        variables = list(self.variables.values())
        self.opt.compute_gradients(lambda: tf.add_n(list(map(tf.reduce_sum, variables))), variables)

    def step(self, *inputs):
        return bool(self._step(*map(tf.constant, inputs)))

    @property
    def worker(self):
        return self.opt._eager.worker

    def x(self):
        return {name: v.numpy() for name, v in self.variables.items()}

    def c(self):
        return dict(self.worker.center.values())


def check(trainer, x, c=None, global_step=None):
    close(list(trainer.x().values()), x)
    if c is not None:
        close(list(trainer.c().values()), c)
    if global_step is not None:
        assert trainer.global_step.numpy() == global_step


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in RUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def team(monkeypatch, directory):
    """`team(n, make)` returns what `make(rank)` makes as each of n workers of one run."""
    made = []

    def team(workers, make):
        monkeypatch.setenv("SPRINGLINE_RUN", str(directory))
        monkeypatch.setenv("SPRINGLINE_WORKERS", str(workers))
        for rank in range(workers):
            monkeypatch.setenv("SPRINGLINE_RANK", str(rank))
            made.append(make(rank))
        return made[-workers:]

    yield team
    for trainer in made:
        worker = trainer.opt._eager._worker
        if worker is not None:  # as after an error: leave without an exchange
            worker.finished = True
            worker.member.leave()
