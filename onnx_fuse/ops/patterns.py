"""Fusion rules as text: the formula that nodes compute, and the one that takes its place.

    Formula("x * Tanh (Softplus (x))", "Mish (x)")

Formulas are those of `ops.formula`. A name stands for any value, the same everywhere; @name for an
attribute, which may have its default; a number for a constant that holds it, rounded to the type of
the graph, and that adds no axes. A name that only the result uses as an attribute is a constant.

Sums, differences, products, quotients by a number, and powers up to 3 are compared as polynomials
of what they combine. So the order of the operations is free, and constants may be folded together.
Where some order overflows or loses the sign of a zero, and the formula does not, numbers show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, rank, required
from onnx_fuse.ir.copying import Copier
from onnx_fuse.ops.activations import signature
from onnx_fuse.ops.formula import written_out
from onnx_fuse.ops.opdef import OpDef
from onnx_fuse.ops.rules import Rewriter, Rule, attribute, consumers, is_float, producer, scalar
from onnx_fuse.reasons import Reason

Bound = dict[Any, Any]
"""Values of a graph by those of a pattern, attributes by name, and under _MISS why it is none."""
Match = dict[str, Any]
"""What the names of a formula stand for: values of a graph, and those of attributes."""
Condition = Callable[[Match], bool]
_MISS = object()
_COMMUTES = frozenset(("Add", "Mul", "Max", "Min", "And", "Or", "Xor", "Equal"))
_NEAR = 2e-3
"""How far constants may be off for --explain to mention them."""


@dataclass(frozen=True)
class Formula:
    """What nodes compute, and what they become."""

    pattern: str
    result: str
    double: bool = True
    """Whether it is for float64, too."""

    @property
    def anchor(self) -> str:
        """The outermost operator of the pattern, arithmetic aside."""
        return next(n for n in re.findall("[A-Z]\\w+", self.pattern) if n not in _ARITHMETIC)

    @cached_property
    def parsed(self) -> tuple[_Pattern, ir.Function]:
        """The pattern and the result."""
        numbers = re.findall(r"@(\w+)", self.result)
        return _Pattern(_function(self.pattern), numbers), _function(self.result)


def text_rule(name: str, level: int, formulas: Sequence[Formula], conditions: str = "") -> Rule:
    """A rule that rewrites by the first of `formulas` that matches around a node.

    `conditions` are those of `Rule`. With "readers" nothing else may read what the outermost
    operator computes, or one after it.
    """
    anchors = tuple(dict.fromkeys(formula.anchor for formula in formulas))

    def apply(rw: Rewriter, node: ir.Node) -> bool:
        misses = []
        double = node.outputs[0].dtype == ir.DataType.DOUBLE
        for formula in formulas:
            if node.op_type != formula.anchor or (double and not formula.double):
                continue
            pattern, result = formula.parsed
            for top, bound in pattern.around(node):
                op_type, miss = result[-1].op_type, bound.get(_MISS)
                reason = miss(op_type) if miss else None
                if not reason and "readers" in conditions.split():
                    reason = other_reader(inside(top, [*node.inputs, *pattern.inputs(bound)]))
                if not reason and not pattern.computed(top, bound):
                    reason = Reason("unlike", op=op_type)
                if not reason:
                    op = Builder()
                    y = _written(result, op, pattern, bound)
                    return rw.replace(top.producer() or node, op, [top], [y])
                misses.append(reason)
        return rw.refuse(name, [node], misses[0]) if misses else False

    return Rule(name, level, anchors, apply, conditions=conditions)


def body_rule(definition: OpDef, level: int) -> Rule:
    """A rule that puts the operator where a graph computes what its body does, node for node.

    The graph is then the same but for the operator's name, so that nothing is rounded differently.
    Inner values must have no other reader. Attributes that the body refers to are read from the
    nodes, a Constant in the body from a constant that is equal to it.
    """
    pattern, name, domain = _Pattern(definition.function()), definition.name, definition.domain

    def apply(rw: Rewriter, node: ir.Node) -> bool:
        for y, bound in pattern.around(node):
            if None in (inputs := pattern.inputs(bound)):
                return False
            nodes = inside(y, inputs)
            if reason := other_reader(nodes):
                return rw.refuse(name, nodes, reason)
            op = Builder()
            attributes = {key: a.value for key, a in bound.items() if isinstance(key, str)}
            result = op.node(name, inputs, domain=domain, attributes=attributes)
            return rw.replace(node, op, [y], [result])
        return False

    last = [n.op_type for n in pattern.function if pattern.root in n.outputs]
    return Rule(name, level, tuple(last), apply)


def _function(text: str) -> ir.Function:
    attributes = dict.fromkeys(re.findall(r"@(\w+)", text))
    inputs = dict.fromkeys(re.findall(r"\b[a-z]\w*\b(?!\s*[.(])", re.sub("<[^<>]*>", "", text)))
    head = f"Formula {signature(', '.join(attributes))}({', '.join(inputs)}) => (y)"
    return OpDef("Formula", body=written_out(f"{head} {{\n  y = {text}\n}}", False)).function()


def _written(result: ir.Function, op: Builder, pattern: _Pattern, bound: Bound) -> Any:
    """The result in terms of the values that the pattern stands for."""
    values = {formal.name: bound.get(formal) for formal in pattern.function.inputs}
    inputs = [values[formal.name] for formal in result.inputs]
    copier = Copier.of_call(result, inputs, bound, fresh=lambda name: None)
    op.nodes += [copy for node in result for copy in copier.copy(node)]
    return copier.values[result.outputs[0]]


def inside(top: ir.Value, leaves: Sequence[ir.Value | None]) -> list[ir.Node]:
    """The nodes that compute `top` from the leaves, the last one first."""
    nodes: dict[ir.Node, None] = {}
    todo = [top]
    while todo:
        node = todo.pop().producer()
        if node is not None and node.op_type != "Constant":
            nodes[node] = None
            todo += [v for v in reversed(node.inputs) if v is not None and v not in leaves]
    return list(nodes)


def other_reader(nodes: Sequence[ir.Node]) -> Reason | None:
    """Why the nodes after the first would stay; None where nothing else reads their results."""
    for value in (v for node in nodes[1:] for v in node.outputs):
        if value.is_graph_output() or any(use.node not in nodes for use in value.uses()):
            return Reason("other-readers", what=f"'{value.name}'")
    return None


class _Pattern:
    """A function that values of a graph may compute: node for node if `numbers` is None.

    Else its arithmetic may be that of any polynomial equal to it, and each of `numbers` that no
    node has as an attribute is a constant of that name.
    """

    def __init__(
        self,
        function: ir.Function,
        numbers: Sequence[str | None] | None = None,
        spellings: Spellings | None = None,
    ) -> None:
        self.function, self._spellings = function, spellings
        (self.root,) = function.outputs
        self._exact = numbers is None
        self._numbers = [v for v in function.inputs if v.name in (numbers or ())]
        self._polynomials: dict[object, Polynomial] = {}
        self.call = self.root if self._is_operator_call(self.root) else self._atoms(self.root)[0]
        """The result of the operator from which on a graph is looked at."""

    def inputs(self, bound: Bound) -> list[ir.Value | None]:
        """The values of a graph that the inputs of the function are."""
        return [bound.get(formal) for formal in self.function.inputs]

    def names(self, bound: Bound) -> Match:
        """What the names of the function stand for, its result as y."""
        values = {str(v.name): actual for v, actual in bound.items() if isinstance(v, ir.Value)}
        return {k: a.value for k, a in bound.items() if isinstance(k, str)} | values

    def around(self, node: ir.Node) -> Iterator[tuple[ir.Value, Bound]]:
        """What computes the function by way of a node, and what it does that with."""
        y = node.outputs[0]
        for bound in self.matches(self.call, y, {}):
            if self.call is self.root:
                yield y, bound
            elif is_float(y):
                for top in tops(y, "Add", "Mul", "Div"):
                    yield from ((top, more) for more in self.matches(self.root, top, bound))

    def matches(
        self, formal: ir.Value | None, actual: ir.Value | None, bound: Bound
    ) -> Iterator[Bound]:
        """The ways in which a value of the graph is that of the pattern."""
        if self._spellings:
            actual = self._spellings.below_views(actual)
        if formal is None or actual is None or formal in bound:
            if bound.get(formal, formal) is actual:
                yield bound
            return
        pattern, node = formal.producer(), actual.producer()
        if pattern is None:
            yield {**bound, formal: actual}
        elif self._spellings and pattern.op_type in self._spellings.table:
            for inner, way in self._spellings.ways(pattern.op_type, actual):
                pairs = tuple(zip(pattern.inputs, inner.inputs(way), strict=False))
                yield from self._all(pairs, {**bound, formal: actual})
        elif pattern.op_type == "Constant":
            yield from self._constant(pattern, actual, bound)
        elif not self._is_operator_call(formal):
            yield from self._polynomial(formal, actual, bound)
        elif (
            node is not None
            and (node.domain, node.op_type) == (pattern.domain, pattern.op_type)
            and formal.index() == actual.index()
            and len(node.inputs) == len(pattern.inputs)
            and (attributes := _attributes(pattern, node, bound)) is not None
            and not (self._spellings and self._spellings.fixed_rank and _adds_axes(node))
        ):
            orders = [node.inputs, node.inputs[::-1]]
            commutes = pattern.op_type in _COMMUTES and len(node.inputs) == 2
            for order in orders if commutes else orders[:1]:
                pairs = tuple(zip(pattern.inputs, order, strict=True))
                yield from self._all(pairs, {**bound, **attributes, formal: actual})

    def _all(self, pairs: Sequence[tuple[Any, Any]], bound: Bound) -> Iterator[Bound]:
        for more in self.matches(*pairs[0], bound) if pairs else ():
            yield from self._all(pairs[1:], more)
        if not pairs:
            yield bound

    def _is_operator_call(self, formal: ir.Value) -> bool:
        return formal.producer() is not None and (self._exact or not _arithmetic_node(formal))

    def _atoms(self, formal: ir.Value) -> list[ir.Value]:
        """What the arithmetic of a value combines: results of operators first, then inputs."""
        values = [v for v in _combined(formal) if not _arithmetic_node(v)]
        return sorted(values, key=lambda v: v.producer() is None)

    def _constant(self, node: ir.Node, actual: ir.Value, bound: Bound) -> Iterator[Bound]:
        """Whether a constant is that of the pattern: in every bit, or as a number of its type."""
        wanted, array, held = const_array(node.outputs[0]), const_array(actual), scalar(actual)
        if wanted is None:
            (wanted,) = (np.asarray(a.value) for a in node.attributes.values())
        if (self._exact and not self._spellings) or wanted.shape:
            same = array is not None and (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
            if same and array is not None and array.tobytes() == wanted.tobytes():
                yield bound
        elif held is not None and (self._spellings or not rank(actual)):
            yield from _compared({(): _stored(wanted, actual)}, {(): held}, bound)

    def _polynomial(self, formal: ir.Value, actual: ir.Value, bound: Bound) -> Iterator[Bound]:
        """The ways in which the arithmetic of the graph is that of the pattern."""
        atoms = [v for v in self._atoms(formal) if v not in self._numbers]
        for atom in atoms:
            if atom not in bound:  # it is one of the values that the graph combines
                for value in _combined(actual):
                    for more in self.matches(atom, value, bound):
                        yield from self._polynomial(formal, actual, more)
                return
        key = formal, actual.dtype
        if key not in self._polynomials:
            indices = {v: i for i, v in enumerate([*atoms, *self._numbers])}
            self._polynomials[key] = _Polynomials(indices, 0, actual).of(formal) or {}
        p = dict(self._polynomials[key])
        ranks = [rank(bound[atom]) for atom in atoms]
        size = None if None in ranks else max(n or 0 for n in ranks)
        q = _Polynomials({bound[v]: i for i, v in enumerate(atoms)}, size, actual).of(actual)
        if q is None:
            return
        for index, number in enumerate(self._numbers, len(atoms)):
            for term in [term for term in p if index in term]:
                rest = tuple(i for i in term if i != index)
                factor = p[rest] = q.get(rest, math.nan) / p.pop(term)
                miss = bound.get(_MISS) or _no_attribute(factor, actual)
                bound = {**bound, number.name: ir.AttrFloat32("", factor), _MISS: miss}
        yield from _compared(p, q, bound)

    def computed(self, top: ir.Value, bound: Bound) -> bool:
        """Whether `top`, worked out step by step in its own type, is the function at all probes.

        Polynomials are of real numbers: where a step overflows or loses the sign of a zero, the
        function must too.
        """
        x, dtype = self.function.inputs[0], top.dtype
        if self._is_operator_call(self.root) or dtype is None:
            return True
        with np.errstate(all="ignore"):
            probes = _probes(dtype)
            formals = {v: np.asarray(bound[v.name].value) for v in self._numbers}
            formals[x] = probes.astype(np.float64)
            truth = _work(self.root, formals, np.dtype(np.float64))
            y = _work(top, {bound[x]: probes}, probes.dtype).astype(np.float64)
            nan, inf = np.isnan(truth), np.isinf(truth)
            if (np.isnan(y) != nan).any() or (np.isinf(y) != inf).any():
                return False
            # 16 roundings, the argument's among them, each of which an operator passes on at most
            bound_of = 16 * float(dtype.eps) * np.fmax(np.abs(formals[x]), np.abs(truth))
            near = (np.abs(y - truth) <= bound_of + float(dtype.tiny)) | nan | inf
            return bool(near.all() and ((np.signbit(y) == np.signbit(truth)) | nan).all())


@dataclass(frozen=True)
class Spellings:
    """Finds formulas, node for node, in which some operators stand for any of several formulas."""

    table: Mapping[str, Mapping[str, Condition | None]]
    """The formulas of each such operator, and what must be true of their values besides."""
    views: tuple[str, ...] = ("Identity",)
    """Operators from floats to floats that may lie between."""
    fixed_rank: bool = True
    """Whether no constant may add axes."""
    _patterns: dict[str, _Pattern] = field(default_factory=dict)

    def find(self, text: str, value: ir.Value | None, fits: Condition = bool) -> Match | None:
        """What the names in a formula are where it computes a value of a graph, the value as y."""
        pattern = self._pattern(text)
        bindings = pattern.matches(pattern.root, value, {}) if value is not None else iter(())
        found = (pattern.names(bound) for bound in bindings if _MISS not in bound)
        return next(filter(fits, found), None)

    def ways(self, operator: str, value: ir.Value) -> Iterator[tuple[_Pattern, Bound]]:
        """The formulas of an operator that compute a value, and what they compute it from."""
        for text, fits in self.table[operator].items():
            pattern = self._pattern(text)
            for bound in pattern.matches(pattern.root, value, {}):
                if _MISS not in bound and (fits is None or fits(pattern.names(bound))):
                    yield pattern, bound

    def below_views(self, value: ir.Value | None) -> ir.Value | None:
        """The value that views were made of."""
        while (node := producer(value, *self.views)) is not None and is_float(node.inputs[0]):
            value = node.inputs[0]
        return value

    def _pattern(self, text: str) -> _Pattern:
        if text not in self._patterns:
            self._patterns[text] = _Pattern(_function(text), spellings=self)
        return self._patterns[text]


NODES = Spellings({}, views=())
"""Finds formulas as they are written, but for the order of operands."""


def _adds_axes(node: ir.Node) -> bool:
    """Whether a constant may have more axes than the other operand of arithmetic."""
    ranks = [rank(v) for v in node.inputs if not _is_number(v)]
    least = 0 if None in ranks else max((n or 0 for n in ranks), default=0)
    numbers = [v for v in node.inputs if _is_number(v)] if node.op_type in _ARITHMETIC else []
    return any((rank(v) or 0) > least for v in numbers)


def _attributes(pattern: ir.Node, node: ir.Node, bound: Bound) -> Bound | None:
    """What attributes that the pattern refers to are in a node; None where another one differs."""
    values: Bound = {}
    for name in {*pattern.attributes, *node.attributes}:
        wanted, value = pattern.attributes.get(name), _setting(node, name)
        if wanted is None or not wanted.is_ref():
            other = _setting(pattern, name)
        else:
            other = bound.get(wanted.ref_attr_name, value)
            values[wanted.ref_attr_name] = value
        if value is None or other is None or other.value != value.value:
            return None
    return values


def _setting(node: ir.Node, name: str) -> ir.Attr | None:
    """An attribute, or the default that ONNX gives it; None for no such default."""
    held = node.attributes.get(name)
    if held is None and onnx.defs.has(node.op_type, node.domain):
        schema = onnx.defs.get_schema(node.op_type, node.domain)
        default = schema.attributes[name].default_value if name in schema.attributes else None
        held = ir.serde.deserialize_attribute(default) if default and default.type else None
    return held


# ---- arithmetic ------------------------------------------------------------------------------

Polynomial = dict[tuple[int, ...], float]
"""The coefficient of each product of atoms."""
_DEGREE = 8


def _arithmetic_node(value: ir.Value) -> ir.Node | None:
    node = producer(value, *_ARITHMETIC)
    divides = node is not None and node.op_type in ("Div", "Pow")
    return None if divides and node is not None and not _is_number(node.inputs[1]) else node


def _is_number(value: ir.Value | None) -> bool:
    held = value.const_value if value is not None else None
    return held is not None or producer(value, "Constant") is not None


def _combined(value: ir.Value) -> list[ir.Value]:
    """A value, and what arithmetic makes it of, but for constants: the nearest first."""
    values = [value]
    for each in values:
        node = _arithmetic_node(each) if len(values) < 24 else None
        read = [v for v in node.inputs if v is not None and not _is_number(v)] if node else []
        values += dict.fromkeys(v for v in read if v not in values)
    return values


def tops(value: ir.Value, *op_types: str) -> list[ir.Value]:
    """What up to five nodes of some operators make of a value, the nearest first."""
    values, level = [], [value]
    for _ in range(5):
        readers = dict.fromkeys(node for v in level for node in consumers(v))
        level = [n.outputs[0] for n in readers if not n.domain and n.op_type in op_types]
        values += level
    return values[:64]


def _compared(p: Polynomial, q: Polynomial, bound: Bound) -> Iterator[Bound]:
    """`bound` if the polynomial of a graph, q, is that of a pattern, p, or nearly is."""
    q = {k: c for k, c in q.items() if c or k in p}
    if set(p) == set(q):
        if all(p[k] == c and np.signbit(p[k]) == np.signbit(c) for k, c in q.items()):
            yield bound
        elif all(math.isclose(p[k], c, rel_tol=_NEAR) for k, c in q.items()):
            yield {**bound, _MISS: bound.get(_MISS) or (lambda op_type: Reason("near", op=op_type))}


def _no_attribute(factor: float, like: ir.Value) -> Callable[[str], Reason] | None:
    """Why an attribute, of float32, cannot hold a constant of the type of `like`."""
    dtype = like.dtype or ir.DataType.FLOAT
    if all(float(np.asarray(factor, kind)) == factor for kind in (np.float32, dtype.numpy())):
        return None
    reason = Reason("not-float32", what="factor", number=factor, dtype=dtype.name.lower())
    return lambda op_type: reason


def _stored(number: object, like: ir.Value) -> float:
    """The number of the type of `like` that is nearest to `number`.

    That is what PyTorch's exporters write for 1.4142135, 0.7978845608, 0.044715 and the like, in
    every type (2.13, opsets 13 to 23); a constant of fewer digits is another function.
    """
    return float(np.asarray(number, (like.dtype or ir.DataType.DOUBLE).numpy()))


class _Polynomials:
    """Values as polynomials in `atoms`; None where anything else enters.

    A constant of more axes than the atoms may have enters nothing: it would raise the rank of the
    result. Numbers are rounded to the type of `like`.
    """

    def __init__(self, atoms: Mapping[ir.Value, int], size: int | None, like: ir.Value) -> None:
        self._of: dict[Any, Polynomial | None] = {v: {(i,): 1.0} for v, i in atoms.items()}
        self._size, self._like = size, like

    def of(self, value: ir.Value | None, depth: int = 12) -> Polynomial | None:
        if value is not None and depth and value not in self._of:
            p = self._worked_out(value, depth)
            self._of[value] = p if p and max(map(len, p)) <= _DEGREE else None
        return self._of.get(value)

    def _worked_out(self, value: ir.Value, depth: int) -> Polynomial | None:
        held, node = scalar(value), _arithmetic_node(value)
        if held is not None:
            axes = rank(value) or 0
            return {(): _stored(held, self._like)} if axes <= (self._size or 0) else None
        if node is None:
            return None
        a, b = (self.of(v, depth - 1) for v in (node.inputs[0], node.inputs[-1]))
        if a is None or b is None:
            return None
        match node.op_type:
            case "Identity":
                return a
            case "Neg":
                return _sum({}, a, -1.0)
            case "Add":
                return _sum(a, b, 1.0)
            case "Sub":
                return _sum(a, b, -1.0)
            case "Mul":
                return _product(a, b)
            case "Div":
                return _sum({}, a, 1 / b[()]) if b[()] else None
        squared = _product(a, a)
        return {1.0: a, 2.0: squared, 3.0: _product(squared, a)}.get(b[()])


def _sum(a: Polynomial, b: Polynomial, factor: float) -> Polynomial:
    return {k: a.get(k, 0.0) + factor * b.get(k, 0.0) for k in {**a, **b}}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for i, p in a.items():
        for k, q in b.items():
            term = tuple(sorted(i + k))
            result[term] = result.get(term, 0.0) + p * q
    return result


# ---- numbers ---------------------------------------------------------------------------------


_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
    "Identity": np.asarray,
}
_CALLS: dict[str, Callable[..., np.ndarray]] = {
    "Clip": np.clip,
    "Erf": np.vectorize(math.erf, otypes=[np.float64]),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1),
    "Sigmoid": lambda x: np.exp(np.fmin(x, 0)) / (1 + np.exp(-np.abs(x))),
    "Softplus": lambda x: np.logaddexp(x, 0),
    "Tanh": np.tanh,
}


def _probes(dtype: ir.DataType) -> np.ndarray:
    """Numbers at which two ways to write one function differ if they ever do.

    The largest is an eighth of the type's: in x (1 + erf(x/√2)) ½, the usual spelling, the product
    overflows above half of it, which no fused activation does.
    """
    kind = dtype.numpy()
    top, least = float(dtype.max) / 8, float(dtype.tiny)
    plain = [0.0, least, least / 4, 1e-3, 0.3, 1.0, 2.5, 6.0, 15.0, 100.0, 1e4, 1e30]
    sized = [*(v for v in plain if v <= top), math.sqrt(top), top, math.inf]
    return np.array([*sized, *(-v for v in sized), math.nan], np.float64).astype(kind)


def _work(value: ir.Value, arrays: dict[ir.Value, np.ndarray], kind: np.dtype) -> np.ndarray:
    """What a value is where `arrays` are some, each step rounded to a type; they grow by it."""
    if value not in arrays:
        held, node = scalar(value), value.producer()
        if held is not None:
            arrays[value] = np.asarray(held, np.float64).astype(kind)
        else:
            node = required(node)
            inputs = [_work(v, arrays, kind) for v in node.inputs if v is not None]
            if node.op_type in _ARITHMETIC:
                arrays[value] = _ARITHMETIC[node.op_type](*inputs).astype(kind)
            else:
                settings = {name: attribute(node, name) for name in node.attributes}
                wide = [array.astype(np.float64) for array in inputs]
                arrays[value] = _CALLS[node.op_type](*wide, **settings).astype(kind)
    return arrays[value]
