import tensorflow as tf

import springline
from springline.tensorflow import ElasticAverageOptimizer

sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
w = tf.Variable([0.0, 0.0, 0.0])
model = tf.Module()
model.w = w


def loss_of(model, x, y):
    return tf.reduce_mean(tf.square(tf.reduce_sum(x * model.w, 1) - y))


def batch(step, rank, workers):
    x = tf.random.stateless_normal([8, 3], [step, rank])
    return x, tf.reduce_sum(x, 1)
