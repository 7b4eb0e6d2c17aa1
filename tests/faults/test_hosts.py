"""Hosts made of namespaces: what they have in common, and what not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hosts

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    while True:
        caller, _ = server.accept()
        with caller:
            while caller.recv(1 << 16):
                continue
            caller.sendall(b"all here")
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3])) as server:
    server.sendall(bytes(int(sys.argv[2])))
    server.shutdown(socket.SHUT_WR)
    sys.exit(server.recv(100) != b"all here")
"""


@pytest.fixture
def two():
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    with hosts.Hosts(2, ray=False) as found:
        yield found


@pytest.fixture
def server(two):
    """A server on the second host."""
    started = two[1].start(
        *(sys.executable, "-c", SERVE, two[1].address), stdout=subprocess.PIPE, text=True
    )
    assert started.stdout.readline() == "ready\n"
    return started


def send(two, nbytes, timeout=60):
    """Send from the first host to the second; return whether it arrived."""
    words = (sys.executable, "-c", SEND, two[1].address, nbytes, timeout)
    return two[0].start(*words, stderr=subprocess.DEVNULL).wait() == 0


def test_a_cable_is_pulled_out_and_put_back(two, server):
    assert send(two, 10)
    two[1].unplug()
    assert not send(two, 10, timeout=0.5)
    two[1].plug()
    assert send(two, 10)


def test_a_link_is_shaped(two, server):
    two[1].shape("8mbit")
    start = time.monotonic()
    assert send(two, 2_000_000)
    assert time.monotonic() - start > 1.2  # it cannot be faster, and may well be slower


def test_a_link_is_delayed(two, server):
    if not hosts.can_delay():
        with pytest.raises(RuntimeError, match="netem"):
            two[1].shape("8mbit", "200ms")
        return
    two[1].shape("8mbit", "200ms")
    start = time.monotonic()
    assert send(two, 10)
    assert time.monotonic() - start > 0.8  # two ways, twice at least


def test_a_process_is_stopped_and_goes_on(two, server):
    process = int(_inside(server)["NSpid"].split()[-1])
    two[1].signal(process, signal.SIGSTOP)
    assert not send(two, 10, timeout=0.5)
    assert _inside(server)["State"].startswith("T")
    two[1].signal(process, signal.SIGCONT)
    assert send(two, 10)
    two[1].end(server)
    assert server.returncode


def test_a_crash_takes_all_processes_and_leaves_the_host(two, server):
    two[1].crash()
    assert server.wait() != 0
    start = time.monotonic()
    assert not send(two, 10, timeout=60)  # refused, not waited for
    assert time.monotonic() - start < 60
    assert two[1].start("true").wait() == 0


def test_nothing_is_left(two, server):
    before = _inside(server)["Pid"]
    assert Path(two._home).exists()
    two.end()
    assert not Path(f"/proc/{before}").exists()
    assert not Path(two._home).exists()
    two._start()  # for the fixture, which ends them again


def _inside(started):
    """What the kernel says of what was started on a host."""
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
    lines = Path(f"/proc/{int(children)}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
