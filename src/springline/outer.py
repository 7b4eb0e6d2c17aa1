"""Outer optimizers, for `outer=`: what turns the workers' messages into the next center."""

from springline.rules.outer import SGD, Adagrad, Adam, Momentum, Nesterov, Outer

__all__ = ["SGD", "Adagrad", "Adam", "Momentum", "Nesterov", "Outer"]
