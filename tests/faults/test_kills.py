"""Workers killed with SIGKILL at random instants: the others and the center do not notice."""

import logging
import random

import pytest
from kills import Drill

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kills", [17, pytest.param(334, marks=SLOW)])
@pytest.mark.parametrize("locking", [True, False], ids=["locked", "unlocked"])
@pytest.mark.parametrize("rule", ["elastic", "average", "agn"])
def test_kills(rule, locking, kills, tmp_path):
    """100 kills over the rules and lock modes, 2,000 in the slow run."""
    seed = random.SystemRandom().randrange(2**32)
    with Drill(tmp_path, rule, locking, seed) as drill:
        drill.run(kills)
    logging.getLogger("kills").info("%s", drill)  # shown by --log-cli-level=INFO
