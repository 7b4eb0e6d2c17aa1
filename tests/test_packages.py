"""The wheel and the sdist: what they hold, and the wheel where there is no repository."""

import os
import subprocess
import sys
import tarfile
import venv
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.numpy import load_file

import springline

ROOT = Path(__file__).parents[1]
SCRIPT = """
import numpy as np
import springline

rank, workers = springline.rank(), springline.workers()
rule = springline.ModelAverage(period=2, workers=workers)
center = springline.directory() / "center"
with springline.Worker({"w": np.zeros(3)}, rule, center=center, rank=rank) as worker:
    for step in springline.steps(6):
        worker.parameters["w"] += rank
        worker.step()
"""


def files_below(folder):
    """The files of a folder that belong into a package, by their path in the repository."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(p.relative_to(ROOT)) for p in found if "__pycache__" not in p.parts}


def needed(requirements, extra=""):
    """The distributions that are needed for these requirements, by name."""
    found = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        one = distribution(requirement.name)
        found[requirement.name] = one
        for its_extra in ("", *requirement.extras):
            found |= needed(one.requires or [], its_extra)
    return found


def link(one, folder):
    """Put an installed distribution into another environment."""
    for name in {path.parts[0] for path in one.files} - {"..", "__pycache__"}:
        target = folder / name
        if not target.exists():
            target.symlink_to(one.locate_file(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist and the wheel, which is built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    made = subprocess.run(words, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.fixture(scope="module")
def clean(wheel, metadata, tmp_path_factory):
    """`clean(*words)` runs a command of an environment that has the wheel and what it requires."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home / "venv", symlinks=True)
    (packages,) = (home / "venv" / "lib").glob("python*/site-packages")
    for one in needed(metadata.get_all("Requires-Dist")).values():
        link(one, packages)
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", home / "venv"]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        options = {"cwd": home, "env": environment, "capture_output": True, "text": True}
        ended = subprocess.run(words, **options)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    # Nothing is downloaded: a requirement that is not there is an error.
    run(*pip, "install", "--quiet", "--disable-pip-version-check", "--no-index", wheel)
    return lambda name, *words: run(home / "venv" / "bin" / name, *words)


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with ZipFile(wheel) as file:
        names = set(file.namelist())
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert {name.partition("/")[2] for name in about} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    assert {f"src/{name}" for name in names - about} == files_below("src")
    assert "springline/py.typed" in names


def test_the_sdist_holds_all_that_the_tests_and_the_docs_need(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    folders = ("src", "tests", "examples", "benchmarks", "docs")
    expected = set().union(*map(files_below, folders))
    expected |= {path.name for path in ROOT.glob("*.md")}
    expected |= {"LICENSE", "Makefile", "constraints.txt", "mkdocs.yml", "pyproject.toml"}
    assert names == expected | {"PKG-INFO", ".gitignore"}


def test_the_version_is_written_in_two_places_that_agree(metadata):
    assert metadata["Version"] == springline.__version__


def test_a_pinned_version_is_one_that_the_package_admits(metadata):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        name = canonicalize_name(requirement.name)
        if name != "springline":  # an extra that includes another one
            assert pinned[name] in requirement.specifier, name


def test_the_package_is_imported_from_where_it_is_installed(clean):
    ask = "import springline; print(springline.__version__, springline.__file__)"
    version, file = clean("python", "-c", ask).split()
    assert version == springline.__version__
    assert "site-packages" in Path(file).parts


def test_the_command_is_installed(clean):
    assert "Train one model on many loosely coupled workers." in clean("springline", "--help")


def test_two_workers_train_on_what_the_wheel_requires(clean, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = tmp_path / "run"
    clean("springline", "run", "--no-live", "--workers", "2", "--run", str(run), script)
    trained = load_file(run / "center.safetensors")
    np.testing.assert_array_equal(trained["w"], np.full(3, 3.0))
