"""Imports point one way: from the command line down to the rules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "springline"
# What a part may import of the others. The parts above may import all that those below may.
BELOW = {
    "rules": set(),
    "center": {"rules"},
    "worker": {"rules", "center"},
    "torch": {"rules", "center", "worker"},
    "tensorflow": {"rules", "center", "worker"},
    "integrations": {"rules", "center", "worker", "torch"},
    "keras": {"rules", "center", "worker"},
    "launch": {"rules", "center", "worker"},
    "monitor": {"rules", "center", "worker", "launch"},
}
COMMON = {"checks", "errors", "files", "sealed", "signals", "typed"}  # needed everywhere
FRAMEWORKS = {
    "torch": {"torch", "center/collective", "integrations"},
    "transformers": {"integrations/huggingface"},
    "accelerate": {"integrations/accelerate"},
    "tensorflow": {"tensorflow"},
    "ray": {"center/ray", "launch/ray"},
    "lightning": {"integrations/lightning"},
    "pytorch_lightning": {"integrations/lightning"},
    "keras": {"keras"},
    "jax": set(),
}


def part_of(module):
    """The part that a module `springline.a.b` is in; files beside the folders are the worker's."""
    name = module.removeprefix("springline").removeprefix(".").partition(".")[0]
    if name in COMMON:
        return "common"
    return name if name in BELOW else "worker"


def imports(path):
    """All modules that a file imports, but for those that only a type checker sees."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = [p for p in sorted(SRC.rglob("*.py")) if p.name not in ("cli.py", "__init__.py")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_file_imports_only_what_is_below_it(path):
    here = part_of(".".join(("springline", *path.relative_to(SRC).with_suffix("").parts)))
    for module in imports(path):
        if module.startswith("springline."):
            part = part_of(module)
            assert part in ("common", here) or part in BELOW.get(here, set()), module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_frameworks_are_imported_in_their_own_folders_only(path):
    place = str(path.relative_to(SRC))
    for module in imports(path):
        allowed = FRAMEWORKS.get(module.partition(".")[0])
        assert allowed is None or any(place.startswith(p) for p in allowed), module


def test_springline_alone_imports_no_framework():
    heavy = [*FRAMEWORKS, "lightning", "keras"]
    look = "import sys, springline, springline.integrations\n"
    look += f"print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_springline_itself_imports_no_framework():
    code = "import sys, springline; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert not {*FRAMEWORKS} & {*loaded.stdout.split()}
