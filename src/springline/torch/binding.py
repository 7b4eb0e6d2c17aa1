"""A model's tensors and their places in a worker's flat buffers.

A float32 or float64 parameter on the CPU becomes a view of the flat buffer, so that an exchange
copies nothing. All others (another device, half precision, another memory format, part of a larger
memory) and all buffers are staged: copied into the flat buffer before an exchange and back after
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from springline.center.layout import Bytes, Layout, aligned_zeros
from springline.torch.naming import clean
from springline.worker import Worker


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
    """The tensors of a worker's model. Buffers are looked up: modules may replace them."""

    def __init__(
        self, worker: Worker, parameters: Mapping[str, Tensor], model: torch.nn.Module | None
    ) -> None:
        self.parameters = dict(parameters)
        self._model = model
        self._views = {n: torch.from_numpy(worker.parameters[n]) for n in parameters}
        self._worker = weakref.proxy(worker)
        self._buffers = {n: torch.from_numpy(b) for n, b in worker.buffers.items()}
        self._bound: dict[str, int] = {}
        self.scatter()

    def gather(self) -> None:
        """Bring everything that is staged into the flat buffer."""
        self._check_model()
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
            if _can_be_view(p, view):
                p.data = view
                self._bound[name] = view.data_ptr()
            else:
                p.detach().copy_(view)
        for staged, b in self._staged_buffers():
            b.copy_(staged)

    def note_rounding(self) -> None:
        """Tell the worker what half precision has left of its own values."""
        for name, p in self.parameters.items():
            view = self._views[name]
            if p.dtype != view.dtype and self._worker.rule.measures_from_base:
                self._worker.note_rounded(name, view.to(p.dtype).to(view.dtype).numpy())

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and the buffers that are in the center, by name."""
        return self.parameters | self._current_buffers()

    def _current_buffers(self) -> dict[str, Tensor]:
        if self._model is None or not self._buffers:
            return {}
        now = {clean(name): b for name, b in self._model.named_buffers()}
        return {name: now[name] for name in self._buffers}

    def _staged_buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, b in self._current_buffers().items():
            yield self._buffers[name], b

    def _check_model(self) -> None:
        if self._model is not None:
            held = {id(p) for p in self._model.parameters()}
            for name, p in self.parameters.items():
                if id(p) not in held:
                    raise RuntimeError(
                        f"The optimizer's parameter {name!r} is no longer in the model: something "
                        "has put another in its place (`load_state_dict(assign=True)` does). "
                        "Do that before the optimizer is made."
                    )


class Mirror:
    """A flat buffer (`a` or `c̃`) as one tensor per parameter, each on its parameter's device.

    On the CPU they are views of the buffer. Elsewhere they are copies, and `down` and `up` bring
    their values to the buffer and back.
    """

    def __init__(
        self, layout: Layout, buffer: Bytes | None, parameters: Mapping[str, Tensor]
    ) -> None:
        self.tensors: dict[int, Tensor] = {}  # by the parameter's id
        self._copies: list[tuple[Tensor, Tensor]] = []
        if buffer is None:
            return
        views = layout.views(buffer)
        for name, p in parameters.items():
            flat = torch.from_numpy(views[name])
            mine = self.tensors[id(p)] = flat.to(p.device)
            if mine is not flat:
                self._copies.append((flat, mine))

    def down(self) -> None:
        """Bring the tensors' values into the flat buffer."""
        for flat, tensor in self._copies:
            flat.copy_(tensor)

    def up(self) -> None:
        """Bring the flat buffer's values to the tensors."""
        for flat, tensor in self._copies:
            tensor.copy_(flat)


def _can_be_view(p: Tensor, view: Tensor) -> bool:
    return (
        p.device.type == "cpu"
        and p.dtype == view.dtype
        and p.is_contiguous()
        and p.untyped_storage().nbytes() == p.nbytes  # else it is part of other memory
    )
