from types import SimpleNamespace

import numpy as np

import springline

rank = springline.rank()
parameters = {"w": np.zeros(3)}
batches = range(20)


def gradients_of(values, number):
    return {"w": values["w"] - number}


def sgd(values, gradients):
    values["w"] -= 0.1 * gradients["w"]


inner = SimpleNamespace(step=sgd)
