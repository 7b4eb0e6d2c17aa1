"""The place of a center, of the kind that a test is run on."""

import pytest
from centers import KINDS


@pytest.fixture
def place(request, directory):
    if request.param == "ray":
        request.getfixturevalue("cluster")
    place = KINDS[request.param](directory)
    yield place
    for center in place.opened:
        center.close()
    place.end()
