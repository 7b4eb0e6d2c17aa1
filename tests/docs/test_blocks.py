"""Every code block of the README and of docs/ runs, or is marked with the reason why it does not.

A page's blocks of Python are one program, after `preambles/PAGE.py`, which has the names that
the page takes for granted. A block with `title="NAME"` is a file, and blocks of bash run beside it.
Marked are those after a line `<!-- not run: the reason -->`; blocks of text are not code.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
BLOCK = re.compile(
    r"^(?P<mark><!-- not run: \S.* -->\n)?^```(?P<language>\w*)(?: title=\"(?P<title>.+)\")?\n"
    r"(?P<text>(?:.*\n)*?)^```$",
    re.MULTILINE,
)
HEAVY = {"accelerate", "huggingface", "index", "keras", "lightning", "migrating-from-tf-contrib"}
ELSEWHERE = {"recipes"}  # torch_front/test_torch_recipes.py
RUN = """
import runpy, sys
from pathlib import Path

preamble, page, program = sys.argv[1:]
names = runpy.run_path(preamble) if Path(preamble).exists() else {}
exec(compile(Path(program).read_text("utf-8"), page, "exec"), names)
"""


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str
    line: int  # of the page, where the text begins


def blocks_of(page):
    """The blocks that are to run."""
    text = page.read_text("utf-8")
    found = [block for block in BLOCK.finditer(text) if block["language"] != "text"]
    assert text.count("\n```") == 2 * len(BLOCK.findall(text)), "a block that is not closed"
    return [
        Block(
            block["language"],
            block["title"],
            block["text"],
            text[: block.start("text")].count("\n"),
        )
        for block in found
        if not block["mark"]
    ]


RUNS = [
    pytest.param(name, marks=pytest.mark.slow if name in HEAVY else ())
    for name, page in PAGES.items()
    if name not in ELSEWHERE and blocks_of(page)
]


@pytest.fixture
def call(tmp_path):
    """`call(*words)` runs a command in `tmp_path`, where `python` and `springline` are ours."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"python": "", "springline": "-m springline"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tools / name).chmod(0o755)

    def call(*words):
        environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        ended = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return call


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_code_that_can_run_or_is_marked(name):
    for block in blocks_of(PAGES[name]):
        assert block.language in ("python", "bash"), f"{name}, line {block.line}: mark it"


@pytest.mark.parametrize("name", RUNS)
def test_the_blocks_of_a_page(name, call, tmp_path):
    program = []
    for block in blocks_of(PAGES[name]):
        if block.title:
            (tmp_path / block.title).write_text(block.text, "utf-8")
        elif block.language == "bash":
            call("bash", "-e", "-c", block.text)
        else:  # every line keeps its number, so that an error names that of the page
            program += [""] * (block.line - len(program)) + block.text.splitlines()
    (tmp_path / "program.py").write_text("\n".join(program), "utf-8")
    preamble = Path(__file__).parent / "preambles" / f"{name}.py"
    call(sys.executable, "-c", RUN, preamble, PAGES[name].name, "program.py")


def test_the_script_of_the_first_page(call, tmp_path):
    (block,) = (block for block in blocks_of(PAGES["index"]) if block.title == "train.py")
    assert block.text in PAGES["README"].read_text("utf-8")
    (tmp_path / "train.py").write_text(block.text, "utf-8")
    printed = call("python", "train.py", "2000")
    accuracy = re.search(r"(\d+)% of new points are on the right spiral", printed)
    assert int(accuracy[1]) > 90  # half of them by guessing
