"""The torch benchmarks run, on tiny settings, and write their pages and plots."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marks import slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, *arguments, out):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments, "--out", str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tables(page):
    """The rows of each table of a page, as lists of cells."""
    found = []
    for part in page.split("\n\n"):
        lines = [line for line in part.splitlines() if line.startswith("|")]
        if lines:
            found.append([[c.strip() for c in line[1:-1].split("|")] for line in lines[2:]])
    return found


def check_written(out, name):
    page = (out / f"{name}.md").read_text("utf-8")
    assert "<svg" in (out / f"{name}.svg").read_text("utf-8")
    assert f"({name}.svg)" in page
    assert f"python benchmarks/{name.replace('-', '_')}.py" in page
    assert str(out) not in page
    assert str(BENCHMARKS.parent) not in page
    return page


@pytest.mark.slow
def test_torch_step_compares_every_rule_with_the_bare_optimizer(tmp_path):
    printed = run("torch_step.py", "--quick", out=tmp_path)
    targets, figures = tables(check_written(tmp_path, "torch-step"))
    names = ("elastic", "averaging", "AGN")
    steps = {("step", rule, optimizer) for rule in names for optimizer in ("SGD", "AdamW")}
    once = {(what, rule, "SGD") for what in ("tiny step", "exchange", "training") for rule in names}
    overlap = {("training, overlap", rule, optimizer) for _, rule, optimizer in steps}
    diloco = {
        (f"training, {how}", "DiLoCo", optimizer)
        for how in ("overlap", "delay 4")
        for optimizer in ("SGD", "AdamW")
    }
    assert {tuple(row[:3]) for row in figures} == steps | once | overlap | diloco
    assert len(figures) == 25
    for *_, bare, ours, _, _ in figures:
        assert float(bare) >= 0
        assert float(ours) > 0
    measured = [mark for mark, *_ in targets if mark != "?"]
    assert len(measured) == 3  # the tiny model's; the others are about 25 M parameters
    assert printed.count("target: at most") == len(targets) == 22


@pytest.fixture
def benchmark(monkeypatch):
    """`time_to_loss`, as a script has it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "examples"))
    import time_to_loss

    return time_to_loss


@pytest.mark.slow
def test_time_to_loss_goes_on_where_it_was(tmp_path):
    first = run("time_to_loss.py", "--quick", "--minutes", "0.001", out=tmp_path)
    lines = (tmp_path / "time-to-loss.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 3  # the settings, and two runs at once however little time there is
    again = run("time_to_loss.py", "--quick", "--minutes", "0.001", out=tmp_path)
    assert (tmp_path / "time-to-loss.jsonl").read_text("utf-8").splitlines() == lines
    assert "one worker, rate 0.01" in first
    assert "one worker, rate 0.01" not in again
    page = check_written(tmp_path, "time-to-loss")
    assert (
        "Not tried in 0.001 minutes: average, τ = 4; diloco, τ = 4, outer 0.7/0.5; elastic" in page
    )


RULES = ["elastic", *slow("whole", "average", "diloco", "async_diloco", "agn")]


@pytest.mark.parametrize("rule", RULES)
def test_two_workers_learn_and_nothing_but_training_is_on_the_clock(benchmark, rule):
    from time_to_loss_runs import QUICK, Job

    setting = next(setting for setting in QUICK.settings if setting.rule == rule)
    made = benchmark.make(Job(setting, 1e-2, 0.5), QUICK, lambda: None)
    assert len(made.seconds) == len(made.losses) == 20
    assert made.seconds == sorted(made.seconds)
    assert made.wall < made.spent
    assert made.final < made.losses[0] < math.log(65) + 0.1


@pytest.mark.parametrize("rule", ["diloco", *slow("average")])
def test_lock_step_has_the_losses_of_a_real_run(benchmark, rule):
    from time_to_loss_runs import QUICK, Job

    setting = next(setting for setting in QUICK.settings if setting.rule == rule)
    job = Job(setting, 1e-2, 0.25)  # 10 steps: the last exchange is of half a period
    real = benchmark.make(job, QUICK, lambda: None)
    lockstep = benchmark.make(job._replace(tuning=True), QUICK, lambda: None)
    assert lockstep.losses == pytest.approx(real.losses, abs=1e-5)
    assert len(set(real.losses)) == 4


def pretended(job, scale, _):
    """A run that takes 10 s; two workers are better, most of all with the rate 8e-3."""
    from time_to_loss_runs import Result

    gains = {"whole": 0.4, "average": 0.3, "diloco": 0.25, "elastic": 0.2, "agn": -0.1}
    gain = gains.get(job.setting.rule, 0.0)
    best = 4e-3 if job.setting.rule == "alone" else 8e-3
    final = 2.0 - gain + abs(math.log2(job.rate / best)) / 10 + (1 - job.fraction)
    seconds = [10 * job.fraction * k / 4 for k in range(1, 5)]
    return Result(seconds, [final + (10 * job.fraction - s) for s in seconds], spent=12.0)


def made_jobs(path):
    return [json.loads(line)["job"] for line in path.read_text("utf-8").splitlines()[1:]]


def sweep(benchmark, monkeypatch, out, minutes):
    monkeypatch.setattr(benchmark, "make", pretended)
    monkeypatch.setattr(sys, "argv", ["x", "--minutes", str(minutes), "--out", str(out)])
    benchmark.main()
    return made_jobs(out / "time-to-loss.jsonl")


def test_the_sweep_finds_the_best_rates_schedules_and_tries_seeds(
    benchmark, monkeypatch, tmp_path, capsys
):
    jobs = sweep(benchmark, monkeypatch, tmp_path, 60)
    assert len({json.dumps(job) for job in jobs}) == len(jobs)
    alone = {j["rate"] for j in jobs if j["setting"][0] == "alone"}
    assert alone == {2e-3, 4e-3, 8e-3}
    first_timed = [j["tuning"] for j in jobs].index(False)
    assert not any(j["tuning"] for j in jobs[first_timed:])
    assert {j["fraction"] for j in jobs[:first_timed]} == {1.0}
    average = [j for j in jobs if j["setting"][:2] == ["average", 10] and j["seed"] == 0]
    assert {j["rate"] for j in average} == {4e-3, 8e-3, 16e-3}
    assert {j["fraction"] for j in average} == {1.0, 0.7, 0.6}  # 0.7 gives 2.0 at the end
    assert {j["fraction"] for j in jobs if j["setting"][0] == "agn"} == {1.0}
    assert {j["seed"] for j in jobs if j["setting"][:2] == ["average", 10]} == {0, 1, 2}
    page = check_written(tmp_path, "time-to-loss")
    best, seeds, every = tables(page)
    assert best[0] == ["one process, twice the batch", "0.008", "240", "6.0", "0.60"]
    assert best[1] == ["average, τ = 10", "0.008", "280", "7.0", "0.70"]
    assert best[2][0] == "diloco, τ = 10, outer 0.7/0.5"
    assert best[-1][-1] == "not reached"
    assert [row[-1] for row in seeds] == ["0.70"] * 3
    assert len(every) == 22
    assert "in lock-step and of a real run: average, τ = 10: 1.7000 and 1.7000; diloco" in page
    assert "0.70, 0.70, 0.70 (seeds 0, 1, 2)" in " ".join(capsys.readouterr().out.split())


def test_with_less_time_fewer_settings_are_tried_and_more_time_goes_on(
    benchmark, monkeypatch, tmp_path
):
    few = sweep(benchmark, monkeypatch, tmp_path, 8.7)
    assert {tuple(j["setting"][:2]) for j in few} == {
        ("alone", 0), ("whole", 0), ("average", 10), ("diloco", 10), ("elastic", 4),
        ("async_diloco", 10), ("agn", 4),
    }  # fmt: skip
    assert {j["seed"] for j in few} == {0, 1, 2}
    more = sweep(benchmark, monkeypatch, tmp_path, 60)
    assert more[: len(few)] == few
    assert len({json.dumps(j["setting"]) for j in more}) == 22


def test_the_page_names_settings_that_there_was_no_time_to_tune(benchmark, monkeypatch, tmp_path):
    sweep(benchmark, monkeypatch, tmp_path, 0.5)
    page = (tmp_path / "time-to-loss.md").read_text("utf-8")
    assert "Not tried in 0.5 minutes: average, τ = 10; diloco" in page
    assert "on both sides in 0.5 minutes: one process, twice the batch." in page


def test_runs_of_another_model_are_not_mixed_in(benchmark, tmp_path):
    from time_to_loss_runs import QUICK, Scale, load

    load(tmp_path / "runs.jsonl", QUICK)
    with pytest.raises(SystemExit, match="another model"):
        load(tmp_path / "runs.jsonl", Scale())


def test_a_line_cut_short_is_forgotten(benchmark, tmp_path):
    from time_to_loss_runs import QUICK, Job, Result, Setting, append, load

    path, job = tmp_path / "runs.jsonl", Job(Setting("elastic", 4, 0.45), 1e-2)
    load(path, QUICK)
    run = Result([1.0, 2.0], [3.0, math.inf], 5.0)
    append(path, job, run)
    with path.open("a") as file:
        file.write('{"job": {"sett')
    assert load(path, QUICK).runs == {job: run}
    append(path, job._replace(seed=1), run)
    assert len(load(path, QUICK).runs) == 2


def test_a_target_is_reached_between_two_points(benchmark):
    from time_to_loss_runs import Result

    run = Result([1.0, 2.0, 3.0], [4.0, 3.0, 2.0], 5.0)
    assert run.reached(2.5) == 2.5
    assert run.reached(4.5) == 1.0
    assert run.reached(1.9) == math.inf
