"""Who is taken for a Ray cluster: whatever answers, before Ray itself tries for minutes."""

import contextlib
import socket
import threading

import pytest

from springline.center import CenterError
from springline.center.ray_peer import connect, ray

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HTTP_1 = b"HTTP/1.1 400 Bad Request\r\n\r\n"


class JoinedError(Exception):
    """Ray was told to join."""


@pytest.fixture(autouse=True)
def init(monkeypatch):
    def init(**_):
        raise JoinedError

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)


@pytest.fixture
def server():
    """`server(answer)` answers so to the first who comes, and returns its address."""
    with contextlib.ExitStack() as stack:

        def server(answer):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            listening.settimeout(10)

            def serve():
                link, _ = listening.accept()
                with link:
                    link.recv(1000)
                    link.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join)
            return f"127.0.0.1:{listening.getsockname()[1]}"

        yield server


@pytest.mark.parametrize("answer", [HTTP_1, b"", b"<!DOCTYPE HTML>"])
@pytest.mark.parametrize("how", ["by itself", "for clients", "auto"])
def test_what_is_no_ray_is_not_joined(server, monkeypatch, answer, how):
    address = server(answer)
    there = f"ray://{address}" if how == "for clients" else address
    monkeypatch.setenv("RAY_ADDRESS", there)
    with pytest.raises(CenterError, match=f"There is no Ray cluster at {there}"):
        connect("auto" if how == "auto" else there)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_what_answers_as_ray_does_is_joined(server, scheme):
    with pytest.raises(JoinedError):
        connect(scheme + server(SETTINGS))


def test_who_speaks_in_secret_is_taken_at_its_word(server, monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(JoinedError):
        connect(server(b""))


def test_who_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("springline.center.ray_peer._PATIENCE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(CenterError, match=f"There is no Ray cluster at {address}. Start one"):
            connect(address)


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "http://127.0.0.1:8265", "http://127.0.0.1"])
def test_the_address_of_the_dashboard_is_known(address, monkeypatch):
    monkeypatch.setattr("springline.center.ray_peer._PATIENCE", 0.05)
    with pytest.raises(CenterError, match=r"dashboard and its job server are; its own address is"):
        connect(address)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1", "nothing"])
def test_what_is_no_address_is_said(address):
    with pytest.raises(CenterError, match=f"There is no Ray cluster at {address}."):
        connect(address)
