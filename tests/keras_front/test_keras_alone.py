"""One process per backend, in which everything that needs no other process is checked."""

import re
from pathlib import Path

import pytest

from marks import slow

HERE = Path(__file__).parent
ALL = "keras_center keras_alone keras_observed keras_refused"


@pytest.mark.parametrize(
    "case",
    [
        "jax keras_center",
        "torch keras_alone keras_observed keras_refused",
        *slow("jax keras_alone", "jax keras_observed keras_refused", "torch keras_center"),
        *slow(f"tensorflow {ALL}"),
    ],
)
def test_in_one_process(start, tmp_path, case):
    backend, *modules = case.split()
    command = start(backend, HERE / "keras_checks.py", tmp_path, *modules)
    assert command.wait(280) == 0, command.output
    texts = [(HERE / f"{module}.py").read_text("utf-8") for module in modules]
    names = [name for text in texts for name in re.findall(r"^def (check_\w+)", text, re.M)]
    assert names
    assert [line for line in command.output.splitlines() if line in names] == names
