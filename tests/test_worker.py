"""The worker: counting, exchanging when due, finishing."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import springline
from springline import (
    AGN,
    AsyncDiLoCo,
    DiLoCo,
    ElasticAverage,
    LocalCenter,
    ModelAverage,
    SharedCenter,
    SlowMo,
    Worker,
    errors,
    progress,
    worker_state,
)
from springline.center import CenterError, Layout, LayoutError, NonFiniteError, RoundTimeoutError
from springline.rules import SGD, Nesterov


def model(value=0.0, dtype=np.float32):
    return {"w": np.full((2, 3), value, dtype), "b": np.full(2, value, dtype)}


def ones(worker):
    return {name: np.ones_like(x) for name, x in worker.parameters.items()}


def center_for(rule, value=0.0):
    return LocalCenter(Layout.of(model()), rule, model(value))


def test_it_exchanges_every_period():
    worker = Worker(model(), ElasticAverage(period=3))
    assert [worker.step() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert (worker.local_step, worker.exchanges, worker.center.version) == (7, 2, 2)
    assert worker.bytes_exchanged == 2 * 2 * worker.layout.nbytes
    assert worker.exchange_seconds > 0


def test_a_joining_worker_takes_the_centers_values():
    rule = ElasticAverage(workers=2)
    worker = Worker(model(5.0), rule, center_for(rule, 1.0), rank=1)
    assert (worker.parameters["w"] == 1).all()
    assert (worker.center.values()["w"] == 1).all()


def test_its_parameters_are_views_of_one_flat_buffer():
    worker = Worker(model(), ElasticAverage())
    worker.parameters["b"] += 1
    assert (worker.layout.views(worker.local.x)["b"] == 1).all()
    assert all(np.shares_memory(x, worker.local.x) for x in worker.parameters.values())


def test_finish_exchanges_what_is_left_and_leaves():
    worker = Worker(model(), AGN(period=4, outer=SGD(1.0)))
    for _ in range(6):
        worker.observe(ones(worker))
        worker.step()
    worker.finish()
    worker.finish()
    assert worker.center.version == 2
    assert worker.center.members() == []
    # (1+1+1+1)/4, then (1+1)/2: AGN divides by the gradients it holds.
    np.testing.assert_array_equal(worker.center.values()["b"], [-2, -2])


def test_finish_right_after_an_exchange_makes_no_other():
    worker = Worker(model(), ElasticAverage(period=2))
    worker.step(), worker.step()
    worker.finish()
    assert worker.center.version == 1


def test_as_a_context_it_finishes_and_after_an_error_only_leaves():
    rule = ElasticAverage(period=10, workers=2)
    center = center_for(rule)
    with Worker(model(), rule, center) as worker:
        worker.step()
    assert (center.version, center.members()) == (1, [])
    with pytest.raises(KeyError):
        fail_inside(Worker(model(), rule, center))
    assert (center.version, center.members()) == (1, [])


def fail_inside(worker):
    with worker:
        worker.step()
        raise KeyError


def test_a_restarted_rank_learns_how_far_it_had_come():
    rule = ElasticAverage(period=5, workers=2)
    center = center_for(rule)
    first = Worker(model(), rule, center, rank=1)
    for _ in range(12):
        first.step()
    first.member.leave()  # as if killed: steps 11 and 12 are lost
    again = Worker(model(), rule, center, rank=1)
    assert (again.start_step, again.local_step) == (10, 0)
    for _ in range(5):
        again.step()
    again.finish()
    assert Worker(model(), rule, center, rank=1).start_step == 15
    assert Worker(model(), rule, center, rank=0).start_step == 0


def test_agn_sends_each_parameters_learning_rate():
    worker = Worker(model(), AGN(period=1, outer=SGD(1.0)))
    worker.set_learning_rate({"w": 0.5})
    worker.observe(ones(worker))
    worker.step()
    assert (worker.parameters["w"] == -0.5).all()
    assert (worker.parameters["b"] == -1).all()
    worker.set_learning_rate(0.0)
    worker.observe(ones(worker))
    worker.step()
    assert (worker.parameters["b"] == -1).all()
    with pytest.raises(ValueError, match=r"finite number >= 0. Received: -1.0 for 'w'"):
        worker.set_learning_rate(-1.0)


@pytest.mark.parametrize("rule", [AsyncDiLoCo, DiLoCo, SlowMo])
def test_the_inner_learning_rate_is_not_the_outer_one(rule):
    worker = Worker(model(), rule(period=1, outer=Nesterov(0.5, 0.0)))
    worker.set_learning_rate(0.01)
    worker.parameters["b"] += 1
    worker.step()
    assert worker.center.values()["b"][0] == worker.outer_rate() == 0.5


def test_agn_without_gradients_says_what_is_missing():
    worker = Worker(model(), AGN(period=1, outer=SGD(1.0)))
    with pytest.raises(RuntimeError, match=r"worker\.observe\(gradients\)"):
        worker.step()


def test_the_penalty_pulls_gradients_towards_the_last_center():
    worker = Worker(model(1.0), ElasticAverage(rho=0.5))
    worker.parameters["b"][:] = 3
    gradients = ones(worker)
    worker.observe(gradients)
    np.testing.assert_array_equal(gradients["b"], [2, 2])  # 1 + 0.5 · (3 − 1)
    np.testing.assert_array_equal(gradients["w"], np.ones((2, 3)))


def test_the_penalty_pulls_a_parameter_that_has_no_gradient():
    worker = Worker(model(1.0), ElasticAverage(rho=0.5))
    worker.parameters["b"][:] = 3
    gradients = {"w": np.ones((2, 3), np.float32)}
    worker.observe(gradients)
    np.testing.assert_array_equal(gradients["b"], [1, 1])  # 0.5 · (3 − 1)
    alone = Worker(model(1.0), ElasticAverage(rho=0.0))
    gradients = {"w": np.ones((2, 3), np.float32)}
    alone.observe(gradients)
    assert gradients.keys() == {"w"}


def test_without_penalty_nothing_is_kept_or_computed():
    worker = Worker(model(), ElasticAverage(rho=0.0))
    gradients = ones(worker)
    worker.observe(gradients)
    assert worker.local.base is None
    assert (gradients["w"] == 1).all()


@pytest.mark.parametrize("rule", [ElasticAverage, ModelAverage, AGN])
def test_half_precision_trains_in_its_own_dtype(rule):
    extra = {AGN: {"outer": SGD(0.5)}, ElasticAverage: {"moving_rate": 0.9}}.get(rule, {})
    worker = Worker(model(0.0, np.float16), rule(period=1, **extra))
    worker.parameters["w"] += np.float16(1)
    worker.observe(ones(worker))
    worker.step()
    assert worker.parameters["w"].dtype == np.float16
    assert worker.center.values()["w"].dtype == np.float32
    expected = {ElasticAverage: (0.1, 0.9), ModelAverage: (1, 1), AGN: (-0.5, -0.5)}[rule]
    np.testing.assert_allclose(worker.parameters["w"], np.float16(expected[0]), rtol=1e-3)
    np.testing.assert_allclose(worker.center.values()["w"], expected[1], rtol=1e-6)


def test_after_nan_a_worker_can_take_the_center_and_go_on():
    worker = Worker(model(1.0), ElasticAverage(period=1))
    worker.parameters["b"][1] = np.nan
    with pytest.raises(NonFiniteError, match=r"'b'.*call .*`worker\.take_center\(\)`"):
        worker.step()
    worker.take_center()
    worker.step()
    assert (worker.parameters["b"] == 1).all()


def test_another_model_is_refused():
    rule = ElasticAverage()
    with pytest.raises(LayoutError, match=r"'w' has shape \(2, 3\) in the center, \(3, 3\)"):
        Worker({"w": np.zeros((3, 3), np.float32)}, rule, center_for(rule))


def test_a_refused_start_gives_the_rank_back():
    rule = ModelAverage(workers=2)
    center = center_for(rule)
    with pytest.raises(RoundTimeoutError, match="missing: rank 1"):
        Worker(model(), rule, center, rank=0, timeout=0.05)
    assert center.members() == []


def test_all_errors_of_a_center_are_springlines():
    for kind in errors.CenterError, *errors.CenterError.__subclasses__():
        if kind.__module__ != errors.__name__:
            continue
        assert getattr(springline, kind.__name__) is kind
        assert kind.__name__ in springline.__all__


def test_import_is_light():
    code = (
        "import sys; import springline; "
        "heavy = {'torch', 'tensorflow', 'ray', 'matplotlib', 'rich', 'typer'} & set(sys.modules); "
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_assigning_to_a_parameter_writes_into_it():
    worker = Worker(model(), ElasticAverage(period=1, moving_rate=1.0))
    worker.parameters["b"] = worker.parameters["b"] + 3
    worker.step()
    assert (worker.center.values()["b"] == 3).all()
    with pytest.raises(KeyError):
        worker.parameters["c"] = np.zeros(2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_center_is_made_of_nan(bad, directory):
    values = model() | {"b": np.array([1, bad], np.float32)}
    for place in (None, directory):
        with pytest.raises(NonFiniteError, match="'b' has NaN or Inf, so no center was made"):
            Worker(values, ElasticAverage(), place)
    Worker(model(), ElasticAverage(), directory).center.close()


def test_steps_are_counted_from_where_the_worker_was_whatever_was_asked_before(tmp_path):
    """Without a run in the environment nobody knows before the worker joins."""
    rule = ElasticAverage(period=1, workers=2)
    with Worker(model(), rule, tmp_path / "center") as worker:
        for _ in range(3):
            worker.step()
    progress._count.start, progress._count.done = 0, None  # as in another process that has asked
    again = Worker(model(), rule, tmp_path / "center")
    assert springline.start_step() == 3
    assert list(springline.steps(5)) == [3, 4]
    again.finish()
    again.center.retire()


@pytest.mark.parametrize("wrong", [-1, 2.5, "3", None, True])
def test_steps_takes_a_number(wrong):
    with pytest.raises(ValueError, match=r"`n` must be an integer >= 0\. Received: n="):
        springline.steps(wrong)


def test_steps_within_steps_do_not_go_back():
    counted = []
    for _ in springline.steps(2):
        counted.append(progress.counted())
        counted += [progress.counted() for _ in springline.steps(3)]
    assert counted == sorted(counted)


def test_who_ends_early_may_come_back(tmp_path, monkeypatch):
    """`sys.exit(1)` runs the exit handlers as a normal end does."""
    monkeypatch.setattr(progress, "_UNSEEN", 0.5)
    rule = ElasticAverage(period=5, workers=2)
    worker = Worker(model(), rule, tmp_path / "center")
    worker.step()
    worker.for_good = False
    worker.finish()
    assert worker.center.finished() == []
    assert worker.center.progress()[0].steps == 1
    assert worker.final(timeout=60)  # not waiting for itself, nor for one that is not there
    worker.center.retire()


def test_start_step_stays_what_it_was_while_the_worker_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path))
    rule = ElasticAverage(period=2)
    assert springline.start_step() == 0
    layout = Layout.of(model())
    with SharedCenter.create_or_join(tmp_path / "center", layout, rule, model()) as center:
        worker = Worker(model(), rule, center)
        for _ in range(5):
            worker.step()
        assert springline.start_step() == 0
        worker.member.leave()
        monkeypatch.setattr(progress, "_count", progress._Count())  # as in another process
        again = Worker(model(), rule, center)
        assert springline.start_step() == again.start_step == 4
        again.member.leave()
        center.retire()


def test_a_block_that_went_through_before_another_was_refused_is_not_sent_again():
    """With a delay the worker has not adopted it."""
    values = {"w": np.zeros(200_000, np.float32), "b": np.zeros(4, np.float32)}
    worker = Worker(values, AsyncDiLoCo(period=2, delay=1, outer=SGD(1.0)))
    worker.parameters["w"] += 1
    worker.parameters["b"][:] = np.nan
    worker.step()
    with pytest.raises(NonFiniteError, match="'b'"):
        worker.step()
    assert worker.center.values()["w"][0] == 1
    worker.parameters["b"][:] = 0
    for made in (0, 0, 1, 1):
        worker.step()
        assert worker.center.values()["w"][0] == 1 + made
        worker.parameters["w"] += worker.local_step == 4
    worker.finish()


@pytest.mark.parametrize("same", [True, False])
def test_copies_are_noticed_fragment_by_fragment(same, caplog):
    names = [f"{k:03d}" for k in range(100)]
    cut = [names[90:], names[80:90], names[70:80], names[65:70], names[:65]]
    start = {name: np.zeros(2) for name in names}
    rule = ModelAverage(period=5, workers=2, fragments=cut)
    center = LocalCenter(Layout.of(start, None, cut), rule, start)

    def train(rank):
        worker = Worker(start, rule, center, rank, timeout=60)
        for _ in range(15):
            for x in worker.parameters.values():
                x += 1 if same else 1 + rank
            worker.step()
        worker.finish()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    assert ("hold the same" in caplog.text) == same


def test_a_failed_exchange_does_not_outlive_the_state_that_is_loaded_after_it():
    worker = Worker({"w": np.zeros(4)}, AsyncDiLoCo(period=2, delay=1, outer=SGD(1.0)))
    saved = worker_state.save(worker)
    worker.parameters["w"][:] = np.nan
    worker.step()
    with pytest.raises(NonFiniteError):
        worker.step()
    worker_state.load(worker, saved)
    worker.parameters["w"][:] = 0
    for _ in range(4):
        worker.parameters["w"] += 1
        worker.step()
    assert worker.center.values()["w"][0] == 2  # of each two steps a delay keeps one


def test_in_the_background_it_also_asks_for_what_the_rule_sends():
    worker = Worker(model(), SlowMo(period=1), overlap=True)
    with pytest.raises(RuntimeError, match="set_learning_rate"):
        worker.step()
    worker = Worker(model(), AGN(period=1, outer=SGD(1.0)), overlap=True)
    with pytest.raises(RuntimeError, match="observe"):
        worker.step()


def test_a_step_after_the_end_names_what_ended_it():
    worker = Worker({"v": np.zeros(1)}, ElasticAverage(period=1))
    worker.step()
    worker.finish()
    with pytest.raises(CenterError, match=r"Call it once, after the training loop"):
        worker.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_rounding_to_half_precision_is_no_step(overlap):
    """The center leaves the values that float16 has, though the worker cannot."""
    ulp = 2.0**-10
    worker = Worker(
        {"w": np.ones(3, np.float16)}, DiLoCo(period=1, outer=SGD(0.25)), overlap=overlap
    )
    for _ in range(40):
        worker.parameters["w"] += np.float16(ulp)
        worker.step()
    worker.finish()
    np.testing.assert_allclose(worker.center.values()["w"], 1 + 0.25 * 40 * ulp, rtol=1e-6)
