"""A model's tensors and their places in a worker's flat buffer.

A float32 or float64 parameter on the CPU becomes a view of the buffer, so that an exchange copies
nothing. All others (another device, half precision, another memory format) and all buffers are
staged: copied into the flat buffer before an exchange and back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from springline.center.layout import Bytes, aligned_zeros
from springline.worker import Worker

_COMPILED = "_orig_mod."


def clean(name: str) -> str:
    """Return a tensor's name in the model as it was before `torch.compile`."""
    return name.replace(_COMPILED, "")


def name_parameters(
    groups: Iterable[Mapping[str, Any]], model: torch.nn.Module | None
) -> dict[str, Tensor]:
    """Name all parameters of an optimizer's groups, from the model or from the groups."""
    known: dict[int, str] = {}
    if model is not None:
        known = {id(p): clean(name) for name, p in model.named_parameters()}
    named: dict[str, Tensor] = {}
    for i, group in enumerate(groups):
        names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            if model is not None and id(p) not in known:
                raise ValueError(
                    f"The optimizer has a parameter of shape {tuple(p.shape)} that is not in "
                    "`model`. Pass the model whose parameters the optimizer was made with."
                )
            named[known.get(id(p), clean(name))] = p
    return named


def float_buffers(model: torch.nn.Module | None) -> dict[str, Tensor]:
    """Return the floating-point buffers that belong to the model's state, by name."""
    if model is None:
        return {}
    kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
    return {
        clean(name): b
        for name, b in model.named_buffers()
        if id(b) in kept and b.is_floating_point()
    }


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's values in the center's dtype, without a copy where that is possible."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    if not tensor.is_floating_point():
        dtype = tensor.dtype  # refused by name when the model is laid out
    array: NDArray[Any] = tensor.detach().to("cpu", dtype).contiguous().numpy()
    return array


def allocator(tensors: Iterable[Tensor]) -> Any:
    """Return what makes flat buffers: in pinned memory if a tensor is on a CUDA device."""
    if not any(t.is_cuda for t in tensors):
        return aligned_zeros

    def pinned(nbytes: int) -> Bytes:
        memory: NDArray[np.uint8] = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    return pinned


class Binding:
    """The tensors of a worker's model.

    Args:
        worker: whose flat buffer they get a place in.
        parameters: by name.
        model: where its buffers are looked up; modules may replace them.
    """

    def __init__(
        self, worker: Worker, parameters: Mapping[str, Tensor], model: torch.nn.Module | None
    ) -> None:
        self.parameters = dict(parameters)
        self._model = model
        self._views = {n: torch.from_numpy(worker.parameters[n]) for n in parameters}
        self._buffers = {n: torch.from_numpy(b) for n, b in worker.buffers.items()}
        self._bound: dict[str, int] = {}
        self.scatter()

    def gather(self) -> None:
        """Bring everything that is staged into the flat buffer."""
        for name, p in self.parameters.items():
            if p.data_ptr() != self._bound.get(name):
                self._views[name].copy_(p.detach())
        for staged, b in self._staged_buffers():
            staged.copy_(b)

    def scatter(self) -> None:
        """Bring the flat buffer's values back to where they are used."""
        for name, p in self.parameters.items():
            view = self._views[name]
            if p.data_ptr() == self._bound.get(name):
                continue
            if p.device.type == "cpu" and p.dtype == view.dtype and p.is_contiguous():
                p.data = view
                self._bound[name] = view.data_ptr()
            else:
                p.detach().copy_(view, non_blocking=True)
        for staged, b in self._staged_buffers():
            b.copy_(staged, non_blocking=True)

    def _staged_buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._model is not None and self._buffers:
            now = {clean(name): b for name, b in self._model.named_buffers()}
            for name, staged in self._buffers.items():
                yield staged, now[name]
