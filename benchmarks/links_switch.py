"""A switch that delays what goes over it, for kernels that cannot (no `netem`).

    python links_switch.py SECONDS NAME NAME…

It makes a TAP device of each name where it runs, prints a line when all are there, and forwards
frames between them, each so many seconds after it came. Segments that the sender's kernel has left
joined stay so, as they do on a veth: a frame may be of 64 KB, and the loop has little to do.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

_SET_DEVICE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
_TAP, _NO_INFO, _VNET_HEADER = 0x0002, 0x1000, 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_CHECKSUM, _TSO4, _TSO6 = 0x01, 0x02, 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_HEADER = 10  # bytes before a frame that say how its segments are joined
_TO, _FROM = slice(_HEADER, _HEADER + 6), slice(_HEADER + 6, _HEADER + 12)
_FRAME = 1 << 17  # bytes that one may have
_BATCH = 64  # frames that are taken from one device before the others have their turn


def open_tap(name: str) -> int:
    """Make a TAP device; return what its frames are read from and written to."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_INFO | _VNET_HEADER
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUM | _TSO4 | _TSO6)
    return device


class Switch:
    """Devices, and the frames that are on their way between them.

    Args:
        devices: open TAP devices, or anything else that gives and takes whole frames.
        delay: seconds.
    """

    def __init__(self, devices: Sequence[int], delay: float) -> None:
        self._devices = list(devices)
        self._delay = delay
        self._way: deque[tuple[float, int, bytes]] = deque()  # due at, came from, frame
        self._known: dict[bytes, int] = {}  # whose address is behind which device
        self._selector = selectors.DefaultSelector()
        for device in devices:
            self._selector.register(device, selectors.EVENT_READ)

    def turn(self, patience: float | None = None) -> None:
        """Deliver what is due, wait for frames or until the next is due, and take what came."""
        now = time.monotonic()
        while self._way and self._way[0][0] <= now:
            _, came_from, frame = self._way.popleft()
            self._deliver(came_from, frame)
        if self._way:
            patience = max(0.0, self._way[0][0] - time.monotonic())
        for key, _ in self._selector.select(patience):
            self._take(key.fd)

    def _take(self, device: int) -> None:
        due = time.monotonic() + self._delay
        for _ in range(_BATCH):
            try:
                frame = os.read(device, _FRAME)
            except BlockingIOError:
                return
            self._known[frame[_FROM]] = device
            self._way.append((due, device, frame))

    def _deliver(self, came_from: int, frame: bytes) -> None:
        known = self._known.get(frame[_TO])
        to = self._devices if known is None else [known]
        for device in to:
            if device != came_from:
                try:
                    os.write(device, frame)
                except OSError:
                    continue  # its cable is out, or its queue is full: networks lose frames


def main(delay: float, names: Sequence[str]) -> None:
    """Be a switch until the process is ended."""
    switch = Switch([open_tap(name) for name in names], delay)
    print("ready", flush=True)
    while True:
        switch.turn()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
