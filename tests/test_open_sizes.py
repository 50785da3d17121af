"""Open sizes: arithmetic and guards; programs lowered once hold for every shape that meets them."""

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import gpt
import numpy as np
import onnx_ir as ir
import pytest
from cases import real_cases
from lowering import answered

import onnx_fuse
from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.cuda.arguments import words_of
from onnx_fuse.cuda.macros import lanes, pow2
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, refusals, select
from onnx_fuse.lower.walk import lower
from onnx_fuse.program import host, template
from onnx_fuse.program.call import Program, Tensor
from onnx_fuse.program.formula import Formulas, value
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.launch import Num
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.problem import CHIPS, GemmProblem, KernelConfig
from onnx_fuse.program.size import (
    OpenSize,
    Trace,
    broadcast,
    coarse,
    maximum,
    minimum,
    size_class,
    upper_bound,
    wide_size_class,
)
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime import ort
from onnx_fuse.runtime import plan as plans
from onnx_fuse.runtime.arg_updates import places, words
from onnx_fuse.runtime.plan import PlannedProgram, plan
from onnx_fuse.runtime.specialize import Specializer
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model

H200 = CHIPS["H200"]
SIZES = {"b": 3, "t": 130}

FORMULAS: dict[str, Callable[[int, int], object]] = {
    "sum": lambda b, t: b + t - 2 * b + 7,
    "product": lambda b, t: (b + 1) * (t - 2) * 64,
    "quotient": lambda b, t: (b * t * 768 + 63) // 64,
    "exact quotient": lambda b, t: (b * t * 768) // (b * 64),
    "remainder": lambda b, t: (8 * b * t + 5) % 8 + t % 4,
    "rounded up": lambda b, t: -(-b * t // 128) * 128,
    "ceil": lambda b, t: math.ceil(b * t / 64),
    "shift": lambda b, t: (t << 3) + (b >> 1),
    "least": lambda b, t: minimum(b * 64, t) + maximum(b, t - 100),
    "negative": lambda b, t: -t + abs(b - t),
    "prod": lambda b, t: math.prod((b, t, 4)),
    "total": lambda b, t: sum((b, t, 4)),
    "of NumPy": lambda b, t: (b * t - np.int64(-1)) // np.int64(2) + b % np.int64(2),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_arithmetic_stays_open(name: str) -> None:
    """The expression gives what plain integers give, at the sizes traced and at others."""
    trace = Trace()
    symbols = {n: trace.symbol(n, v) for n, v in SIZES.items()}
    found = FORMULAS[name](symbols["b"], symbols["t"])
    assert type(found.value) is int  # a NumPy integer has other methods
    opened = SymbolicProgram((found,), trace)
    rng = random.Random(0)
    tried = 0
    for _ in range(200):
        b, t = rng.randint(1, 40), rng.randint(1, 400)
        if opened.holds({"b": b, "t": t}):
            tried += 1
            assert opened.at({"b": b, "t": t}) == (FORMULAS[name](b, t),)
    assert tried
    assert not any("==" in guard for guard in trace.guards if not guard.startswith("not"))


@pytest.mark.parametrize("number", [5, np.int64(5)])
def test_a_size_of_numpys_integers_is_compared_as_any_other(number: int) -> None:
    n = Trace().symbol("n", number)
    assert [n < 10, n <= 10, n > 10, n >= 10, n < 5, n >= 5] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]


DECISIONS: dict[str, Callable[[int, int], object]] = {
    "less": lambda b, t: t < 128 or t <= 130,
    "float": lambda b, t: (t <= 130.5, t >= 129.5, t < 131.5, t > 1e30),
    "equal": lambda b, t: (t == 130, b == t, b != 3),
    "truth": lambda b, t: bool(t) and not (b - 3),
    "multiple": lambda b, t: t % 8 == 0,
    "plain": lambda b, t: (int(t), f"{b}"),
    "index": lambda b, t: list(range(600))[t],
    "range": lambda b, t: len(range(t)),
    "float value": lambda b, t: t * 0.5,
    "sorted": lambda b, t: sorted((t, b, 64)) == [b, 64, t],
    "bits": lambda b, t: t.bit_length(),
    "broadcast": lambda b, t: broadcast((b, 1, t), (1, t)),
    "class": lambda b, t: upper_bound(b * t),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_is_a_guard(name: str) -> None:
    """Wherever the guards hold, the same is decided; where it is not, they do not hold."""
    trace = Trace()
    symbols = {n: trace.symbol(n, v) for n, v in SIZES.items()}

    def closed(found: object, b: int, t: int) -> object:
        return SymbolicProgram((found,), trace).at({"b": b, "t": t})

    decided = DECISIONS[name](symbols["b"], symbols["t"])
    opened = SymbolicProgram((decided,), trace)
    assert opened.holds(SIZES)
    others = 0
    for b in (1, 2, 3, 4, 17):
        for t in (1, 2, 127, 128, 129, 130, 131, 136, 500):
            if name == "class":
                continue
            same = closed(decided, b, t) == (DECISIONS[name](b, t),)
            assert same or not opened.holds({"b": b, "t": t})
            others += not same
    assert others or name in ("broadcast", "class")


def test_a_set_holds_what_is_equal_at_every_size() -> None:
    trace = Trace()
    b, t = trace.symbol("b", 3), trace.symbol("t", 3)
    assert len({b, t, b + t, t + b, 2 * b - b, 3}) == 4
    assert not trace.guards


def test_the_class_of_a_size() -> None:
    """Classes cover all sizes, without gaps; a large one is at most an eighth long."""
    size, seen = 1, []
    while size < 5000:
        first, last = size_class(size)
        assert first == size
        assert all(size_class(n) == (first, last) for n in (first, (first + last) // 2, last))
        seen.append((first, last))
        size = last + 1
    assert seen[:6] == [(1, 1), (2, 16), (17, 32), (33, 64), (65, 128), (129, 192)]
    assert all(last - first < max(64, last / 4) for first, last in seen)
    trace = Trace()
    b, t = trace.symbol("b", 3), trace.symbol("t", 130)
    assert upper_bound(b * t * 768) == 16 * 192 * 768
    assert set(trace.guards) == {"2 <= b <= 16", "129 <= t <= 192"}
    p = trace.symbol("p", 300)
    assert upper_bound(p + t, wide_size_class) == 512 + 192  # the narrow class that t has already
    assert "2 <= p <= 512" in trace.guards


def test_an_estimate_does_not_divide_by_bounds_that_never_meet() -> None:
    trace = Trace()
    past, new, total = trace.symbol("past", 7), trace.symbol("new", 2), trace.symbol("total", 9)
    heads = 8 * total // (total // (past + new))  # at the bounds past + new is more than total
    assert upper_bound(heads) == heads.value == 72


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (256, 64), (768, 192), (768, 768)])
@pytest.mark.parametrize("batch", [3, 4, 15, 40])
def test_whoever_shares_k_has_a_part_of_it(dtype: str, m: int, n: int, batch: int) -> None:
    """A weight's gradient sums over open rows: no block may be left without rows.

    What suits the largest rows of a class would leave it so for the fewest. And a shape has one
    choice, whichever shape of its class was lowered first.
    """

    def chosen(t: int) -> tuple[Trace, str, KernelConfig]:
        trace = Trace()
        rows = trace.symbol("b", batch) * trace.symbol("t", t)
        problem = GemmProblem.of(
            "Gemm", m=m, n=n, k=rows, trans_a=True, dtype=dtype, lda=m, ldb=n, align=16
        )
        choice = select("Gemm", problem, H200)
        shares = choice.config.integer("split", choice.config.integer("splits", 1))
        steps = math.ceil(batch * t / 64)
        # fma shares evenly; the others give each block as many steps as the first
        each = 1 if choice.kernel.name == "fma" else math.ceil(steps / shares)
        assert shares == 1 or (shares - 1) * each < steps
        return trace, choice.kernel.name, choice.config

    lengths = (17, 20, 24, 32)
    found = {t: chosen(t) for t in lengths}
    for trace, *choice in found.values():
        for t in lengths:
            if all(eval(guard, {"b": batch, "t": t}) for guard in trace.guards):
                assert choice == list(found[t][1:])


def reread(opened: SymbolicProgram) -> SymbolicProgram:
    """As it comes back from a file."""
    arrays: list[np.ndarray] = []

    def store(array: np.ndarray) -> str:
        arrays.append(array)
        return str(len(arrays) - 1)

    data = json.loads(json.dumps([opened.guards.data, template.write(opened, store)]))
    guards = Formulas.read(data[0], conditions=True)
    recipes = template.read(data[1], guards, lambda name, dtype, shape: arrays[int(name)])
    found: SymbolicProgram = object.__new__(SymbolicProgram)
    found.set(guards, recipes)
    return found


def test_whatever_holds_sizes_is_built_anew() -> None:
    """Dataclasses, tuples of any length, lists, dicts and arrays; what holds none is shared."""
    trace = Trace()
    t = trace.symbol("t", 6)
    closed = Tensor(1, "float32", (4, 8), (8, 1))

    def made(t: int) -> dict[str, object]:
        return {
            "tensor": Tensor(3, "float32", (t, 8), (8, 1), 2 * t),
            "nested": ((t,), [t, "x", closed], (closed, -0.0, True, 1, None)),
            "inner": {"n": (t * t, (closed,))},
        }

    arrays = np.array([[t, 2], [3, t + 1]], object)
    opened = SymbolicProgram((made(t), arrays, closed), trace, {"part": (t // 4,), "plain": closed})
    for each in (opened, reread(opened)):
        for n in (6, 9):
            found, array, kept = each.at({"t": n})
            assert repr(found) == repr(made(n))
            np.testing.assert_array_equal(array, [[n, 2], [3, n + 1]])
            assert array.dtype == np.int64
            assert kept is found["nested"][1][2]
            assert each.part("part", {"t": n}) == (n // 4,)
            assert each.part("plain", {"t": n}) == closed
    assert opened.part("other", {"t": 6}) is None


def test_equal_parts_are_one_object_in_a_file() -> None:
    """Those that differ in a type or in the bits of a number stay apart."""
    trace = Trace()
    size = trace.symbol("s0", 5)
    number = partial(Num, "f32")
    parts = [number(x) for x in (0.0, -0.0, 1, 1.0, True, float("nan"), math.inf)]
    rows = [(Tensor(3, (2, 4), (4, 1), "float32"), part) for part in parts]
    twice = [*rows, *[(replace(tensor), replace(part)) for tensor, part in rows]]
    made = SymbolicProgram({"size": size, "rows": tuple(twice)}, trace, {"rows": (size, *twice)})
    read = reread(made)
    found = read.at({"s0": 5})["rows"]
    assert repr(found) == repr(tuple(twice)) == repr(read.part("rows", {"s0": 5})[1:])
    assert repr(read.at({"s0": 7})) == repr(made.at({"s0": 7}))
    both = [*found, *read.part("rows", {"s0": 5})[1:]]
    assert len({id(tensor) for tensor, _ in both}) == 1
    assert len({id(part) for _, part in both}) == len(parts)


def test_a_limit_by_the_way_is_asked_of_the_largest_lengths() -> None:
    """A length whose class is a guard takes part with its largest; a batch of few stays open."""
    trace = Trace()
    b, t = trace.symbol("b", 3), trace.symbol("t", 100)
    assert coarse(b * t) > 200
    assert set(trace.guards) == {"not (-200+b*t) <= 0"}, "nothing has asked for a class yet"
    assert upper_bound(t) == 128
    guards = set(trace.guards)
    assert coarse(b * minimum(t, 512)) <= 3 * 128
    assert set(trace.guards) - guards == {"(-384+128*b) <= 0"}
    assert coarse(7) == 7


def test_what_two_traces_hold_is_not_mixed() -> None:
    """A memo belongs to one trace: equal problems of two traces are each asked for their guards."""
    guards = []
    for _ in range(2):
        trace = Trace()
        m = trace.symbol("m", 96)
        problem = GemmProblem.of("Gemm", m=m, n=768, k=768, dtype="float16", align=16)
        assert select("Gemm", problem, H200) is not None
        guards.append(set(trace.guards))
    assert guards[0] == guards[1] != set()


def test_a_size_in_a_reason_is_no_decision() -> None:
    """Kernels say which size they refuse; the program still holds for other such sizes."""
    trace = Trace()
    m, k = trace.symbol("m", 96), trace.symbol("k", 97)
    problem = GemmProblem.of("Gemm", m=m, n=768, k=k, dtype="float16", lda=k, ldb=768, align=2)
    assert any("97" in reason for reason in refusals("Gemm", problem, H200).values())
    assert not any("==" in guard and not guard.startswith("not") for guard in trace.guards)
    assert f"{k}" == "97"
    assert "(k) == 97" in trace.guards


def test_shared_rows_of_a_weights_gradient_are_no_guard() -> None:
    """A kernel whose CTAs share k has stages for the largest of the class, whatever its steps."""
    kernel = next(k for k in candidates("Gemm") if k.name == "cluster")
    tried = 0
    for rows in (70, 260, 500):
        trace = Trace()
        k = trace.symbol("k", rows)
        problem = GemmProblem.of(
            "Gemm", m=768, n=768, k=k, dtype="bfloat16", trans_a=True, lda=768, ldb=768, align=16
        )
        for config in kernel.configs(problem.upper_bound(), H200):
            if kernel.fits(problem.upper_bound(), config):
                kernel.launch(problem, config, H200)
                tried += 1
        assert set(trace.guards) == {f"{size_class(rows)[0]} <= k <= {size_class(rows)[1]}"}
    assert tried


def test_lanes_are_a_power_of_two_up_to_a_warp() -> None:
    assert [lanes(n) for n in range(1, 99)] == [min(32, pow2(n)) for n in range(1, 99)]
    trace = Trace()
    assert lanes(trace.symbol("n", 1000)) == 32
    assert set(trace.guards) == {"not (-16+n) <= 0"}


def test_host_arithmetic() -> None:
    """Reshape's targets stay open through Shape, Gather, Concat, Mul, Slice and Unsqueeze."""
    trace = Trace()
    b, t = trace.symbol("b", 2), trace.symbol("t", 6)
    shape = np.array([b, t, 64], object)
    picked = host.evaluate(ir.node("Gather", []), [shape, np.array([0, 1])])
    product = host.evaluate(ir.node("Mul", []), [picked, np.array([1, 2])])
    target = host.evaluate(ir.node("Concat", [], {"axis": 0}), [product, np.array([-1, 8])])
    assert [type(v) for v in target] == [OpenSize, OpenSize, int, int]
    assert SymbolicProgram((tuple(target),), trace).at({"b": 5, "t": 7}) == ((5, 14, -1, 8),)
    assert host.evaluate(ir.node("Equal", []), [target, np.array([2, 12, -1, 8])]).all()
    assert {"(12+-2*t) == 0", "(2+-1*b) == 0"} == set(trace.guards)
    assert host.evaluate(ir.node("TopK", []), [target]) is None
    for noop, size in ((1, 4), (0, 1)):  # axes that are there, and none
        node = ir.node("ReduceMax", [ir.Value(), ir.Value()], {"noop_with_empty_axes": noop})
        assert host.evaluate(node, [target, np.zeros(0, np.int64)]).shape == (size,)
        assert host.evaluate(node, [target, None]) is None


# ---- whole models -------------------------------------------------------------------------------


def models() -> Iterator[Path]:
    for case in real_cases():
        yield case.path
    yield from sorted((Path(__file__).parent / "data" / "decoders").glob("*.onnx"))


def shapes_of(
    model: ir.Model, size: Callable[[str, int, str], int]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and types of the inputs; the sizes of open axes by name, axis and symbol."""
    found = {}
    for v in model.graph.inputs:
        dims = (d if isinstance(d, int) else size(v.name, i, str(d)) for i, d in enumerate(v.shape))
        found[v.name] = (tuple(dims), v.dtype.numpy().name)
    return found


def assert_changes(source: SymbolicProgram, numbers: dict[str, int], sizes: dict[str, int]) -> None:
    """The launches for `numbers` become those for `sizes` by writing what is named as changes."""
    found, before, after = source.part("changes", sizes), source.at(numbers), source.at(sizes)
    if found is None:
        return
    changed = {(i, j): numbers for i, j, *numbers in found}
    for i, (old, new) in enumerate(zip(before.calls, after.calls, strict=True)):
        for j, (x, y) in enumerate(zip(old.launches, new.launches, strict=True)):
            bare = [replace(launch, grid=(), smem=0, args=(), sync=0) for launch in (x, y)]
            assert bare[0] == bare[1]
            had, want = (
                [launch.grid, launch.smem, words(i, call, launch), launch.sync]
                for call, launch in ((old, x), (new, y))
            )
            assert changed.get((i, j), had) == want, (i, j)
            assert (i, j) in changed or x.args == y.args, (i, j)
            spots = words_of(x.args, places(i, old))[1]
            assert spots == words_of(y.args, places(i, new))[1], (i, j)
    ends = source.part("ends", sizes)
    for name in ("inputs", "outputs", "setup"):
        assert repr(getattr(ends, name)) == repr(getattr(after, name)), name


@pytest.mark.parametrize("path", list(models()), ids=lambda p: p.stem)
def test_a_program_holds_for_every_shape_that_meets_its_guards(path: Path) -> None:
    """What is evaluated is what lowering for that shape makes, launches and constants included."""
    from onnx_fuse.validation.inputs import generate

    model = onnx_fuse.optimize(onnx_fuse.session.load(str(path)))
    graph, precision = in_precision(model, "fp32")
    session = ort.session(onnx_fuse.session.load(str(path)))
    feeds = generate(onnx_fuse.session.load(str(path)), lambda feed: session.run(None, feed))
    specializer = Specializer(graph, H200, math=precision)
    rng = random.Random(1)
    held = 0
    for feed, _ in feeds[:2]:
        shapes = {n: (a.shape, a.dtype.name) for n, a in feed.items()}
        values: dict[str, np.ndarray] = {}
        made = answered(partial(specializer.of, shapes), feed, values)
        symbols = specializer.symbols(shapes)
        if not symbols:
            return
        assert made.source is not None
        numbers = {symbol: shapes[name][0][axis] for name, axis, symbol in symbols}
        tries = [numbers]
        for _ in range(40):
            some = {s for s in numbers if rng.random() < 0.5}
            more = rng.choice((1, 2, 8, 40))
            tries.append({s: n + (more if s in some else 0) for s, n in numbers.items()})
        for sizes in [s for s in tries if made.source.holds(s)][:4]:
            trace = Trace()
            opened = {s: trace.symbol(s, n) for s, n in sizes.items()}
            there = specializer.changed(shapes, opened)
            again = SymbolicProgram(lower(graph, there, H200, math=precision, values=values), trace)
            assert repr(again.at(sizes)) == repr(made.source.at(sizes)), sizes
            assert_changes(made.source, numbers, sizes)
            held += 1
        stored = reread(made.source)  # as the cache has it
        for sizes in tries:
            assert stored.holds(sizes) == made.source.holds(sizes)
            if stored.holds(sizes):
                assert repr(stored.at(sizes)) == repr(made.source.at(sizes))
    assert held >= 2


LENGTHS = """
<ir_version: 10, opset_import: ["": 21]>
agraph (float[B,T,8] x, int64[B,T] ids) => (float[B,T,8] y, float[T,T] z) {
    dims = Shape(ids)
    one = Constant<value_ints = [1]>()
    zero = Constant<value_int = 0>()
    step = Constant<value_int = 1>()
    last = Gather<axis = 0>(dims, step)
    places = Range(zero, last, step)
    row = Unsqueeze(places, one)
    below = GreaterOrEqual(row, places)
    z = Cast<to = 1>(below)
    s = MatMul(z, x)
    y = Neg(s)
}
"""


@pytest.mark.parametrize("sizes", [(2, 5), (3, 9), (1, 16), (4, 1)])
def test_what_depends_on_sizes_alone_is_made_before_the_first_run(sizes: tuple[int, int]) -> None:
    """A mask of positions is no constant of one shape: a call makes it, once."""
    model = text_model(LENGTHS)
    specializer = Specializer(model, H200)
    batch, length = sizes
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((batch, length, 8)).astype(np.float32),
             "ids": np.zeros((batch, length), np.int64)}  # fmt: skip
    program: Program | None = None
    for b, t in ((2, 7), sizes):
        program = specializer.of({"x": ((b, t, 8), "float32"), "ids": ((b, t), "int64")}).program
    assert program.setup or length == 1
    got = interpret(program, feeds, {})
    mask = np.tril(np.ones((length, length), np.float32))
    np.testing.assert_array_equal(got["z"], mask)
    np.testing.assert_allclose(got["y"], -(mask @ feeds["x"]), atol=1e-5)


def test_shared_memory_may_hold_open_sizes() -> None:
    """A product of few rows keeps all of them there: another number is no other program."""
    text = "agraph (float16[N,2048] x, float16[2048,2048] w) => (float16[N,2048] y)"
    specializer = Specializer(text_model(text + " { y = MatMul(x, w) }"), H200)
    for n in (3, 8):
        made = specializer.of({"x": ((n, 2048), "float16"), "w": ((2048, 2048), "float16")})
        ((launch,),) = [call.launches for call in made.program.calls]
        assert specializer.traced == 1
        assert made.changes is not None
        assert [smem for _, _, _, smem, *_ in made.changes] == [launch.smem]
        assert launch.smem
    assert made.source is not None
    assert_changes(made.source, {"s0": 3}, {"s0": 8})


def test_a_forgotten_program_is_evaluated_again() -> None:
    specializer = Specializer(text_model(LENGTHS), H200)
    shapes = {"x": ((2, 7, 8), "float32"), "ids": ((2, 7), "int64")}
    made = specializer.of(shapes)
    before, text = made.program, repr(made.program)
    made.forget()
    other = {"x": ((3, 9, 8), "float32"), "ids": ((3, 9), "int64")}
    assert specializer.of(other).program is not before
    assert made.program is not before
    assert repr(made.program) == text
    closed = PlannedProgram(before, made.plan)
    closed.forget()  # nothing could make it again
    assert closed.program is before


def test_few_lowerings_serve_all_lengths() -> None:
    """A BERT-like encoder over many lengths: as many lowerings as classes and alignments."""
    path = next(c.path for c in real_cases() if c.name == "bert__ts13")
    graph, precision = in_precision(onnx_fuse.optimize(onnx_fuse.session.load(str(path))), "fp16")
    specializer = Specializer(graph, H200, math=precision)
    for length in range(2, 40):
        shapes = {v.name or "": ((1, length), "int64") for v in graph.graph.inputs}
        assert specializer.of(shapes).source is not None
    # three classes, of which short rows make steps of 8; multiples of 1, 2, 4 and 8 in each
    assert specializer.traced <= 20


def test_expressions_are_evaluated_over_their_symbols() -> None:
    assert value("min(b,3)*t", {"b": 5, "t": 2}) == 6


def test_a_growing_cache_keeps_one_layout() -> None:
    """Where keys have wide classes, the plan has room for the largest: no layout a token."""
    path = Path(__file__).parent / "data" / "decoders" / "llama_sdpa_dyn23.onnx"
    graph, precision = in_precision(onnx_fuse.optimize(onnx_fuse.session.load(str(path))), "fp16")
    specializer = Specializer(graph, H200, math=precision)

    def at(past: int) -> PlannedProgram:
        numbers = {"s69": past, "s89": past, "s53": past + 1}  # the others: one token of one text
        made = specializer.of(shapes_of(graph, lambda _, i, symbol: numbers.get(symbol, 1)))
        assert made.source is not None
        return made

    plans = {id(at(past).plan) for past in range(72, 250, 8)}
    assert len(plans) == specializer.traced <= 4


def decoder(name: str) -> tuple[Specializer, Callable[[int], PlannedProgram]]:
    """A stored decoder in float16, and its program for a token after so many."""
    path = Path(__file__).parent / "data" / "decoders" / f"{name}.onnx"
    model = load(path)
    rewrite.optimize(model, own_kernels=True)
    graph, precision = in_precision(model, "fp16")
    specializer = Specializer(graph, H200, math=precision)

    def at(past: int) -> PlannedProgram:
        def size(name: str, axis: int, _: str) -> int:
            long = {2: past} if "past" in name else {1: past + 1} if "mask" in name else {}
            return long.get(axis, 1)

        return specializer.of(shapes_of(graph, size))

    return specializer, at


@pytest.mark.parametrize("name", ["llama_sdpa_dyn23", "gpt2_ts17tot_nopos", "whisper_ts14_f32"])
def test_a_token_more_is_no_other_program(name: str) -> None:
    """Positions, masks and caches of a decoder stay open from 2 to 30 tokens of the past."""
    specializer, at = decoder(name)
    assert all(at(past).source is not None for past in range(2, 31))
    # heads of 4 columns: every second past ends within the 16 bytes of an access
    assert specializer.traced <= 2


def test_a_shape_that_cannot_run_leaves_the_others_open() -> None:
    _, at = decoder("whisper_ts14_f32")
    assert at(6).source is not None
    assert at(41).source is None, "it has 40 positions"
    assert at(8).source is not None


def test_a_small_batch_of_a_large_class_has_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the largest shape takes much more memory, lengths share a layout made for less."""
    monkeypatch.setattr(plans, "LARGE", 1 << 12)
    model = text_model(
        "agraph (float[B,T,64] x, float[64,64] w) => (float[B,T,64] y) "
        "{ m = MatMul(x, w) n = Softmax(m) k = MatMul(n, w) y = Softmax(k) }"
    )
    model.graph.inputs[0].shape = ir.Shape(["B", "T", 64])
    specializer = Specializer(model, H200)
    found = [
        specializer.of({"x": ((3, n, 64), "float32"), "w": ((64, 64), "float32")})
        for n in (200, 130, 131, 190)
    ]
    made = found[1:]
    assert len({id(one.source) for one in made}) == len({id(one.plan) for one in made}) == 1
    for one in made:
        assert plan(one.program).arena <= one.plan.arena
        assert one.plan.arena < plan(one.source.at({"s0": 16, "s1": 192})).arena


@cache
def training_step(precision: str) -> ir.Model:
    """The step of one layer of GPT-2 124M."""
    return training_model(
        gpt.build(gpt.Config(1, 12, 768, 50257, 1024)),
        loss="cross_entropy",
        optimizer=optim.AdamW(),
        level=2,
        precision=precision,
    )[0]


def step_shapes(step: ir.Model, sizes: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shapes of its inputs at a batch and a length."""
    return shapes_of(step, lambda _, i, __: sizes[i])


@pytest.mark.parametrize(
    ("precision", "batch", "lengths"),
    [
        ("fp32", 16, (450, 451, 467, 490, 511, 456, 480, 504)),
        ("bf16", 16, (450, 451, 467, 490, 511, 456, 480, 504)),
        ("bf16", 4, (100, 65, 66, 81, 82, 96, 128)),  # 264 and 328 rows: tiles of rows of the H200
        ("bf16", 4, (180, 129, 131, 132, 133, 191, 192)),  # 528 rows: 4 a multiprocessor; 768
        ("bf16", 3, (86, 85, 65, 128)),  # 256 rows: one block's sums of the losses
        ("bf16", 3, (171, 170, 129, 192)),  # 512: the products of few rows
        ("bf16", 5, (409, 410, 385, 448)),  # 2048: threads of a norm's gradient
        ("bf16", 12, (341, 342, 321, 352, 353, 384)),  # 4096: a chunk of scores; 4224: of moments
        ("fp32", 4, (180, 129, 131, 191, 192)),  # rooms in one workspace, whichever is the largest
        ("tf32", 5, (409, 410, 385, 448)),  # transposes, of rows in fours and of others
    ],
)
def test_a_length_of_a_class_is_no_other_training_step(
    precision: str, batch: int, lengths: tuple[int, ...]
) -> None:
    """One program for the lengths of a class, whatever they are multiples of.

    It is the one that lowering makes for the length, and it does not matter which came first.
    """
    step = training_step("fp32" if precision == "tf32" else precision)
    math = "tf32" if precision == "tf32" else "ieee"
    specializer = Specializer(step, H200, math=math)
    made = [specializer.of(step_shapes(step, (batch, length))) for length in lengths]
    assert specializer.traced == 1
    assert made[-1].source is not None
    again = Specializer(step, H200, math=math).of(step_shapes(step, (batch, lengths[-1])))
    assert repr(again.program) == repr(made[-1].program)
    first, last = (specializer.numbers(step_shapes(step, (batch, lengths[n]))) for n in (0, -1))
    assert made[-1].changes is not None  # a length writes the words of launches anew, and no more
    assert_changes(made[-1].source, first, last)


INT32_SIZES = """agraph (float[N, 8] x) => (int32[1] count, int32[1] more, float[M] y)
    { shape = Shape <start = 0, end = 1> (x)  count = Cast <to = 6> (shape)
    two = Constant <value = int32[1] {2}> ()  more = Add (count, two)  wide = Cast <to = 7> (more)
    y = ConstantOfShape (wide) }"""


def test_sizes_stay_open_as_int32() -> None:
    specializer = Specializer(text_model(INT32_SIZES), H200)
    for n in (7, 11, 15):
        x = np.zeros((n, 8), np.float32)
        got = interpret(specializer.of({"x": (x.shape, "float32")}).program, {"x": x}, {})
        assert (got["count"], got["more"], got["y"].shape) == (n, n + 2, (n + 2,))
        assert got["count"].dtype == got["more"].dtype == np.int32
    assert specializer.traced == 1


def test_an_evaluation_makes_anew_what_the_changed_sizes_have_a_part_in() -> None:
    trace = Trace()
    n, m = trace.symbol("n", 3), trace.symbol("m", 5)
    opened = SymbolicProgram(((n, "a"), (m, m + n), ((m,), 1)), trace)
    one = opened.at({"n": 4, "m": 6})
    other = opened.at({"n": 7, "m": 6})
    assert one == ((4, "a"), (6, 10), ((6,), 1))
    assert other == ((7, "a"), (6, 13), ((6,), 1))
    assert other[2] is one[2]
    assert opened.at({"n": 4, "m": 2}) == ((4, "a"), (2, 6), ((2,), 1))
