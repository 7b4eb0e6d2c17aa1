"""What a link is: the round trip of a few bytes, and how many bytes a stream carries in a second.

python links_probe.py listen ADDRESS          # prints a line when it does
python links_probe.py ask ADDRESS SECONDS     # prints seconds, and bytes per second
"""

from __future__ import annotations

import socket
import statistics
import struct
import sys
import time

PORT = 5201
_TRIPS = 10
_WAY = 1.0  # seconds in which a stream gathers way
_PIECE = bytes(1 << 16)


def listen(address: str) -> None:
    """Answer small messages, and then say how many bytes of a stream came in a second."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        stream, _ = server.accept()
        with stream:
            for _ in range(_TRIPS + 1):
                stream.sendall(stream.recv(1))
            begin, received, seconds = time.monotonic() + _WAY, 0, 0.0
            while got := len(stream.recv(1 << 20)):
                if (now := time.monotonic()) > begin:
                    received += got
                    seconds = now - begin
            stream.sendall(struct.pack("!d", received / seconds))


def ask(address: str, seconds: float) -> tuple[float, float]:
    """Return the median round trip, and bytes per second of a stream that has gathered way."""
    with socket.create_connection((address, PORT)) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_TRIPS + 1):  # the first is for the addresses to be known
            start = time.monotonic()
            stream.sendall(b"?")
            stream.recv(1)
            trips.append(time.monotonic() - start)
        deadline = time.monotonic() + _WAY + seconds
        while time.monotonic() < deadline:
            stream.sendall(_PIECE)
        stream.shutdown(socket.SHUT_WR)
        (rate,) = struct.unpack("!d", stream.recv(8))
    return statistics.median(trips[1:]), rate


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(sys.argv[2])
    else:
        print(*ask(sys.argv[2], float(sys.argv[3])))
