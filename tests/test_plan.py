"""plan: nothing that lives at the same time shares memory; what dies is used again."""

import numpy as np
import pytest

from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Buffer, Call, Program, Tensor, dense_strides
from onnx_fuse.program.launch import Launch
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import plan as module
from onnx_fuse.runtime.plan import aligned, plan
from onnx_fuse.runtime.schedule import (
    Aliases,
    by_dependency,
    overlappable,
    put_off,
    segments,
    sequential,
)

H200 = CHIPS["H200"]


def tensor(buffer: int, size: int) -> Tensor:
    return Tensor(buffer, "float32", (size,), dense_strides((size,)))


def program(steps: list[tuple[list[int], list[int]]], sizes: dict[int, int], **call) -> Program:
    """Calls of (reads, writes) by buffer: 0 is the input, the last one written the output."""
    calls = tuple(
        Call(
            "k",
            ("node",),
            (),
            tuple((f"a{b}", tensor(b, sizes[b])) for b in reads),
            tuple((f"y{b}", tensor(b, sizes[b])) for b in writes),
            **call,
        )
        for reads, writes in steps
    )
    last = steps[-1][1][-1]
    kinds = {0: "input", last: "output"}
    buffers = tuple(Buffer(b, kinds.get(b, "temp"), 4 * n) for b, n in sizes.items())
    return Program(calls, buffers, (("x", tensor(0, sizes[0])),), (("y", tensor(last, 1)),), {})


def random_program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    steps = [(sorted({int(rng.integers(max(0, b - 6), b)) for _ in range(2)}), [b])
             for b in range(1, 60)]  # fmt: skip
    return program(steps, {b: int(rng.integers(1, 5000)) for b in range(60)})


@pytest.mark.parametrize("seed", range(5))
def test_what_lives_together_does_not_overlap(seed: int) -> None:
    p = random_program(seed)
    layout = plan(p)
    size = {b.id: b.nbytes for b in p.buffers}
    life: dict[int, list[int]] = {}
    for i, call in enumerate(p.calls):
        for _, t in (*call.reads, *call.writes):
            if t.buffer in layout.offsets:
                life.setdefault(t.buffer, []).append(i)
    for a in life:
        for b in life:
            together = life[a][0] <= life[b][-1] and life[b][0] <= life[a][-1]
            if a < b and together:
                low, high = sorted((layout.offsets[x], x) for x in (a, b))
                assert low[0] + size[low[1]] <= high[0]
    assert all(at % 256 == 0 for at in layout.offsets.values())
    assert all(at + size[b] <= layout.arena for b, at in layout.offsets.items())
    assert layout.arena < layout.naive


def test_a_chain_takes_two_buffers() -> None:
    steps = [([b], [b + 1]) for b in range(9)]
    layout = plan(program(steps, dict.fromkeys(range(10), 1000)))
    assert layout.arena == 2 * aligned(4000)


def test_in_place_where_the_call_allows_it_and_nothing_else_reads() -> None:
    steps = [([0], [1]), ([1], [2]), ([2], [3])]
    p = program(steps, dict.fromkeys(range(4), 1000))
    calls = (p.calls[0], Call(**{**vars(p.calls[1]), "inplace": (("y2", "a1"),)}), p.calls[2])
    layout = plan(Program(calls, p.buffers, p.inputs, p.outputs, {}))
    assert layout.offsets[1] == layout.offsets[2]
    assert layout.inplace == 1
    # read again later: no longer
    late = Call(**{**vars(calls[2]), "reads": (*calls[2].reads, ("b1", tensor(1, 1000)))})
    layout = plan(Program((*calls[:2], late), p.buffers, p.inputs, p.outputs, {}))
    assert layout.offsets[1] != layout.offsets[2]
    assert layout.inplace == 0


def test_workspaces_live_for_their_call() -> None:
    steps = [([0], [1]), ([1], [2]), ([2], [3])]
    p = program(steps, dict.fromkeys(range(4), 100), workspace=10_000)
    layout = plan(p)
    assert set(layout.workspaces) == {0, 1, 2}
    assert layout.arena == aligned(10_000) + 2 * aligned(400)


def test_segments_are_cut_at_host_calls() -> None:
    text = """agraph (float[1,1,2,2,2] x, float[1,1,1,1,3] g) => (float[1,1,1,1,1] y)
    { a = Exp (x) d = GridSample <mode = "cubic"> (a, g) y = Neg (d) }"""
    shapes = {"x": ((1, 1, 2, 2, 2), "float32"), "g": ((1, 1, 1, 1, 3), "float32")}
    p = lower(text_model(text), shapes, H200)
    parts = segments(p)
    assert [bool(part.host) for part in parts] == [False, True, False]
    assert [part.first for part in parts] == [0, 1, 2]
    assert p.fallbacks == ("GridSample: no kernel for cubic steps in three axes",)


def bits(calls: set[int]) -> int:
    return sum(1 << i for i in calls)


def test_calls_follow_what_the_data_asks_for_and_no_more() -> None:
    # 1 and 2 read what 0 wrote; 3 reads both; 4 overwrites what 1 read; 5 is on its own
    steps = [([0], [1]), ([1], [2]), ([1], [3]), ([2, 3], [4]), ([0], [1]), ([0], [5])]
    p = program(steps, dict.fromkeys(range(6), 10))
    order = by_dependency(p)
    assert order.after == ((), (0,), (0,), (2, 1), (2, 1), ())
    assert order.before[3] == order.before[4] == bits({0, 1, 2})
    line = sequential(p)
    assert line.after == ((), (0,), (1,), (2,), (3,), (4,))
    assert line.before[5] == bits({0, 1, 2, 3, 4})


def test_a_graph_begins_at_one_call_and_those_of_many_blocks() -> None:
    steps = [([0], [1]), ([0], [2]), ([1, 2], [3])]
    for blocks, after in ((1, ((), (0,), (1,))), (100, ((), (), (1, 0)))):
        launches = (Launch("", "k", (blocks, 1, 1), (32, 1, 1), ()),)
        p = program(steps, dict.fromkeys(range(4), 10))
        calls = tuple(Call(**{**vars(call), "launches": launches}) for call in p.calls)
        assert by_dependency(Program(calls, p.buffers, p.inputs, p.outputs, {})).after == after


def test_the_longest_row_alone_is_launched_early() -> None:
    # 0 1 3 5 6 is the row; 2 ends, 4 follows 3 too, 6 follows both of the same length
    after = [[], [0], [0], [1], [3], [3], [5, 4], [6, 2]]
    assert overlappable(after) == [(), (0,), (), (1,), (), (3,), (), (6,)]
    longer = [[], [0], [0], [2], [3]]  # the second of two followers has more behind it
    assert overlappable(longer) == [(), (), (0,), (2,), (3,)]


ROW = [(), (0,), (1,), (2,), (3,), (4,), (5,), (6,)]
"""A row of eight steps; each test puts others beside it."""


@pytest.mark.parametrize(
    ("beside", "last", "blocks", "waits"),
    [
        ([(0,)], (7, 8), 64, {8: 3}),  # it may follow any of the first seven
        ([(0,)], (7, 8), 65, {}),  # too large
        ([(3,)], (7, 8), 1, {}),  # its reader comes soon
        ([(1,)], (7, 8), 1, {8: 4}),
        ([(0,), (8,)], (7, 9), 1, {}),  # a row of its own
        ([(0,), (0,)], (7, 8, 9), 1, {8: 3, 9: 3}),
        ([(0,)], (7,), 1, {}),  # nothing reads it
        ([()], (7, 8), 1, {}),  # it follows nothing
    ],
)
def test_small_steps_wait_until_the_longest_row_is_half_way(
    beside: list[tuple[int, ...]], last: tuple[int, ...], blocks: int, waits: dict[int, int]
) -> None:
    after = [*ROW, *beside, last]
    sequence, found = put_off(after, [blocks] * len(after))
    assert sorted(sequence) == list(range(len(after)))
    assert all(k < i for i, steps in enumerate(found) for k in steps)
    new = {i: {sequence[k] for k in steps} for i, steps in zip(sequence, found, strict=True)}
    assert new == {i: {waits[i]} if i in waits else set(steps) for i, steps in enumerate(after)}


@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_is_put_off_comes_after_all_that_it_followed(seed: int) -> None:
    order = by_dependency(random_program(seed))
    sequence, found = put_off(order.after, [1] * len(order.after))
    before = [0] * len(sequence)
    for i, steps in zip(sequence, found, strict=True):
        for k in steps:
            before[i] |= before[sequence[k]] | 1 << sequence[k]
    assert all(new & old == old for new, old in zip(before, order.before, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_what_may_run_side_by_side_does_not_overlap(seed: int) -> None:
    p = random_program(seed)
    layout = plan(p)
    size = {b.id: b.nbytes for b in p.buffers}
    users: dict[int, set[int]] = {}
    for i, call in enumerate(p.calls):
        for _, t in (*call.reads, *call.writes):
            if t.buffer in layout.offsets:
                users.setdefault(t.buffer, set()).add(i)
    before = by_dependency(p).before
    assert layout.order.before == before
    for a in users:
        for b in users:
            (low, x), (high, _) = sorted((layout.offsets[c], c) for c in (a, b))
            if a != b and low + size[x] > high:
                done_a = bits(users[a]) & ~before[min(users[b])] == 0
                done_b = bits(users[b]) & ~before[min(users[a])] == 0
                assert done_a or done_b


def test_where_that_takes_much_memory_calls_run_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    p = random_program(0)
    free = plan(p)
    monkeypatch.setattr(module, "SIDE_BY_SIDE", free.arena - 1)
    line = plan(p)
    assert line.order == sequential(p) != free.order
    assert line.arena < free.arena


CACHED = """agraph (float16[1,4,C,8] past, float16[1,4,1,8] new, int64[1,4,1,8] at)
=> (float16[1,4,C,8] present, float16[1,4,1,C] scores)
    { present = ScatterElements <axis = 2> (past, at, new)
    turned = Transpose <perm = [0, 1, 3, 2]> (WHICH)  scores = MatMul (new, turned) }"""


@pytest.mark.parametrize(("which", "free"), [("present", True), ("past", False)])
def test_an_output_may_overwrite_an_input_that_nothing_reads_later(which: str, free: bool) -> None:
    shapes = {"past": ((1, 4, 32, 8), "float16"), "new": ((1, 4, 1, 8), "float16"),
              "at": ((1, 4, 1, 8), "int64")}  # fmt: skip
    p = lower(text_model(CACHED.replace("WHICH", which)), shapes, H200)
    aliases = Aliases(p, plan(p).order)
    assert aliases.may_share("present", "past") is free
    assert not aliases.may_share("present", "new")
