"""New processes, forked from one that has imported what most of them need: they start at once."""

import multiprocessing
import os

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


def _call(function, pipe, environment, *args):
    os.environ.clear()  # that of the first test that had a process forked
    os.environ.update(environment)
    function(pipe, *args)
