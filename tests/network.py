"""A network of our own for servers that listen on all interfaces, whatever they are told."""

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000
_HERE = Path("/proc/thread-self/ns/net")
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def private_network():
    """A network with a loopback only, where the machine allows it; this thread is in it."""
    with new_network() as network, inside(network):
        yield


@contextlib.contextmanager
def new_network():
    """A network with a loopback only, where the machine allows it; else this one."""
    before = os.open(_HERE, os.O_RDONLY)
    try:
        if _libc.unshare(CLONE_NEWNET) == 0:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        network = os.open(_HERE, os.O_RDONLY)
    finally:
        _libc.setns(before, CLONE_NEWNET)
        os.close(before)
    try:
        yield network
    finally:
        os.close(network)


@contextlib.contextmanager
def inside(network):
    """This thread, and those that it starts, are in a network for a while."""
    before = os.open(_HERE, os.O_RDONLY)
    _libc.setns(network, CLONE_NEWNET)
    try:
        yield
    finally:
        _libc.setns(before, CLONE_NEWNET)
        os.close(before)


def enter(path):
    """Let this thread, and those that it starts, be in another thread's network for good."""
    network = os.open(path, os.O_RDONLY)
    try:
        if not os.path.samestat(os.fstat(network), _HERE.stat()):
            assert _libc.setns(network, CLONE_NEWNET) == 0
    finally:
        os.close(network)
