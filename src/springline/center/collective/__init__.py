"""The synchronous rules over a process group of torch.distributed: every machine has the center."""

from springline.center.collective.center import CollectiveCenter
from springline.center.collective.place import Collective

__all__ = ["Collective", "CollectiveCenter"]
