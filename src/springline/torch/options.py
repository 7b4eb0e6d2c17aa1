"""What all optimizers take, whatever their rule."""

from __future__ import annotations

from typing import TypedDict

from springline.torch.resolve import AnyCenter


class Options(TypedDict, total=False):
    """What all optimizers take, whatever their rule.

    Attributes:
        overlap: exchange in the background while training goes on. A round must be over when the
            next one is due. DiLoCo and its relatives keep the steps that are made meanwhile.
        use_locking: whether an exchange is atomic, per part of the center. False only without
            outer state: not with momentum, Adam or a function that makes a torch optimizer.
        center: a center, the directory of a shared one, or, where an exchange can be a round, a
            `torch.distributed` process group. By default that of the run the script was started
            in, else one of this worker's own.
        name: distinguishes this optimizer's center from those of others in the same script; by
            default the order in which they are made does.
        timeout: seconds after which waiting for other workers fails, naming them.
        keep_own_weights: whether a worker that has loaded weights after this was made goes on with
            those, where the center has others by then; by default it takes the center's.
    """

    overlap: bool
    use_locking: bool
    center: AnyCenter
    name: str | None
    timeout: float | None
    keep_own_weights: bool
