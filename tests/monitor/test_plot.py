"""The plot: what is drawn, where, and what happens when nothing can be."""

import logging
import struct
import subprocess
import sys

import numpy as np
import pytest
from made import MODEL, NBYTES, START, center, launch, log

import springline
from springline import DiLoCo, ElasticAverage, ModelAverage, Worker
from springline.center.directory import read_layout
from springline.monitor.curves import Timeline, is_strong, quantities
from springline.monitor.metrics import read_metrics
from springline.monitor.plot import draw, figure
from springline.rules import Nesterov
from springline.run import Run
from springline.schedule import Warmup


def noisy(seconds, every=0.1, seed=0):
    """Lines of a worker that makes 100 steps per second."""
    noise = np.random.default_rng(seed).normal(0, 0.1, round(seconds / every))
    return [(k * every, round(100 * k * every), {"loss": 1 + x}) for k, x in enumerate(noise)]


def lines(ax):
    """Labels of the lines in an axes; those without one are the faint ones below a smoothed one."""
    return ["faint" if t.get_label().startswith("_") else t.get_label() for t in ax.get_lines()]


@pytest.fixture
def run(directory):
    """Two workers for ten seconds; rank 1 is restarted once, rank 0 evaluates the center."""
    center(directory).close()
    log(directory, 0, (0, 0, {}), *noisy(10))
    log(directory, 0, *((10 + k, 1000, {"center_loss": 1.0, "val_acc": 0.9}) for k in range(3)))
    log(directory, 1, (0, 0, {}), *noisy(5, seed=1), (6, 490, {}), (7, 500, {"loss": 0.9}))
    return directory


def test_a_row_per_quantity_a_column_for_time_for_steps_and_for_bytes(run):
    axes = np.reshape(figure(run).axes, (2, 3))
    assert [row[0].get_ylabel() for row in axes] == ["loss", "accuracy"]
    assert axes[-1, 0].get_xlabel() == "time, seconds"
    assert axes[-1, 1].get_xlabel() == "steps of a worker"
    assert axes[-1, 2].get_xlabel() == "bytes exchanged by all workers"
    for ax in axes[0]:
        single = ["faint"]  # the point of the restarted worker, whose incarnation has no other
        assert lines(ax) == ["faint", "worker 0", "worker 1", *single, "center", "restart"]
    assert lines(axes[1, 0]) == ["val", "restart"]


def test_the_center_is_drawn_stronger_and_a_restart_is_marked(run):
    by_label = {line.get_label(): line for line in figure(run).axes[0].get_lines()}
    assert by_label["center"].get_linewidth() > 1.5 * by_label["worker 0"].get_linewidth()
    assert by_label["restart"].get_xdata().tolist() == [6.0]
    assert by_label["restart"].get_color() == by_label["worker 1"].get_color()
    assert by_label["worker 0"].get_color() != by_label["worker 1"].get_color()
    dead = np.isnan(by_label["worker 1"].get_xdata())
    assert dead.sum() == 1  # the line is open where the worker was dead


def drawn(ax, label):
    return [line for line in ax.get_lines() if line.get_label() == label]


def test_restarts_at_about_the_same_time_are_stacked_each_in_its_workers_color(tmp_path):
    for rank in range(3):
        log(tmp_path, rank, *((k, k, {"loss": 1.0}) for k in range(50)))
        log(tmp_path, rank, (60 + rank / 10, 45, {}), (100, 90, {"loss": 0.5}))
    log(tmp_path, 1, (120, 85, {}), (130, 95, {"loss": 0.5}))
    picture = figure(tmp_path)
    marks = drawn(picture.axes[0], "restart")
    colors = [drawn(picture.axes[0], f"worker {k}")[0].get_color() for k in range(3)]
    assert [mark.get_color() for mark in marks] == colors
    heights = [mark.get_ydata().tolist() for mark in marks]
    assert heights[0] == [0]
    assert heights[1][1] == 0  # it is alone there
    assert 0 < heights[1][0] < heights[2][0] < 0.15
    handles = dict(
        zip(
            [t.get_text() for t in picture.legends[0].get_texts()],
            picture.legends[0].legend_handles,
            strict=True,
        )
    )
    assert handles["restart"].get_color() not in colors


def test_many_restarts_at_once_leave_room_for_the_curves(tmp_path):
    for rank in range(20):
        log(tmp_path, rank, (0, 9, {"loss": 1.0}), (5, 8, {"loss": 1.0}), (9, 9, {"loss": 1.0}))
    heights = [mark.get_ydata()[0] for mark in drawn(figure(tmp_path).axes[0], "restart")]
    assert len(set(heights)) == 20
    assert max(heights) < 0.3


def test_a_life_that_only_the_launcher_saw_begin_opens_the_line(tmp_path):
    # The script does not count with `springline.steps`, and no step came twice.
    log(tmp_path, 0, *((k, k, {"loss": 1.0}) for k in range(5)))
    log(tmp_path, 0, *((k + 20, k, {"loss": 1.0}) for k in range(5, 9)))
    launch(tmp_path, "finished", starts=[[START - 1, START + 15]])
    ax, _ = figure(tmp_path).axes
    assert drawn(ax, "restart")[0].get_xdata().tolist() == [25]
    assert (
        np.isnan(drawn(ax, "worker 0")[0].get_xdata()).tolist()
        == [False] * 5 + [True] + [False] * 4
    )


def test_the_line_of_one_who_speaks_for_all_is_dotted_where_it_was_dead(tmp_path):
    log(tmp_path, 0, (0, 0, {"loss": 4.0}), (1, 5, {"loss": 3.0}))
    log(tmp_path, 0, (8, 5, {}), (9, 6, {"loss": 2.0}), (10, 7, {"loss": 1.0}))
    log(tmp_path, 1, (0, 0, {}))
    ax, _ = figure(tmp_path).axes
    dotted = [line for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert [line.get_xdata().tolist() for line in dotted] == [[1, 9]]
    assert [line.get_ydata().tolist() for line in dotted] == [[3, 2]]
    assert np.isnan(drawn(ax, "loss")[0].get_xdata()).sum() == 1


def test_title_and_legend(run):
    picture = figure(run)
    title = picture.get_suptitle()
    assert title.startswith("elastic averaging, τ = 10, α = 0.45, 2 workers")
    texts = [text.get_text() for text in picture.legends[0].get_texts()]
    assert texts == ["worker 0", "worker 1", "center", "val", "restart"]


def test_a_noisy_series_is_smoothed_a_quiet_one_is_not(tmp_path):
    quiet = [(k, k, {"loss": 1 / (k + 1), "lr": 0.1}) for k in range(500)]
    log(tmp_path, 0, *quiet)
    log(tmp_path, 1, *noisy(50))
    loss, _, lr, _ = figure(tmp_path).axes
    assert lines(loss) == ["worker 0", "faint", "worker 1"]
    assert lines(lr) == ["lr"]
    faint, smoothed = (line.get_ydata() for line in loss.get_lines()[1:])
    assert np.std(smoothed) < np.std(faint) / 2
    assert np.mean(smoothed) == pytest.approx(np.mean(faint), abs=0.02)


def test_a_picture_of_three_columns(run):
    path = draw(run)
    assert path == run / "plot.png"
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width == 1584
    assert 700 < height < 1000
    assert [p.name for p in run.glob(".plot*")] == []


def test_to_another_place(run):
    path = run / "figures.svg"
    assert draw(run, path) == path
    assert path.read_text().startswith("<?xml")


def test_bytes_are_those_of_all_workers(run):
    timeline = Timeline(read_metrics(run), read_layout(run / "center")[0])
    at = START + np.array([0.0, 2.0, 4.0])  # each makes 100 steps, so 10 exchanges, per second
    np.testing.assert_array_equal(timeline.nbytes(at), 2 * NBYTES * np.array([0, 40, 80]))


def test_a_worker_that_logs_nothing_is_as_far_as_the_others(directory):
    center(directory, ElasticAverage(period=10, workers=4)).close()
    log(directory, 0, (0, 0, {"loss": 1.0}), (1, 100, {"loss": 1.0}))
    timeline = Timeline(read_metrics(directory), read_layout(directory / "center")[0])
    assert timeline.nbytes(np.array([START + 1])) == 2 * NBYTES * 4 * 10


def test_the_bytes_of_a_real_run(directory, together):
    rule = ModelAverage(period=5, workers=2)

    def train(rank):
        run = Run(directory, rank, 2)
        with Worker(MODEL, rule, run.center_directory, rank) as worker:
            for step in range(20):
                worker.step()
                run.log(step + 1, {"loss": 1.0})
            return worker.bytes_exchanged

    exchanged = sum(together(lambda: train(0), lambda: train(1)))
    metrics = read_metrics(directory)
    end = np.array([max(series.time[-1] for series in metrics.values())])
    assert Timeline(metrics, read_layout(directory / "center")[0]).nbytes(end) == exchanged
    assert len(figure(directory).axes) == 3


def test_the_break_before_a_run_went_on_takes_no_room(tmp_path):
    day = 86_400
    for rank in (0, 1):
        log(tmp_path, rank, (0, 0, {}), (30, 5, {"loss": 1.0}))
        log(tmp_path, rank, (day + rank, 5, {}), (day + 10, 10, {"loss": 1.0}))
    timeline = Timeline(read_metrics(tmp_path), None)
    at = START + np.array([0, 30, day, day + 10.0])
    assert timeline.seconds(at).tolist() == [0, 30, 30, 40]


def test_no_pause_between_two_launches_takes_room_however_short(tmp_path):
    for rank in (0, 1):
        log(tmp_path, rank, (0, 0, {}), (5, 5, {"loss": 1.0}), (7, 4, {}), (9, 9, {"loss": 1.0}))
        log(tmp_path, rank, (29 + rank, 9, {}))  # nothing was left to do
        log(tmp_path, rank, (49 + rank, 9, {}), (60, 20, {"loss": 1.0}))
    launches = [(START - 1, START + 10), (START + 28, START + 31)]
    launch(tmp_path, "finished", "finished", started=START + 48, earlier=launches)
    ax, _ = figure(tmp_path).axes
    assert drawn(ax, "worker 0")[0].get_xdata()[[0, -1]].tolist() == [5, 9 + 1 + 11]
    assert [line.get_xdata()[0] for line in drawn(ax, "run went on")] == [9, 10]
    assert [line.get_xdata().tolist() for line in drawn(ax, "restart")] == [[7], [7]]


def test_a_launch_that_has_not_logged_yet_changes_nothing(tmp_path):
    log(tmp_path, 0, (0, 0, {}), (30, 5, {"loss": 1.0}))
    launch(tmp_path, "running", started=START + 90, earlier=[(START - 1, START + 31)])
    ax, _ = figure(tmp_path).axes
    assert drawn(ax, "run went on") == []
    assert drawn(ax, "worker 0")[0].get_xdata().tolist() == [30]


def test_a_long_pause_of_a_running_worker_is_kept(tmp_path):
    log(tmp_path, 0, (0, 1, {"loss": 1.0}), (500, 2, {"loss": 1.0}))
    timeline = Timeline(read_metrics(tmp_path), None)
    assert timeline.seconds(START + np.array([500.0])).tolist() == [500]


def test_loss_and_accuracy_come_first_and_names_are_grouped(tmp_path):
    log(tmp_path, 0, (0, 1, {"lr": 0.1, "val_accuracy": 0.5, "loss": 1.0, "broken": None}))
    log(tmp_path, 1, (0, 1, {"lr": 0.1, "loss": 1.0, "center_loss": 1.0}))
    metrics = read_metrics(tmp_path)
    assert quantities(metrics) == {
        "loss": ["loss", "center_loss"],
        "accuracy": ["val_accuracy"],
        "lr": ["lr"],
    }
    assert list(quantities(metrics)) == ["loss", "accuracy", "lr"]
    strong = [
        name for name in ("loss", "lr", "val_accuracy", "center_loss") if is_strong(name, metrics)
    ]
    assert strong == ["val_accuracy", "center_loss"]


def test_validation_of_every_workers_own_is_dashed(tmp_path):
    for rank in (0, 1):
        log(tmp_path, rank, *((k, k, {"loss": 1.0, "val_loss": 1.1}) for k in range(5)))
    ax, _ = figure(tmp_path).axes
    assert lines(ax) == ["worker 0", "worker 1", "worker 0 val", "worker 1 val"]
    assert [line.get_linestyle() for line in ax.get_lines()] == ["-", "-", "--", "--"]


def test_at_most_four_rows(tmp_path):
    log(tmp_path, 0, (0, 1, {f"number{k}": 1.0 for k in range(9)} | {"accuracy": 0.5}))
    assert [ax.get_ylabel() for ax in figure(tmp_path).axes[::2]] == [
        *("accuracy", "number0", "number1", "number2")
    ]


def test_many_workers_and_many_lines(tmp_path):
    for rank in range(20):
        log(tmp_path, rank, *((k, k, {"loss": 1.0 + k}) for k in range(5)))
    log(tmp_path, 0, *((k, k, {"loss": 5.0}) for k in range(5, 9000)))
    picture = figure(tmp_path)
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["worker 0", "worker 19"]
    drawn = picture.axes[0].get_lines()
    assert len(drawn[0].get_xdata()) == 2000
    assert len({str(line.get_color()) for line in drawn}) == 20


def test_a_loss_that_falls_far_has_a_logarithmic_scale(tmp_path):
    log(tmp_path, 0, *((k, k, {"loss": 10.0**-k, "accuracy": 0.001 + 0.1 * k}) for k in range(5)))
    scales = [ax.get_yscale() for ax in figure(tmp_path).axes]
    assert scales == ["log", "log", "linear", "linear"]


def test_what_is_smoothed_is_what_is_seen(tmp_path):
    """On a logarithmic axis the smoothed line runs through the middle of the noise, not above."""
    k = np.arange(600)
    truth, noise = np.exp(-k / 60), np.random.default_rng(0).normal(0, 1, len(k))
    log(tmp_path, 0, *((t, t, {"loss": x}) for t, x in enumerate(truth * np.exp(noise))))
    ax = figure(tmp_path).axes[0]
    assert ax.get_yscale() == "log"
    (line,) = drawn(ax, "worker 0")
    above = np.log(line.get_ydata()) - np.log(truth)
    assert abs(np.mean(above)) < 0.1  # the mean of the values themselves is 0.5 above
    assert np.std(above) < 0.4


def test_against_steps_a_repeated_step_is_at_its_own_place(run):
    """Rank 1 was at step 490 when it died, and its next incarnation begins there."""
    ax = figure(run).axes[1]
    (restart,) = drawn(ax, "restart")
    assert restart.get_xdata().tolist() == [490]
    (line,) = drawn(ax, "worker 1")
    steps = line.get_xdata()
    assert steps[~np.isnan(steps)].tolist() == [*range(0, 500, 10), 500]
    assert np.isnan(steps).sum() == 1


def test_without_steps_there_is_no_axis_for_them(tmp_path):
    log(tmp_path, 0, *((k, 0, {"loss": 1.0}) for k in range(5)))
    assert [ax.get_xlabel() for ax in figure(tmp_path).axes] == ["time, seconds"]


def test_one_line_is_enough(tmp_path):
    log(tmp_path, 0, (0, 1, {"loss": 1.0}))
    assert draw(tmp_path).exists()


def test_nothing_was_logged(tmp_path, caplog):
    log(tmp_path, 0, (0, 0, {}), (1, 1, {"loss": None}))
    assert draw(tmp_path) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("No plot: nothing was logged in")


def test_without_matplotlib(run, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw(run) is None
    assert caplog.messages == [
        "No plot: matplotlib is missing. Install it: `pip install springline[plots]`."
    ]


def test_a_place_that_cannot_be_written(run, caplog):
    assert draw(run, run / "missing" / "plot.png") is None
    assert "cannot be written (No such file or directory)" in caplog.messages[0]


def test_springline_alone_imports_neither_rich_nor_matplotlib():
    script = "import sys, springline; print({'rich', 'matplotlib'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def test_a_life_is_smoothed_by_itself(directory):
    center(directory).close()
    before = [(k / 10, k, {"loss": 2.0 + (-1) ** k / 10}) for k in range(100)]
    after = [(20 + k / 10, 100 + k, {"loss": 0.2 + (-1) ** k / 10}) for k in range(100)]
    log(directory, 0, (0, 0, {}), *before, (19, 100, {}), *after)
    (line,) = drawn(figure(directory).axes[0], "worker 0")
    y = line.get_ydata()
    y = y[~np.isnan(y)]
    assert y[:100].min() > 1.8
    assert y[100:].max() < 0.4


def test_logged_bytes_count_across_restarts_whatever_the_period(directory):
    rule = ElasticAverage(period=Warmup(5, then=10), workers=2)
    center(directory, rule).close()
    plan = read_layout(directory / "center")[0]
    exchanged = [(1, 10, 100.0), (2, 20, 300.0), (3, 21, None), (4, 15, 50.0)]
    log(directory, 0, *((at, step, {"bytes_exchanged": n}) for at, step, n in exchanged))
    at = START + np.array([0.0, 1.0, 2.5, 4.0])
    timeline = Timeline(read_metrics(directory), plan)
    np.testing.assert_array_equal(timeline.nbytes(at), 2 * np.array([0, 100, 300, 350]))


def test_a_schedule_without_logged_bytes_has_no_axis_of_bytes(directory):
    center(directory, ElasticAverage(period=Warmup(5, then=10), workers=2)).close()
    log(directory, 0, *((k, k, {"loss": 1.0}) for k in range(3)))
    assert len(figure(directory).axes) == 2


def test_what_springline_adds_comes_last(directory):
    for k in range(3):
        line = {"distance": 0.1 * k, "outer_learning_rate": 0.7, "bytes_exchanged": k}
        log(directory, 0, (k, k, line | {"speed": 1.0, "loss": 1.0}))
    assert list(quantities(read_metrics(directory))) == ["loss", "speed", "distance"]
    log(directory, 0, (4, 4, {"outer_learning_rate": 0.5}))
    assert "outer_learning_rate" in quantities(read_metrics(directory))


@pytest.mark.parametrize("rate", [0.7, lambda number: 1 / (1 + number)])
def test_a_worker_logs_what_it_exchanged(directory, monkeypatch, rate):
    monkeypatch.setenv("SPRINGLINE_RUN", str(directory))
    rule = DiLoCo(period=2, outer=Nesterov(rate, 0.5))
    with Worker({"w": np.ones(16, np.float32)}, rule, directory / "center") as worker:
        for _ in range(4):
            worker.parameters["w"] -= 0.5
            worker.step()
            springline.log(loss=1.0)
    values = read_metrics(directory)[0].values
    assert np.isfinite(values["distance"]).tolist() == [False, True, False, True]
    assert values["bytes_exchanged"][[1, 3]].tolist() == [2 * 64, 4 * 64]
    rates = [0.7, 0.7] if rate == 0.7 else [1.0, 0.5]
    assert values["outer_learning_rate"][[1, 3]].tolist() == rates
