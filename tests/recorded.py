"""The nine runs recorded from TensorFlow 1.15.5, and the model they were made with."""

import json
from pathlib import Path

import numpy as np

from springline.rules import AGN, SGD, Adagrad, Adam, ElasticAverage, ModelAverage, Momentum
from springline.rules.reference import Twin

FIXTURES = Path(__file__).parent / "fixtures" / "tf115"
RECORDED = json.loads((FIXTURES / "trajectories.json").read_text())
OPTIMIZERS = {"sgd": SGD, "momentum": Momentum, "adagrad": Adagrad, "adam": Adam}


def start():
    """The first values: `w` random, `b` zero."""
    w = np.random.RandomState(7).randn(3, 2).astype(np.float32)
    return {"w": w, "b": np.zeros(2, np.float32)}


def data(worker):
    """All batches of one worker."""
    rng = np.random.RandomState(1000 + worker)
    x, y = rng.randn(64, 4, 3), rng.randn(64, 4, 2)
    return x.astype(np.float32), y.astype(np.float32)


DATA = [data(worker) for worker in range(3)]


def gradient(worker, step, x):
    """The gradient of the mean squared error of `y = x·w + b`."""
    inputs, targets = DATA[worker][0][step], DATA[worker][1][step]
    error = inputs @ x["w"] + x["b"] - targets
    scale = np.float32(2 / error.size)
    return {"w": scale * inputs.T @ error, "b": scale * error.sum(0)}


def rule_of(name):
    """The rule of a recorded run, with TensorFlow's defaults, and its inner optimizer."""
    config = RECORDED[name]["config"]
    given = config.get("kwargs", {})
    period = given.get("communication_period", given.get("interval_steps", 10))
    common = {"period": period, "workers": config["workers"]}
    inner = OPTIMIZERS[config["opt"]](config["lr"])
    if config["rule"] == "average":
        return ModelAverage(**common), inner
    if config["rule"] == "agn":
        return AGN(**common, outer=inner), inner
    α = given.get("moving_rate", ElasticAverage.BETA / period / config["workers"])
    rho = given.get("rho", α / config["lr"])
    return ElasticAverage(**common, moving_rate=α, rho=rho), inner


def schedule_of(name):
    """Which worker steps when; a list where several step together."""
    return RECORDED[name]["config"]["schedule"]


def rows(name):
    """What was recorded: the start, then one list per entry of the schedule."""
    return RECORDED[name]["trajectory"]


def twin_of(name):
    """A twin of a recorded run."""
    rule, inner = rule_of(name)
    return Twin(rule, start(), inner, gradient)
