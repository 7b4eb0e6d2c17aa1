"""The same small runs where TensorFlow's second version is switched off, as old programs do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from marks import slow

HERE = Path(__file__).parent
PATH = os.pathsep.join(map(str, (HERE, HERE.parents[1] / "src")))
SCRIPT = """
import sys
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_v2_behavior()
from tf_cluster import INNERS, PERIODS, Model, Servers, close

rule, hook = sys.argv[1], sys.argv[2] == "hook"
EXPECTED = {"elastic": ([1, 2], [1, 2]), "average": ([2, 3], [2, 3]), "agn": ([1, 2], [1, 2])}
for resource in (None, True):

    def build(model):
        made = [v1.get_variable(f"v{k}", initializer=float(k)) for k in range(2)]
        assert hasattr(made[0], "handle") == bool(resource)
        model.moving = v1.get_variable("moving", initializer=0.0, trainable=False)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, model.moving.assign_add(1.0))
        return [(tf.constant(-1.0), v) for v in made]

    def update_ops():
        return tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS))

    options = {PERIODS[rule]: 2, "scope": update_ops}
    options |= ({"moving_rate": 0.5} if rule == "elastic" else {})
    inner = lambda: INNERS["sgd"](1.0)
    model = Model(Servers(1, 1), rule, 0, 1, inner, build, hook, resource=resource, **options)
    model.start()
    model.step()
    close(list(model.values()["local"].values()), [1, 2])
    close(list(model.values()["center"].values()), [0, 1])
    model.step()
    values = model.values()
    local, center = EXPECTED[rule]
    close(list(values["local"].values()), local)
    close(list(values["center"].values()), center)
    assert values["global_step"] == 1
print("as expected")
"""


@pytest.mark.parametrize(
    "case",
    ["average op", "elastic hook", *slow("average hook", "elastic op", "agn op", "agn hook")],
)
def test_without_v2(case):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *case.split()],
        env=os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "as expected" in done.stdout, done.stderr
