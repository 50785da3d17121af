"""Proof that a program lowered over open sizes is right at every size, 0 and 1 among them.

For each shape that onnxruntime takes, the program that a `Specializer` evaluates is held against:

1. The program that is lowered for this shape over open sizes of its own. All calls must be equal:
   kernel, problem, expression, operands (buffer, shape, strides, offset), launches; so must the
   outputs. Where the `Specializer` has just lowered for this shape, that program is this one.
2. The program that is lowered for plain integers, the closed one. Calls are compared in the same
   way. A choice that looks at the largest size of a class (which kernel, what is fused, what is
   copied) may differ there. Where any call differs, the closed program is interpreted as well, and
   its results must be onnxruntime's.
3. onnxruntime: the results of the open program, by the interpreter. Every problem has an answer in
   NumPy; one without an answer, or an error of any kind, is a difference.

Without results (`results=False`), 3 is left out, and 2 interprets both programs where their
calls differ. Above `LARGE` elements nothing is interpreted.
"""

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from lowering import answered, with_values
from support import answers, stock

from onnx_fuse.importer.save import inline
from onnx_fuse.ir.build import required_inputs
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.interpret.run import initializers
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.program.size import Trace
from onnx_fuse.runtime.plan import PlannedProgram
from onnx_fuse.runtime.specialize import Specializer
from onnx_fuse.validation import input_sizes, inputs
from onnx_fuse.validation.arrays import role_of
from onnx_fuse.validation.symbolic import caches

H200 = CHIPS["H200"]
SIZES = (0, 1, 2, 3, 7, 64, 129)
"""What each dynamic dimension is in turn."""
USUAL = tuple(size for size in SIZES if size > 1)
LARGE = 1 << 19
"""Elements of all inputs together above which problems alone are compared, not results."""
ROUNDINGS = 4
"""How often the inputs are rounded anew, where a result is not near enough."""
RTOL = {"float16": 2e-2, "bfloat16": 6e-2, "float32": 2e-4, "float64": 1e-8}
"""Of an output's largest finite number: sums in another order."""
SMALL = 1e-2
"""Outputs whose numbers are all smaller are sums of numbers that cancel each other, such as the
gradient of a score of the only key: the product of two rows of numbers near 1, less the same."""
MASKS = 1e6
"""Constants that are larger leave nothing of a score."""
STEPS = {ir.DataType.BFLOAT16: 2.0**-8, ir.DataType.FLOAT16: 2.0**-11, ir.DataType.FLOAT: 2.0**-23}
"""The relative distance of numbers that are rounded to the same one."""
INTEGER_PRODUCTS = ("MatMulInteger", "QGemm", "QLinearMatMul")
Feeds = dict[str, np.ndarray]
Sizes = dict[str, int]


@dataclass
class Subject:
    """A model, the graph that is lowered for it and, of a gradient, the model before it."""

    name: str
    original: ir.Model
    graph: ir.Model
    forward: ir.Model | None = None

    @cached_property
    def session(self) -> onnxruntime.InferenceSession:
        return stock(self.original)

    @cached_property
    def before(self) -> onnxruntime.InferenceSession | None:
        """What gives the outputs whose gradients are inputs."""
        return None if self.forward is None else stock(self.forward)

    def lowered_results(self, feed: Feeds) -> Feeds | None:
        """What onnxruntime makes of the graph that is lowered."""
        return _run(stock(self.graph), feed)

    @cached_property
    def comparable(self) -> set[str]:
        """The outputs that both graphs have: not the gradient of a weight that a fusion changed."""
        plain, fused = initializers(self.original), initializers(self.graph)
        same = {
            f"{name}.grad"
            for name in plain.keys() & fused.keys()
            if np.array_equal(plain[name], fused[name])
        }
        gone = {f"{name}.grad" for name in plain.keys() | fused.keys()} - same
        return {value.name or "" for value in self.graph.graph.outputs} - gone

    def differ(
        self, feed: Feeds, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]
    ) -> str:
        """What `differ` says, where onnxruntime's results for inputs that are rounded otherwise are
        not as far apart.
        """
        text = differ(got, want)
        if not text:
            return ""
        rng, moves = np.random.default_rng(len(text)), dict.fromkeys(want, 0.0)
        for _ in range(ROUNDINGS):
            moved = {name: rounded(x, self.coarsest, rng) for name, x in feed.items()}
            other = _run(self.session, moved)
            if other is None:
                return text
            for name, y in want.items():
                with np.errstate(invalid="ignore"):
                    change = np.abs(other[name].astype(np.float64) - y.astype(np.float64))
                moves[name] = max(moves[name], np.nan_to_num(change, posinf=0).max(initial=0))
        return differ(got, want, moves)

    @cached_property
    def coarsest(self) -> float:
        """The relative step of the coarsest type that a value of the model has.

        Beside a mask of -10000 that is what the sum with it leaves of a score near 1.
        """
        kinds = {node_value.dtype for node in self.original.graph for node_value in node.outputs}
        kinds |= {value.dtype for value in self.original.graph.inputs}
        constants = initializers(self.graph).values()
        numbers = [float(np.abs(a)) for a in constants if a.dtype.kind == "f" and a.ndim == 0]
        beside = max((n for n in numbers if n < MASKS), default=1.0)
        return max((STEPS[k] for k in kinds if k in STEPS), default=2.0**-23) * max(beside, 1.0)

    def is_uninitialized(self, feed: Feeds) -> bool:
        """Whether onnxruntime (1.32) gives what was in memory: by products of rows of no number."""
        rows = [(n, n.inputs[0]) for n in self.original.graph if n.op_type in INTEGER_PRODUCTS]
        return any(
            a is not None
            and a.name in feed
            and feed[a.name].shape[node.attributes.get_int("transA", 0) - 1] == 0
            for node, a in rows
        )

    @property
    def sized(self) -> ir.Model:
        """The model whose inputs' sizes are free."""
        return self.forward or self.original

    @cached_property
    def assignment(self) -> Any:
        """The constraints on sizes that the graph shows."""
        plain = self.sized
        if any(node.domain for node in plain.graph):
            plain = inline(plain, lambda node: not caches.is_grouped(node))
        return input_sizes.assignment(plain, input_sizes.dims_of(self.sized), {})

    @property
    def symbols(self) -> list[str]:
        """The dimensions that may have any size."""
        return list(self.assignment.free)

    def fitted(self, sizes: Sizes) -> Sizes:
        """The nearest sizes that meet the constraints, as far as there are such."""
        found: Sizes = self.assignment.repaired(sizes, {})[0]
        return found

    def feed(self, sizes: Sizes, rng: np.random.Generator) -> Feeds | None:
        """Inputs for these sizes of the symbols, None where onnxruntime refuses the sizes."""
        way = self.assignment
        shapes = {n: [max(way.value_of(d, sizes), 0) for d in s] for n, s in way.shapes.items()}
        lengths = {
            n: way.tokens(told, shapes[n], sizes) for n, told in way.lengths.items() if n in shapes
        }
        choice = input_sizes.InputSizes(sizes, shapes, {}, True, [], lengths)
        roles = {v.name or "": role_of(v) for v in required_inputs(self.sized)}
        feed = inputs.draw(roles, choice, rng, 2)
        if self.before is None:
            return feed
        results = _run(self.before, feed)
        if results is None:
            return None
        names = {f"{name}.grad": y for name, y in results.items()}
        wanted = {v.name for v in self.original.graph.inputs}
        grads = {name: y for name, y in names.items() if name in wanted}
        return feed | {n: rng.standard_normal(y.shape).astype(y.dtype) for n, y in grads.items()}


def _run(session: onnxruntime.InferenceSession, feed: Feeds) -> Feeds | None:
    """What onnxruntime makes of it, by output, None where it refuses the sizes."""
    try:
        return answers(session, feed)
    except Exception as error:
        if "onnxruntime" not in type(error).__module__:
            raise
        return None


def rounded(x: np.ndarray, step: float, rng: np.random.Generator) -> np.ndarray:
    """The array with each number moved by a step up or down, integers as they are."""
    if x.dtype.kind in "biu":
        return x
    return np.asarray(x * (1 + step * rng.choice([-1, 1], x.shape)), x.dtype)


def sample(symbols: list[str], seed: int) -> Iterator[Sizes]:
    """Sizes of the symbols, without end: each is 1 alone and with each other one, then any."""
    rng = random.Random(seed)
    singles = [(s,) for s in symbols]
    for ones in ((), *singles, *itertools.combinations(symbols, 2), tuple(symbols)):
        yield {s: 1 if s in ones else rng.choice(USUAL) for s in symbols}
    while True:
        yield {s: rng.choice(SIZES) for s in symbols}


@dataclass
class Report:
    """How many shapes of a subject came out in which way; what differs, in words."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return " ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))


def prove(
    subject: Subject,
    shapes: int,
    seed: int = 0,
    *,
    results: bool = True,
    refused: Collection[int] = (),
    asks: Callable[[int], None] = lambda number: None,
) -> Report:
    """Compare at so many shapes that onnxruntime takes; `results` as said above.

    `refused` are numbers of samples at which onnxruntime ends the process. `asks` is called with
    the number of a sample before onnxruntime gets it, and with -1 behind that.
    """
    report, specializer = Report(), Specializer(subject.graph, H200)
    weights = initializers(subject.graph)
    ends = subject.comparable
    done: set[tuple[int, ...]] = set()
    report.counts["refused"] += len(refused)
    for number, sizes in enumerate(sample(subject.symbols, seed)):
        if report.counts["shapes"] >= shapes or number > 20 * shapes:
            break
        if number in refused:
            done.add(tuple(sizes.values()))  # which may come again
            continue
        rng = np.random.default_rng([seed, number])
        feed, want = None, None
        for fitting in (sizes, *([subject.fitted(sizes)] if 0 not in sizes.values() else [])):
            key = tuple(fitting.values())
            if key in done:
                continue
            done.add(key)
            asks(number)
            feed = subject.feed(fitting, rng)
            want = None if feed is None else _run(subject.session, feed)
            asks(-1)
            sizes = fitting
            if want is not None and subject.is_uninitialized(feed):
                report.counts["uninitialized"] += 1
                want = None
            elif want is not None:
                want = {name: y for name, y in want.items() if name in ends}
                break
            else:
                report.counts["refused"] += 1
        if feed is None or want is None:
            if len(done) >= len(SIZES) ** len(sizes):
                break
            continue
        report.counts["shapes"] += 1
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="each shape is lowered by itself")
                fault = compared(
                    specializer, feed, want, weights, report.counts, results,
                    lambda got, expected, feed=feed: subject.differ(feed, got, expected),
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a fault of this shape, whatever it is
            fault = f"{type(error).__name__}: {error}"
        report.counts["different" if fault else "equal"] += 1
        if fault:
            report.faults.append(f"{subject.name} at {sizes}: {fault}"[:600])
    return report


def compared(
    specializer: Specializer,
    feed: Feeds,
    want: Feeds,
    weights: Feeds,
    counts: Counter[str],
    results: bool,
    unlike: Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], str] | None = None,
) -> str:
    """What differs at one shape, results by `unlike` (`differ`); "" where all is equal."""
    shapes = {name: (array.shape, array.dtype.name) for name, array in feed.items()}
    values: Feeds = {}
    before = 0

    def specialized(values: Feeds) -> PlannedProgram:
        nonlocal before
        before = specializer.traced
        return specializer.of(shapes, values)

    made = answered(specialized, feed, values)
    model, math = specializer.model, specializer.math
    programs = {"open": made.program} if results else {}
    if made.source is None:
        counts["by itself"] += 1
    else:
        numbers = specializer.numbers(shapes)
        if specializer.traced == before:
            trace = Trace()
            opened = {s: trace.symbol(s, n) for s, n in numbers.items()}
            there = specializer.changed(shapes, opened)
            again = SymbolicProgram(lower(model, there, H200, math=math, values=values), trace)
            counts["evaluated"] += 1
            if text := _problems(made.program, again.at(numbers)):
                return text
        closed = lower(model, shapes, H200, math=math, values=values)
        if _problems(made.program, closed):
            counts["closed otherwise"] += 1
            programs |= {"open": made.program, "closed": closed}
    if sum(a.size for a in (*feed.values(), *want.values())) > LARGE:
        return ""

    for name, program in programs.items():
        got = interpret(program, feed, weights, partial(with_values, math=math))
        if text := (unlike or differ)(got, want):
            return f"{name} program: {text}"
    counts["results"] += bool(programs)
    return ""


def _problems(program: Program, other: Program) -> str:
    """The first call that is another in the other program."""
    pairs = itertools.zip_longest((*program.setup, *program.calls), (*other.setup, *other.calls))
    for i, (a, b) in enumerate(pairs):
        if a is None or b is None:
            return f"call {i}: {a or b} is in one program only"
        for what in ("kernel", "problem", "expression", "reads", "writes", "launches"):
            x, y = getattr(a, what), getattr(b, what)
            if x != y and repr(x) != repr(y):  # a NaN is not equal to itself
                return f"call {i}: {what} {x} is {y} by itself"
    ends = [
        [(n, t) for n, t in p.outputs if not isinstance(t, np.ndarray)] for p in (program, other)
    ]
    return "" if ends[0] == ends[1] else f"outputs {ends[0]} are {ends[1]} by itself"


def largest_gradient(outputs: Mapping[str, Any]) -> float:
    """The largest finite number of the gradients: where its terms cancel, any other of the same
    graph is no more than their rounding."""
    grads = [y.astype(np.float64) for name, y in outputs.items() if name.endswith(".grad")]
    return max((np.abs(g[np.isfinite(g)]).max(initial=0) for g in grads), default=0)


def differ(
    got: Mapping[str, np.ndarray], want: Mapping[str, Any], moves: Mapping[str, float] | None = None
) -> str:
    """The first output that is not what is wanted, or farther off than 8 times its `moves`."""
    largest = largest_gradient(want)
    for name, expected in want.items():
        y = got[name]
        if y.shape != expected.shape or y.dtype != expected.dtype:
            return f"{name} is {y.dtype}{list(y.shape)}, not {expected.dtype}{list(expected.shape)}"
        if expected.dtype.kind in "biu":
            apart = np.abs(y.astype(np.float64) - expected.astype(np.float64))
            if (y != expected).any() and not (moves and apart.max() <= moves[name]):
                return f"{name} has other integers"
            continue
        y, expected = y.astype(np.float64), expected.astype(np.float64)
        finite = np.isfinite(expected)
        same = np.isnan(y) & np.isnan(expected) | (y == expected)
        least = SMALL * max(1, largest) if name.endswith(".grad") else SMALL
        limit = RTOL[want[name].dtype.name] * max(np.abs(expected[finite]).max(initial=0), least)
        limit = max(limit, 8 * moves[name] if moves else 0)
        with np.errstate(invalid="ignore"):
            near = finite & (np.abs(y - expected) <= limit)
        if not (same | near).all():
            place = np.unravel_index(int(np.argmin(same | near)), y.shape)
            return f"{name}{[int(i) for i in place]} is {y[place]}, not {expected[place]}"
    return ""
