"""Names: every tensor of a worker's model has one, and all workers must agree on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_COMPILED = "_orig_mod."
Group = dict[str, Any]


@dataclass(frozen=True)
class Named:
    """A parameter of the optimizer, its name and its group."""

    name: str
    parameter: Tensor
    group: Group


def clean(name: str) -> str:
    """Return a tensor's name in the model as it was before `torch.compile`."""
    return name.replace(_COMPILED, "")


def name_parameters(groups: Iterable[Group], model: torch.nn.Module | None) -> list[Named]:
    """Name all parameters of an optimizer, from the model or from its groups."""
    known: dict[int, str] = {}
    if model is not None:
        known = {id(p): clean(name) for name, p in model.named_parameters()}
    named: dict[str, Named] = {}
    for i, group in enumerate(groups):
        names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
        for given, p in zip(names, group["params"], strict=True):
            if model is not None and id(p) not in known:
                shape = "none yet" if is_lazy(p) else tuple(p.shape)
                raise ValueError(
                    f"The optimizer has a parameter of shape {shape} that is not in "
                    "`model`. Pass the model whose parameters the optimizer was made with."
                )
            name = known.get(id(p), clean(given))
            check_plain("Parameter", name, p)
            if name in named:
                raise ValueError(
                    f"Two parameters are named {name!r}. Pass `model=`, whose names are used "
                    "once, or give the optimizer `model.named_parameters()`."
                )
            named[name] = Named(name, p, group)
    return list(named.values())


def float_buffers(model: torch.nn.Module | None) -> dict[str, Tensor]:
    """Return the floating-point buffers that belong to the model's state, by name."""
    if model is None:
        return {}
    kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
    named = [(clean(name), b) for name, b in model.named_buffers() if id(b) in kept]
    found = {name: b for name, b in named if b.is_floating_point()}
    for name, b in found.items():
        check_plain("Buffer", name, b)
    return found


def check_plain(kind: str, name: str, tensor: Tensor) -> None:
    """Refuse a tensor that has no values of its own, all of them, one after the other."""
    if is_lazy(tensor):
        why = "has no shape yet. Send a batch through the model first"
    elif tensor.is_meta:
        why = "is on the meta device and has no values. Materialise the model first (`to_empty`)"
    elif hasattr(tensor, "__tensor_flatten__") or getattr(tensor, "_fsdp_flattened", False):
        why = (
            f"({type(tensor).__name__}) is sharded or made of other tensors (FSDP, DTensor, "
            "quantized). That is not supported: every worker has the whole model"
        )
    elif tensor.layout != torch.strided:
        why = "is sparse, which is not supported (sparse gradients are). Use `to_dense()`"
    else:
        return
    raise ValueError(f"{kind} {name!r} {why}.")


def beside_center(
    tensors: Mapping[str, Tensor], model: torch.nn.Module
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what a model's state has beside these tensors: others, and their other names."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    others: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for full, tensor in model.state_dict(keep_vars=True).items():
        name = clean(full)
        if isinstance(tensor, Tensor) and name not in tensors:  # extra state may be anything
            if id(tensor) in names:
                aliases[name] = names[id(tensor)]
            else:
                others[name] = tensor
    return others, aliases


def other_names(
    tensors: Mapping[str, Tensor], model: torch.nn.Module | None
) -> dict[str, str | None]:
    """Return the names that a model's file has beside these; see `Worker`."""
    if model is None:
        return {}
    others, aliases = beside_center(tensors, model)
    return {**dict.fromkeys(others), **aliases}


def under_all_names(
    values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], model: torch.nn.Module
) -> dict[str, Tensor]:
    """Return a model's whole state with the center's values in place of these tensors."""
    others, aliases = beside_center(tensors, model)
    whole = {**values, **{name: tensor.detach().cpu() for name, tensor in others.items()}}
    whole |= {alias: values[name] for alias, name in aliases.items()}
    return {name: tensor.clone().contiguous() for name, tensor in whole.items()}
