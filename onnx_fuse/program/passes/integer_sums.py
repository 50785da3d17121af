"""A sum of two integers, each times its scale, that is quantized, with fewer instructions.

a sa + b sb, divided by the scale s of the next codes, is two products, a sum and an exact division.
a (sa / s) + b (sb / s) is one product and one FMA. It may round to another code where a sum stands
halfway between two, so every pair of integers is tried, with factors of a few last bits more or
less, and nothing changes where none of them gives all codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TypeAlias

import numpy as np

from onnx_fuse.program.call import Call
from onnx_fuse.program.expression import Expression, Operation
from onnx_fuse.program.passes.pointwise_fusion import without_stores

Ends: TypeAlias = tuple[float, float]
"""The least and the most of integers."""
_BITS = 6
"""How many last bits a factor may be changed by."""
_NEAR = 2e-3
"""What is so many steps away from halfway between two codes rounds alike by every factor tried,"""
_MOST = 1024.0
"""if both terms have no more steps together."""


def sums_in_steps(call: Call) -> Call:
    """The call with such sums in steps of the next codes' scale."""
    e = call.expression
    if e is None:
        return call
    kinds, first = [tensor.dtype for _, tensor in call.reads], e.loads + len(e.scalars)
    for i, step in enumerate(e.steps):
        if step.name != "Quantize":
            continue
        _, total = _behind_casts(e, step.args[0])
        scale, _, zero, low, high = (_number(e, at) for at in step.args[1:])
        if total is not None and total.name == "Relu" and low == zero:  # which clips, too
            _, total = _behind_casts(e, total.args[0])
        if total is None or (total.name, total.dtype) != ("Add", "float32"):
            continue
        one, other = (_term(e, at, kinds) for at in total.args)
        if one is None or other is None:
            continue
        (a, of_a, sa), (b, of_b, sb) = one, other
        factors = _factors(of_a, of_b, (sa, sb), scale, (low - zero, high - zero))
        if factors is None:
            continue
        # the scalars and the steps behind them move on by two, those from here on by four more
        steps = [_moved(s, first, 2) for s in e.steps]
        at = first + 2 + i
        steps[i:] = [
            Operation("Mul", "float32", (a + 2 * (a >= first), first)),
            Operation("Scale", "float32", (b + 2 * (b >= first), first + 1)),
            Operation("Add", "float32", (at, at + 1)),
            Operation("Scale", "float32", (at + 2, step.args[1])),
            *(_moved(s, at, 4) for s in steps[i:]),
        ]
        steps[i + 4] = replace(steps[i + 4], args=(at + 3, *steps[i + 4].args[1:]))
        stores = [v + 2 * (v >= first) for v in e.stores]
        e = Expression(
            e.loads, (*e.scalars, *(("f32", f) for f in factors)), tuple(steps),
            tuple(v + 4 * (v >= at) for v in stores), e.rows,
        )  # fmt: skip
        return sums_in_steps(without_stores(replace(call, expression=e), lambda buffer: False))
    return call


def _moved(step: Operation, first: int, count: int) -> Operation:
    """The step with the values from the `first` on counted from `count` further."""
    return replace(step, args=tuple(v + count * (v >= first) for v in step.args))


def _number(e: Expression, value: int) -> float:
    """The scalar that a value is, or NaN."""
    at = value - e.loads
    return e.scalars[at][1] if 0 <= at < len(e.scalars) else np.nan


def _behind_casts(e: Expression, value: int) -> tuple[int, Operation | None]:
    """The value that a float32 is Casts to float32 of, and the step that makes it."""
    first = e.loads + len(e.scalars)
    while value >= first and (step := e.steps[value - first]).name == "Cast":
        if step.dtype != "float32":
            break  # an integer: the model's own Cast drops a fraction, or wraps
        value = step.args[0]
    return value, e.steps[value - first] if value >= first else None


def _term(e: Expression, value: int, kinds: Sequence[str]) -> tuple[int, Ends, float] | None:
    """The integers that a term scales, their ends and their scale: codes less their zero point."""
    _, step = _behind_casts(e, value)
    if step is None or step.name != "Scale":
        return None
    integers, scale, zero = step.args[0], _number(e, step.args[1]), 0.0
    at, step = _behind_casts(e, integers)
    if step is not None and (step.name, step.dtype) == ("Sub", "float32"):
        zero = _number(e, step.args[1])
        at, step = _behind_casts(e, step.args[0])
    if step is not None and step.name == "Code":
        quantize = e.steps[step.args[0] - e.loads - len(e.scalars)]
        low, high = (_number(e, end) for end in quantize.args[4:])
    elif at < e.loads and kinds[at] in ("int8", "uint8"):
        low, high = float(np.iinfo(kinds[at]).min), float(np.iinfo(kinds[at]).max)
    else:
        return None
    return integers, (low - zero, high - zero), scale


@lru_cache(4096)
def _factors(
    of_a: Ends, of_b: Ends, scales: tuple[float, float], scale: float, codes: Ends
) -> tuple[float, float] | None:
    """What a and b are multiplied by in steps of `scale`; None where no pair gives all codes."""
    if not np.isfinite([*of_a, *of_b, *scales, scale, *codes]).all():
        return None  # not all of them are known
    sa, sb, s = (np.float32(x) for x in (*scales, scale))
    a, b = (np.arange(low, high + 1).astype(np.float32) for low, high in (of_a, of_b))
    with np.errstate(all="ignore"):
        want = np.clip(((a * sa)[:, None] + b * sb) / s, *codes)
        ratios = np.array([sa, sb]).astype(np.float64) / s
        x, y = a.astype(np.float64) * ratios[0], b.astype(np.float64) * ratios[1]
        if not np.abs(x).max() + np.abs(y).max() <= _MOST:
            return None
        place = x[:, None] + y
        near = np.nonzero(np.abs(place - np.floor(place) - 0.5) < _NEAR)
        a, b, want = a[near[0]], b[near[1]], np.rint(want[near])
        steps = sorted(range(-_BITS, _BITS + 1), key=abs)
        for more in sorted(product(steps, steps), key=lambda pair: sum(map(abs, pair))):
            ka, kb = (_next(np.float32(ratio), n) for ratio, n in zip(ratios, more, strict=True))
            scaled = b * kb
            once = (a.astype(np.float64) * ka + scaled).astype(np.float32)  # as an FMA rounds
            twice = (a * ka + scaled) * s / s  # as NumPy computes the steps
            if all((np.rint(np.clip(x, *codes)) == want).all() for x in (once, twice)):
                return float(ka), float(kb)
    return None


def _next(x: np.float32, n: int) -> np.float32:
    """The float of n last bits more."""
    return np.int32(x.view(np.int32) + n).view(np.float32)
