"""The center as the model's own weights: to evaluate it, and to write it down."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch

from springline import run as runs
from springline.center import SharedCenter
from springline.center.checkpoint import write_file
from springline.center.extras import write_extras
from springline.center.layout import Bytes
from springline.center.remote.center import RemoteCenter
from springline.files import can_do_without
from springline.progress import is_over
from springline.torch.binding import Binding, to_numpy
from springline.torch.naming import beside_center, under_all_names
from springline.torch.several import parts
from springline.torch.wrapper import Wrapper
from springline.worker import Worker

_log = logging.getLogger("springline")


class CenterReader(Wrapper):
    """An optimizer whose worker's center can be put into the model, and be saved."""

    worker: Worker
    binding: Binding
    _model: torch.nn.Module | None
    _owns_center: bool
    _own: Bytes | None = None  # the worker's own weights, while the model holds the center
    _warned = False  # that the center lacks steps of ours

    @abstractmethod
    def wait(self) -> None:
        """Wait for an exchange in the background and fold it in."""

    def eval(self) -> None:
        """Put the center into the model, to evaluate it, until `train`.

        It is the center that is evaluated, whatever the inner optimizer evaluates: an inner one
        that has an `eval` of its own (schedule-free) is called first, and the center replaces what
        it has put there.
        """
        if self._own is not None:
            return
        self._bring_up_to_date()
        self._call_inner("eval")
        self.binding.gather()
        self._own = self.worker.local.x.copy()
        try:
            self._show(self._read_center(self.worker.layout.allocate()))
        except BaseException:
            self.train()
            raise

    def train(self) -> None:
        """Put the worker's own weights back into the model, and go on training."""
        if self._own is not None:
            self._show(self._own)
            self._own = None
        self._call_inner("train")

    @contextlib.contextmanager
    def center_weights(self) -> Iterator[None]:
        """Put the center into the model, to evaluate it, and take it out again: `eval`, `train`."""
        was_there = self._own is not None
        self.eval()
        try:
            yield
        finally:
            if not was_there:
                self.train()

    def _show(self, values: Bytes) -> None:
        self.worker.local.x[:] = values
        self.binding.scatter()

    def _call_inner(self, name: str) -> None:
        for optimizer in parts(self.inner):
            method = getattr(optimizer, name, None)
            if callable(method):
                method()

    def save_center(self, path: str | Path) -> None:
        """Write the center as safetensors that `model.load_state_dict(load_file(path))` takes.

        What is not in the center (frozen parameters, integer buffers) is the model's own. After
        `eval` it is the center that the model holds.
        """
        from safetensors.torch import save

        if self._own is not None:
            center = self.worker.local.x.copy()
        else:
            self._bring_up_to_date()
            self.binding.gather()
            center = self._read_center(self.worker.layout.allocate())
        values = {n: torch.from_numpy(v) for n, v in self.worker.layout.views(center).items()}
        if self._model is not None:
            values = under_all_names(values, self.binding.tensors(), self._model)
        write_file(Path(path), lambda file: file.write(save(values)))

    def _read_center(self, out: Bytes) -> Bytes:
        """Copy the center; alone, before the first step, it is to be what the model has."""
        if self._owns_center and not self.worker.begun:
            out[:] = self.worker.local.x
            return out
        return self.worker.center.read(out)

    def _bring_up_to_date(self) -> None:
        """Exchange steps that are not in the center, if that is all it does; else warn of them."""
        self.wait()
        worker = self.worker
        if not worker.unexchanged or worker.finished:
            return
        if self._owns_center and worker.rule.follows and not worker.rule.keeps_base:
            while worker.unexchanged:
                worker.exchange()
            return
        never = worker.unexchanged > 1 and not (worker.exchanges or worker.start_step)
        if not self._warned and (is_over() or never):
            self._warned = True
            _log.warning(
                "What rank %d has made since its last exchange (steps: %d) is not in the center, "
                "which is evaluated or saved now. At the end of the training call `opt.final()` "
                "first: it exchanges what is left, and waits for the other workers.",
                worker.rank,
                worker.unexchanged,
            )

    def _check_training(self, what: str) -> None:
        if self._own is not None:
            raise RuntimeError(
                f"The model holds the center, and `{what}` is for the worker's own weights: call "
                "`opt.train()` or leave `center_weights` first."
            )

    @can_do_without("What the model's file has beside the center")
    def _write_extras(self) -> None:
        """Let rank 0 write down what belongs to the model's file beside the center."""
        center = self.worker.center
        folder = center.directory if isinstance(center, SharedCenter) else None
        if isinstance(center, RemoteCenter):  # elsewhere: our launcher looks here
            folder = runs.Run.from_environment().center_directory
        if self._model is not None and folder is not None and self.worker.rank == 0:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            others, aliases = beside_center(self.binding.tensors(), self._model)
            arrays = {name: to_numpy(tensor) for name, tensor in others.items()}
            write_extras(folder, arrays, aliases)
