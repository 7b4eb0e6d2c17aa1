"""The notebook prints and draws what is stored in it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def outputs(notebook):
    """What each cell of code prints; of a picture only its title."""
    return [
        [output.get("text") or output["metadata"] for output in cell["outputs"]]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.slow
def test_the_tour(tmp_path):
    stored = json.loads(TOUR.read_text("utf-8"))
    again = tmp_path / "tour.ipynb"
    for cell in stored["cells"]:
        assert cell["cell_type"] == "markdown" or cell.pop("outputs", None) is not None
    again.write_text(json.dumps(stored), "utf-8")
    words = [sys.executable, "-W", "error", Path(__file__).with_name("notebook.py"), again]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    found = outputs(json.loads(again.read_text("utf-8")))
    assert found == outputs(json.loads(TOUR.read_text("utf-8")))
    assert {"alt": "Two workers and their center under DiLoCo"} in found[2]
