"""The optimizers of TensorFlow 1's `tf.contrib.opt`, for TensorFlow 2: change the import."""

from springline.tensorflow.agn import AGNOptimizer
from springline.tensorflow.average import ModelAverageOptimizer
from springline.tensorflow.cluster import Cluster, cluster
from springline.tensorflow.elastic import ElasticAverageOptimizer
from springline.tensorflow.getter import (
    GLOBAL_VARIABLE_NAME,
    GRAD_VARIABLE_NAME,
    LOCAL_VARIABLE_NAME,
    AGNCustomGetter,
    ElasticAverageCustomGetter,
    ModelAverageCustomGetter,
)
from springline.tensorflow.optimizer import optimizers_of
from springline.tensorflow.sessions import join_living

__all__ = [
    "GLOBAL_VARIABLE_NAME",
    "GRAD_VARIABLE_NAME",
    "LOCAL_VARIABLE_NAME",
    "AGNCustomGetter",
    "AGNOptimizer",
    "Cluster",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "cluster",
]

join_living(optimizers_of)
