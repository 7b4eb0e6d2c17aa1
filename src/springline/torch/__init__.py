"""PyTorch: wrap your optimizer, keep your training loop."""

from springline.torch.optimizers import (
    AGNOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
)

__all__ = ["AGNOptimizer", "ElasticAverageOptimizer", "ModelAverageOptimizer"]
