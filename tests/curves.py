"""Activations and their slopes in float64."""

from math import erf

import numpy as np


def gelu(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(value, derivative)"""
    phi = 0.5 * (1 + np.vectorize(erf)(z / np.sqrt(2)))
    return z * phi, phi + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)


def sigmoid(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(value, derivative)"""
    s = 0.5 * (1 + np.tanh(z / 2))
    return s, s * (1 - s)


def silu(z: np.ndarray, alpha: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    s, slope = sigmoid(alpha * z)
    return z * s, s + alpha * z * slope


def gelu_tanh(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    k = 2 * np.sqrt(2 / np.pi)
    s, slope = sigmoid(k * (z + 0.044715 * z**3))
    return z * s, s + z * slope * k * (1 + 3 * 0.044715 * z**2)


def mish(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    t, s = np.tanh(np.logaddexp(0, z)), sigmoid(z)[0]
    return z * t, t + z * s * (1 - t * t)


def elu(z: np.ndarray, alpha: float = 1.0, gamma: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    below = np.minimum(z, 0)
    value, slope = np.where(z < 0, alpha * np.expm1(below), z), alpha * np.exp(below)
    return gamma * value, gamma * np.where(z < 0, slope, 1.0)


def hard_sigmoid(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    v = np.float64(np.float32(0.2)) * z + 0.5
    return np.clip(v, 0, 1), ((v > 0) & (v < 1)) * 0.2


def hard_swish(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return z * np.clip(z / 6 + 0.5, 0, 1), np.where(z >= 3, 1, (z > -3) * (z / 3 + 0.5))


PIECEWISE = ("relu", "clipped_relu", "leaky_relu", "elu", "selu", "hard_sigmoid", "hard_swish")
"""Activations whose slope compares z, and so is a number where z is NaN."""
CURVES = {
    "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "sigmoid": sigmoid,
    "quick_gelu": lambda z: silu(z, 1.702), "tanh": lambda z: (np.tanh(z), 1 - np.tanh(z) ** 2),
    "relu": lambda z: (np.maximum(z, 0), (z > 0) * 1.0),
    "clipped_relu": lambda z: (np.clip(z, 0, 6), 1.0 - ((z < 0) | (z > 6))),
    "mish": mish, "elu": elu,
    "selu": lambda z: elu(z, 1.6732632, 1.0507010), "hard_sigmoid": hard_sigmoid,
    "hard_swish": hard_swish, "softplus": lambda z: (np.logaddexp(0, z), sigmoid(z)[0]),
    "leaky_relu": lambda z: (np.where(z < 0, 0.01 * z, z), np.where(z < 0, 0.01, 1.0)),
}  # fmt: skip
