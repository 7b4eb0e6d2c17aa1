"""Workers killed with SIGKILL at random instants: the others and the center do not notice."""

import logging
import random

import pytest
from kills import Drill

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kills", [17, pytest.param(334, marks=SLOW)])
@pytest.mark.parametrize(
    ("rule", "locking"),
    [
        *[(rule, locking) for rule in ("elastic", "average", "agn") for locking in (True, False)],
        *[(rule, True) for rule in ("rounds", "pushes")],  # with an outer optimizer that has state
    ],
)
def test_kills(rule, locking, kills, tmp_path):
    """136 kills over the rules and lock modes, 2,672 in the slow run."""
    seed = random.SystemRandom().randrange(2**32)
    with Drill(tmp_path, rule, locking, seed) as drill:
        drill.run(kills)
    logging.getLogger("kills").info("%s", drill)  # shown by --log-cli-level=INFO
