"""Runs a notebook's cells of code, in order and in one namespace; stores what they print and draw.

python tests/examples/notebook.py examples/tour.ipynb    stores it in the file
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams |= {"svg.hashsalt": "springline", "svg.fonttype": "none"}
from matplotlib import pyplot as plt  # noqa: E402 - the backend is chosen first


def run(notebook):
    """Replace the outputs of a notebook's cells by what they print and draw now."""
    names = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        code = compile("".join(cell["source"]), f"cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        cell["execution_count"] = number
        cell["outputs"] = [*stream(printed.getvalue()), *pictures()]


def stream(text):
    """What a cell printed."""
    if text:
        yield {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def pictures():
    """The figures that a cell has drawn, each with its title as the text in its place."""
    for number in plt.get_fignums():
        figure, file = plt.figure(number), io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
        svg = re.sub(r"(\.\d\d)\d+", r"\1", file.getvalue())  # hundredths of a point will do
        yield {
            "output_type": "display_data",
            "data": {"image/svg+xml": svg[svg.index("<svg") :]},
            "metadata": {"alt": figure.get_label()},
        }
    plt.close("all")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    found = json.loads(path.read_text("utf-8"))
    run(found)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
