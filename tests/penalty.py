"""What ρ means, for every front end: rows that a step does not use, a variable without a gradient.

`table` is an embedding of which each step uses some rows; `idle` has no gradient. After the first
step `idle` is set to 3, away from its center.
"""

import numpy as np

from springline.rules import SGD, Adagrad, ElasticAverage, Momentum
from springline.rules.reference import Twin

RHO, ALPHA, PERIOD, RATE = 0.7, 0.4, 2, 0.1
ROWS = [[0, 2], [2, 2], [3, 1], [0, 0], [1, 2], [3, 3]]
START = {
    "table": np.arange(10, dtype=np.float32).reshape(5, 2) / 10,
    "idle": np.ones(2, np.float32),
}
INNERS = {"sgd": SGD(RATE), "momentum": Momentum(RATE, 0.9), "adagrad": Adagrad(RATE, 0.1)}


def gradient(worker, step, x):
    """Of the sum of squares of the rows."""
    g = np.zeros_like(x["table"])
    for row in ROWS[step]:
        g[row] += 2 * x["table"][row]
    return {"table": g}


def twin_rows(inner):
    """Yield the worker's variables and the center after each step."""
    rule = ElasticAverage(period=PERIOD, moving_rate=ALPHA, rho=RHO)
    twin = Twin(rule, START, INNERS[inner], gradient)
    for step, _ in enumerate(twin.run([0] * len(ROWS))):
        yield twin.workers[0].x, twin.c
        if step == 0:
            twin.workers[0].x["idle"][...] = 3
