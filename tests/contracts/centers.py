"""The kinds of center that the contract is tested on. A new kind is a class and a row of KINDS.

A test names what it needs (`on`, `each`) and runs on every kind that declares it.
"""

import sys
import time
from functools import partial
from multiprocessing import parent_process

import numpy as np
import pytest
import ray

from own_rules import Ahead, Decaying, EveryFourth, MeanOfPseudoGradients, Pushes, Stale
from ray_cluster import end_center
from remote import Service, contributing
from springline import (
    AGN,
    AsyncDiLoCo,
    DiLoCo,
    ElasticAverage,
    LocalCenter,
    ModelAverage,
    SharedCenter,
    Worker,
)
from springline.center import Layout
from springline.center.center import check_plan
from springline.center.plan import CLOSED, CONTRIBUTED, Plan
from springline.center.ray import RayCenter
from springline.center.remote.center import RemoteCenter
from springline.rules import SGD, Adagrad, Adam, Momentum, Nesterov

PATIENCE = 120.0  # seconds: on a busy machine Ray takes a while to start an actor
RULES = {
    "elastic": lambda **k: ElasticAverage(**({"moving_rate": 0.25} | k)),
    "average": ModelAverage,
    "agn-sgd": lambda **k: AGN(outer=SGD(0.5), **k),
    "agn-momentum": lambda **k: AGN(outer=Momentum(0.5), **k),
    "agn-adagrad": lambda **k: AGN(outer=Adagrad(0.5), **k),
    "agn-adam": lambda **k: AGN(outer=Adam(0.5), **k),
    "diloco": DiLoCo,
    "async_diloco": lambda **k: AsyncDiLoCo(staleness="inverse", **k),
    **{
        f"{rule.__name__}-{outer.kind}": partial(rule, outer=outer)
        for rule, outers in (
            (MeanOfPseudoGradients, (SGD(0.5), Nesterov(0.5, 0.5), Adam(0.1), Ahead(), Decaying())),
            (
                Pushes,
                (SGD(0.5), Momentum(0.5, 0.5), Adagrad(0.5), EveryFourth(), Ahead(), Decaying()),
            ),
            (Stale, (SGD(0.5),)),
        )
        for outer in outers
    },
}
LOCK_FREE = "elastic", "average", "agn-sgd", "Pushes-sgd"
IN_ROUNDS = tuple(name for name, rule in RULES.items() if rule().rounds or name == "elastic")


class Place:
    """Where one center is: the first `make` makes it, every later one joins it.

    Attributes:
        center: its class.
        asynchronous: whether exchanges without rounds are possible.
        synchronous: whether rounds are.
        by_path: whether any process can open it by its path.
        joinable: whether workers may come and go while others train.
        steps_here: whether steps run in the process of the worker.
    """

    center: type
    asynchronous = True
    synchronous = True
    by_path = False
    joinable = True
    steps_here = True

    def __init__(self, path):
        self.path = path
        self.opened = []

    def make(self, layout, rule, values, use_locking=True, restore=None):
        raise NotImplementedError

    @staticmethod
    def takes(rule):
        """Whether it can be made with a rule."""
        return True

    @staticmethod
    def open(path):
        """For kinds with `by_path`: open the center from any process."""
        raise NotImplementedError

    def waits(self, rank):
        """Whether this rank has contributed to a round that is still open."""
        raise NotImplementedError

    def worker(self, parameters, rule, rank=0, *, buffers=None, **options):
        """A worker as a front end makes it; it waits for nobody before its first step."""
        making = {k: options.pop(k) for k in ("use_locking", "restore") if k in options}
        values = {**parameters, **(buffers or {})}
        layout = Layout.of(parameters, buffers, rule.fragments)
        center = self.make(layout, rule, values, **making)
        options = {"synchronous": False, "timeout": 30} | options
        return Worker(parameters, rule, center, rank, buffers=buffers, **options)

    def workers(self, parameters, rule, **options):
        """All workers that the rule is configured for."""
        return [self.worker(parameters, rule, rank, **options) for rank in range(rule.workers)]

    def end(self):
        """Let go of what is left when all centers are closed."""

    def other(self):
        """Another place of the same kind."""
        place = type(self)(self.path.with_name(f"{self.path.name}-other"))
        place.opened = self.opened
        return place


class InMemory(Place):
    """Centers in memory that this process can look at."""

    def waits(self, rank):
        memory = self.opened[-1].memory
        return memory.ranks[rank, CONTRIBUTED] == memory.head[CLOSED] + 1


class Local(InMemory):
    center = LocalCenter

    def __init__(self, path):
        super().__init__(path)
        self.made = None

    def make(self, layout, rule, values, use_locking=True, restore=None):
        if self.made is None:
            self.made = LocalCenter(layout, rule, values, use_locking=use_locking, restore=restore)
            self.opened.append(self.made)
        return self.made


class Remote(Place):
    center = RemoteCenter
    steps_here = False

    def __init__(self, path):
        super().__init__(path)
        self.service = None
        self.others = []

    def make(self, layout, rule, values, use_locking=True, restore=None):
        if self.service is None:
            self.service = Service(layout, rule, values, use_locking, restore)
        center = self.service.open()
        check_plan(center.plan, Plan.of(layout, rule, use_locking))
        self.opened.append(center)
        return center

    def waits(self, rank):
        return rank in contributing(self.service)

    def other(self):
        self.others.append(super().other())
        return self.others[-1]

    def end(self):
        for place in (self, *self.others):
            if place.service:
                place.service.close()


class Shared(InMemory):
    center = SharedCenter
    by_path = True

    def make(self, layout, rule, values, use_locking=True, restore=None):
        options = {"use_locking": use_locking, "restore": restore}
        self.opened.append(SharedCenter.create_or_join(self.path, layout, rule, values, **options))
        return self.opened[-1]

    @staticmethod
    def open(path):
        return SharedCenter.open(path)


class OnRay(Place):
    """A real Ray cluster; making a center there takes a second or two."""

    center = RayCenter
    by_path = True
    steps_here = False

    def __init__(self, path):
        super().__init__(path)
        self.name = f"{path.parent.name}-{path.name}"
        self.others = []

    def make(self, layout, rule, values, use_locking=True, restore=None):
        for module in {type(rule).__module__, type(rule.outer).__module__}:
            if not module.startswith("springline"):  # the actors cannot import a test
                ray.cloudpickle.register_pickle_by_value(sys.modules[module])
        options = {"use_locking": use_locking, "restore": restore, "shards": 2, "token": self.name}
        center = RayCenter.create_or_join(self.name, layout, rule, values, **options)
        self.opened.append(center)
        return center

    @staticmethod
    def open(path):
        name = f"{path.parent.name}-{path.name}"
        return RayCenter.open(name, token=name)

    def waits(self, rank):
        members = (m for center in self.opened for m in center._members if m.rank == rank)
        return isinstance(next(members).ask_as_member("begin", 0.0), list)  # for whom it waits

    def other(self):
        self.others.append(super().other())
        return self.others[-1]

    def end(self):
        for place in (self, *self.others):
            end_center(place.name)


KINDS = {
    "local": Local,
    "shared": Shared,
    "remote": Remote,
    "ray": OnRay,
}
if parent_process() is None:  # a process that a test starts does without torch
    from grouped import Grouped

    KINDS["collective"] = Grouped
SLOW = {"ray"}  # the others, and `tests/center`, are enough for every day


def _marked(kind, *values):
    return pytest.param(kind, *values, marks=[pytest.mark.slow] if kind in SLOW else [])


def on(*declared, fixed=False):
    """Run a test on every kind that declares all of these.

    `fixed`: also where workers cannot come and go. Such a test makes all of them at once.
    """
    needed = declared if fixed else (*declared, "joinable")

    def has(place, name):
        return getattr(place if hasattr(place, name) else place.center, name)

    kinds = [kind for kind, place in KINDS.items() if all(has(place, name) for name in needed)]
    return pytest.mark.parametrize("place", [_marked(kind) for kind in kinds], indirect=True)


def each(*names, fixed=()):
    """Run a test on every kind with each of these rules (all without any) that it takes.

    `fixed`: the rules with which it also runs where workers cannot come and go.
    """
    cases = [
        _marked(kind, name)
        for kind, place in KINDS.items()
        for name in names or RULES
        if place.takes(RULES[name]()) and (place.joinable or name in fixed)
    ]
    return pytest.mark.parametrize(("place", "name"), cases, indirect=["place"])


def model(**values):
    """Small float32 parameters."""
    return {name: np.array(value, np.float32) for name, value in values.items()}


def exchange_all(workers, together):
    """One exchange of every worker: at once in rounds, else in turn."""
    if workers[0].in_rounds:
        together(*[worker.exchange for worker in workers])
    else:
        for worker in workers:
            worker.exchange()


def wait_for(condition, seconds=PATIENCE):
    """Poll a condition that will come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
