"""One process per backend, in which everything that needs no other process is checked."""

from pathlib import Path

import pytest

from marks import slow

SCRIPT = Path(__file__).with_name("keras_alone.py")


@pytest.mark.parametrize("backend", ["jax", *slow("torch", "tensorflow")])
def test_in_one_process(start, tmp_path, backend):
    command = start(backend, SCRIPT, tmp_path)
    assert command.wait(280) == 0, command.output
    names = [
        line.split("(")[0][4:] for line in SCRIPT.read_text().splitlines() if "def check" in line
    ]
    assert [line for line in command.output.splitlines() if line in names] == names
