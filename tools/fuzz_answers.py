"""What onnxruntime makes of a graph that was drawn, and how near another result must be to it."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
from onnx import ModelProto, TensorProto
from support import stock

Feeds = dict[str, np.ndarray]
RTOL = {"float16": 2e-2, "float32": 2e-4, "float64": 1e-8}
"""Of an output's largest finite magnitude: sums in another order, fewer roundings to float16."""
SENSITIVITY = 16
"""How much more than the mutant's own difference from itself its fusion may differ."""
ELEMENTS = {
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "double": TensorProto.DOUBLE,
    "bool": TensorProto.BOOL,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


def hostile(feeds: Feeds, rng: np.random.Generator) -> Feeds:
    """The same feeds with -0, 0, infinities, NaN and large numbers in a few places."""
    values = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 3e4, -3e4, 1e-6])
    result = {}
    for name, array in feeds.items():
        if array.dtype.kind == "f" and array.size:
            chosen = rng.random(array.shape) < 0.06
            drawn = rng.choice(values, array.shape)
            if array.dtype == np.float16:  # onnxruntime keeps some values in float32, beyond it
                drawn = np.clip(drawn, -100, 100) + np.where(np.isinf(drawn), drawn, 0)
            array = np.where(chosen, drawn, array).astype(array.dtype)
        result[name] = array
    return result


def moved(feeds: Feeds, toward: float, coarse: str = "") -> Feeds:
    """Each float by one unit in the last place; of float64, in that of what it is computed in."""

    def step(a: np.ndarray) -> np.ndarray:
        narrow = a.astype(np.float32) if a.dtype == np.float64 and coarse == "float32" else a
        return np.asarray(np.nextafter(narrow, np.array(toward, narrow.dtype))).astype(a.dtype)

    with np.errstate(over="ignore"):
        return {name: step(a) if a.dtype.kind == "f" else a for name, a in feeds.items()}


def nudged(model: ModelProto, toward: float) -> bytes:
    """The model with each float among its constants moved so, except those that give sizes.

    What a Fourier transform sums to 0 is what is left of rounded sines in onnxruntime, and gates,
    Tanh and inverse functions are approximations: some of that size is added to their results, so
    that a Sign, a Floor, a TopK's indices or rounded numbers say nothing of them.
    """
    result = ModelProto()
    result.CopyFrom(model)
    coarse = coarsest(model)
    sizes = {name for n in model.graph.node if n.op_type in SIZED for name in n.input}
    for tensor in result.graph.initializer:
        if tensor.name not in sizes and tensor.data_type in ELEMENTS.values():
            array = onnx.numpy_helper.to_array(tensor)
            shifted = moved({tensor.name: array}, toward, coarse)[tensor.name]
            tensor.CopyFrom(onnx.numpy_helper.from_array(shifted, tensor.name))
    _with_noise(result.graph, coarse, toward)
    return result.SerializeToString()


def _with_noise(graph: onnx.GraphProto, coarse: str, toward: float) -> None:
    for i, node in reversed([*enumerate(graph.node)]):
        for attribute in node.attribute:
            _with_noise(attribute.g, coarse, toward)
        for k, name in enumerate(node.output) if node.op_type in NOISY else ():
            for later in reversed(_noise(node, k, graph, coarse, toward) if name else ()):
                graph.node.insert(i + 1, later)


def _noise(
    node: onnx.NodeProto, k: int, graph: onnx.GraphProto, coarse: str, toward: float
) -> list[onnx.NodeProto]:
    """y = v + |v| step sin(1, 2, 3, ...), where v is the node's result `k` from now on."""
    y, make = node.output[k], onnx.helper.make_node
    v, step = f"{y}.exact", 2.0**-20 if coarse else 2.0**-48
    node.output[k] = v
    constants = {"step": step if toward > 0 else -step, "all": np.array([-1]), "axis": np.array(0)}
    graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array), f"{y}.{name}")
        for name, array in constants.items()
    )
    steps = [
        ("Sub", [v, v], "zeros"), ("Cos", ["zeros"], "ones"), ("Reshape", ["ones", "all"], "flat"),
        ("CumSum", ["flat", "axis"], "places"), ("Sin", ["places"], "waves"),
        ("Shape", [v], "shape"), ("Reshape", ["waves", "shape"], "noise"),
        ("ReduceL2", [v], "size"), ("CastLike", ["step", v], "part"),
        ("Mul", ["size", "part"], "a"), ("Mul", ["noise", "a"], "b"), ("Add", [v, "b"], y),
    ]  # fmt: skip
    named = {v: v, y: y}
    return [
        make(op, [named.get(x, f"{y}.{x}") for x in inputs], [named.get(name, f"{y}.{name}")])
        for op, inputs, name in steps
    ]


SIZED = ("Resize", "Upsample", "Range")
NOISY = ("DFT", "STFT", "GRU", "LSTM", "RNN", "Tanh", "Asin", "Acos", "Atan")


def outputs(runner: onnxruntime.InferenceSession, feeds: Feeds) -> list[Any]:
    wanted = {v.name for v in runner.get_inputs()}
    found: list[Any] = runner.run(None, {k: v for k, v in feeds.items() if k in wanted})
    return found


IN_FLOAT32 = {"Shrink", "GroupNormalization", "Gelu", "Attention", "DFT"}
"""What onnxruntime (1.22 to 1.32) computes in float32 of float64: all of it, what stash_type says,
the constants of Gelu with tanh, the root of Attention's scale, and the 1 / n of an inverse DFT."""


def coarsest(model: ModelProto) -> str:
    """The type of the fewest digits in which something is computed; "" for float64 alone."""
    graph = model.graph
    kinds = {v.type.tensor_type.elem_type for v in graph.input}
    kinds |= {t.data_type for t in graph.initializer}
    kinds |= {a.i for n in graph.node if n.op_type == "Cast" for a in n.attribute}
    kinds |= {TensorProto.FLOAT for n in graph.node if n.op_type in IN_FLOAT32}
    named = ((TensorProto.FLOAT16, "float16"), (TensorProto.FLOAT, "float32"))
    return next((name for kind, name in named if kind in kinds), "")


def differs(
    want: Any, got: Any, own: list[Any], coarse: str = "", times: float = 1, least: float = 1e-5
) -> str:
    """Why `got` is not `want`, whose other computations are `own`; empty where it is.

    The type of `coarse` was used on the way, or else that of the output alone. Numbers may be
    `times` the usual limit apart. Where all are below `least`, they count as rounding of it.
    """
    want, got = np.asarray(want), np.asarray(got)
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
    if want.dtype.kind not in "fc" or not want.size:
        stable = all(np.array_equal(want, np.asarray(o)) for o in own)
        return "" if not stable or np.array_equal(want, got) else "other values"
    kinds = [np.isnan(want), np.isposinf(want), np.isneginf(want)]
    for o in own:  # places where the mutant does not agree with itself say nothing
        o = np.asarray(o)
        if o.shape != want.shape:
            return ""
        if any(
            (k != f(o)).any()
            for k, f in zip(kinds, (np.isnan, np.isposinf, np.isneginf), strict=True)
        ):
            return ""
    for kind, test in zip(kinds, (np.isnan, np.isposinf, np.isneginf), strict=True):
        if (kind != test(got)).any():
            return f"{test.__name__} in other places"
    finite = np.isfinite(want)
    a, b = want[finite].astype(np.float64), got[finite].astype(np.float64)
    if not a.size:
        return ""
    error = np.abs(a - b).max()
    noise = max(
        (np.abs(a - np.asarray(o)[finite].astype(np.float64)).max() for o in own), default=0
    )
    limit = RTOL.get(coarse or want.dtype.name, 2e-2) * max(np.abs(a).max(), least)
    limit += SENSITIVITY * noise
    return "" if error <= times * limit else f"off by {error:.3g} (limit {limit:.3g})"


def reference(model: ModelProto, feeds: Feeds, output: int, want: Any, got: Any) -> str:
    """With whom onnx's reference implementation agrees, in brackets; "" where it has no answer."""
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            its = ReferenceEvaluator(model).run(None, feeds)[output]
    except Exception:  # noqa: BLE001 - it lacks operators, and fails in many ways
        return ""
    sides = {"onnxruntime": not differs(want, its, []), "this package": not differs(got, its, [])}
    agrees = [name for name, same in sides.items() if same]
    return f" (onnx.reference agrees with {' and '.join(agrees) or 'neither'})"


@dataclass
class Run:
    """A feed, onnxruntime's outputs for it, and by other ways, from which they may differ."""

    label: str
    feed: Feeds
    want: list[Any]
    own: list[list[Any]]

    def fault(self, model: ModelProto, got: Sequence[Any], coarse: str) -> str:
        """Why these are not the outputs; empty where they are."""
        for i, (a, b) in enumerate(zip(self.want, got, strict=True)):
            own = [o[i] for o in self.own]
            why = differs(a, b, own, coarse)
            if why and not differs(a, b, own, coarse, times=SENSITIVITY):
                exact = in_float64(model, self.feed, i)
                if exact is not None and not differs(exact.astype(a.dtype), b, own, coarse):
                    continue
            if why:
                return f"{self.label}, output {i}: {why}{reference(model, self.feed, i, a, b)}"
        return ""


def in_float64(model: ModelProto, feed: Feeds, output: int) -> np.ndarray | None:
    """The output in float64, None where nothing computes that.

    What is near to it is right, though onnxruntime's own result be farther off: its norm of one
    number is that number times 300, less the same.
    """
    from onnx_fuse.validation.reference import evaluator_in_double, in_double

    name = model.graph.output[output].name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluate = evaluator_in_double(onnx_ir.serde.deserialize_model(model), [name])
            return np.asarray(evaluate(in_double(feed))[name])
    except Exception:  # noqa: BLE001 - it lacks operators, and fails in many ways
        return None


def rounded(model: ModelProto) -> bytes:
    """The model with two Identities behind each node: onnxruntime rounds to float16 there.

    What it has no float16 kernel for it computes in float32, unrounded up to the next float16
    kernel. A float16 kernel that stands alone between such nodes is run in float32 as well.
    """
    apart = ModelProto()
    apart.CopyFrom(model)
    for i, node in reversed([*enumerate(apart.graph.node)]):
        names = [name for name in node.output if name]
        node.output[:] = [name and f"{name}.unrounded" for name in node.output]
        for name in names:
            copies = (f"{name}.rounded", name), (f"{name}.unrounded", f"{name}.rounded")
            for read, written in copies:
                apart.graph.node.insert(i + 1, onnx.helper.make_node("Identity", [read], [written]))
    return apart.SerializeToString()


@cache
def _empties_are_right() -> bool:
    """Whether a reduction of an empty tensor has the result's sizes, as in onnxruntime 1.32.

    In 1.30 it has the input's.
    """
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[0,4,0] x) => (int64[A,B,C] y) '
    model = onnx.parser.parse_model(text + "{ y = ArgMin <axis = -2> (x) }")
    (y,) = outputs(stock(model), {"x": np.zeros((0, 4, 0), "f")})
    return bool(y.shape == (0, 1, 0))


def references(
    original: ModelProto, feeds: Sequence[Feeds], rng: np.random.Generator, harsh: bool
) -> list[Run]:
    """onnxruntime's outputs for the feeds that it takes. Raises what it raises for the first."""
    runs: list[Run] = []
    data = original.SerializeToString()
    plain, others = stock(data), [stock(data, optimized=True)]
    beside = {end: stock(nudged(original, end)) for end in (np.inf, -np.inf)}
    coarse = coarsest(original)
    if coarse == "float16":
        others.append(stock(rounded(original)))
    labelled = [
        (f"feed {i}", feed)
        for i, feed in enumerate(feeds)
        if i == 0 or _empties_are_right() or all(array.size for array in feed.values())
    ]
    if harsh:
        labelled.insert(1, ("hostile feed", hostile(feeds[0], rng)))
    for label, feed in labelled:
        try:
            want = outputs(plain, feed)
            near = [outputs(each, moved(feed, end, coarse)) for end, each in beside.items()]
            runs.append(Run(label, feed, want, [*(outputs(o, feed) for o in others), *near]))
        except Exception:  # noqa: PERF203 - each feed may be refused
            if not runs:
                raise
    return runs
