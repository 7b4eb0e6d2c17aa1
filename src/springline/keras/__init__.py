"""Keras 3: one callback, and `fit` as it is, on the backends of TensorFlow, PyTorch and JAX."""

try:
    import keras as _keras  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "springline.keras needs Keras 3. Install it with: pip install 'springline[keras]'",
        name=error.name,
    ) from error
if int(_keras.__version__.partition(".")[0]) < 3:
    raise ImportError(f"springline.keras needs Keras 3. Received: keras {_keras.__version__}.")

from springline.keras.callback import Options
from springline.keras.callbacks import AGN, AsyncDiLoCo, DiLoCo, ElasticAverage, ModelAverage

__all__ = ["AGN", "AsyncDiLoCo", "DiLoCo", "ElasticAverage", "ModelAverage", "Options"]


def __getattr__(name: str) -> object:
    if name == "SlowMo":
        raise ImportError(  # an AttributeError would lose its text in `from ... import`
            "springline.keras has no SlowMo: it needs every step's learning rate, which a callback "
            "does not see. With a loop of your own, springline.torch has it on Keras' torch "
            "backend."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
