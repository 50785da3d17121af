"""Fewer instructions where an expression quantizes: steps that undo each other are left out."""

from __future__ import annotations

from onnx_fuse.program.expression import Expression, Operation

Args = tuple[int, ...]


WIDE_CODE = "wide_code({1}, {2}, {0}, {3}, {4})"
"""A Code as an integer that saturates to it."""
_FROM_0 = "code_from_0({1}, {2}, {0})"
_OF_GELU = "wide_code(__fmul_rn({0}, {2}), {3}, {4})"
"""That of a number off by 1e-7 itself, for which an exact division gives no better code."""


def quantizing(expression: Expression, step: Operation, text: str) -> tuple[str, Args]:
    """The text of a step, which is `text` in general, and its operands."""
    first, args = expression.loads + len(expression.scalars), step.args
    before = args[0] - first if args else -1  # an Iota reads nothing
    if step.name == "Cast" and before >= 0 and expression.steps[before].name == "Code":
        return text, expression.steps[before].args  # the integer as it was, in a float
    if step.name == "Scale" and before >= 0 and (at := args[1] - expression.loads) >= 0:
        cast = expression.steps[before]
        read = (cast.name, cast.dtype) == ("Cast", "float32") and cast.args[0] < expression.loads
        if read and at < len(expression.scalars) and abs(expression.scalars[at][1]) < 2.0**100:
            return "scaled({0}, {1})", (cast.args[0], args[1])
    if (quantized := _less_zero(expression, step)) is not None:
        args, text = quantized, "quantized_less_zero({0}, {1}, {2}, {3}, {4}, {5})"
    elif step.name == "Code":
        args = expression.steps[before].args
        if text == WIDE_CODE and _maker(expression, args[0]) == "Gelu":
            return _OF_GELU, args
        if text == WIDE_CODE and step.dtype == "uint8" and args[3] == args[4]:
            text = _FROM_0
    elif step.name != "Quantize":
        return text, args
    args = _clipped_once(expression, args)
    if (steps := _in_steps(expression, args)) is not None:
        return text.replace("{1}, {2}, ", ""), _clipped_once(expression, steps)
    return text, args


def _maker(expression: Expression, value: int) -> str:
    """The name of the step that makes a float32, before its Casts."""
    first = expression.loads + len(expression.scalars)
    while value >= first and (step := expression.steps[value - first]).dtype == "float32":
        if step.name != "Cast":
            return step.name
        value = step.args[0]
    return ""


def in_steps(expression: Expression, args: Args) -> tuple[str, Args]:
    """The quotient by a scale, of what a kernel sums in floats: in one product, or in none."""
    steps = _in_steps(expression, args)
    return ("{0} * {1}", (args[0], args[2])) if steps is None else ("{0}", steps[:1])


def to_float8(expression: Expression, step: Operation, text: str, stored: bool) -> tuple[str, Args]:
    """The text of a step to e4m3fn, which is `text` in general, and its operands.

    What is `stored` saturates there, and a NaN takes the place of what does not.
    """
    first, at = expression.loads + len(expression.scalars), step.args[0]
    ends = {expression.loads + i: value for i, (_, value) in enumerate(expression.scalars)}
    for name, end in (("ClipMax", 448), ("ClipMin", -448)):
        clip = expression.steps[at - first] if at >= first else step
        if clip.name != name or ends.get(clip.args[1]) != end:
            return "unsaturated_e4m3({0})" if stored else text, step.args
        at = clip.args[0]
    return "{0}" if stored else "round_e4m3({0})", (at,)


def _clipped_once(expression: Expression, args: Args) -> Args:
    """The operands of a Quantize, of its Relu's where what is negative, or NaN, is the least."""
    first, at = expression.loads + len(expression.scalars), args[0]
    while at >= first and (step := expression.steps[at - first]).name in ("Cast", "Relu"):
        if step.name == "Relu" and step.dtype == "float32" and args[3] == args[4]:
            return (step.args[0], *args[1:])
        if step.dtype != "float32":
            break
        at = step.args[0]
    return args


def _less_zero(expression: Expression, step: Operation) -> Args | None:
    """The operands of the Quantize from which a Sub takes its zero point again; or None."""
    first, at = expression.loads + len(expression.scalars), step.args[0] if step.args else -1
    while step.name == "Sub" and at >= first:
        before = expression.steps[at - first]
        if before.name == "Quantize":
            return before.args if before.args[3] == step.args[1] else None
        if before.name != "Code" and (before.name, before.dtype) != ("Cast", "float32"):
            return None
        at = before.args[0]
    return None


def _in_steps(expression: Expression, args: Args) -> Args | None:
    """The operands of a Quantize, of what was multiplied by its scale just before; or None."""
    first, at = expression.loads + len(expression.scalars), args[0]
    while at >= first and (step := expression.steps[at - first]).dtype == "float32":
        if step.name == "Scale":
            numbers = [step.args[1] - expression.loads, args[1] - expression.loads]
            known = expression.loads <= step.args[1] < first
            alike = known and len({expression.scalars[n] for n in numbers}) == 1
            return (step.args[0], *args[1:]) if alike else None
        if step.name != "Cast":
            return None
        at = step.args[0]
    return None
