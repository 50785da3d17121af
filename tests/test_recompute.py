"""A program within a memory budget runs calls a second time, and gives the same bits."""

from dataclasses import replace

import numpy as np
import pytest
from lowering import program_of

from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import costs
from onnx_fuse.lower.walk import lower
from onnx_fuse.program import template
from onnx_fuse.program.call import Program
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.passes.recompute import Lifetimes, recomputed
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.program.size import Trace
from onnx_fuse.runtime import budget, encoding
from onnx_fuse.runtime.plan import plan
from onnx_fuse.training.trainer import Trainer

H200 = CHIPS["H200"]
LAYERS, ROWS, WIDTH = 8, 96, 64


def network(rows: int | str = ROWS, *, update: str = "") -> str:
    """Layers x' = tanh(x w), and the gradient of x, which reads every x' again.

    `update` is a line between the two halves.
    """
    weights = ", ".join(f"float[{WIDTH},{WIDTH}] w{i}" for i in range(LAYERS))
    lines = []
    for i in range(LAYERS):
        lines += [f"z{i} = MatMul(x{i}, w{i})", f"x{i + 1} = Tanh(z{i})"]
    lines += [update, f"g{LAYERS} = Sub(x{LAYERS}, t)"]
    for i in reversed(range(LAYERS)):
        lines += [f"s{i} = Mul(x{i + 1}, x{i + 1})", f"o{i} = Sub(one, s{i})"]
        lines += [f"d{i} = Mul(g{i + 1}, o{i})", f"v{i} = Transpose<perm = [1, 0]>(w{i})"]
        lines += [f"g{i} = MatMul(d{i}, v{i})"]
    tensor = f"float[{rows},{WIDTH}]"
    ends = f"{tensor} g0" + (f", float[{WIDTH},{WIDTH}] w0_next" if update else "")
    head = f"agraph ({tensor} x0, {tensor} t, {weights}) => ({ends}) <float one = {{1}}>"
    return f"{head} {{ {' '.join(lines)} }}"


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x0", "t")}
    for i in range(LAYERS):
        found[f"w{i}"] = (rng.normal(size=(WIDTH, WIDTH)) / 8).astype(np.float32)
    return found


def program(text: str, **options: object) -> Program:
    return program_of(load(text_model(text)), feeds(), **options)


def peak(program: Program) -> int:
    return sum(b.nbytes for b in program.buffers if b.kind != "temp") + plan(program).arena


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("6GiB", 6 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("800MB", 800_000_000),
        ("2g", 2_000_000_000),
        ("4096", 4096),
        (4096, 4096),
        ("min", "min"),
    ],
)
def test_a_budget_is_bytes_or_a_size(given: str | int, expected: object) -> None:
    assert budget.parse(given) == expected


@pytest.mark.parametrize("given", ["", "much", "-1", 0, "0 GiB", "6 GiBs", "nan"])
def test_what_is_no_size_is_refused(given: str | int) -> None:
    with pytest.raises(UsageError, match='give bytes, a size such as "6GiB", or "min"'):
        budget.parse(given)


def test_every_amount_of_recomputing_gives_the_same_bits() -> None:
    whole = program(network())
    memory = Lifetimes(whole)
    choices = memory.candidates(lambda call: costs.seconds(call.problem, H200))
    assert len(choices) >= LAYERS - 1
    expected = interpret(whole, feeds(), {})["g0"]
    peaks = []
    for count in range(len(choices) + 1):
        again = {i for choice in choices[:count] for i in choice.calls}
        made = recomputed(whole, memory.turn, again)
        assert len(made.calls) == len(whole.calls) + len(again)
        np.testing.assert_array_equal(interpret(made, feeds(), {})["g0"], expected)
        peaks.append(plan(made).arena)
    assert min(peaks) < 0.7 * peaks[0]


def test_a_program_takes_no_more_than_its_budget() -> None:
    whole = program(network())
    least = budget.within(whole, "min", H200)
    assert least.before == peak(whole)
    assert least.after < least.before
    for share in (0.0, 0.3, 0.7, 1.0):
        most = round(least.after + share * (least.before - least.after))
        found = budget.within(whole, most, H200)
        made = recomputed(whole, found.turn, found.calls) if found.calls else whole
        assert peak(made) == found.after <= most
        assert found.seconds <= least.seconds
    assert not budget.within(whole, least.before, H200).calls
    with pytest.raises(UsageError, match="is too little: a step of these shapes needs at least"):
        budget.within(whole, least.after - 1, H200)


def test_a_call_whose_operand_changes_does_not_run_again() -> None:
    """The first product would read the new weight."""
    late = program(network(update="w0_next = Neg(w0)"), state={"w0_next": "w0"})
    *calls, update = late.calls
    assert update.kernel == "Neg"
    turn = Lifetimes(late).turn
    early = replace(late, calls=(*calls[: turn + 1], update, *calls[turn + 1 :]))
    places = dict(late.inputs)
    for made, expected in ((late, [True, True]), (early, [False, True])):
        choices = Lifetimes(made).candidates(lambda call: costs.seconds(call.problem, H200))
        again = {i for choice in choices for i in choice.calls}
        reads = {t.buffer for i in again for _, t in made.calls[i].reads}
        assert [places[f"w{i}"].buffer in reads for i in range(2)] == expected


def test_open_sizes_stay_open() -> None:
    """What is chosen for the largest shape of a class serves the smaller ones too."""
    trace = Trace()
    rows = trace.symbol("rows", ROWS)
    shapes = {name: (a.shape, a.dtype.name) for name, a in feeds().items()}
    shapes |= dict.fromkeys(("x0", "t"), ((rows, WIDTH), "float32"))  # type: ignore[dict-item]
    whole = lower(load(text_model(network("rows"))), shapes, H200)
    found = budget.within(SymbolicProgram(whole, trace).at(trace.largest()), "min", H200)
    guards = set(trace.guards)
    made = SymbolicProgram(recomputed(whole, found.turn, found.calls), trace)
    assert set(trace.guards) == guards
    smaller = {"rows": ROWS - 8}
    assert made.holds(smaller)
    given = {k: a[: ROWS - 8] if k in ("x0", "t") else a for k, a in feeds().items()}
    expected = interpret(SymbolicProgram(whole, trace).at(smaller), given, {})["g0"]
    np.testing.assert_array_equal(interpret(made.at(smaller), given, {})["g0"], expected)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_program_in_a_file_keeps_its_order(sequential: bool) -> None:
    opened = SymbolicProgram(replace(program(network()), sequential=sequential), Trace())
    data = template.write(opened, lambda array: "")
    read = encoding.read(data, opened.guards, lambda *given: np.zeros(0)).at({})
    assert read.sequential == sequential


def test_memory_is_of_the_gpu() -> None:
    text = "agraph (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }"
    with pytest.raises(UsageError, match="leave it out on the CPU"):
        Trainer(text_model(text), loss="mse", memory="1GiB")
