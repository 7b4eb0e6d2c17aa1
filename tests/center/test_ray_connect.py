"""Who is taken for a Ray cluster: Ray itself would try for minutes where nobody listens."""

import socket

import pytest

from springline.center import CenterError
from springline.center.ray_peer import connect, ray


@pytest.fixture
def init(monkeypatch):
    """`init(error)` lets Ray fail so when it is to connect."""

    def init(error):
        def fail(**_):
            raise error

        monkeypatch.setattr(ray, "init", fail)

    return init


@pytest.fixture
def listening():
    """The address of somebody who listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1:99999", "127.0.0.1", "nothing", "ray://127.0.0.1:1"]
)
def test_where_nobody_listens_is_no_cluster(address, monkeypatch):
    with pytest.raises(CenterError, match=f"There is no Ray cluster at {address}. Start one"):
        connect(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        CenterError, match=f"There is no Ray cluster at {address}, the last one that Ray knows"
    ):
        connect("auto")


def test_what_ray_cannot_join_is_said_with_its_reason(init, listening, caplog, monkeypatch):
    init(ConnectionError("Failed to connect"))
    with pytest.raises(CenterError, match=rf"Cannot join the Ray .* {listening}: Failed to connec"):
        connect(listening)
    assert not caplog.messages
    monkeypatch.setenv("RAY_ADDRESS", listening)
    with pytest.raises(CenterError, match=f"There is no Ray cluster at {listening}, the last one"):
        connect("auto")


def test_that_it_takes_long_is_said(listening, caplog, monkeypatch):
    monkeypatch.setattr("springline.center.ray_peer._PATIENCE", 0.05)

    def init(**_):
        while not caplog.messages:
            continue

    monkeypatch.setattr(ray, "init", init)
    connect(listening)
    assert caplog.messages == [
        f"Waiting for the Ray cluster at {listening}, for a minute or two at most."
    ]


def test_a_token_that_is_missing_is_said(init, listening):
    error = ConnectionError("Failed to connect")
    error.__cause__ = RuntimeError("InvalidAuthToken: Authentication token is missing")
    init(error)
    with pytest.raises(CenterError, match=r"asks for a token. Set RAY_AUTH_MODE=token on"):
        connect(listening)
