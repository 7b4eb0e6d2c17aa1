"""TensorFlow's servers listen on all interfaces: here on those of a network without others."""

import pytest

from network import private_network


@pytest.fixture(scope="module", autouse=True)
def network():
    with private_network():
        yield
