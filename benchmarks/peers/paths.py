"""Lets scripts of this folder import those of `benchmarks/`, the examples and springline itself."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples"

for path in (HERE.parent, ROOT / "src", EXAMPLES):
    sys.path.append(str(path))
