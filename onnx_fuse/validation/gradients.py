"""Every gradient against central differences in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import DataType, Value

from onnx_fuse import progress
from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import inline
from onnx_fuse.ir.build import bind_defaults, const_array, defaults, feeds_of, remove_unused_nodes
from onnx_fuse.ir.constants import Model
from onnx_fuse.options import GradientOptions, shared, takes
from onnx_fuse.runtime import ort
from onnx_fuse.validation.arrays import is_added
from onnx_fuse.validation.compare import Tolerance, difference
from onnx_fuse.validation.freeze import hold, roundings, selections, straight_through
from onnx_fuse.validation.inputs import Feeds, cotangents_of
from onnx_fuse.validation.reference import evaluator_in_double, in_double
from onnx_fuse.validation.request import Request, guarded
from onnx_fuse.validation.shapes import wrong_sizes
from onnx_fuse.validation.slopes import Slopes
from onnx_fuse.validation.values import by_name, values_of


class _Limits(NamedTuple):
    """The relative limits of slopes in float64, and of a gradient in its own type.

    `slope`, of |gradient| |direction|: what curvature and rounding leave of the difference, and
    constants of 16 bits (GELU's in its gradient). `top`, of the largest entry: float16 rounds each
    value by up to 5e-4, sums of terms that cancel lose some bits more; bfloat16 has 3 bits less.
    """

    slope: float
    top: float


_SINGLE = _Limits(1e-5, 1e-4)
_NARROWER = {DataType.FLOAT16: _Limits(1e-3, 2e-2), DataType.BFLOAT16: _Limits(8e-3, 1.5e-1)}
_TIED = 1e-3
"""The limit `top` behind a scale that is found at run time: values near the minimum of a GELU are
equal in float32 alone, and share the slope of the scale there."""
_GRAD, _SEED = ", its gradient", ", the incoming gradient"
"""Suffixes of a gradient's name here, and of one given of an output: a tensor may have both."""
_ABSORBS, _SOFT = 1e6, 1e5
"""Numbers beyond the first leave few of a score's digits in a sum; the second hides as well."""
_ROUNDINGS = 8.0
"""What a gradient's own type may lose, in changes by the last bit of all weights and inputs: sound
gradients are off by 0.5 to 4.6 of them (LeViT, TextNet), as each layer rounds too."""
_ZERO = 1e-6
"""The share of the largest entry in the whole model below which a gradient counts as zero."""
_ASIDE = 1e-2
"""Of a parameter's size: how far the point is from the graph's own at which slopes are compared
where its own is a kink. Biases of 0 behind weak layers put a Relu's kink right there."""


@dataclass(frozen=True)
class GradientError:
    """What the check of one trainable tensor's gradient found."""

    tensor: str
    """The tensor's name."""
    op: str
    """Operator and name of a node that reads the tensor."""
    slope: float
    """The slope that the gradient predicts, along the direction in which it errs most. Tensors that
    were compared together, and are right, share it."""
    expected: float
    """The slope along that direction by central differences, in float64."""
    slope_error: float
    """The absolute difference of the two slopes."""
    max_abs: float
    """The largest absolute difference of the gradient in its own type from that in float64."""
    limit: float
    """The value that `max_abs` may have."""
    where: str
    """The place of that difference, as `name[index]`."""
    kernel: str
    """The kernel that wrote the gradient on a GPU; "" on the CPU."""
    ok: bool
    """Whether the slope and the gradient in its own type are both within their limits."""


@dataclass(repr=False)
class GradientCheck:
    """The outcome of a gradient check."""

    errors: list[GradientError] = field(default_factory=list)
    """One GradientError for each trainable tensor, in the order of the nodes that read them."""
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader should know, such as tensors that could not be compared."""
    sizes: list[str] = field(default_factory=list)
    """A sentence for each node of the backward whose inferred sizes are not onnxruntime's."""

    @property
    def ok(self) -> bool:
        """Whether every gradient is right, and inferred sizes are the actual ones."""
        return all(e.ok for e in self.errors) and not self.sizes

    @property
    def failed(self) -> list[GradientError]:
        """The wrong gradients, nearest to the outputs first.

        A wrong rule spoils every tensor before its node, so the first one is the guilty one.
        """
        return [e for e in reversed(self.errors) if not e.ok]

    def __repr__(self) -> str:
        return f"GradientCheck(ok={self.ok}, {len(self.errors)} tensors, {len(self.failed)} wrong)"

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON values, as `--json` writes it."""
        return {
            "ok": self.ok,
            "notes": self.notes,
            "sizes": self.sizes,
            "tensors": [asdict(e) for e in self.errors],
        }


@dataclass(frozen=True)
class _GradientArguments(GradientOptions):
    model: Model
    feeds: Feeds | None = field(default=None, kw_only=True)


@takes(_GradientArguments)
def check_gradients(arguments: _GradientArguments) -> GradientCheck:
    """Check the gradient of every trainable float tensor against central differences.

    The loss is sum(output * cotangent) for fixed random cotangents. The backward of the fused graph
    runs in `precision` on `device`, and the same backward with all function bodies written out in
    float64. Along random directions, the latter must give the slope that the unfused graph has in
    float64. A direction changes many tensors at once; where the slopes differ, its tensors are
    split until only the wrong ones are left.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model.
        feeds: Arrays by input name; without it, inputs are generated that fit the graph.
        {options}

    Raises:
        ModelError: The model is malformed, or onnxruntime cannot run it.
        UsageError: A name or shape does not fit the model.
    """
    model, feeds = arguments.model, arguments.feeds
    request = Request(**shared(Request, arguments) | {"feeds": [feeds] if feeds else None})
    return guarded(partial(compare_gradients, model, request), model, request.place)


def compare_gradients(model: Model, request: Request) -> GradientCheck:
    """Check the gradients that are made of the model, as `check_gradients` describes it."""
    from onnx_fuse import autodiff, rewrite

    plain = request.loaded(model)
    check = GradientCheck()
    progress.report("running the original")
    with ort.faults("the original"):
        session = ort.session(plain)
    inputs, outputs = request.pairs(plain, partial(ort.run, session), check.notes)[0]
    bind_defaults(plain, inputs)
    hostile = _hostile(plain, inputs, outputs)
    rng = np.random.default_rng(request.seed)
    names = [v.name or "" for v in plain.graph.outputs]
    cotangents = cotangents_of(names, outputs, rng)
    if hostile:
        values = dict(zip(names, outputs, strict=True))
        cotangents = {y: _where_finite(c, values[y]) for y, c in cotangents.items()}
    progress.report("making the backward")
    fused = plain.clone()
    rewrite.optimize(fused, training=True)
    backward = autodiff.append_gradients(fused)[0]
    _named_for_what_they_are(backward)
    seeds = {f"{name}{_SEED}": c for name, c in cotangents.items()}
    seeds = feeds_of(backward, inputs | seeds)
    # One element is a constant of the graph (a scale, a mask's -inf), not a parameter.
    wanted = [
        v.name or ""
        for v in backward.graph.outputs
        if v.name not in names and (v.name or "").endswith(_GRAD) and _elements(v) != 1
    ]
    if not (wanted := _with_slopes(plain, wanted, check.notes)):
        check.notes.append("no weight of more than one number has a slope: nothing is compared")
        return check
    chosen = _chosen(plain, backward, inputs, check.notes)
    backward, seeds = hold(backward, list(chosen)), seeds | chosen
    gradients = _Gradients.of(backward, seeds, wanted, request)
    # What is folded in float32 on one side alone may cross an integer there (T5's buckets).
    rewrite.optimize(plain, level=0, training=True)
    forward, parameters = _forward(plain, [name.removesuffix(_GRAD) for name in wanted])
    shared = [name for name in selections(forward) if name in chosen]
    forward, inputs = hold(forward, shared), inputs | chosen
    lost = [name for name in wanted if name.removesuffix(_GRAD) not in parameters]
    check.notes.extend(
        f"{name}: created while loading, so its slope is not compared" for name in lost
    )
    _Comparison(
        request, rng, gradients, forward, inputs, parameters, cotangents, hostile=hostile
    ).enter_accepted(check)
    if request.place == "cpu":
        check.sizes = wrong_sizes(backward, [seeds], check.notes)
    return check


def _named_for_what_they_are(backward: ir.Model) -> dict[str, str]:
    """Call gradients by what they are of, and _SEED or _GRAD; returns new names by old ones."""
    from onnx_fuse import autodiff

    names: dict[str, str] = {}
    for values, suffix in ((backward.graph.inputs, _SEED), (backward.graph.outputs, _GRAD)):
        for of, name in autodiff.gradient_names(values).items():
            value = next(v for v in values if v.name == name)
            value.name = names[name] = f"{of}{suffix}"
    return names


def _with_slopes(model: ir.Model, wanted: list[str], notes: list[str]) -> list[str]:
    """The gradients that pass no rounding straight through; a note names the others."""
    rounded = straight_through(model)
    others = [name for name in wanted if name.removesuffix(_GRAD) in rounded]
    if others:
        count = f"{len(others)} of {len(wanted)} gradients pass"
        notes.append(f"{count} quantization straight through: their slopes are not compared")
    return [name for name in wanted if name not in others]


def _chosen(plain: ir.Model, backward: ir.Model, inputs: Feeds, notes: list[str]) -> Feeds:
    """What both graphs select, as the model does in its own type; a note says so."""
    selected = set(selections(backward))
    names = [name for name in selections(plain) if name in selected]
    if not names:
        return {}
    notes.append(
        f"which elements are selected ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}) is "
        "held: gradients are those of the elements that the model selects in its own type"
    )
    return values_of(plain, inputs, names)


def check_written(model: Model, request: Request | None = None) -> GradientCheck:
    """Compare the outputs `w.grad` that `autodiff.gradient` wrote, as `check_gradients` does.

    The graph's own forward gives the slopes: of its outputs times their `y.grad`, or of its loss.
    Raises ModelError where onnxruntime cannot run the graph.
    """
    request = request or Request()
    backward = request.loaded(model)
    new_names = _named_for_what_they_are(backward)
    if request.feeds:
        named = [{new_names.get(n, n): a for n, a in feed.items()} for feed in request.feeds]
        request = replace(request, feeds=named)
    check = GradientCheck()
    with ort.faults("the gradient graph"):
        session = ort.session(backward)
    names = [v.name or "" for v in backward.graph.outputs]
    inputs = _with_seeds(backward, request, check.notes)
    with ort.faults("the gradient graph"):
        outputs = ort.run(session, inputs)
    for y, array in zip(names, outputs, strict=True):
        seed = inputs.get(f"{y}{_SEED}")
        if seed is not None and seed.shape != array.shape:
            shapes_text = f"{[*seed.shape]}, the output {[*array.shape]}"
            raise ModelError(f"the gradient given of output '{y}' has shape {shapes_text}")
    results = {y: a for y, a in zip(names, outputs, strict=True) if not y.endswith(_GRAD)}
    hostile = _hostile(backward, inputs, [*results.values()])
    for y, array in results.items() if hostile else ():
        if (seed := inputs.get(f"{y}{_SEED}")) is not None:
            inputs[f"{y}{_SEED}"] = _where_finite(seed, array)
    inputs = defaults(backward) | inputs
    seeds = {k.removesuffix(_SEED): a for k, a in inputs.items() if k.endswith(_SEED)}
    cotangents = {y: a for y, a in seeds.items() if y in names}
    if not cotangents:
        scalars = [v.name or "" for v in backward.graph.outputs if _elements(v) == 1]
        loss = [n for n in scalars if not n.endswith(_GRAD)]
        cotangents = {"loss" if "loss" in loss else loss[0]: np.ones(())} if loss else {}
    tensors = {*_inputs(backward), *backward.graph.initializers}
    grads = [v for v in backward.graph.outputs if (v.name or "").endswith(_GRAD)]
    # A tensor of one element is probably a constant; it is checked only if there is no other.
    grads = [v for v in grads if _elements(v) != 1] or grads
    wanted = [v.name or "" for v in grads if (v.name or "").removesuffix(_GRAD) in tensors]
    check.notes.extend(
        f"{v.name}: its tensor is not in the graph by that name, its slope is not compared"
        for v in grads
        if v.name not in wanted
    )
    if not (wanted := _with_slopes(backward, wanted, check.notes)):
        check.notes.append("the graph has no gradient to compare")
        return check
    gradients = _Gradients.of(backward, inputs, wanted, request)
    forward, parameters = _forward(backward, [n.removesuffix(_GRAD) for n in wanted])
    parameters |= in_double({k: a for k, a in inputs.items() if f"{k}{_GRAD}" in wanted})
    rng = np.random.default_rng(request.seed)
    _Comparison(
        request, rng, gradients, forward, inputs, parameters, cotangents, hostile=hostile
    ).enter_accepted(check)
    check.sizes = wrong_sizes(backward, [inputs], check.notes)
    return check


def _with_seeds(backward: ir.Model, request: Request, notes: list[str]) -> Feeds:
    """Inputs of a gradient graph; a `y.grad` that is not given has the shape of `y` for the others.

    The graph says little of that shape: exporters give the sizes of outputs names of their own.
    """
    feeds = request.feeds[0] if request.feeds else {}
    open_inputs = [name for name in _inputs(backward) if name not in feeds]
    names = dict.fromkeys(str(v.name) for v in backward.graph.outputs)  # one may stand twice
    ends = [name for name in names if f"{name}{_SEED}" in open_inputs]
    if feeds and not ends:
        return dict(feeds)
    forward = backward.clone()
    if not ends:
        return request.pairs(forward, partial(ort.run, ort.session(forward)), notes)[0][0]
    forward.graph.outputs[:] = list(by_name(forward, ends).values())
    remove_unused_nodes(forward)
    forward.graph.inputs[:] = [v for v in forward.graph.inputs if not f"{v.name}".endswith(_SEED)]
    session, read = ort.session(forward), _inputs(forward)

    def run(feed: Feeds) -> list[Any]:
        return ort.run(session, {name: feed[name] for name in read if name in feed})

    inputs, outputs = request.pairs(forward, run, notes)[0]
    seeds = cotangents_of(ends, outputs, np.random.default_rng(request.seed))
    return inputs | {f"{y}{_SEED}": seed for y, seed in seeds.items()}


@dataclass(frozen=True)
class _Gradients:
    """The gradients that a backward graph computes from `feeds`."""

    backward: ir.Model
    feeds: Feeds
    single: Feeds
    """The gradients by name, in their own types, as the request's device computes them."""
    double: Feeds
    """The same in float64."""
    rounded: Feeds
    """The integers that both round to."""
    kernels: Mapping[str, str]
    """The kernel that wrote each of `single` on a GPU."""

    @classmethod
    def of(
        cls, backward: ir.Model, feeds: Feeds, wanted: Sequence[str], request: Request
    ) -> _Gradients:
        """Run the backward as the request says, and in float64."""
        names = roundings(backward)
        held = hold(backward, names)
        kernels: dict[str, str] = {}
        progress.report("running the backward")
        single = values_of(backward, feeds, [*wanted, *names], request, kernels=kernels)
        rounded = {name: single.pop(name) for name in names}
        progress.report("running the backward in float64")
        wide = in_double(feeds) | rounded
        try:
            double = evaluator_in_double(inline(held), wanted)(wide)
        except Exception as error:
            if not isinstance(error, ModelError) and not ort.is_fault(error):
                raise
            ends = {v.name: f"{v.name}{_SEED}" for v in backward.graph.outputs}
            seeds = {y: wide[dy] for y, dy in ends.items() if y and dy in wide}
            _refuse_other_sizes(evaluator_in_double(inline(held), list(seeds))(wide), seeds)
            raise
        return cls(backward, feeds, single, double, rounded, kernels)

    def elsewhere(self, point: Feeds) -> dict[str, Array]:
        """The gradients in float64 with other values of the parameters."""
        names = [name.removesuffix(_GRAD) for name in self.double]
        model, _ = _forward(inline(self.backward), names)
        return evaluator_in_double(model, list(self.double))(in_double(self.feeds) | point)

    def softened(self) -> _Gradients:
        """The gradients in float64 with the constants of `_softened`, for both types."""
        plain = inline(self.backward)
        double = evaluator_in_double(_softened(plain) or plain, list(self.double))(
            in_double(self.feeds)
        )
        return replace(self, single=double, double=double, rounded={})

    def changes(self, rng: np.random.Generator) -> dict[str, float]:
        """By how much each gradient changes by the last bit of all weights and inputs.

        Where the terms of a sum nearly cancel, that is more than the limit of a sound gradient.
        """
        moved = inline(self.backward)
        for name in self.double:
            value = moved.graph.initializers.get(name.removesuffix(_GRAD))
            array = const_array(value)
            if value is not None and array is not None:
                value.const_value = ir.tensor(_last_bit(array, rng), name=value.name)
        near = {k: a if k.endswith(_SEED) else _last_bit(a, rng) for k, a in self.feeds.items()}
        moved_grads = evaluator_in_double(moved, list(self.double))(in_double(near))
        moves = {name: np.abs(moved_grads[name] - g) for name, g in self.double.items()}
        return {name: float(np.fmax.reduce(a, axis=None, initial=0.0)) for name, a in moves.items()}


@dataclass(frozen=True)
class _Comparison:
    """Gradients, and the forward graph whose slopes they should be.

    Of a `hostile` point, entries of the float64 gradient that are not finite are left out, and so
    are tensors along which the loss is not finite.
    """

    request: Request
    rng: np.random.Generator
    gradients: _Gradients
    forward: ir.Model
    inputs: Feeds
    parameters: Feeds
    cotangents: Feeds
    hostile: bool
    soft: bool = False
    """Whether the constants are those of `_softened`: then a kink is none to step aside from."""

    def enter_accepted(self, check: GradientCheck) -> None:
        """Enter each gradient; slopes that absorbed scores hide are those of a softened graph."""
        self.enter(check)
        if not check.ok and (soft := _softened(self.forward)):
            again = GradientCheck()
            replace(self, gradients=self.gradients.softened(), forward=soft, soft=True).enter(again)
            _accept(check, again)

    def enter(self, check: GradientCheck) -> None:
        """Enter each parameter's gradient, in its own type and in float64, against the slopes."""
        forward, hostile, rng = self.forward, self.hostile, self.rng
        inputs, parameters, cotangents = self.inputs, self.parameters, self.cotangents
        single, double, every = self.gradients.single, self.gradients.double, self.request.every
        integral = roundings(inline(forward))
        evaluate = evaluator_in_double(hold(inline(forward), integral), list(cotangents))
        integers = evaluator_in_double(forward, integral) if integral else None
        largest = (float(np.abs(g[np.isfinite(g)]).max(initial=0.0)) for g in double.values())
        floor = _ZERO * max(largest, default=0.0)

        limits = _coarsest_limits(forward)
        readers = {w: node for node, w in _by_reader(forward, parameters)}
        expected = {w: double[f"{w}{_GRAD}"] for w in readers}
        finite = {w: np.isfinite(g) for w, g in expected.items()} if hostile else {}
        left_out = sum(int(np.count_nonzero(~mask)) for mask in finite.values())
        readers = {w: node for w, node in readers.items() if w not in finite or finite[w].any()}

        def finite_part(w: str, gradient: Array) -> Array:
            return np.where(finite[w], gradient, 0.0) if w in finite else gradient

        def slopes_at(point: Feeds, gradients: Mapping[str, Array], rounded: Feeds) -> Slopes:
            fixed = in_double(inputs) | point
            if integers is not None:
                fixed |= integers(fixed) | rounded

            def loss(changed: Mapping[str, Array]) -> float:
                values = evaluate(fixed | dict(changed))
                _refuse_other_sizes(values, cotangents)
                pairs = ((np.where(c == 0, 0.0, values[n]), c) for n, c in cotangents.items())
                return sum(float(np.vdot(y, c)) for y, c in pairs)

            gradients = {w: finite_part(w, g) for w, g in gradients.items()}
            return Slopes(loss, point, gradients, limits.slope, floor, rng, finite)

        slopes = slopes_at(parameters, expected, self.gradients.rounded)
        names = list(readers)
        compared = slopes.each(names) if every else slopes.sampled(names, split=False)
        if not all(slope.ok for slope in compared.values()) and not self.soft:
            aside = {
                w: a + _ASIDE * slopes.size(w) * rng.standard_normal(a.shape)
                for w, a in parameters.items()
            }
            found_there = self.gradients.elsewhere(aside)
            there = slopes_at(aside, {w: found_there[f"{w}{_GRAD}"] for w in readers}, {})
            beside = there.sampled(names, split=False)
            if all(slope.ok for slope in beside.values()):
                compared = beside
                check.notes.append(
                    "the loss has a kink at the weights: the slopes are compared near them"
                )
        if not every and not all(slope.ok for slope in compared.values()):
            compared = slopes.sampled(names)
        coarse = max(_own_limit(self.request.precision, limits), _TIED if integral else 0.0)
        tolerance = Tolerance(coarse, floor, "its own type against float64")
        rounding: Mapping[str, float] = {}
        for w, node in readers.items():
            slope = compared[w]
            if hostile and not math.isfinite(slope.measured):
                left_out += int(np.count_nonzero(finite[w]))
                continue
            own_type = finite_part(w, single[f"{w}{_GRAD}"].astype(np.float64))
            deviation = difference(w, finite_part(w, expected[w]), own_type, tolerance)
            limit = deviation.limit
            if not deviation.ok:
                rounding = rounding or self.gradients.changes(rng)
                limit = max(limit, _ROUNDINGS * rounding[f"{w}{_GRAD}"])
            check.errors.append(
                GradientError(
                    tensor=w,
                    op=f"{node.op_type} '{node.name}'",
                    slope=slope.predicted,
                    expected=slope.measured,
                    slope_error=slope.error,
                    max_abs=deviation.max_abs,
                    limit=limit,
                    where=deviation.where,
                    kernel=self.gradients.kernels.get(f"{w}{_GRAD}", ""),
                    ok=slope.ok and (deviation.ok or deviation.max_abs <= limit),
                )
            )
        if left_out:
            check.notes.append(
                f"{left_out} of {sum(mask.size for mask in finite.values())} numbers of the "
                "gradients are left out: inputs or outputs hold NaN or infinity, and the slopes "
                "there are not finite"
            )


def _hostile(model: ir.Model, inputs: Feeds, outputs: Sequence[Any]) -> bool:
    """Whether right gradients may be not finite: the outputs or the inputs are not.

    A mask's infinities alone do not make them so: a rule that makes NaN of them is wrong.
    """
    added = {v.name for v in model.graph.inputs if is_added(v)}
    read = (array for name, array in inputs.items() if name not in added)
    return not all(map(_is_finite, (*read, *outputs)))


def _is_finite(array: object) -> bool:
    if not isinstance(array, np.ndarray):
        return True
    floats = DataType.from_numpy(array.dtype).is_floating_point()
    return not floats or bool(np.isfinite(array.astype(np.float64)).all())


def _where_finite(cotangent: Array, y: Array) -> Array:
    """The cotangent, 0 where the output is not finite: no loss is made of it."""
    return np.where(np.isfinite(y.astype(np.float64)), cotangent, np.zeros((), cotangent.dtype))


def _refuse_other_sizes(outputs: Feeds, cotangents: Feeds) -> None:
    """Raise ModelError if an output's shape in float64 is not that of its given gradient."""
    for y, seed in cotangents.items():
        if (array := outputs[y]).shape != seed.shape:
            raise ModelError(
                f"output '{y}' has shape {[*array.shape]} in float64 and {[*seed.shape]} in its "
                "own type: the graph selects another number of results, and its gradients cannot "
                "be checked by differences"
            )


def _last_bit(array: Array, rng: np.random.Generator) -> Array:
    """Floats moved up or down by their last bit; zeros and very large ones stay."""
    if not DataType.from_numpy(array.dtype).is_floating_point():
        return array
    ends = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(array.dtype)
    moves = (array != 0) & (np.abs(array) < _ABSORBS)
    return np.where(moves, np.nextafter(array, ends), array)


def _own_limit(precision: str, limits: _Limits) -> float:
    """The limit of a gradient in a precision, or of the model's types where these are coarser."""
    narrow = {"fp16": DataType.FLOAT16, "bf16": DataType.BFLOAT16, "tf32": DataType.FLOAT16}
    kind = narrow.get(precision, DataType.FLOAT)
    return max(_NARROWER.get(kind, _SINGLE).top, limits.top)


def _coarsest_limits(model: ir.Model) -> _Limits:
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    values = [*model.graph.inputs, *(v for node in nodes for v in (*node.inputs, *node.outputs))]
    dtypes = {v.dtype for v in values if v is not None and v.dtype is not None}
    return max(_NARROWER.get(dtype, _SINGLE) for dtype in (*dtypes, DataType.FLOAT))


def _softened(model: ir.Model) -> ir.Model | None:
    """A copy in which no finite constant absorbs what it is added to; None where none does.

    Where -3.4e38 is added to every score of a row, a Softmax does not see the scores any more, not
    even in float64; its gradient is that of the sum, and the difference of two losses is zero.
    """
    changed = False
    model = model.clone()
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    constants = [n.outputs[0] for n in nodes if n.op_type == "Constant" and not n.domain]
    for value in (*model.graph.initializers.values(), *constants):
        array = const_array(value)
        if array is None or not DataType.from_numpy(array.dtype).is_floating_point():
            continue
        absorbs = np.isfinite(array) & (np.abs(array) > _ABSORBS)
        if absorbs.any():
            changed = True
            soft = np.where(absorbs, np.sign(array) * _SOFT, array).astype(array.dtype)
            value.const_value = ir.tensor(soft, name=value.name)
            if (node := value.producer()) is not None:
                node.attributes.clear()
                node.attributes["value"] = ir.AttrTensor("value", value.const_value)
    return model if changed else None


def _accept(check: GradientCheck, softened: GradientCheck) -> None:
    """Take the slopes of `softened` where those of `check` are wrong and its floats are right."""
    by_tensor = {e.tensor: e for e in softened.errors if e.ok}
    accepted = 0
    for i, e in enumerate(check.errors):
        if not e.ok and e.max_abs <= e.limit and (soft := by_tensor.get(e.tensor)) is not None:
            check.errors[i] = replace(soft, max_abs=e.max_abs, limit=e.limit, where=e.where)
            accepted += 1
    if accepted:
        check.notes.append(
            f"the slopes of {accepted} tensors are compared with masks of -{_SOFT:.0f}: the "
            "graph's own absorb the scores of a row of which they hide everything"
        )


def _elements(value: Value) -> int | None:
    shape = value.shape
    return None if shape is None or not shape.is_static() else math.prod(shape.numpy())


def _forward(plain: ir.Model, names: Sequence[str]) -> tuple[ir.Model, Feeds]:
    """The model with the named initializers as inputs, and their values in float64."""
    model = plain.clone()
    arrays: Feeds = {}
    for name in names:
        value = model.graph.initializers.pop(name, None)
        array = const_array(value)
        if value is not None and array is not None:
            value.const_value = None
            model.graph.inputs.append(value)
            arrays[name] = array
    return model, in_double(arrays)


def _by_reader(model: ir.Model, names: Mapping[str, Array]) -> Iterator[tuple[ir.Node, str]]:
    """(first reader, tensor) in graph order."""
    seen: set[str] = set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for value in node.inputs:
            name = (value.name or "") if value is not None else ""
            if name in names and name not in seen:
                seen.add(name)
                yield node, name


def _inputs(model: ir.Model) -> list[str]:
    return [v.name or "" for v in model.graph.inputs]
