"""Hosts of a network of their own, each with a Ray node: namespaces, on this machine.

A host has its own network, processes and directory for Ray; only files are common to all, as on a
cluster with a shared directory. Its first process holds it: when that is killed, all that runs on
the host is, at once. The hosts hang on a switch, a bridge in a namespace too. Nothing of this
machine's own network is touched, and the kernel takes it all away with the last process.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # whatever token this machine has
PORT = 6379
NETWORK = "10.77.0"
NODE = ("--num-cpus=2", "--object-store-memory=150000000", "--disable-usage-stats")
TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")
PATIENCE = 120.0  # seconds for a node to start, on a busy machine
_HOLD = "trap '' CHLD; {}ip link set lo up && exec sleep infinity"  # the kernel reaps its orphans


def missing():
    """Say why there can be no hosts on this machine; None if there can."""
    absent = [tool for tool in TOOLS if not shutil.which(tool)]
    if absent:
        return f"hosts need {', '.join(absent)} (iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    return f"hosts need root: {tried.stderr.strip()}" if tried.returncode else None


def can_delay():
    """Whether this kernel can delay packets (its module `sch_netem`)."""
    with _Namespaces("--net") as held:
        return held.run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")


class _Namespaces:
    """Namespaces, for as long as their first process lives, which is not longer than this one."""

    def __init__(self, *kinds, first=""):
        self.kinds = [f"-{kind.strip('-')[0]}" for kind in kinds]
        self._outer = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child"]
            + ["--mount-proc"] * ("--pid" in kinds)
            + ["sh", "-c", _HOLD.format(first)],
            stderr=subprocess.DEVNULL,  # it complains when what it holds is killed
        )
        self.first = int(_poll(lambda: _children(self._outer), "a namespace"))
        _poll(lambda: self.run("sh", "-c", "ip link show lo | grep -q LOWER_UP"), "a namespace")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def command(self, *words, kinds=None):
        """What runs a command in here."""
        return ["nsenter", "-t", str(self.first), *(kinds or self.kinds), *map(str, words)]

    def run(self, *words):
        """Run a command to its end, in our network; return whether it succeeded."""
        command = self.command(*words, kinds=["-n"])
        return subprocess.run(command, capture_output=True).returncode == 0

    def do(self, *words):
        """Run a command to its end, in our network; it must succeed."""
        command = self.command(*words, kinds=["-n"])
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")

    def end(self):
        """Kill all that runs here."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first, signal.SIGKILL)  # the kernel ends the others before it
        self._outer.wait()


class Host:
    """One host, without a Ray node at first."""

    def __init__(self, number, switch, ray_home):
        self.number = number
        self.address = f"{NETWORK}.{number + 1}"
        self.alive = True
        self._switch, self._port = switch, f"port{number}"
        self._started = []
        own = Path(ray_home) / str(number)
        own.mkdir()
        self._held = _Namespaces(
            "--net", "--mount", "--pid", first=f"mount --bind {own} {ray_home} && "
        )
        port = ("ip", "link", "add", self._port, "type", "veth")
        switch.do(*port, "peer", "name", "eth0", "netns", self._held.first)
        switch.do("ip", "link", "set", self._port, "master", "switch", "up")
        self._held.do("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self._held.do("ip", "link", "set", "eth0", "up")

    def start(self, *command, **options):
        """Start a process here; what it is told of its id is its id here."""
        process = subprocess.Popen(self._held.command(*command), **options)
        self._started.append(process)
        return process

    def signal(self, process, number):
        """Send a signal to a process by its id here."""
        kill = self._held.command("kill", f"-{int(number)}", process, kinds=["-p"])
        subprocess.run(kill, check=True)
        if number in (signal.SIGCONT, signal.SIGKILL):
            for started in self._started:  # `nsenter` has stopped when what it runs did
                if started.poll() is None and _child(started) == process:
                    started.send_signal(signal.SIGCONT)

    def end(self, started):
        """Kill what was started here."""
        self.signal(_child(started), signal.SIGKILL)
        started.wait()

    def start_ray(self, *options, **environment):
        """Start a Ray node; return the process that does."""
        ray = Path(sys.executable).with_name("ray")
        return self.start(
            *(ray, "start", f"--node-ip-address={self.address}", *NODE, *options),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def unplug(self):
        """Pull the cable out at the switch."""
        self._switch.do("ip", "link", "set", self._port, "down")

    def plug(self):
        """Put the cable back in."""
        self._switch.do("ip", "link", "set", self._port, "up")

    def shape(self, rate, delay=None):
        """Limit the link, in both directions (`100mbit`), and delay what goes over it (`20ms`)."""
        shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
        if delay:
            shape = ("netem", "rate", rate, "delay", delay)
        add = ("tc", "qdisc", "replace", "dev")
        self._held.do(*add, "eth0", "root", *shape)
        self._switch.do(*add, self._port, "root", *shape)

    def crash(self):
        """Kill all that runs here; the host itself stays, and says that nobody is there."""
        killed = self._held.command("kill", "-KILL", "--", "-1", kinds=["-p"])
        subprocess.run(killed, check=True)

    def kill(self):
        """Kill all that runs here, at once, and the host with it: nobody answers any more."""
        if self.alive:
            self.alive = False
            self._held.end()
            for process in self._started:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe:
                        pipe.close()


class Hosts:
    """A Ray cluster of hosts; Ray's own head is on the first.

    Args:
        count: how many.
        ray: whether there are Ray nodes on them.
        options: of `ray start`, for every node.
        head_options: of `ray start`, for the first.
        environment: of Ray's nodes.
    """

    def __init__(self, count=3, ray=True, options=(), head_options=(), **environment):
        self._count, self._ray, self._environment = count, ray, environment
        self._options, self._head_options = options, head_options
        self._start()

    def _start(self):
        self._home = tempfile.mkdtemp(prefix="sl", dir="/tmp")  # a short path: it holds sockets
        self.address = f"{NETWORK}.1:{PORT}"
        self.all, self._switch = [], None
        try:
            self._switch = _Namespaces("--net")
            self._switch.do("ip", "link", "add", "switch", "type", "bridge")
            self._switch.do("ip", "link", "set", "switch", "up")
            self.all = [Host(k, self._switch, self._home) for k in range(self._count)]
            if self._ray:
                self._start_ray()
        except BaseException:
            self.end()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def __getitem__(self, number):
        return [host for host in self.all if host.alive][number]

    def add(self):
        """Add a host; return it."""
        self.all.append(Host(len(self.all), self._switch, self._home))
        if self._ray:
            self._wait(self._join(self[-1]))
        return self[-1]

    def end(self):
        """Kill all hosts and the switch."""
        for host in self.all:
            host.kill()
        if self._switch:
            self._switch.end()
        shutil.rmtree(self._home)

    def restart(self, **environment):
        """Kill all hosts, and start as many new ones as there were at first."""
        self.end()
        self._environment = environment
        self._start()

    def at(self, address):
        """Return the host of an address."""
        return next(host for host in self.all if host.address == address)

    def _start_ray(self):
        head = ("--head", f"--port={PORT}", "--include-dashboard=false")
        head += (*self._options, *self._head_options)
        self._wait(self[0].start_ray(*head, f"--temp-dir={self._home}", **self._environment))
        for started in [self._join(host) for host in self.all[1:]]:
            self._wait(started)

    def _join(self, host):
        given = (f"--address={self.address}", *self._options)
        return host.start_ray(*given, **self._environment)

    def _wait(self, started):
        said, _ = started.communicate(timeout=PATIENCE)
        if started.returncode:
            raise RuntimeError(f"a Ray node did not start: {said}")


def _children(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


def _child(process):
    """The id, in its own namespace, of what an `nsenter` runs."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in Path(f"/proc/{int(_children(process))}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None


def _poll(what, name):
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not come to be in {PATIENCE:.0f} s")
        time.sleep(0.005)
    return found
