"""The script of docs/migrating-from-tf-contrib.md, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from tf_cluster import close

from marks import slow

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "migrating-from-tf-contrib.md"
LAUNCH = ["-m", "springline.cli", "run", "--no-live", "--ps", "1", "--workers", "2", "--run", "run"]


def after():
    """What the page's difference leaves."""
    (change,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return "\n".join(line[1:] for line in change.splitlines() if not line.startswith("-"))


@pytest.mark.parametrize("launch", [[], *slow(LAUNCH)], ids=["alone", "cluster"])
def test_the_script_of_the_page(launch, tmp_path):
    (tmp_path / "train.py").write_text(after())
    ended = subprocess.run(
        [sys.executable, *launch, "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    saved = tf.train.load_checkpoint(str(tmp_path / "saved" / "center"))
    close(saved.get_tensor("model/w"), [1, -2, 3], 0.05)
    assert "serializing" not in ended.stderr  # nothing in the graph that a saver could not write


def test_what_the_page_links_to_is_there():
    text = PAGE.read_text("utf-8")
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert (DOCS / path).exists(), target
        assert path or anchor in anchors, target
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    for anchor in re.findall(rf"{PAGE.name}#([^)]+)\)", readme):
        assert anchor in anchors
