"""Sharded weights within a memory budget: the plan of each rank, its peak, and equal results."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir
import pytest
from lowering import lowered
from rank_program import Exchange, step_program
from support import with_weights

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.call import Call, Program, Tensor
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.passes.recompute import Lifetimes, gathered_twice, recomputed
from onnx_fuse.program.problem import CHIPS, Collective
from onnx_fuse.program.size import Trace
from onnx_fuse.runtime import budget
from onnx_fuse.runtime.plan import plan
from onnx_fuse.training import optim
from onnx_fuse.training.ranks import SHARDS, Ranks
from onnx_fuse.training.step import Spec, training_model

Array = np.ndarray[Any, Any]
H200 = CHIPS["H200"]
LAYERS, ROWS, WIDTH, STEPS = 8, 512, 64, 3
TOLERANCE = 2e-6
"""Of weights below 0.6: the ranks' sums are rounded to float32 in another order than one GPU's."""


ADAMW = optim.AdamW(lr=1e-3)


def network() -> onnx_ir.Model:
    """Layers x' = tanh(x w), and the mean of the squares of what they end in."""
    lines = [f"z{i} = MatMul(x{i}, w{i}) x{i + 1} = Tanh(z{i})" for i in range(LAYERS)]
    lines += [f"d = Sub(x{LAYERS}, t) q = Mul(d, d) last = Constant<value_ints = [1]>()"]
    lines += ["each = ReduceMean<keepdims = 0>(q, last) loss = ReduceMean<keepdims = 0>(each)"]
    square, rows = f"float[{WIDTH},{WIDTH}]", f"float[n,{WIDTH}]"
    given = ", ".join(f"{square} w{i}" for i in range(LAYERS))
    model = text_model(
        f"agraph ({rows} x0, {rows} t, {given}) => (float loss) {{ {' '.join(lines)} }}"
    )
    rng = np.random.default_rng(0)
    names = [v.name for v in model.graph.inputs[2:]]
    return with_weights(
        model, {n: (rng.normal(size=(WIDTH, WIDTH)) / 8).astype(np.float32) for n in names}
    )


def batches() -> list[dict[str, Array]]:
    rng = np.random.default_rng(1)
    shape = (ROWS, WIDTH)
    return [
        {name: rng.normal(size=shape).astype(np.float32) for name in ("x0", "t")}
        for _ in range(STEPS)
    ]


def step(
    rank: int, ranks: int, shard: str, rows: int | None = None, optimizer: optim.Optimizer = ADAMW
) -> tuple[Program, Spec]:
    """A rank's step of `rows` rows, its part of the batch where no other number is given."""
    given = Ranks(rank, ranks, shard=shard, bucket=2 * WIDTH * WIDTH * 4) if ranks > 1 else None
    graph, spec = training_model(
        network(), loss="loss", optimizer=optimizer, clip_norm=0.5, ranks=given
    )
    rows = ROWS // ranks if rows is None else rows
    states = {s.next: s.name for s in spec.states if s.next}
    return lowered(graph, size=rows, state=states), spec


def within(program: Program, memory: budget.Budget) -> tuple[Program, budget.Recompute]:
    found = budget.within(program, memory, H200)
    return recomputed(program, found.turn, found.calls), found


def trained(
    made: Sequence[tuple[Program, Spec]], rows: Sequence[slice]
) -> tuple[list[dict[str, Array]], list[float]]:
    """What each rank holds of the states after STEPS steps, and the losses."""
    exchange = Exchange(len(made))

    def run(rank: int) -> tuple[dict[str, Array], list[float]]:
        program, spec = made[rank]
        states = {s.name: np.asarray(s.initial) for s in spec.states}
        losses = []
        for number, batch in enumerate(batches(), start=1):
            feeds: dict[str, Any] = {k: a[rows[rank]] for k, a in batch.items()} | states
            feeds |= {spec.lr: np.float32(1e-3), spec.step: np.array(number)}
            if spec.counts:
                own = rows[rank].stop - rows[rank].start
                feeds[spec.counts] = np.full(1 + len(spec.measures), own, np.float64)
            found = interpret(program, feeds, {}, exchange=lambda *given: exchange.of(rank, *given))
            states = {s.name: found[s.next] if s.next else states[s.name] for s in spec.states}
            losses.append(float(found[spec.loss]))
        return states, losses

    with ThreadPoolExecutor(len(made)) as pool:
        results = [each.result() for each in [pool.submit(run, i) for i in range(len(made))]]
    assert all(losses == results[0][1] for _, losses in results)
    return [states for states, _ in results], results[0][1]


def even(ranks: int) -> list[slice]:
    return [slice(i * ROWS // ranks, (i + 1) * ROWS // ranks) for i in range(ranks)]


def peak(program: Program) -> int:
    return sum(b.nbytes for b in program.buffers if b.kind != "temp") + plan(program).arena


def gathers(calls: Sequence[Call]) -> list[int]:
    return [i for i, c in enumerate(calls) if getattr(c.problem, "kind", "") == "AllGather"]


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Array], list[float]]:
    """States and losses of one GPU with the batches of all."""
    (states,), losses = trained([step(0, 1, "")], [slice(0, ROWS)])
    return states, losses


@pytest.mark.parametrize(("shard", "ranks"), [("", 2), ("optimizer", 2), ("all", 2), ("all", 4)])
def test_ranks_within_a_budget_train_to_the_same_bits(
    shard: str, ranks: int, alone: tuple[dict[str, Array], list[float]]
) -> None:
    """As without one; and, but for the order of sums, as one GPU with all rows."""
    made = [step(rank, ranks, shard) for rank in range(ranks)]
    small = [(within(program, "min")[0], spec) for program, spec in made]
    assert all(len(p.calls) > len(q.calls) for (p, _), (q, _) in zip(small, made, strict=True))
    states, losses = trained(made, even(ranks))
    again, same = trained(small, even(ranks))
    assert same == losses
    for found, expected in zip(again, states, strict=True):
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    np.testing.assert_allclose(losses, alone[1], rtol=1e-6)
    assert_near_alone(again, alone[0])


def assert_near_alone(ranks: Sequence[dict[str, Array]], alone: dict[str, Array]) -> None:
    """The ranks' states, put together, are those of one GPU, but for the order of sums."""
    for name, expected in alone.items():
        each = [own[name] for own in ranks]
        whole = each[0] if each[0].shape == expected.shape else np.concatenate(each)
        np.testing.assert_allclose(
            whole.reshape(expected.shape), expected, rtol=0, atol=TOLERANCE, err_msg=name
        )


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_weights_that_are_updated_as_a_whole_are_not_divided(shard: str) -> None:
    """Muon's iterations read a whole matrix; what AdamW updates beside them has parts."""
    muon = optim.Muon(lr=1e-3, adamw=("w1",))
    (alone,), losses = trained([step(0, 1, "", optimizer=muon)], [slice(0, ROWS)])
    made = [step(rank, 2, shard, optimizer=muon) for rank in range(2)]
    states, found = trained(made, even(2))
    assert [states[0][name].ndim for name in ("w0", "w1")] == [2, 1]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_near_alone(states, alone)


def test_ranks_may_compute_again_what_others_keep() -> None:
    """Of unequal rows each rank chooses by itself; what they exchange stays in one order."""
    rows = [slice(0, 384), slice(384, 512)]
    made = [step(rank, 2, "all", own.stop - own.start) for rank, own in enumerate(rows)]
    small = [(within(made[0][0], "min")[0], made[0][1]), made[1]]
    assert len(small[0][0].calls) > len(small[1][0].calls)
    (states, losses), (again, same) = trained(made, rows), trained(small, rows)
    assert same == losses
    for found, expected in zip(again, states, strict=True):
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_sharded_step_takes_no_more_than_its_budget(shard: str) -> None:
    whole = step_program(shard, widths=(512,) * 9, bucket=1 << 20, rows=1024)
    least = budget.within(whole, "min", H200)
    assert least.before == peak(whole)
    assert least.after < least.before
    for share in (0.0, 0.5, 1.0):
        most = round(least.after + share * (least.before - least.after))
        made, found = within(whole, most)
        assert peak(made) == found.after <= most
        problems = [c.problem for c in made.calls if isinstance(c.problem, Collective)]
        assert problems == [c.problem for c in whole.calls if isinstance(c.problem, Collective)]
    with pytest.raises(UsageError, match=r"needs at least .* GiB on each of 2 GPUs") as error:
        budget.within(whole, least.after - 1, H200)
    assert str(error.value).endswith("may take less") == (shard != "all")


def test_what_is_sharded_leaves_room_within_a_budget() -> None:
    """Each way takes less than the one before, at the least that recomputing leaves."""
    found = [
        budget.within(step_program(shard, widths=(512,) * 9, bucket=1 << 20), "min", H200).after
        for shard in SHARDS
    ]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


def test_a_second_run_reads_the_weights_that_the_backward_gathers() -> None:
    whole, _ = step(0, 2, "all")
    found = budget.within(whole, "min", H200)
    made = recomputed(whole, found.turn, found.calls)
    assert len(gathers(made.calls)) == len(gathers(whole.calls))
    twins = gathered_twice(made.calls)
    read = {
        at
        for i, call in enumerate(made.calls)
        if call.why.startswith("run again")
        for _, t in call.reads
        for at, buffer in twins.get(t.buffer, ())
        if buffer == t.buffer and at < i
    }
    assert read
    assert min(read) > found.turn


def test_a_copy_that_is_gathered_later_serves_no_earlier_run() -> None:
    """All results again: a second run reads the forward's copy where there is no other yet."""
    program, spec = step(0, 2, "all")
    turn = Lifetimes(program).turn
    again = {
        i
        for i, call in enumerate(program.calls[:turn])
        if call.kernel == "MatMul" and not isinstance(call.problem, Collective)
    }
    made = recomputed(program, turn, again)
    written = {t.buffer for _, t in (*program.inputs, *program.outputs)} | {*program.constants}
    for call in made.calls:
        assert written.issuperset(t.buffer for _, t in call.reads)
        written.update(t.buffer for _, t in call.writes)
    rows, other = even(2), step(1, 2, "all")
    expected, losses = trained([(program, spec), other], rows)
    found, same = trained([(made, spec), other], rows)
    assert losses == same
    for name in expected[0]:
        np.testing.assert_array_equal(found[0][name], expected[0][name], err_msg=name)


@pytest.mark.parametrize("shard", SHARDS)
def test_open_rows_stay_open(shard: str) -> None:
    """What is chosen for the most rows of a class serves fewer, which have the layout of these."""
    trace, wide = Trace(), {"widths": (512,) * 9, "bucket": 1 << 18}
    rows = trace.symbol("rows", 1000)
    whole = step_program(shard, rows=rows, **wide)  # type: ignore[arg-type]
    found = budget.within(SymbolicProgram(whole, trace).at(trace.largest()), "min", H200)
    assert found.calls
    guards = set(trace.guards)
    made = SymbolicProgram(recomputed(whole, found.turn, found.calls), trace)
    assert set(trace.guards) == guards
    largest = trace.largest()["rows"]
    for fewer in (1000, largest):
        assert made.holds({"rows": fewer})
        closed = step_program(shard, rows=fewer, **wide)  # type: ignore[arg-type]
        again = recomputed(closed, found.turn, found.calls)
        assert peak(made.at({"rows": fewer})) == peak(again)
        opened = [c.kernel for c in made.at({"rows": fewer}).calls]
        assert opened == [c.kernel for c in again.calls]
    assert peak(made.at(trace.largest())) == found.after


def test_parts_that_change_in_between_are_no_copies() -> None:
    gather = Collective("AllGather", (4,), ("float32",), 2, 0)
    part, first, second = (Tensor(i, "float32", (4 * (1 + (i > 0)),), (1,), 0) for i in range(3))

    def call(y: Tensor) -> Call:
        return Call.of("AllGather", ("n",), gather, {"x.0": part}, {"y.0": y})

    update = Call("Update", ("n",), (), (), (("y", part),))
    both = [(0, 1), (1, 2)]
    assert gathered_twice([call(first), call(second)]) == {1: both, 2: both}
    assert not gathered_twice([call(first), update, call(second)])


@pytest.mark.parametrize(("shard", "ranks"), [("", 1), ("all", 2)])
def test_the_message_has_what_is_run_again_and_its_price(shard: str, ranks: int) -> None:
    program, _ = step(0, ranks, shard)
    found = str(budget.within(program, "min", H200))
    where = f" on each of {ranks} GPUs" if ranks > 1 else ""
    assert re.fullmatch(
        rf"memory: 0\.00 GiB{where} instead of 0\.00, 0\.00 for weights, states, inputs and "
        r"outputs; \d+ calls run again in the backward, 0\.\d\d ms: \d+ MatMul",
        found,
    )
    plenty = str(budget.within(program, 2**30, H200))
    assert plenty.endswith("for weights, states, inputs and outputs; nothing is computed again")
