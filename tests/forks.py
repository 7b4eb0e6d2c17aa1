"""New processes, forked from one that has imported what most of them need: they start at once."""

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

from network import enter

context = multiprocessing.get_context("forkserver")
# What cannot be imported is left out. No thread is started by an import: a fork is clean.
context.set_forkserver_preload(["pytest", "hypothesis", "springline", "torch.distributed"])


def fork(function, *args):
    """Run `function(pipe, *args)` in a process with our environment and network, nothing opened.

    Returns:
        The process and our end of the pipe.
    """
    ours, theirs = context.Pipe()
    target = function, theirs, dict(os.environ), _network(), *args
    process = context.Process(target=_call, args=target, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def pool(processes):
    """Return an executor of such processes."""
    here = dict(os.environ), _network()
    return ProcessPoolExecutor(processes, context, initializer=_move, initargs=here)


def _network():
    """Return the network that this thread is in."""
    return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"


def _move(environment, network):
    """Leave the environment and the network of the first test that had a process forked."""
    os.environ.clear()
    os.environ.update(environment)
    enter(network)


def _call(function, pipe, environment, network, *args):
    _move(environment, network)
    function(pipe, *args)
