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
    drill(tmp_path, rule, locking, kills)


@pytest.mark.parametrize("kills", [25, pytest.param(500, marks=SLOW)])
@pytest.mark.parametrize(
    "rule", ["diloco, nesterov", "diloco, adam", "diloco, fragments", "async diloco"]
)
def test_a_replay_of_what_counted_is_the_center(rule, kills, tmp_path):
    """100 kills over these, 2,000 in the slow run."""
    drill(tmp_path, rule, True, kills)


def drill(home, rule, locking, kills):
    seed = random.SystemRandom().randrange(2**32)
    with Drill(home, rule, locking, seed) as drill:
        drill.run(kills)
    logging.getLogger("kills").info("%s", drill)  # shown by --log-cli-level=INFO
