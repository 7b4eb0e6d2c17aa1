"""TensorFlow's servers listen on all interfaces: here on those of a network without others."""

import pytest

from network import inside, new_network


@pytest.fixture(scope="session")
def network():
    """One for all, since servers are used again."""
    with new_network() as network:
        yield network


@pytest.fixture(scope="module", autouse=True)
def _in_it(network):
    """Only here: other tests of this process fetch something."""
    with inside(network):
        yield
