"""DiLoCo under kills: the center and its outer state are a replay of what counted, to the bit.

In rounds each worker writes down what it contributes, before it does, and who was in the round,
after it. Without rounds the order of pushes may differ from block to block, so all push the same.
"""

import os
import struct
import time

import invariants
import numpy as np
from invariants import SHAPES, WORKERS

from springline.center.layout import BLOCK
from springline.center.plan import CLOSED, MEMBER_OF
from springline.rules import Adam, AsyncDiLoCo, DiLoCo, Nesterov
from springline.rules.outer import Exchange, Point

PATIENCE = 20.0  # seconds until the log has a round that was closed
_CONTRIBUTED = struct.Struct(f"qq{len(SHAPES)}d")  # the round, the rank, one number per parameter
_CLOSED = struct.Struct(f"q{WORKERS}q")  # the round, who was in it
_KINDS = {"contributed": _CONTRIBUTED, "closed": _CLOSED}


class Log:
    """Lines that outlive their writers: one `write` each, which a kill does not tear."""

    def __init__(self, home):
        self._home = home
        self._read = dict.fromkeys(_KINDS, 0)

    def append(self, kind, *values):
        path = self._home / kind
        file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(file, _KINDS[kind].pack(*values))
        os.close(file)

    def new(self, kind):
        """Yield what has come since the last call."""
        with (self._home / kind).open("rb") as file:
            file.seek(self._read[kind])
            found = file.read()
        self._read[kind] += len(found)
        return list(_KINDS[kind].iter_unpack(found))


class Replay:
    """What an outer optimizer makes of one number per parameter, block after block the same."""

    def __init__(self, outer, first):
        self._outer = outer
        self.points = {
            name: Point(
                np.full(1, first, dtype),
                {k: np.full(1, v, dtype) for k, (_, v) in outer.state(name, (1,)).items()},
            )
            for name, (_, dtype) in SHAPES.items()
        }

    def step(self, name, g, number):
        c, state = self.points[name]
        then = Point(np.empty_like(c), {k: np.empty_like(v) for k, v in state.items()})
        rate = self._outer.rate(name, number)
        self._outer.step(Point(c, state), g, Exchange(number, rate=rate, name=name), then)
        self.points[name] = then


class InRounds:
    """Every worker brings numbers that no other brings, and that no other round has."""

    first = 3.0

    def __init__(self, locking):
        assert locking, "an outer optimizer with state needs locks"
        self.log = None
        self.contributed = {}  # by round and rank; the last counts, of a rank that was restarted
        self.members = {}  # by round
        self.history = []  # by round, the center after it: parameter by parameter

    def before(self, worker):
        if self.log is None:
            self.log = Log(worker.center.directory.parent)
            self._write_down(worker)
            self.random = np.random.default_rng(os.getpid())
        for x in worker.parameters.values():
            np.subtract(x, self.random.uniform(-1, 2), out=x)

    def _write_down(self, worker):
        """Let every exchange of a worker, the last ones too, be in the log."""
        exchange, memory = worker.member.exchange, worker.center.memory
        base = worker.layout.views(worker.local.base)

        def logged(local):
            gone = (base[n].flat[0] - x.flat[0] for n, x in worker.parameters.items())
            self.log.append("contributed", worker.member.number, worker.rank, *map(float, gone))
            done = exchange(local)
            if done:  # no round closes without us, so that this is still ours
                closed = int(memory.head[CLOSED])
                inside = memory.ranks[:, MEMBER_OF] == closed
                self.log.append("closed", closed - 1, *map(int, inside))
            return done

        worker.member.exchange = logged

    def after(self, worker):
        """The log has it all."""

    def check(self, seen):
        before, after = seen.versions
        self._replay(seen.home, after)
        for number, (name, c) in enumerate(seen.values.items()):
            oldest = max(0, before - 1) if seen.live else after
            allowed = self.history[oldest : after + 1, number].astype(c.dtype)
            wrong = ~np.isin(c, allowed)
            assert not wrong.any(), f"{c[wrong][:5]} in {name!r}, not {allowed}"
        if seen.live:
            return
        for name, state in seen.state.items():
            for key, array in state.items():
                right = self.replay.points[name].state[key]
                assert (array == right).all(), f"{key} of {name!r} is {array}, not {right}"

    def _replay(self, home, rounds):
        """Take the outer steps of all rounds so far."""
        if self.log is None:
            self.log = Log(home)
            self.replay = Replay(self.rule.outer, self.first)
            self.history = self._values()[None]
        end = time.monotonic() + PATIENCE
        while not all(r in self.members for r in range(len(self.history) - 1, rounds)):
            for number, *inside in self.log.new("closed"):
                assert self.members.setdefault(number, inside) == inside, f"two rounds {number}"
            assert time.monotonic() < end, f"rounds up to {max(self.members)}, but not {rounds}"
        for number, rank, *gone in self.log.new("contributed"):
            self.contributed[number, rank] = gone
        for number in range(len(self.history) - 1, rounds):
            ranks = np.flatnonzero(self.members[number])
            gone = [self.contributed[number, rank] for rank in ranks]
            for k, name in enumerate(SHAPES):
                if self.fragments[k] == number % self.rule.fragment_count:
                    self.replay.step(name, self._mean(name, [g[k] for g in gone]), number)
            self.history = np.vstack([self.history, self._values()])

    def _mean(self, name, gone):
        dtype = SHAPES[name][1]
        total = np.zeros(1, dtype)
        for g in gone:  # in rank order
            total = total + dtype(g)
        return total / len(gone)

    def _values(self):
        return np.array([float(self.replay.points[name].c[0]) for name in SHAPES])


class Nesterovs(InRounds):
    """DiLoCo as its paper has it."""

    rule = DiLoCo(period=1, workers=WORKERS, outer=Nesterov(0.7, 0.9))
    fragments = (0,) * len(SHAPES)


class Adams(InRounds):
    """A step count per block is part of the state."""

    rule = DiLoCo(period=1, workers=WORKERS, outer=Adam(0.1))
    fragments = (0,) * len(SHAPES)


class Fragments(InRounds):
    """One half in every other round."""

    rule = DiLoCo(
        period=2,
        workers=WORKERS,
        outer=Nesterov(0.7, 0.9),
        fragments=[["double", "own1"], ["all", "own0", "own2"]],
    )
    fragments = (0, 1, 1, 0, 1)


class Pushed:
    """All push 1, exactly: the center stays where floats are as far apart as those around it."""

    first = 1.5 * 2**19
    rule = AsyncDiLoCo(period=1, workers=WORKERS)

    def __init__(self, locking):
        assert locking, "an outer optimizer with state needs locks"
        self._replays = {}  # by dtype

    def before(self, worker):
        for x in worker.parameters.values():
            np.subtract(x, 1, out=x)

    def after(self, worker):
        """The center tells it all."""

    def check(self, seen):
        low, high = invariants.pushes(seen)
        for name, c in seen.values.items():
            dtype = SHAPES[name][1]
            after = np.array([p.c[0] for p in self._pushed(name, high)])
            assert (np.diff(after) < 0).all()
            number = len(after) - 1 - np.searchsorted(after[::-1], c)
            assert (after[number.clip(0, high)] == c).all(), f"{np.unique(c)} in {name!r}"
            assert number.min() >= low, f"{low} pushes, but {number.min()} in {name!r}"
            if not seen.live:
                self._check_state(name, number, seen.state[name], dtype)

    def _check_state(self, name, number, state, dtype):
        """It must be that of as many pushes as the center has, element by element."""
        number, points = number.ravel(), self._pushed(name, int(number.max()))
        first = number[:: BLOCK // np.dtype(dtype).itemsize]
        for key, array in state.items():
            right = np.array([p.state[key][0] for p in points])
            of = first if key == "pushes" else number
            assert (array.ravel() == right[of]).all(), f"{key} of {name!r}"

    def _pushed(self, name, pushes):
        """Return the points after 0, 1, 2, … pushes."""
        dtype = SHAPES[name][1]
        if dtype not in self._replays:
            replay = Replay(self.rule.outer, self.first)
            self._replays[dtype] = replay, [replay.points[name]], name
        replay, points, of = self._replays[dtype]
        while len(points) <= pushes:
            replay.step(of, np.ones(1, dtype), len(points) - 1)
            points.append(replay.points[of])
        return points[: pushes + 1]


SUBJECTS = invariants.SUBJECTS | {
    "diloco, nesterov": Nesterovs,
    "diloco, adam": Adams,
    "diloco, fragments": Fragments,
    "async diloco": Pushed,
}
