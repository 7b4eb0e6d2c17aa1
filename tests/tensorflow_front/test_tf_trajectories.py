"""The nine runs recorded from TensorFlow 1.15.5, on a real cluster."""

from functools import partial
from itertools import product

import pytest
import tensorflow as tf
from tf_cluster import INNERS, Model, Servers, close, together

from recorded import DATA, RECORDED, start

v1 = tf.compat.v1


def build(model):
    """`y = x·w + b`, squared loss."""
    first = start()
    w = v1.get_variable("w", initializer=first["w"])
    b = v1.get_variable("b", initializer=first["b"])
    model.x = v1.placeholder(tf.float32, [4, 3])
    model.y = v1.placeholder(tf.float32, [4, 2])
    return tf.reduce_mean(tf.square(tf.matmul(model.x, w) + b - model.y))


WAYS = list(product(sorted(RECORDED), (True, False), (False, True)))
EVERY_DAY = [
    *((name, True, hook) for name, resource, hook in WAYS if resource),
    *((name, False, True) for name in ("agn-momentum", "average-momentum", "elastic-momentum-rho")),
]
OTHERS = [pytest.param(*way, marks=pytest.mark.slow) for way in WAYS if way not in EVERY_DAY]


@pytest.mark.parametrize(("name", "resource", "hook"), [*EVERY_DAY, *OTHERS])
def test_recorded(name, resource, hook):
    config = RECORDED[name]["config"]
    workers = config["workers"]
    servers = Servers(1, workers)
    inner = partial(INNERS[config["opt"]], config["lr"])
    models = [
        Model(
            servers,
            config["rule"],
            k,
            workers,
            inner,
            build,
            hook,
            resource,
            **config.get("kwargs", {}),
        )
        for k in range(workers)
    ]
    for model in models:
        model.start()
    steps = [0] * workers
    for turn, rows in zip([None, *config["schedule"]], RECORDED[name]["trajectory"], strict=True):
        if turn is not None:
            ks = turn if isinstance(turn, list) else [turn]
            feeds = [
                {models[k].x: DATA[k][0][steps[k]], models[k].y: DATA[k][1][steps[k]]} for k in ks
            ]
            together([models[k] for k in ks], feeds)
            for k in ks:
                steps[k] += 1
        for row in rows:
            values = models[row["worker"]].values()
            assert values["global_step"] == row["global_step"]
            for key in ("w", "b"):
                close(values["local"][key], row["local"][key])
                close(values["center"][key], row["center"][key])
