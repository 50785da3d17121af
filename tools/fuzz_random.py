"""How random nodes are drawn for tools/fuzz.py: with what holds of each of their results."""

from typing import Any

import numpy as np
from fuzz_graphs import Draw, Graph, table
from onnx import helper


def held(g: Graph, operator: str, names: list[str], **attributes: Any) -> None:
    """A node that reads random values, which no other node may read after it."""
    g.node(operator, names, **attributes)
    for name in names:
        if name not in g.constants and name not in g.inputs:
            del g.values[name]


def random(g: Graph, operator: str) -> None:
    """Numbers that are equal every time, or that differ, or that keep within bounds."""
    dtype = g.one_of(("float32", "float32", "float64", "float16"))
    given: dict[str, Any] = {"dtype": helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    fixed = g.chance(0.4)
    if operator == "Bernoulli":  # onnxruntime gives 1 with probability 1 - x, the standard with x
        g.node(operator, [g.fresh(dtype, g.shape(g.number(0, 3)))], dtype=g.one_of((1, 7, 11)))
        bit = g.nodes[-1].output[0]
        g.node("Mul", [bit, bit])
        return held(g, "Sub", [g.nodes[-1].output[0], bit])
    if operator.endswith("Like"):
        inputs = [g.value(("float32", "float64", "float16"))]
        given = given if g.chance(0.6) else {}
        dtype = dtype if given else g.dtype(inputs[0])
    else:
        inputs, given["shape"] = [], [g.number(0, 4) for _ in range(g.number(1, 3))]
    low, high = (g.one_of((-2.0, 0.5)) for _ in range(2)) if fixed else (-1.0, 2.0)
    if "Normal" in operator:
        given |= {"mean": low, "scale": 1e-30 if fixed else high}
    else:
        given |= {"low": low, "high": low if fixed else high}
    if g.chance(0.3):
        given["seed"] = float(g.number(0, 3))
    g.node(operator, inputs, **given)
    if fixed:
        return
    first = g.nodes[-1].output[0]
    if "Uniform" in operator and g.chance(0.4):
        return held(g, "GreaterOrEqual", [g.constant(high, dtype), first])
    if dtype != "float16" and "seed" not in given and g.chance(0.6):
        g.node(operator, inputs, **given)
        return held(g, "Equal", [first, g.nodes[-1].output[0]])
    held(g, "Shape", [first])


def chosen(g: Graph, operator: str) -> None:
    """Multinomial: one class of each row has all the odds."""
    rows, classes = g.number(1, 4), g.number(1, 5)
    odds = np.full((rows, classes), -1e4)
    odds[np.arange(rows), g.rng.integers(0, classes, rows)] = 0
    g.node(operator, [g.constant(odds, "float32")], sample_size=g.number(1, 3), dtype=6)


def dropout(g: Graph, operator: str) -> None:
    """Its result outside training; in training, how far it is from what its mask says."""
    x = g.value(("float32", "float64"))
    ratio = g.one_of((0.0, 0.5, 0.75))  # whose factors are exact
    trains = g.chance(0.6)
    inputs = [x, g.constant(ratio, g.one_of(("float32", g.dtype(x))))]
    given = {"seed": 3} if g.chance(0.3) else {}
    inputs += [g.constant(trains)] if trains or g.chance(0.5) else []
    g.node(operator, inputs, 1 if not trains and g.chance(0.5) else 2, **given)
    if not trains or not ratio:
        return
    y, mask = g.nodes[-1].output
    g.node("Mul", [x, g.constant(1 / (1 - ratio), g.dtype(x))])
    scaled = g.nodes[-1].output[0]
    g.node("Where", [mask, scaled, g.constant(0, g.dtype(x))])
    held(g, "Sub", [y, g.nodes[-1].output[0]])
    del g.values[mask]


RANDOM: dict[str, Draw] = {
    "Dropout": dropout,
    "Multinomial": chosen,
    **table(random, "Bernoulli RandomNormal RandomNormalLike RandomUniform RandomUniformLike"),
}
"""How nodes of random operators are drawn."""
