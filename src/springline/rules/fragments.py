"""How a model is cut into fragments, which are exchanged in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from springline.errors import LayoutError

Fragments = int | Sequence[Sequence[str]]


def fragment_of(
    sizes: Mapping[str, int],
    fragments: Fragments,
    other_names: Mapping[str, str | None] | None = None,
) -> dict[str, int]:
    """Return the fragment of every parameter.

    Args:
        sizes: bytes by name, in the model's order.
        fragments: how many, of about the same size; or their parameters' names, or the beginnings
            of names, up to a dot.
        other_names: that may be given, too: another name of a parameter, or None for what is not
            exchanged.

    >>> fragment_of({"a.w": 4, "a.b": 1, "c.w": 3}, 2)
    {'a.w': 0, 'a.b': 1, 'c.w': 1}
    >>> fragment_of({"a.w": 4, "a.b": 1, "c.w": 3}, [["c.w"], ["a"]])
    {'a.w': 1, 'a.b': 1, 'c.w': 0}
    >>> fragment_of({"a.w": 4, "c.w": 3}, [["a", "tied"], ["c", "frozen"]],
    ...             {"tied.w": "a.w", "frozen.w": None})
    {'a.w': 0, 'c.w': 1}
    """
    if not isinstance(fragments, Sequence):
        return dict(zip(sizes, _even(list(sizes.values()), fragments), strict=True))
    known = {**(other_names or {}), **{name: name for name in sizes}}
    found: dict[str, int] = {}
    for number, names in enumerate(fragments):
        if isinstance(names, str) or not isinstance(names, Sequence):
            advice = f"; write [{names!r}]" if isinstance(names, str) else ""
            raise LayoutError(
                f"`fragments` must be a number, or lists of names. Received: {names!r} in a "
                f"list{advice}."
            )
        for name in names:
            mine = [n for n in known if n == name or n.startswith(f"{name.rstrip('.')}.")]
            if not mine:
                raise LayoutError(f"`fragments` names {name!r}, but no parameter begins so.")
            for parameter in filter(None, map(known.get, mine)):
                if found.setdefault(parameter, number) != number:
                    raise LayoutError(f"`fragments` has {parameter!r} in two fragments.")
    missing = next((name for name in sizes if name not in found), None)
    if missing is not None:
        raise LayoutError(
            f"`fragments` leaves out {missing!r}: together they must be the whole model."
        )
    if set(found.values()) != set(range(len(fragments))):
        raise LayoutError("`fragments` has an empty fragment.")
    return {name: found[name] for name in sizes}


def _even(sizes: Sequence[int], fragments: int) -> list[int]:
    """Cut a sequence into runs of about the same size, each of one element at least."""
    n = len(sizes)
    if fragments > n:
        raise LayoutError(
            f"The model has {n} parameters and cannot be cut into {fragments} fragments, which "
            "are made of whole parameters."
        )
    ends = list(accumulate(sizes))
    cuts = [0]
    for k in range(1, fragments):
        at, possible = ends[-1] * k / fragments, range(cuts[-1] + 1, n - fragments + k + 1)
        cuts.append(min(possible, key=lambda i: abs(ends[i - 1] - at)))
    return [sum(cut <= i for cut in cuts) - 1 for i in range(n)]
