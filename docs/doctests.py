"""Shows a docstring's doctests as code: elsewhere than under "Examples:" they would be text."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^.+\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences the doctests that begin at the margin."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence those of one function, class or module."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = DOCTEST.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)
