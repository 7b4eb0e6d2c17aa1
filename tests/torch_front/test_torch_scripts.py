"""Whole scripts: how they end, and what they say without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_training import INNERS, center, near, network, train, wrap

from springline import SharedCenter

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("end", "versions"),
    [
        ("return", 2),
        ("raise", 1),
        pytest.param("exit overlap", 2, marks=pytest.mark.slow),
        pytest.param("nan", 1, marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_script(end, versions, directory):
    """A normal one sends what the last period left over, an error does not; both are told."""
    command = [sys.executable, str(HERE / "torch_script.py"), *end.split()]
    environment = os.environ | {"SPRINGLINE_RUN": str(directory), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (end in ("raise", "nan")), done.stderr
    with SharedCenter.open(directory / "center") as held:
        assert (held.version, held.members()) == (versions, [])
        if end == "return":
            model = network()
            opt = wrap("elastic", INNERS["sgd"](model.parameters()), 4, model=model)
            train(model, opt, range(6))
            opt.finish()
            values = {name: array.copy() for name, array in held.values().items()}
            for name, c in center(opt).items():
                assert (values[name] == c.numpy()).all()
    assert ("an error of the script" in done.stderr) == (end == "raise")


def test_without_torch_a_sentence_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n"
        "    import springline.torch\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error, error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'springline[torch]'" in done.stdout
    assert done.stdout.strip().endswith("torch")


@pytest.mark.parametrize("rule", ["elastic", "average", "agn"])
def test_finish_sends_the_rest_and_leaves(rule):
    model = network()
    opt = wrap(rule, INNERS["sgd"](model.parameters()), 4, model=model)
    train(model, opt, range(6))
    opt.finish()
    opt.finish()
    assert (opt.worker.center.version, opt.worker.center.members()) == (2, [])
    if rule != "elastic":
        near(center(opt), {n: p.detach() for n, p in model.named_parameters()}, atol=0)


def test_finish_right_after_an_exchange_sends_nothing():
    model = network()
    opt = wrap("agn", INNERS["sgd"](model.parameters()), 4, model=model)
    train(model, opt, range(4))
    opt.finish()
    assert opt.worker.center.version == 1
