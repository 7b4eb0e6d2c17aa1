"""Checks for the backend that KERAS_BACKEND names: `keras_checks.py DIRECTORY MODULE…`.

Each function of the modules whose name begins with `check_` is called, and its name printed.
"""

import sys
from importlib import import_module

if __name__ == "__main__":
    for module in map(import_module, sys.argv[2:]):
        for name, check in list(vars(module).items()):
            if name.startswith("check_"):
                print(name, flush=True)
                check()
