"""New processes, forked from one that has imported what most of them need: they start at once."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

context = multiprocessing.get_context("forkserver")
# What cannot be imported is left out. No thread is started by an import: a fork is clean.
context.set_forkserver_preload(["pytest", "hypothesis", "springline", "torch.distributed"])


def fork(function, *args):
    """Run `function(pipe, *args)` in a process that has our environment and opened nothing.

    Returns:
        The process and our end of the pipe.
    """
    ours, theirs = context.Pipe()
    target = function, theirs, dict(os.environ), *args
    process = context.Process(target=_call, args=target, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def pool(processes):
    """Return an executor of such processes."""
    return ProcessPoolExecutor(
        processes, context, initializer=_set_environment, initargs=(dict(os.environ),)
    )


def _set_environment(environment):
    os.environ.clear()  # that of the first test that had a process forked
    os.environ.update(environment)


def _call(function, pipe, environment, *args):
    _set_environment(environment)
    function(pipe, *args)
