"""Hyperparameters validate themselves, with a sentence that says what to do."""

import dataclasses
from functools import partial

import pytest

from springline.rules import (
    AGN,
    SGD,
    Adagrad,
    Adam,
    DelayedNesterov,
    ElasticAverage,
    ModelAverage,
    Momentum,
    Nesterov,
)

RULES = [ElasticAverage, ModelAverage, partial(AGN, outer=SGD(0.1))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [0, -1, 2.5, "10", None, True])
@pytest.mark.parametrize("name", ["period", "workers"])
def test_counts_are_integers_of_at_least_one(rule, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer >= 1.*{name}={value!r}"):
        rule(**{name: value})


@pytest.mark.parametrize("α", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_moving_rate_out_of_range(α):
    with pytest.raises(ValueError, match=r"`moving_rate` must be in \(0, 1\]"):
        ElasticAverage(moving_rate=α)


def test_moving_rate_defaults_to_the_authors():
    assert ElasticAverage(workers=4, period=7).alpha == pytest.approx(0.9 / 4)
    assert ElasticAverage(workers=4, moving_rate=0.1).alpha == 0.1


def test_overshooting_moving_rate_warns():
    with pytest.warns(UserWarning, match="above 1"):
        ElasticAverage(workers=4, moving_rate=0.5)
    ElasticAverage(workers=2, moving_rate=0.5)


@pytest.mark.parametrize("rho", [-1.0, float("nan"), float("inf")])
def test_rho_out_of_range(rho):
    with pytest.raises(ValueError, match="`rho` must be a finite number >= 0"):
        ElasticAverage(rho=rho)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SGD(-0.1), "learning_rate"),
        (lambda: SGD(float("nan")), "learning_rate"),
        (lambda: Momentum(0.1, momentum=1.0), "momentum"),
        (lambda: Adagrad(0.1, initial_accumulator=-1.0), "initial_accumulator"),
        (lambda: Adam(0.1, beta1=1.0), "beta1"),
        (lambda: Adam(0.1, beta2=-0.1), "beta2"),
        (lambda: Adam(0.1, epsilon=-1e-8), "epsilon"),
    ],
)
def test_outer_settings_out_of_range(make, name):
    with pytest.raises(ValueError, match=f"`{name}` must be a number"):
        make()


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_frozen(rule):
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule().period = 3


def test_settings_are_what_workers_must_agree_on():
    assert ElasticAverage(workers=2, rho=0.1).settings() == {
        "rule": "elastic",
        "period": 10,
        "workers": 2,
        "moving_rate": 0.45,
    }
    assert ModelAverage(period=3).settings() == {"rule": "average", "period": 3, "workers": 1}
    outer = AGN(outer=Momentum(0.5, momentum=0.8)).settings()["outer"]
    assert outer == {"kind": "momentum", "momentum": 0.8}


@pytest.mark.parametrize("kind", [SGD, Momentum, Nesterov, Adagrad, Adam, DelayedNesterov])
def test_an_outer_optimizer_asks_for_its_learning_rate(kind):
    """A rate of 0, in silence, would take every step of the workers back."""
    with pytest.raises(TypeError, match="learning_rate"):
        kind()
