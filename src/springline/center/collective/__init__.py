"""The synchronous rules over a process group of torch.distributed: every rank has the center."""

from springline.center.collective.center import Collective, CollectiveCenter

__all__ = ["Collective", "CollectiveCenter"]
