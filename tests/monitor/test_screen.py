"""The screen: exact cells in a terminal, plain lines elsewhere."""

import io
import os
import re
from dataclasses import replace

import pytest
from made import START, center, count, launch, launcher_alive, log
from rich.console import Console

from springline import AGN, AsyncDiLoCo, DiLoCo, ElasticAverage, SlowMo
from springline.monitor import screen as module
from springline.monitor.screen import Screen, seconds_left
from springline.monitor.status import Status, WorkerStatus
from springline.monitor.words import rule_in_words
from springline.rules import SGD
from springline.schedule import Warmup


def terminal(width=100, height=40):
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="standard"
    )


def pipe(encoding="utf-8"):
    """A console that is no terminal, and the bytes that went to it."""
    out = io.BytesIO()
    return Console(file=io.TextIOWrapper(out, encoding, write_through=True)), out


def show(directory, **settings):
    """Return the lines of the last picture of a run in a terminal."""
    console = terminal(settings.pop("width", 100), settings.pop("height", 40))
    screen = Screen(directory, console, live=True, **settings)
    with screen:
        screen.refresh()
        plain = Console(file=io.StringIO(), width=console.width, height=console.height)
        plain.print(screen._picture())
    return [line.rstrip() for line in plain.file.getvalue().splitlines()]


@pytest.fixture
def run(directory, clock):
    """A run of three workers, two of them under way, after 75 seconds."""
    clock.now = 75
    shared = center(directory, AGN(period=10, workers=3, outer=SGD(0.1)))
    count(shared, 0, steps=1200, exchanges=120, seconds=1.5)
    count(shared, 1, steps=900, exchanges=90, seconds=0.36)
    launch(
        directory, "running", "restarting", "starting", restarts=(0, 2, 0), checkpoint=START + 63
    )
    (directory / "total").write_text("2000\n")
    log(directory, 0, *((k, 16 * k, {"loss": 0.5}) for k in range(70, 76)))
    log(directory, 1, (60, 905, {"loss": None}))
    with launcher_alive(directory):
        yield directory
    shared.close()


def test_a_row_per_worker(run):
    rows = [line.split() for line in show(run)]
    head = next(i for i, row in enumerate(rows) if row[:1] == ["worker"])
    assert rows[head] == [
        *("worker", "step", "steps/s", "loss", "exchanges", "ms/exchange", "restarts", "state")
    ]
    assert rows[head + 2 : head + 5] == [
        ["0", "1,200", "16.0", "0.5000", "120", "12.5", "0", "●", "running"],
        ["1", "905", "-", "NaN/Inf", "90", "4.00", "2", "↻", "restarting"],
        ["2", "0", "-", "-", "0", "-", "0", "○", "starting"],
    ]


def test_header_progress_and_footer(run):
    lines = show(run)
    assert re.fullmatch(
        rf".*{re.escape(str(run))[-20:]} +AGN, τ = 10, outer sgd  ·  0:01:15", lines[0]
    )
    assert lines[1].endswith(" 35 %  2,105 of 6,000 steps  0:02:05 left")
    assert lines[1].startswith("━━━━")
    assert lines[-1] == "center version 210  ·  checkpoint 12 s ago  ·  430.1 kB exchanged"


def test_the_last_validation(run):
    log(run, 0, (76, 1100, {"val_loss": 2.5}), (77, 1200, {"val_loss": 2.25, "val_acc": 0.75}))
    log(run, 1, (70, 900, {"center_loss": 2.125}))
    lines = show(run)
    assert lines[-3:-1] == [
        "center_loss 2.1250 at step 900",
        "val_loss 2.2500, val_acc 0.7500 at step 1,200",
    ]
    assert "val_loss 2.2500, val_acc 0.7500 at step 1…" in show(run, width=42)  # not broken
    console, out = pipe()
    with Screen(run, console, live=False):
        pass
    words = "center_loss 2.1250 at step 900  val_loss 2.2500, val_acc 0.7500 at step 1,200"
    assert f"  {words}  version 210" in out.getvalue().decode()


def test_before_there_is_a_center(directory, clock):
    launch(directory, "starting", "starting")
    with launcher_alive(directory):
        lines = show(directory)
    assert lines[0].split() == [str(directory), "0:00:00"]
    assert lines[1].endswith(" 0 steps")
    assert lines[-1] == "no center yet"


def test_what_nobody_tells_is_not_made_up(directory, clock):
    """As of a process group: no launcher, and the center is with the ranks."""
    clock.now = 75
    log(directory, 0, (60, 600, {"loss": 0.5}))
    checkpoint = directory / "center" / "checkpoint.safetensors"
    checkpoint.parent.mkdir(exist_ok=True)
    checkpoint.touch()
    os.utime(checkpoint, (START + 63, START + 63))
    lines = show(directory)
    assert lines[-3].split() == ["0", "600", "-", "0.5000", "-", "-", "0", "?", "unknown"]
    assert lines[-1] == "the center is on every rank  ·  checkpoint 12 s ago"


def test_before_there_is_a_run(tmp_path):
    assert " ".join(show(tmp_path)) == f"Waiting for a run in {tmp_path}."


def test_the_center_is_gone(directory):
    shared = center(directory)
    shared._path.unlink()
    shared.close()
    assert show(directory)[-1] == "the center is gone; no checkpoint"


def test_without_a_total_the_bar_tells_steps_only(run):
    (run / "total").unlink()
    assert show(run)[1].endswith(" 2,105 steps")
    (run / "total").write_text("1000\n")
    assert show(run)[1].endswith(" 65 %  2,105 of 3,200 steps  0:01:02 left")


@pytest.mark.parametrize("width", [50, 60, 80, 200])
def test_every_width_keeps_its_lines_apart(run, width):
    lines = show(run, width=width)
    assert all(len(line) <= width for line in lines)
    rows = [line.split() for line in lines[5:8]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[-1] for row in rows] == ["running", "restarting", "starting"]
    assert len(rows[0]) == (9 if width >= 80 else 7 if width >= 60 else 6)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_large_numbers_are_whole_or_not_there(directory, width):
    workers = [
        *(WorkerStatus(k, "restarting", 1_234_567, None, -1.2345e-5, 123_456) for k in (0, 1)),
        WorkerStatus(1000, "running", 98_765_432, 1_234_567.8, 1.5, 98_765_432, 123_456.7, 12),
    ]
    screen = Screen(directory, terminal(width), live=True)
    plain = Console(file=io.StringIO(), width=width)
    plain.print(screen._workers(replace(status(*workers), directory=directory), room=30))
    head, rule, *rows = plain.file.getvalue().splitlines()
    names = head.split()
    values = ["1000", "98,765,432", "1,234,567.8", "1.5000", "98,765,432", "123,456.7", "12"]
    shown = [name for name in module._COLUMNS if name != "distance"]  # nobody knows it
    cells = dict(zip(shown, [*values, "running"], strict=True))
    assert rows[2].replace("●", "").split() == [cells[name] for name in names]
    assert {"worker", "step", "state"} <= set(names)
    assert len(names) == {40: 3, 60: 5, 80: 6, 100: 8, 120: 8}[width]
    assert "…" not in plain.file.getvalue()
    assert max(map(len, [head, *rows])) <= len(rule) <= width


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_lines_of_a_long_run_at_every_width(run, clock, width):
    clock.now = 100_000
    (run / "total").write_text("12345678\n")
    lines = show(run, width=width)
    assert re.fullmatch(rf".*/{run.name} +AGN, τ = 10, outer sgd  ·  27:46:40", lines[0])
    assert lines[1].endswith("  0 %       2,105 of 37,037,034 steps  -:--:-- left")
    assert lines[-1] == "center version 210  ·  checkpoint 28 h ago  ·  430.1 kB exchanged"


def test_a_path_that_fits_is_whole(tmp_path):
    launch(tmp_path / "r", "finished", ended=START + 1)
    path = str(tmp_path / "r")
    assert show(tmp_path / "r", width=len(path) + 8)[0] == f"{path} 0:00:01"
    assert show(tmp_path / "r", width=len(path) + 7)[0] == f"…{path[2:]} 0:00:01"


def test_a_run_that_is_further_than_it_was_asked_to_come(run):
    (run / "total").write_text("800\n")
    whole = 1200 + 905 + 800
    assert show(run)[1].endswith(f" 72 %  2,105 of {whole:,} steps  0:00:50 left")


def test_more_workers_than_lines(directory):
    launch(directory, *["running"] * 30, "failed")
    with launcher_alive(directory):
        lines = show(directory, height=20)
    assert len(lines) < 20
    assert lines[-2] == "… and 20 starting, 1 failed"


def test_colors_go_with_words(run):
    console = terminal()
    with Screen(run, console, live=True):
        pass
    text = console.file.getvalue()
    assert "\x1b[32m● running" in text
    assert "\x1b[33m↻ restarting" in text


def test_a_terminal_without_unicode(run):
    out = io.BytesIO()
    file = io.TextIOWrapper(out, "ascii", write_through=True)  # raises on anything else
    console = Console(file=file, width=100, height=40, force_terminal=True)
    with Screen(run, console, live=True):
        pass
    assert "AGN, ? = 10" in out.getvalue().decode("ascii")


def test_the_last_picture_stays(run):
    console = terminal()
    with Screen(run, console, live=True):
        launch(run, "finished", "finished", "failed", ended=START + 80)
    last = console.file.getvalue().rsplit("worker", 1)[1]
    assert last.count("✓ finished") == 2
    assert "✗ failed" in last
    assert "checkpoint" in last


def test_at_most_four_pictures_a_second(run, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    screen = Screen(run, terminal(), live=True)
    drawn = []
    monkeypatch.setattr(screen, "_draw", lambda: drawn.append(now[0]))
    with screen:
        for _ in range(200):  # two seconds
            screen.refresh()
            now[0] += 0.01
        assert len(drawn) == 8
    assert len(drawn) == 9


def test_plain_lines(run):
    console, out = pipe()
    with Screen(run, console, live=False) as screen:
        screen.refresh()
        screen.refresh()
    line = (
        "0:01:15  2,105 of 6,000 steps (35%)  16.0 steps/s  loss 0.5000  loss NaN/Inf in 1 worker  "
        "version 210  430.1 kB exchanged  2 restarts  1 running, 1 restarting, 1 starting"
    )
    assert out.getvalue().decode() == (
        f"{run}: AGN, τ = 10, outer sgd, 3 workers\n{line}\n{line}\n"
    )


def test_plain_lines_of_a_run_that_goes_on(directory, clock):
    launch(directory, "running", earlier=[(START - 60, START - 30)])
    log(directory, 0, *((k - 35, 100 * k, {"loss": 0.5}) for k in range(5)))
    console, out = pipe()
    with launcher_alive(directory), Screen(directory, console, live=False):
        pass
    assert out.getvalue() == b"0:00:30  400 steps  loss 0.5000  1 running\n"


def test_plain_lines_come_every_five_seconds(run, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console, out = pipe()
    with Screen(run, console, live=False) as screen:
        for _ in range(120):  # twelve seconds
            screen.refresh()
            now[0] += 0.1
    assert out.getvalue().count(b" steps ") == 3 + 1


def test_plain_lines_of_a_run_that_is_over_say_so_once(directory):
    launch(directory, "finished", ended=START + 60)
    console, out = pipe()
    with Screen(directory, console, live=False) as screen:
        screen.refresh()
    assert out.getvalue() == b"0:01:00  0 steps  1 finished\n"
    assert screen.status.over


def test_plain_lines_have_no_control_characters_even_in_a_terminal(run):
    console = terminal()
    with Screen(run, console, live=False):
        pass
    assert "steps" in console.file.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", console.file.getvalue())


def test_plain_lines_without_unicode(run):
    console, out = pipe("ascii")
    with Screen(run, console, live=False):
        pass
    assert b"AGN, ? = 10" in out.getvalue()


def test_watching_does_not_end_the_run(run):
    (run / "center" / "layout.json").write_text("{")
    assert "layout.json" in "".join(show(run))
    console, out = pipe()
    with Screen(run, console, live=False) as screen:
        screen.refresh()
    assert out.getvalue().count(b"cut short or damaged") == 1


def status(*workers):
    return Status(None, workers, {}, None, 0, 0.0, None, None, False)


def test_seconds_left():
    fast, slow = WorkerStatus(0, "running", 50, 10.0), WorkerStatus(1, "running", 50, 5.0)
    assert seconds_left(status(fast, slow), 100) == 10
    assert seconds_left(status(fast, WorkerStatus(1, "finished", 100, 5.0)), 100) == 5
    assert seconds_left(status(fast, slow, WorkerStatus(2, "restarting", 40)), 100) == 10
    assert seconds_left(status(fast, WorkerStatus(1, "running", 50, 0.0)), 100) is None
    assert seconds_left(status(WorkerStatus(0, "starting")), 100) is None
    assert seconds_left(status(WorkerStatus(0, "running", 120, 5.0)), 100) == 0


def test_distance_and_outer_learning_rate_where_they_are_logged(run):
    of_exchange = {"distance": 0.0123456, "outer_learning_rate": 0.7, "bytes_exchanged": 2048}
    log(run, 0, (60, 1190, of_exchange | {"loss": 0.5}))
    log(run, 1, (74, 905, of_exchange | {"outer_learning_rate": 0.35}), (75, 906, {"loss": 1.0}))
    lines = show(run)
    head, _, *rows = [line.split() for line in lines[3:8]]
    at = head.index("distance")
    assert [row[at] for row in rows] == ["0.012", "0.012", "-"]
    assert lines[-1].endswith("430.1 kB exchanged  ·  outer learning rate 0.35")  # the latest
    console, out = pipe()
    with Screen(run, console, live=False):
        pass
    assert "  distance 0.012  outer learning rate 0.35  " in out.getvalue().decode()
    assert "distance" not in " ".join(show(run, width=50)[3:8])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (DiLoCo(period=20, workers=2, fragments=4), "DiLoCo, τ = 20, 4 fragments, outer nesterov"),
        (DiLoCo(period=20, delay=3), "DiLoCo, τ = 20, delay 3, outer nesterov"),
        (AsyncDiLoCo(period=20), "asynchronous DiLoCo, τ = 20, outer delayed nesterov"),
        (SlowMo(period=Warmup(3, then=12)), "SlowMo, τ = 1 to 12 (Warmup), outer slow momentum"),
        (
            ElasticAverage(period=lambda step: 5, moving_rate=0.5, fragments=[["w"], ["b"]]),
            "elastic averaging, τ = 6 to 6 (schedule), 2 fragments, α = 0.5",
        ),
    ],
)
def test_rules_in_words(rule, words):
    assert rule_in_words(rule.settings()) == words


def test_a_period_that_only_its_file_knows():
    assert rule_in_words({"rule": "own", "period": "anything"}) == "own, τ by anything"
