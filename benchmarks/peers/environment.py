"""The environment that the comparison with peers runs in: torchft beside springline, all pinned.

    python benchmarks/peers/environment.py    # make it if needed; prints its interpreter

`python()` does the same from a script. torchft is installed without its dependencies, of which
torch is the one of `constraints.txt`.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOME = HERE / ".venv"
CONSTRAINTS = (ROOT / "constraints.txt", HERE / "constraints.txt")
STEPS = (
    ("-e", f"{ROOT}[torch,ray,plots]"),
    ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),  # torchft imports them
    ("--no-deps", "torchft==0.2.0"),
)


def python() -> Path:
    """Return the interpreter; make its environment first unless it is there and up to date."""
    interpreter, ready = HOME / "bin" / "python", HOME / "ready"
    wanted = "\n".join([*map(str, STEPS), *(c.read_text("utf-8") for c in CONSTRAINTS)])
    HOME.mkdir(exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two benchmarks may start at once
        if ready.exists() and ready.read_text("utf-8") == wanted:
            return interpreter
        _say(f"Making {HOME.relative_to(ROOT)} (once, some minutes)")
        subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for constraints in CONSTRAINTS:
            pip += ["-c", str(constraints)]
        for step in STEPS:
            _say(f"pip install {' '.join(step).replace(f'{ROOT}', '.')}")
            subprocess.run([*pip, *step], check=True)
        subprocess.run([interpreter, "-c", "import springline, torchft.local_sgd"], check=True)
        ready.write_text(wanted, "utf-8")
    return interpreter


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(python())
