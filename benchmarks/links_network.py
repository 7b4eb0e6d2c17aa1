"""Hosts with slow links: what `tests/hosts.py` makes, shaped and with a delay on the way."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROBE = HERE / "links_probe.py"
sys.path.append(str(HERE.parent / "tests"))
hosts: Any = importlib.import_module("hosts")


@dataclass(frozen=True)
class Link:
    """What every host is behind.

    Args:
        mbits: Mbit/s, in each direction.
        delay: seconds from one host to another; a round trip takes twice as long.
    """

    mbits: float
    delay: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes of frames that a direction carries."""
        return self.mbits * 1e6 / 8

    @property
    def round_trip(self) -> float:
        """Seconds there and back, of something small."""
        return 2 * self.delay


@dataclass(frozen=True)
class Measured:
    """What a link was found to be."""

    round_trip: float  # seconds
    bytes_per_second: float  # of a stream's own bytes
    how: str  # it is made, in a sentence


@contextmanager
def slow_links(cluster: Any, link: Link) -> Iterator[str]:
    """Shape the links of a cluster's hosts; yield a sentence that says how."""
    rate = f"{link.mbits:g}mbit"
    if hosts.can_delay():
        for host in cluster.all:  # half of it where it leaves a host, half where it enters one
            host.shape(rate, f"{500 * link.delay:g}ms")
        yield "`tc` does both, with `netem`."
        return
    with _delaying_switch(cluster, link.delay):
        for host in cluster.all:
            host.shape(rate)
        yield (
            "`tc` limits them, with `tbf`; a switch of our own (`benchmarks/links_switch.py`) "
            "holds every frame back, since this kernel has no `netem`."
        )


@contextmanager
def _delaying_switch(cluster: Any, delay: float) -> Iterator[None]:
    """Replace the bridge of all hosts by one for each, and connect those by a process."""
    switch = cluster._switch
    taps = [f"tap{host.number}" for host in cluster.all]
    words = switch.command(sys.executable, HERE / "links_switch.py", delay, *taps)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not process.stdout or not process.stdout.readline():
                raise RuntimeError("The switch did not start. Is there a /dev/net/tun?")
            for host, tap in zip(cluster.all, taps, strict=True):
                own = f"own{host.number}"
                switch.do("ip", "link", "add", own, "type", "bridge")
                for member in (f"port{host.number}", tap):
                    switch.do("ip", "link", "set", member, "master", own)
                for device in (tap, own):
                    switch.do("ip", "link", "set", device, "up")
            yield
        finally:
            process.kill()


def measure(cluster: Any, how: str, seconds: float) -> Measured:
    """Find what the link between the last two hosts is."""
    *_, near, far = cluster.all
    listening = far.start(sys.executable, PROBE, "listen", far.address, stdout=subprocess.PIPE)
    listening.stdout.readline()
    words = (sys.executable, PROBE, "ask", far.address, str(seconds))
    asking = near.start(*words, stdout=subprocess.PIPE, text=True)
    said, _ = asking.communicate(timeout=60 + 10 * seconds)
    listening.wait(timeout=60)
    round_trip, rate = map(float, said.split())
    return Measured(round_trip, rate, how)


def traffic(host: Any) -> tuple[int, int]:
    """Return the bytes that a host has received and sent so far."""
    shown = host.start("cat", "/proc/net/dev", stdout=subprocess.PIPE, text=True)
    text, _ = shown.communicate(timeout=60)
    for line in text.splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            received, *_ = values = [int(figure) for figure in figures.split()]
            return received, values[8]
    raise RuntimeError(f"{host.address} has no eth0.")
