"""The runs recorded from TensorFlow 1.15.5 and from torchft, and the model they were made with."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from springline.rules import (
    AGN,
    SGD,
    Adagrad,
    Adam,
    DiLoCo,
    ElasticAverage,
    ModelAverage,
    Momentum,
    Nesterov,
)
from springline.rules.outer import Point
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


# Five runs of torchft 0.2.0's own DiLoCo, on the same model with two workers.
TORCHFT = {
    run["name"]: run
    for run in json.loads((FIXTURES.parent / "torchft" / "trajectories.json").read_text())["runs"]
}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with torch's default weight decay, which the recorded runs have inside."""

    def step(self, now, g, exchange, then):
        shrunk = np.float32(1 - 0.01 * self.learning_rate) * now.c
        super().step(Point(shrunk, now.state), g, exchange, then)


def diloco_of(name):
    """The rule of a recorded run of torchft, and its inner optimizer."""
    run = TORCHFT[name]
    kinds = {"sgd": lambda rate, *_: SGD(rate), "nesterov": Nesterov, "adamw": AdamW}
    inner, outer = (kinds[kind](*settings) for kind, *settings in (run["inner"], run["outer"]))
    fragments = [["w"], ["b"]] if run["fragments"] == 2 else 1
    settings = {key: run[key] for key in ("period", "delay", "mixing", "workers")}
    return DiLoCo(**settings, outer=outer, fragments=fragments), inner


def adoptions(name):
    """The steps, from 0 on, at which workers adopt the center: then it is where torchft's is."""
    run = TORCHFT[name]
    gap = run["period"] // run["fragments"]
    return range(gap - 1, run["steps"], gap)
