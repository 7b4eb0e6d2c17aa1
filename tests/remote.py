"""A remote center whose head and shards are in this process: the same code, without a network."""

import asyncio
import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from springline import Worker
from springline.center.plan import Plan
from springline.center.remote.center import RemoteCenter, first_parts
from springline.center.remote.head import Head
from springline.center.remote.interceptor import Interceptor
from springline.center.remote.messages import Message, RankProgress, Sender, latest
from springline.center.remote.peer import NotHereError, PeerLostError
from springline.center.remote.shard import Shard

SHARDS = 3
TOKEN = "that of every center here"


class LocalPeer:
    """A head or a shard here. What crosses over is copied, and read-only, as on a real wire.

    Attributes:
        disturb: called before every call with its method: may raise `PeerLostError`, the call is
            then lost on its way there; may return "twice", the call is then made twice; or "lose",
            its answer is then lost, or the call is said to be while it goes on.
        token: what its calls carry.
    """

    def __init__(self, name, target, pool, loop=None):
        self.name, self.target = name, target
        self._pool, self._loop = pool, loop
        self.disturb = lambda method: None
        self.token = TOKEN

    def ask(self, method, *arguments):
        try:
            how = self.disturb(method)
        except PeerLostError as error:
            return Lost(error)
        arguments = over_the_wire(arguments)
        pending = self._call(method, arguments)
        if how == "twice":
            return Pending(pending, self._call(method, arguments))
        return Pending(pending, lost=how == "lose")

    def tell(self, method, *arguments):
        self.ask(method, *arguments)

    def _call(self, method, arguments):
        interceptor = Interceptor(self.target, TOKEN, getattr(self.target, "ranges", ()))

        def call():
            return interceptor.admit(self.token, method, arguments)(*arguments)

        async def call_head():
            return await call()

        if self._loop:
            return asyncio.run_coroutine_threadsafe(call_head(), self._loop)
        return self._pool.submit(call)


class Pending:
    def __init__(self, *futures, lost=False):
        self._futures, self._lost = futures, lost

    def result(self, timeout):
        missing = wait(self._futures, 0.1 if self._lost else timeout).not_done
        if self._lost:
            raise PeerLostError("the answer was lost")
        if missing:
            raise NotHereError
        answers = [future.result() for future in self._futures]
        return over_the_wire(answers[-1])


class Lost:
    def __init__(self, error):
        self._error = error

    def result(self, timeout):
        raise self._error


def over_the_wire(values):
    buffers = []
    data = pickle.dumps(values, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(b.raw()) for b in buffers])


class Loop:
    """An event loop in a thread of its own, for heads."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self):
        self.loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self.loop.close()

    def _end(self):
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)


class Service:
    """A head and shards in this process."""

    def __init__(self, layout, rule, values, use_locking, restore, shards=SHARDS, storage=None):
        self.rule = rule
        names = [entry.name for entry in layout.entries if entry.kind == "parameter"]
        self.values = {name: values[name] for name in names}
        self.pool, self.loop = ThreadPoolExecutor(32), Loop()
        self.opened = []
        plan = Plan.of(layout, rule, use_locking)
        parts, version, steps = first_parts(plan, values, shards, restore)
        make = [
            lambda k=k: Shard(plan.to_json(), copy.deepcopy(rule), k, shards, storage, base=version)
            for k in range(len(parts))
        ]
        self.shards = [LocalPeer(f"shard {k}", new(), self.pool) for k, new in enumerate(make)]
        for peer, (center, state) in zip(self.shards, parts, strict=True):
            peer.target.initialise(center, state, steps)
        self.make = make
        self.storage = storage
        self.head = LocalPeer("the head", self.new_head(), self.pool, self.loop.loop)
        self.description = {
            "plan": plan.to_json(),
            "asked": shards,
            "shards": len(parts),
            "base": version,
        }
        assert self.head.target.registration.find() is None
        self.head.target.registration.publish(self.description)

    def new_head(self):
        async def ask_rows(_):
            return latest([peer.target.rows() for peer in self.shards])

        return Head(ask_rows, self.storage, token=TOKEN)

    def open(self):
        self.opened.append(RemoteCenter(self.description, self.head, self.shards))
        return self.opened[-1]

    def close(self):
        for peer in (self.head, *self.shards):
            peer.disturb = lambda method: None
        for center in self.opened:
            center.close()
        self.loop.close()
        self.pool.shutdown()


def contributing(service):
    """The ranks that have contributed to the round that is open."""
    membership = service.head.target._membership
    sent = dict(membership.sent)  # it changes meanwhile, in the head's thread
    return sorted(rank for rank, part in sent.items() if part.number == membership.closed + 1)


def worker(service, rule=None, rank=0, values=None, **options):
    """A worker with a place at the center."""
    options = {"synchronous": False, "timeout": 30} | options
    given = service.values if values is None else values
    return Worker(given, rule or service.rule, service.open(), rank, **options)


def message(rank, number, value=0.0, incarnation=1):
    """What a worker sends of up to two parameters."""
    sender = Sender(rank, RankProgress(incarnation, number, number, number))
    data = np.full(5, value, np.float32).view(np.uint8)
    return Message(sender, 0, data, np.ones(2, bool), np.ones(2))
