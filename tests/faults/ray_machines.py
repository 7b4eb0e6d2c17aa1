"""Faults of machines and of what is between them."""

import signal

import numpy as np
from ray_checks import FOREIGN, Outcome, check, counts_of, said

DOWN = 10.0  # seconds


class MisplacedError(AssertionError):
    """Ray has put the center where the fault would not hit it."""


def node_killed(scene, fault="all on a machine killed", silent=False):
    """All on a host, with shards and a worker, is killed; a new one was added before."""
    scene.begin()
    victim, rank, shards = victim_of(scene)
    others, new = [r for r in range(scene.workers) if r != rank], scene.hosts.add()
    if silent:
        scene.hold(others)  # their replies are lost with the host
    scene.fault()
    kept = {k: scene.kept(k) for k in shards}
    if silent:
        victim.unplug()
        victim.kill()
        scene.release()
    else:
        victim.crash()
        scene.processes[rank][1].wait()
    done = scene.done()
    scene.forget(rank)
    scene.start(rank, new, FOREIGN)
    scene.exchange()
    victim.kill()
    steps, found = scene.finish()
    losses = {k: done - kept[k] for k in shards}
    lost = check(scene, steps, found, losses, interrupted=[rank])
    return Outcome.of(scene, fault, others, lost)


def victim_of(scene):
    """A host with shards, but without Ray's head: it, its worker, and its shards."""
    places = scene.ask("actors")
    everywhere = range(scene.shards)
    scene.wait(lambda: all(min(scene.kept(k)) > 0 for k in everywhere), "all checkpoints")
    for rank in range(1, scene.workers):
        address = scene.hosts[rank].address
        shards = [k for k in everywhere if places[f"shard-{k}"][1] == address]
        if shards:
            return scene.hosts[rank], rank, shards
    raise MisplacedError(f"all shards are with Ray's head: {places}")


def power_lost(scene):
    """As before, but the host does not answer any more: nobody is told."""
    return node_killed(scene, "a machine without power", silent=True)


def power_lost_quick(scene):
    """As before; Ray was told to look sooner."""
    return node_killed(scene, "a machine without power, Ray looks sooner", silent=True)


def link_down(scene):
    """A host with a worker and shards on it cannot be reached for ten seconds."""
    scene.begin()
    address = scene.ask("actors")["shard-1"][1]
    host = scene.host_at(address)
    scene.fault()
    host.unplug()
    scene.pass_by(DOWN)
    host.plug()
    scene.exchange()
    steps, found = scene.finish()
    lost = check(scene, steps, found)
    return Outcome.of(scene, f"a link down for {DOWN:.0f} s", range(scene.workers), lost)


def link_cut(scene):
    """A host is away for longer than Ray waits: it is declared dead, and comes back."""
    scene.begin()
    victim, rank, shards = victim_of(scene)
    others = [r for r in range(scene.workers) if r != rank]
    scene.hold(others)  # their replies are on the other side
    scene.fault()
    kept = {k: scene.kept(k) for k in shards}
    victim.unplug()
    scene.release()
    done = scene.done()
    scene.exchange(others)
    victim.plug()
    if scene.processes[rank][1].poll() is None:  # its node has ended, which it may not notice
        scene.signal(rank, signal.SIGKILL)
    else:
        scene.forget(rank)
    scene.start(rank, scene.hosts[0], FOREIGN)
    scene.exchange()
    steps, found = scene.finish()
    losses = {k: done - kept[k] for k in shards}
    lost = check(scene, steps, found, losses, interrupted=[rank])
    return Outcome.of(scene, "a link down for longer than Ray waits", others, lost)


def all_killed(scene):
    """All hosts are killed; new ones, with the same storage, go on from the checkpoints."""
    scene.begin()
    scene.wait(lambda: min(min(scene.kept(k)) for k in range(scene.shards)) > 0, "checkpoints")
    scene.fault()
    scene.move()
    done, kept = scene.done(), np.array([scene.kept(k) for k in range(scene.shards)])
    for rank in range(scene.workers):
        scene.start(rank, first=FOREIGN)
    scene.exchange()
    _, found = scene.finish()
    after = scene.done() - done
    counts = counts_of(scene, found["shards"])
    assert (counts == kept + after).all(), (counts, kept, after)
    started = [scene.log(rank).born[1].steps for rank in range(scene.workers)]
    assert (started == kept.max(axis=0)).all(), (started, kept)
    lost = said(np.maximum(done - kept, 0))  # a checkpoint may have one that no log has
    return Outcome.of(scene, "everything killed and started again", range(scene.workers), lost)
