"""What a worker and a script are given: wrong input is refused, and nothing has begun."""

import numpy as np
import pytest

import springline
from springline import AGN, ElasticAverage, LocalCenter, Worker, progress
from springline.center import Layout
from springline.rules import SGD, Adam

MODEL = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)}


@pytest.mark.parametrize("center", ["ray://head:10001", "tcp://10.0.0.1:6379"])
def test_an_address_is_no_directory(center, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"springline run --address.*SPRINGLINE_ADDRESS") as caught:
        Worker(MODEL, ElasticAverage(), center)
    assert repr(center) in str(caught.value)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("center", [5, True, {"w": 1}, b"run"])
def test_what_is_no_center_is_refused(center):
    with pytest.raises(TypeError, match=r"`center` must be a center or the directory of one"):
        Worker(MODEL, ElasticAverage(), center)


@pytest.mark.parametrize("name", ["use_locking", "synchronous"])
@pytest.mark.parametrize("value", ["False", "yes", 1])
def test_a_word_is_not_true_or_false(name, value, directory):
    words = rf"`{name}` must be True or False. Received: {name}={value!r}\."
    with pytest.raises(TypeError, match=words):
        Worker(MODEL, ElasticAverage(), directory, **{name: value})
    assert not directory.exists()


def test_a_center_takes_no_word_either():
    with pytest.raises(TypeError, match=r"`use_locking` must be True or False"):
        LocalCenter(Layout.of(MODEL), ElasticAverage(), MODEL, use_locking="False")
    Worker(MODEL, ElasticAverage(), use_locking=np.bool_(False), synchronous=None)


@pytest.mark.parametrize("timeout", ["5", True, -1, float("nan"), [5]])
def test_a_timeout_is_a_number_of_seconds(timeout, directory):
    with pytest.raises(ValueError, match=r"`timeout` must be seconds >= 0, or None. Received: "):
        Worker(MODEL, ElasticAverage(), directory, timeout=timeout)
    assert not directory.exists()


@pytest.mark.parametrize("rate", ["0.1", None, True, [0.1], -0.1])
def test_a_learning_rate_is_a_number(rate):
    worker = Worker(MODEL, AGN(outer=SGD(0.1)))
    for given in (rate, {"b": rate}):
        with pytest.raises(ValueError, match=r"A learning rate must be a finite number >= 0"):
            worker.set_learning_rate(given)


def test_a_learning_rate_has_a_parameter():
    worker = Worker(MODEL, AGN(outer=SGD(0.1)))
    with pytest.raises(ValueError, match=r"no parameter 'c'. It has: 'w', 'b'"):
        worker.set_learning_rate({"c": 0.1})


@pytest.mark.parametrize("value", ["0.1", True, [0.1], b"1"])
def test_rates_are_numbers(value):
    with pytest.raises(ValueError, match=r"`moving_rate` must be in \(0, 1\].*Received: moving"):
        ElasticAverage(moving_rate=value)
    with pytest.raises(ValueError, match=r"`rho` must be a finite number >= 0. Received: rho="):
        ElasticAverage(rho=value)
    with pytest.raises(ValueError, match=r"`learning_rate` must be a number.*Received: learning"):
        SGD(value)
    with pytest.raises(ValueError, match=r"`epsilon` must be a number above 0. Received: eps"):
        Adam(0.1, epsilon=value)


def test_none_is_no_rate():
    with pytest.raises(ValueError, match=r"`rho` must be a finite number"):
        ElasticAverage(rho=None)
    with pytest.raises(ValueError, match=r"`learning_rate` must be a number"):
        SGD(None)


def test_numbers_of_numpy_are_numbers():
    rule = ElasticAverage(moving_rate=np.float32(0.5), rho=np.array(0.0), period=np.int64(3))
    assert rule.settings()["moving_rate"] == 0.5


RULES = [AGN(period=1, outer=SGD(1.0)), ElasticAverage(period=1, rho=0.1)]


@pytest.mark.parametrize("rule", RULES, ids=["agn", "penalty"])
@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 1), (4, 2, 3)])
def test_a_gradient_of_another_shape_is_not_broadcast(rule, shape):
    worker = Worker(MODEL, rule)
    gradients = {"b": np.ones(2, np.float32), "w": np.ones(shape, np.float32)}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'w' has shape \(2, 3\). Received: ") as caught:
            worker.observe(gradients)
        assert f"a gradient of shape {shape}" in str(caught.value)
    assert worker.local.gradients == 0
    assert (gradients["b"] == 1).all()


@pytest.mark.parametrize("rule", RULES, ids=["agn", "penalty"])
def test_a_gradient_of_an_unknown_parameter_is_refused(rule):
    buffers = {"mean": np.zeros(2, np.float32)}
    worker = Worker(MODEL, rule, buffers=buffers)
    for name in ("bias", "mean"):
        with pytest.raises(ValueError, match=rf"no parameter '{name}'. It has: 'w', 'b'"):
            worker.observe({name: np.ones(2, np.float32)})


@pytest.mark.parametrize("name", ["step", "time"])
def test_log_keeps_its_own_columns(name):
    with pytest.raises(ValueError, match=rf"`{name}` .*another name. Received: {name}=3\."):
        springline.log(loss=1.0, **{name: 3})


@pytest.mark.parametrize("value", ["0.5", None, np.ones(2), [1.0], 1j])
def test_log_takes_numbers(value, tmp_path, monkeypatch):
    for run in (None, tmp_path):  # a script alone learns it, too
        if run:
            monkeypatch.setenv("SPRINGLINE_RUN", str(run))
        with pytest.raises(ValueError, match=r"`accuracy` must be a number. Received: accuracy="):
            springline.log(loss=1.0, accuracy=value)
    assert [*tmp_path.iterdir()] == []


def test_a_line_without_values_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path))
    springline.log()
    progress.log_numbers({"step": 3, "time": 1.5, "table": [1, 2], "words": "two", "none": None})
    assert not (tmp_path / "metrics").exists()  # it would be the mark of a restart
    progress.log_numbers({"step": 3, "val_loss": np.float32(0.5), "bad": np.nan})
    (line,) = (tmp_path / "metrics" / "rank-0.jsonl").read_text().splitlines()
    assert line.endswith('"val_loss": 0.5, "bad": null}')


def test_log_takes_arrays_of_one_number(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path))
    springline.log(a=np.float32(0.5), b=np.array(0.5), c=np.array([0.5]), d=1, e=np.nan)
    line = (tmp_path / "metrics" / "rank-0.jsonl").read_text()
    assert '"a": 0.5, "b": 0.5, "c": 0.5, "d": 1.0, "e": null}' in line
