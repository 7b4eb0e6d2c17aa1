"""The benchmark of the period: its runs, the order in which it makes them, and its page."""

import math

import pytest
from test_torch_benchmarks import BENCHMARKS, run, tables

PEAK = 8e-3  # the best learning rate of pretended runs


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "examples"))


@pytest.fixture
def train(monkeypatch):
    """Make a run of one or more workers in this process; return its loss."""
    monkeypatch.setenv("SPRINGLINE_RANK", "0")  # put back what lock-step sets
    monkeypatch.setenv("SPRINGLINE_WORKERS", "1")
    from period import train
    from period_plan import QUICK, Family, Run

    return lambda workers, rule, outer=None, period=3: train(
        Run(Family(workers, rule, outer), period, 1e-2), QUICK
    )


def test_alone_every_rule_is_what_it_should_be(train):
    plain = train(1, "whole")
    assert train(1, "average") == train(1, "elastic") == plain < math.log(65)
    with_momentum = train(1, "diloco", (0.7, 0.5))
    assert with_momentum != plain
    for rule in ("async_diloco", "async_nesterov"):
        assert train(1, rule, (0.7, 0.5)) == pytest.approx(with_momentum, abs=1e-6)


def test_two_workers_in_lock_step_differ_by_rule_and_period(train):
    pair = (0.7, 0.5)
    losses = [
        train(2, "average"),
        train(2, "average", period=1),
        train(2, "elastic"),
        train(2, "diloco", pair),
        train(2, "async_diloco", pair),
        train(2, "async_nesterov", pair),
    ]
    assert len(set(losses)) == len(losses)
    assert max(losses) < math.log(65)


def test_without_outer_momentum_diloco_is_averaging(train):
    assert train(2, "diloco", (1.0, 0.0)) == pytest.approx(train(2, "average"), abs=1e-5)


def test_a_run_that_diverges_has_an_infinite_loss(monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RANK", "0")
    monkeypatch.setenv("SPRINGLINE_WORKERS", "1")
    from period import train
    from period_plan import QUICK, Family, Run

    assert train(Run(Family(2, "average"), 1, 1e30), QUICK) == math.inf


def pretended(run):
    """A loss that grows with the period, and with the way from the best learning rate."""
    workers, rule, outer = run.family
    worse = {"average": 0.02, "elastic": 0.1}.get(rule, 0.01 * (outer == (0.7, 0.9)))
    off = abs(math.log2(run.rate / PEAK)) / 10
    return 2.0 + worse + off - workers / 100 + run.period / 1000


@pytest.fixture
def swept():
    """All runs of a smaller sweep, pretended, in their order."""
    from period_plan import Results, Scale

    results = Results(Scale(workers=(2, 4), periods=(200, 1), later=()))
    while found := next(results.wanted(), None):
        assert found not in results.losses
        results.losses[found] = pretended(found)
    return results


def test_the_sweep_tunes_and_then_fills(swept):
    from period_plan import Family

    scale = swept.scale
    for workers in scale.workers:
        for period in (*scale.anchors, *scale.periods):
            for family in scale.families(workers, period):
                assert swept.rate(family, period) == PEAK
                assert not math.isnan(swept.loss(family, period))
    few, more = (swept.tried(Family(p, "average"), 50) for p in scale.workers)
    assert set(few) == {PEAK / 4, PEAK / 2, PEAK, 2 * PEAK}  # from the first rate, both sides
    assert set(more) == {PEAK, 2 * PEAK}
    made = list(swept.losses)
    assert made[0].family == Family(1, "whole")
    assert next(r for r in made if r.seed).family.workers == 2
    assert {r.family.rule for r in made if r.real} == {"diloco", "elastic", "async_diloco"}


def test_a_sweep_goes_on_where_it_was(tmp_path):
    from period_plan import QUICK, Family, Run, Scale, append, load

    path, one = tmp_path / "runs.jsonl", Run(Family(2, "diloco", (0.7, 0.5)), 5, 1e-2)
    load(path, Scale())
    append(path, one, 2.5)
    with path.open("a") as file:
        file.write('{"run": [[2, "aver')  # cut short
    assert load(path, Scale()).losses == {one: 2.5}
    append(path, one._replace(seed=7), math.inf)
    assert load(path, Scale()).losses == {one: 2.5, one._replace(seed=7): math.inf}
    with pytest.raises(SystemExit, match="another model"):
        load(path, QUICK)


def test_the_page_answers_first(swept, tmp_path):
    from period_report import draw, page

    answers, two, *_ = tables(page(swept))
    assert answers[0] == ["2", "model averaging", "2.001", "5", "2.005, 0.008", "none"]
    assert answers[1] == ["2", "DiLoCo", "1.981", "5", "1.985, 0.7/0.5, 0.008", "5"]
    assert two[0] == ["model averaging", "2.001", "2.005", "2.050", "2.200"]
    draw(swept, tmp_path / "period.svg")
    assert "<svg" in (tmp_path / "period.svg").read_text("utf-8")


@pytest.mark.slow
def test_the_script_makes_every_run_and_writes_the_page(tmp_path):
    printed = run("period.py", "--quick", out=tmp_path)
    assert "2 real diloco 0.7/0.5 τ=2" in printed
    page = (tmp_path / "period.md").read_text("utf-8")
    fair = next(rows for rows in tables(page) if rows[0][:2] == ["DiLoCo, 0.7/0.5", "2"])
    assert fair[0][3] == fair[0][4]  # in rounds: lock-step and real
    assert "run 1:" not in run("period.py", "--quick", out=tmp_path)
