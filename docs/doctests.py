"""Shows what a docstring has for code: its doctests, and the blocks after two colons."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^.+\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences the doctests that begin at the margin."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence those of one function, class or module."""
        if obj.docstring:
            text = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = DOCTEST.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)
