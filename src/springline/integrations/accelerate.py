"""accelerate: an `Accelerator` for one worker of a run, and its part of the data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from springline.integrations.common import local
from springline.run import rank, workers

__all__ = ["Accelerator", "local", "shard", "take_rank"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's own, for one worker of a run. A script alone gets exactly that.

    - The model is never in DistributedDataParallel, also under `torchrun`.
    - `is_main_process` is true on rank 0, which prints, writes models and feeds the trackers.
    - `save_state(directory)` writes this worker's own checkpoint, `directory/worker-RANK`, and
      `load_state(directory)` reads it. A worker that is killed meanwhile leaves the one before.

    Args:
        *args: accelerate's.
        **kwargs: accelerate's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        local()
        super().__init__(*args, **kwargs)
        if self.num_processes > 1:
            raise RuntimeError(
                f"accelerate has joined a group of {self.num_processes} processes, where the model "
                "would be in DistributedDataParallel and all workers have the same gradients. Make "
                "this Accelerator before anything that joins the group of `torchrun`."
            )
        if workers() > 1:
            take_rank()
            self.dataloader_config.dispatch_batches = False  # rank 0 would read for all
            if self.project_configuration.automatic_checkpoint_naming:
                raise ValueError(
                    "`automatic_checkpoint_naming` counts from 0 again when a worker is restarted, "
                    "and finds the names taken. Give `save_state` a directory instead."
                )
            self.project_configuration.save_on_each_node = True  # each in its own directory

    def has_state(self, directory: str | Path) -> bool:
        """Whether this worker has saved its state in a directory."""
        own = self._own(directory)
        if not own.exists() and _old(own).exists():  # it was killed between two renames
            _old(own).rename(own)
        return own.exists()

    def save_state(self, output_dir: str | Path | None = None, **kwargs: Any) -> Any:
        """Save this worker's state: all of it or nothing."""
        if output_dir is None or workers() == 1:
            return super().save_state(output_dir, **kwargs)
        own = self._own(output_dir)
        new = own.with_name(f"{own.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        super().save_state(str(new), **kwargs)
        if self.has_state(output_dir):
            shutil.rmtree(_old(own), ignore_errors=True)
            own.rename(_old(own))
        new.rename(own)
        shutil.rmtree(_old(own), ignore_errors=True)
        return own

    def load_state(self, input_dir: str | Path | None = None, **kwargs: Any) -> None:
        """Load this worker's state; in a run the center's weights replace those that it has.

        A worker that has none loads what a script alone has saved in the directory.
        """
        if input_dir is not None and workers() > 1:
            folder = Path(input_dir)
            if self.has_state(folder):
                input_dir = self._own(folder)
            elif folder.is_dir() and not any(path.is_file() for path in folder.iterdir()):
                raise FileNotFoundError(
                    f"Rank {rank()} has not saved a state in {str(input_dir)!r}. "
                    "Load it if `accelerator.has_state(directory)`."
                )
        super().load_state(input_dir, **kwargs)

    def _own(self, directory: str | Path) -> Path:
        return Path(directory) / f"worker-{rank()}" if workers() > 1 else Path(directory)


def _old(own: Path) -> Path:
    return own.with_name(f"{own.name}.old")


def shard(
    loader: DataLoader[Any], device: torch.device | str | None = None, seed: int = 0
) -> DataLoader[Any]:
    """Return this worker's part of a training loader's batches, in an order that all share.

    Every epoch is shuffled anew (`loader.set_epoch`), as a whole, and then dealt out. A script
    alone gets all of it, in the loader's own order. There is no need to `prepare` the result.

    Args:
        loader: what one process alone would train with.
        device: where the batches are to go.
        seed: of the order that the workers share; the same on all of them.
    """
    sharded: DataLoader[Any] = prepare_data_loader(
        loader,
        None if device is None else torch.device(device),
        num_processes=workers(),
        process_index=rank(),
        put_on_device=device is not None,
        dispatch_batches=False,
        use_seedable_sampler=workers() > 1,
        data_seed=seed,
    )
    return sharded


def take_rank() -> None:
    """Let accelerate know the worker's rank, though it is the only process of its group."""
    PartialState().process_index = rank()
    AcceleratorState()  # takes it over
