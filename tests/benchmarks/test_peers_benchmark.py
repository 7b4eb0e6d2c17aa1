"""The comparison with peers over links and with faults: what is to be run, and what it says."""

import importlib
import itertools
import math
import sys

import pytest
from test_torch_benchmarks import BENCHMARKS, run, tables

from hosts import missing

PEERS = BENCHMARKS / "peers"


@pytest.fixture(scope="module")
def peers():
    """The scripts, as modules."""
    before = sys.path[:]
    sys.path.insert(0, str(PEERS))
    yield {
        name: importlib.import_module(name) for name in ("over_links", "campaign", "with_faults")
    }
    sys.path[:] = before


class Machine:
    """Makes runs up: `final` gives the loss of a case, `step` the seconds of its steps."""

    def __init__(self, peers, final, step):
        self.outcome, self.final, self.step = peers["campaign"].Outcome, final, step

    def make(self, wanted, records, most=1000):
        """Make what is wanted until nothing is; return the cases in order."""
        made = []
        while (case := next(wanted(records), None)) is not None:
            made.append(case)
            assert len(made) < most
            steps = case.stop_at or case.steps
            seconds = [self.step(case) * steps * k / 4 for k in (1, 2, 3, 4)]
            losses = [self.final(case) + gap for gap in (0.3, 0.2, 0.1, 0.0)]
            sent = [1000.0 * steps * k for k in (1, 2, 3, 4)]
            wall = seconds[-1] * (4 if case.fault == "straggler" else 1)
            records.add(case, self.outcome(seconds, sent, losses, seconds[-1], wall, 6.0, 1.5))
        return made


def final(case):
    """A loss that is better with more steps, and that of one process with all batches best."""
    if case.system in ("whole", "ddp"):
        return 2.0
    return (2.3 if case.system == "alone" else 2.1) - 0.2 * (case.steps / 40 - 1) * (
        case.system in ("torchft", "diloco", "diloco_overlap", "elastic")
    )


def step(case):
    return {"ddp": 0.4, "torchft": 0.08}.get(case.system, 0.05)


@pytest.fixture
def links(peers, tmp_path):
    over = peers["over_links"]
    records = peers["campaign"].Records(tmp_path / "runs.jsonl", over.QUICK)
    return over.Plan(over.tuned_for(True, None), over.COMPARED), records


def test_more_steps_are_tried_until_the_loss_of_ddp_is_reached(peers, links):
    plan, records = links
    made = Machine(peers, final, step).make(plan.wanted, records)
    assert len(set(made)) == len(made)
    for link in peers["campaign"].LINKS:
        timed = {case.system for case in made if case.stop_at == 40 and case.link == link}
        assert timed == {"ddp", "postlocal", "torchft", "average", "diloco"}
        for system, steps in {"diloco_overlap": [40, 60], "elastic": [40, 60]}.items():
            assert [c.steps for c in made if (c.system, c.link) == (system, link)] == steps
        assert plan.best(records, "diloco", 2, link).steps == 60
    whole = [(c.system, c.steps) for c in made if c.link and not c.stop_at]
    losses = {"postlocal": [40, 60, 80], "torchft": [40, 60], "average": [], "diloco": []}
    for system, steps in losses.items():  # those of the same rule are the same
        assert [made for name, made in whole if name == system] == steps


def test_the_page_has_the_time_to_ddps_loss_and_says_who_is_first(peers, links, tmp_path):
    plan, records = links
    Machine(peers, final, step).make(plan.wanted, records)
    said = peers["over_links"].page(plan, records, "the command")
    assert f"Made by `the command`: {len(records.runs)} runs" in said
    assert "The load was 1.5 to 1.5." in said
    for rows in tables(said):
        found = {row[0]: row for row in rows}
        assert found["DistributedDataParallel"][8:10] == ["16.0", "1.00"]
        assert found["springline DiLoCo"][8:10] == ["3.0", "0.19"]
        assert found["torchft DiLoCo"][8:10] == ["4.8", "0.30"]
        assert found["springline averaging"][8:10] == ["not reached"] * 2
    slow, fast = (line for line in said.splitlines() if line.startswith("- **"))
    assert "springline DiLoCo" in slow or "springline elastic is first" in slow
    assert "quarter of DistributedDataParallel's time, is met: 0.19" in slow
    assert "quarter" not in fast
    peers["over_links"].draw(plan, records, tmp_path)
    assert (tmp_path / "peers-links-2.svg").read_text("utf-8").count("<svg") == 1


def test_a_peer_that_wins_is_said_to(peers, links):
    plan, records = links
    Machine(peers, final, lambda case: 0.02 if case.system == "torchft" else step(case)).make(
        plan.wanted, records
    )
    page = peers["over_links"].page(plan, records, "")
    assert page.count("a peer wins: torchft DiLoCo is first") == 2


def test_what_was_interrupted_goes_on(peers, links):
    plan, records = links
    Machine(peers, lambda case: math.inf if case.system == "elastic" else final(case), step).make(
        lambda r: itertools.islice(plan.wanted(r), 0 if len(r.runs) == 5 else None), records
    )
    with records.path.open("a") as file:
        file.write('{"case": {"sys')  # killed in the middle of a line
    again = peers["campaign"].Records(records.path, records.scale)
    assert again.runs == records.runs
    assert len(again.runs) == 5
    assert next(plan.wanted(again)) not in records.runs
    with pytest.raises(SystemExit, match="other models or another number of steps"):
        peers["campaign"].Records(records.path, peers["over_links"].FULL)


def test_faults_are_compared_with_the_same_system_undisturbed(peers, tmp_path):
    faults = peers["with_faults"]
    records = peers["campaign"].Records(tmp_path / "runs.jsonl", faults.QUICK)
    plan = faults.Plan(peers["over_links"].tuned_for(True, 2)[2], faults.COMPARED)

    def worse(case):
        return final(case) + 0.05 * (case.fault == "killed")

    made = Machine(peers, worse, step).make(plan.wanted, records)
    assert len(made) == 3 * len(faults.COMPARED)
    straggler, killed = tables(faults.page(plan, records, "the command"))
    assert {row[0] for row in straggler} == {row[0] for row in killed}
    for slow, dead in zip(straggler, killed, strict=True):
        assert float(slow[5].split()[0]) > 0
        assert slow[7].startswith("+0.0000")
        assert dead[7].startswith("+0.0500")
    faults.draw(plan, records, tmp_path / "faults.svg")
    assert (tmp_path / "faults.svg").read_text("utf-8").count("<svg") == 1


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("script", ["over_links", "with_faults"])
def test_real_workers_train_on_their_hosts(script, tmp_path):
    run(f"peers/{script}.py", "--quick", out=tmp_path)
    name = {"over_links": "peers-links", "with_faults": "peers-faults"}[script]
    page = (tmp_path / f"{name}.md").read_text("utf-8")
    assert str(tmp_path) not in page
    for rows in tables(page):
        titles = {row[0] for row in rows}
        assert {"DistributedDataParallel", "springline averaging", "springline elastic"} <= titles
