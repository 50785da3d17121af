"""Formulas: bodies and gradients of operators as text, and the nodes that they stand for.

    dx = dy / Sqrt(1 - x * x)             t = Tanh(Softplus(x)); t + x * Sigmoid(x) * (1 - t * t)
    h1 = o * Tanh (f * c + i * g)         m = ReduceMean <keepdims: int = 1> (x * x, [-1])

Calls may stand within calls, with + - * / and < > <= >= == between values, in the precedence that
Python has. A list of integers is a constant. A number, or an attribute as in `Where(x < 0, @alpha,
1)`, takes the type of the operand beside it, or of the first name where there is none. What is
made of numbers alone is a number: `Sqrt(2 * pi)`. A formula becomes ONNX text (`written_out`), in
which other lines, such as the first of a node that holds a graph, stay as they are; or nodes of a
Builder (`emitted`).
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnx_fuse.ir.build import Builder

_END = re.compile(r"[\n;]")
_LINE = re.compile(r"\s*(?:((?:\w+\s*,\s*)*\w+) = )?(.+)")
_ATTRIBUTES = re.compile(r"(\w+)\s*(<\s*\w+\s*[:=][^<>]*>)\s*\(")
_SIGNS: dict[type[ast.AST], str] = {
    **{ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.USub: "Neg"},
    **{ast.Lt: "Less", ast.Gt: "Greater", ast.Eq: "Equal"},
    **{ast.LtE: "LessOrEqual", ast.GtE: "GreaterOrEqual"},
}
_OF_NUMBERS: dict[str, Callable[..., float]] = {
    **{"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.truediv},
    **{"Neg": operator.neg, "Sqrt": math.sqrt, "Max": max},
}
_NAMED = {"pi": math.pi, "inf": math.inf, "nan": math.nan}
_OF_ONE_TYPE = {*_OF_NUMBERS, "Pow"}
"""Operators whose result has the type of their first operand."""


@dataclass(frozen=True)
class _Call:
    op_type: str
    attributes: str
    operands: tuple[_Tree, ...]


_Tree: TypeAlias = "_Call | str | float | tuple[int, ...]"
"""A call; a name, or `@name` for an attribute; a number; a list of integers."""


class _NoFormulaError(Exception):
    """A text of Python that formulas do not have, such as that of a node with a graph."""


@lru_cache(1024)
def _parsed(line: str) -> tuple[str, _Tree | None]:
    """What a line names, and its formula: None of what is none.

    The grammar is Python's, in which attributes become a first argument, and `@name` `at.name`.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        return "", None
    text = _ATTRIBUTES.sub(lambda call: f"{call[1]}({call[2]!r}, ", match[2].replace("@", "at."))
    try:
        return match[1] or "", _tree(ast.parse(text, mode="eval").body)
    except (SyntaxError, _NoFormulaError):
        return match[1] or "", None


def _tree(node: ast.expr) -> _Tree:
    """The tree of Python's. Raises _NoFormulaError."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return _NAMED.get(name, name)
        case ast.Attribute(value=ast.Name(id="at"), attr=name):
            return f"@{name}"
        case ast.Tuple(elts=results):
            return _Call("", "", tuple(map(_tree, results)))
        case ast.List():
            return tuple(ast.literal_eval(node))
        case ast.UnaryOp(op=ast.USub() as sign, operand=a):
            return _call(_SIGNS[type(sign)], "", [a])
        case (
            ast.BinOp(op=sign, left=a, right=b) | ast.Compare(ops=[sign], left=a, comparators=[b])
        ) if type(sign) in _SIGNS:
            return _call(_SIGNS[type(sign)], "", [a, b])
        case ast.Call(op_type, [ast.Constant(value=str() as attributes), *operands]):
            return _call(ast.unparse(op_type), attributes.replace("at.", "@"), operands)
        case ast.Call(op_type, operands):
            return _call(ast.unparse(op_type), "", operands)
    raise _NoFormulaError(ast.unparse(node))


def _call(op_type: str, attributes: str, nodes: Sequence[ast.expr]) -> _Tree:
    operands = tuple(map(_tree, nodes))
    number = _folded_number(op_type, operands)
    return _Call(op_type, attributes, operands) if number is None else number


def _folded_number(op_type: str, operands: Sequence[Any]) -> float | None:
    if op_type not in _OF_NUMBERS or not all(isinstance(v, float) for v in operands):
        return None
    return _OF_NUMBERS[op_type](*operands)


def _first_name(tree: _Tree) -> str:
    if isinstance(tree, _Call):
        return next(filter(None, map(_first_name, tree.operands)), "")
    return tree if isinstance(tree, str) and tree[0] != "@" else ""


def _is_number_or_attribute(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, str) and value[0] == "@")


def _write(tree: _Tree, target: _Text | _Nodes, outputs: int = 1) -> Any:
    """What stands for a tree in the target, each operand made before what it is an operand of."""
    if isinstance(tree, str):
        return target.attribute(tree) if tree[0] == "@" else target.named(tree)
    if not isinstance(tree, _Call):
        return target.integers(tree) if isinstance(tree, tuple) else tree
    values = [_write(operand, target) for operand in tree.operands]
    if not tree.op_type:
        return values
    if any(map(_is_number_or_attribute, values)):
        number = _folded_number(tree.op_type, values)
        if number is not None:
            return number
        if tree.op_type == "Mul" and 1.0 in [v for v in values if isinstance(v, float)]:
            return next(v for v in values if not isinstance(v, float))
        beside = values[1:] if tree.op_type == "Where" else values
        like = [v for v in beside if not _is_number_or_attribute(v)] or [
            target.named(_first_name(tree))
        ]
        values = [target.number(v, like) if _is_number_or_attribute(v) else v for v in values]
    return target.node(tree.op_type, tree.attributes, values, outputs)


# ---- as text ---------------------------------------------------------------------------------


@lru_cache(1024)
def written_out(text: str, typed: bool = True) -> str:
    """The text of a function with its formulas as nodes; numbers are of float64 if not `typed`."""
    lines = []
    for line in _END.split(text):
        targets, tree = _parsed(line)
        nodes = _Text(targets, typed).nodes(tree) if targets else []
        lines += nodes or [line]
    return "\n".join(lines)


class _Text:
    """The lines of one formula's nodes."""

    def __init__(self, targets: str, typed: bool) -> None:
        self._targets, self._name, self._typed = targets, targets.split(",")[0].strip(), typed
        self._lines: list[str] = []
        self._numbers: dict[tuple[Any, str], str] = {}

    def nodes(self, tree: _Tree | None) -> list[str]:
        """All lines, the last of which gives the formula's names; none for a name or a number."""
        if isinstance(tree, _Call | tuple):
            last = f"{_write(tree, self)} ="
            self._lines[-1] = self._lines[-1].replace(last, f"{self._targets} =", 1)
        return self._lines

    def named(self, name: str) -> str:
        return name

    attribute = named

    def number(self, number: float | str, like: Sequence[str]) -> str:
        key = number, like[0]
        if key not in self._numbers:
            of_type = "value: tensor = double {%s}"
            of_type = of_type if isinstance(number, float) else "value_float: float = %s"
            constant = self.node("Constant", f"<{of_type % number}>", [])
            if not self._typed:
                return constant
            self._numbers[key] = self.node("CastLike", "", [constant, like[0]])
        return self._numbers[key]

    def integers(self, numbers: tuple[int, ...]) -> str:
        return self.node("Constant", f"<value_ints: ints = {list(numbers)}>", [])

    def node(self, op_type: str, attributes: str, values: Sequence[str], outputs: int = 1) -> str:
        name = f"{self._name}_{len(self._lines) + 1}"
        call = f"{op_type} {attributes} " if attributes else f"{op_type} "
        self._lines.append(f"{name} = {call}({', '.join(values)})")
        return name


# ---- as nodes --------------------------------------------------------------------------------


def emitted(text: str, op: Builder, node: ir.Node | None = None, /, **values: object) -> Any:
    """The result of formulas, one a line or between `;`, whose nodes the Builder `op` makes.

    A last line of names between commas gives them all. `values` are the tensors, and what a
    Builder makes constants of, by their names; `@alpha` is an attribute of `node`, with the
    standard's default, and its operator of its input is its output.
    """
    result, target = None, _Nodes(op, node, values)
    for name, tree in _lines(text):
        names = name.split(", ")
        values[name] = result = _write(tree, target, len(names))
        if len(names) > 1:
            values.update(zip(names, result, strict=True))
    return result


@lru_cache(1024)
def _lines(text: str) -> list[tuple[str, _Tree]]:
    lines = []
    for line in _END.split(text):
        name, tree = _parsed(line)
        if tree is None:
            raise ValueError(f"this is no formula: {line}")
        lines.append((name, tree))
    return lines


class _Nodes:
    """The nodes that a Builder makes."""

    def __init__(self, op: Builder, node: ir.Node | None, values: dict[str, Any]) -> None:
        self._op, self._node, self._values = op, node, values

    def named(self, name: str) -> Any:
        return self._values[name]

    def attribute(self, name: str) -> Any:
        assert self._node is not None
        attribute = self._node.attributes.get(name[1:])
        if attribute is None:
            return _standard_default(self._node.op_type, self._node.domain, name[1:])
        return attribute.value

    def number(self, number: float, like: Sequence[Any]) -> Any:
        typed = like[0]
        if not isinstance(typed, ir.Value) or typed.dtype is None:
            tensors = (v for v in [*like, *self._values.values()] if isinstance(v, ir.Value))
            typed = next((v for v in tensors if v.dtype), like[0])
        constant = self._op.constant(number, typed.dtype)
        return constant if typed.dtype else self._op.CastLike(constant, typed)

    def integers(self, numbers: tuple[int, ...]) -> Any:
        return list(numbers)

    def node(self, op_type: str, attributes: str, values: Sequence[Any], outputs: int) -> Any:
        node = self._node
        if node is not None and node.op_type == op_type and values == [node.inputs[0]]:
            return node.outputs[0]
        if op_type == "CastLike":
            result = self._op.to_like(*values)
            result.dtype = result.dtype or values[1].dtype
            return result
        settings = dict(_attributes(attributes)) if attributes else {}
        for name, value in settings.items():
            if isinstance(value, str) and value[:1] == "@":
                settings[name] = self.attribute(value)
        domain, _, name = op_type.rpartition(".")
        result = self._op.node(name, values, outputs=outputs, domain=domain, attributes=settings)
        if outputs == 1 and not domain and result.dtype is None:  # numbers beside it take its type
            if name == "Cast":
                result.dtype = ir.DataType(settings["to"])
            elif name in _OF_ONE_TYPE and values[0].dtype is not None:
                result.dtype = values[0].dtype
        return result


@lru_cache(256)
def _attributes(text: str) -> tuple[tuple[str, Any], ...]:
    """The attributes of a call; a reference as `@name`."""
    pairs = re.findall(r"(\w+)\s*(?::\s*\w+\s*)?=\s*(\[[^\]]*\]|[^,>]*[^,>\s])", text)
    named = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
    return tuple((k, v if v[0] == "@" else named.get(v) or ast.literal_eval(v)) for k, v in pairs)


@lru_cache(256)
def _standard_default(op_type: str, domain: str, name: str) -> Any:
    schema = onnx.defs.get_schema(op_type, domain)
    return onnx.helper.get_attribute_value(schema.attributes[name].default_value)
