"""PyTorch: wrap your optimizer, keep your training loop."""

try:
    import torch as _torch  # noqa: F401 - asks whether the extra is there
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "springline.torch needs PyTorch. Install it with: pip install 'springline[torch]'",
        name=error.name,
    ) from error

from springline.center.collective import Collective
from springline.torch.by_name import wrap
from springline.torch.diloco import AsyncDiLoCoOptimizer, DiLoCoOptimizer, SlowMoOptimizer
from springline.torch.optimizers import (
    AGNOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
)
from springline.torch.options import Options
from springline.torch.sampler import ResumableSampler

__all__ = [
    "AGNOptimizer",
    "AsyncDiLoCoOptimizer",
    "Collective",
    "DiLoCoOptimizer",
    "ElasticAverageOptimizer",
    "ModelAverageOptimizer",
    "Options",
    "ResumableSampler",
    "SlowMoOptimizer",
    "wrap",
]
