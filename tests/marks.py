"""Parameters of tests that are for `make test-all` only."""

import pytest


def slow(*values):
    """Each of these values as a parameter whose test is slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
