"""What every program satisfies (`program.spec`): what breaks it is named, and no pass breaks it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from lowering import lowered
from support import table

from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, refusals, select
from onnx_fuse.lower.walk import lower
from onnx_fuse.program import passes, spec
from onnx_fuse.program.call import Call, Program, Tensor
from onnx_fuse.program.contractions import Attention, AttentionGrad
from onnx_fuse.program.launch import Num, Ptr, TensorMap
from onnx_fuse.program.problem import CHIPS, GemmProblem, KernelConfig
from onnx_fuse.program.size import Trace

H200, A100 = CHIPS["H200"], CHIPS["A100"]
MODEL = """agraph (float16[16,64] x, float16[64,32] w, float16[16,32] r) => (float16[16,32] y)
    { p = MatMul (x, w) y = Add (p, r) }"""
SHAPES = {"x": ((16, 64), "float16"), "w": ((64, 32), "float16"), "r": ((16, 32), "float16")}


@pytest.fixture(scope="module")
def program() -> Program:
    return lower(text_model(MODEL), SHAPES, H200)


def _changed(call: Call, name: str, change: Callable[[Tensor], Tensor]) -> Call:
    reads, writes = (
        tuple((n, change(t) if n == name else t) for n, t in part)
        for part in (call.reads, call.writes)
    )
    return replace(call, reads=reads, writes=writes)


def _of(name: str, **fields: object) -> Callable[[Call], Call]:
    return lambda call: _changed(call, name, lambda t: replace(t, **fields))  # type: ignore[arg-type]


def _launched(**fields: object) -> Callable[[Call], Call]:
    return lambda call: replace(call, launches=(replace(call.launches[0], **fields),))  # type: ignore[arg-type]


def _mapped(**fields: object) -> Callable[[Call], Call]:
    arg = TensorMap(Ptr("a"), "float16", shape=(64, 16), strides=(128,), box=(64, 16))
    return _launched(args=(replace(arg, **fields),))  # type: ignore[arg-type]


def _written_twice(call: Call) -> Call:
    return replace(call, writes=(*call.writes, ("z", dict(call.writes)["y"])))


BROKEN = {
    "y is written at +8 bytes, not at a multiple of 16": _of("y", offset=4),
    "a is read at +2 bytes, not at a multiple of 16": _of("a", offset=1),
    "has a negative size": _of("y", shape=(-16, 32)),
    "has another number of strides than of axes": _of("c", shape=(16,)),
    "goes from byte 0 to 4096 of b0": _of("a", shape=(32, 64)),
    "goes from byte -1920 to 128 of b0": _of("a", strides=(-64, 1)),
    "b is touched up to byte 4608 of b1, of 4096": _of("b", offset=256, shape=(60, 32)),
    "y is float32, where": _of("y", dtype="float32"),
    "writes one place several times": _of("y", strides=(0, 1)),
    "is written over a, which is read": _of("y", buffer=0),
    "has 65536 blocks along y, of 1 to 65535": _launched(grid=(1, 65536, 1)),
    "has 2147483648 blocks along x": _launched(grid=(2**31, 1, 1)),
    "has 2048 threads a block": _launched(block=(2048, 1, 1)),
    "has 128 threads a block": _launched(block=(1, 1, 128)),
    "has a block of a symbolic size": _launched(block=(Trace().symbol("n", 32), 1, 1)),
    "has 4 blocks in 3s": _launched(grid=(4, 1, 1), cluster=3),
    "bytes of shared memory a block": _launched(smem=1 << 20),
    "takes 2147483648 as argument 0, which does not fit in i32": _launched(
        args=(Num("i32", 2**31),)
    ),
    "the map of a has an offset or a stride that is no multiple of 16": _mapped(strides=(120,)),
    "the map of a has a stride that is not between 0 and 2^40 bytes": _mapped(strides=(0,)),
    "the map of a has an axis that is not of 1 to 2^32": _mapped(shape=(0, 16)),
    "the map of a has a box that is not of 1 to 256": _mapped(box=(512, 16)),
    "y and z are written to the same places": _written_twice,
    "is of no type that a device holds": _of("y", dtype="float5"),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_what_breaks_the_spec_is_said_with_the_call_and_the_operand(
    program: Program, sentence: str
) -> None:
    assert spec.violations(program, H200) == []
    (call,) = program.calls
    found = spec.violations(replace(program, calls=(BROKEN[sentence](call),)), H200)
    assert any(sentence in text and text.startswith("MatMul (p, y)") for text in found), found


def test_what_is_read_was_written_before(program: Program) -> None:
    (call,) = program.calls
    temp = replace(program.buffers[0], kind="temp")
    found = spec.violations(replace(program, buffers=(temp, *program.buffers[1:])))
    assert found == [f"MatMul (p, y): a is read from b{temp.id}, to which nothing was written"]
    assert call.reads[0][1].buffer == temp.id


def test_a_pass_that_breaks_the_spec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(calls: passes.Calls) -> list[Call]:
        return [_of("y", offset=4)(call) for call in calls.calls]

    monkeypatch.setattr(passes, "PIPELINE", (("careless", careless), *passes.PIPELINE))
    with pytest.raises(AssertionError, match=r"after careless: MatMul \(p\): y.*not at a multiple"):
        lower(text_model(MODEL), SHAPES, H200)


def test_looking_at_open_sizes_adds_no_guard() -> None:
    trace = Trace()
    rows = trace.symbol("rows", 16)
    shapes = SHAPES | {"x": ((rows, 64), "float16"), "r": ((rows, 32), "float16")}
    program = lower(text_model(MODEL), shapes, H200)
    guards = dict(trace.guards)
    assert spec.violations(program, H200) == []
    assert trace.guards == guards


# ---- parts of other buffers ----------------------------------------------------------------------

FLOATS = {
    "a": (13, 64), "r1": (13, 12), "c": (64, 64), "r2": (64, 512), "w": (64, 12), "v": (64, 512),
}  # fmt: skip
HEAD = ", ".join(f"float16[{m},{n}] {name}" for name, (m, n) in FLOATS.items())
SECOND = {
    "a sum": "s = MatMul (c, v) t = Add (s, r2)",
    "an activation": "s = MatMul (c, v) t = Relu (s)",
    "a chain": "s = MatMul (c, v) u = Add (s, r2) t = Relu (u)",
    "a softmax with a tail": "s = Softmax (r2) t = Relu (s)",
    "a norm with a tail": """one = Constant <value_floats = [1.0]> ()
        half = CastLike (one, r2) n = Constant <value_ints = [512]> () scale = Expand (half, n)
        s = LayerNormalization <axis = -1> (r2, scale) t = Relu (s)""",
}


@pytest.mark.parametrize("made", SECOND)
@pytest.mark.parametrize("hw", [H200, A100], ids=lambda hw: hw.arch)
def test_what_a_kernel_stores_begins_at_sixteen_bytes(made: str, hw) -> None:
    """The second part of a result stands at +312 bytes, where no kernel stores 16 at once."""
    model = text_model(f"""agraph ({HEAD}) => (float16[N] y) <int64[1] flat = {{-1}}>
        {{ p = MatMul (a, w) q = Add (p, r1) q1 = Reshape (q, flat)
           {SECOND[made]} t1 = Reshape (t, flat) y = Concat <axis = 0> (q1, t1) }}""")
    program = lower(model, {name: (FLOATS[name], "float16") for name in FLOATS}, hw)
    assert spec.violations(program, hw) == []
    parts = [t for call in program.calls for _, t in call.writes if t.offset]
    assert [2 * t.offset for t in parts] == [312]  # the concatenation takes no copy of its own
    made_by = [call for call in program.calls if parts[0] in dict(call.writes).values()]
    assert made_by[0].why.startswith("generated")


# ---- launches beyond a grid ----------------------------------------------------------------------

BEYOND = table(globals())("""
attention of a large batch: dict.fromkeys("qkv", ((70_000, 1, 4, 64), "float16")), "", 2
  agraph (float16[B,H,4,64] q, float16[B,H,4,64] k, float16[B,H,4,64] v)=> (float16[B,H,4,64] y)
  { y = Attention (q, k, v) }
attention of many heads: dict.fromkeys("qkv", ((1, 70_000, 4, 64), "float16")), "", 2
  agraph (float16[B,H,4,64] q, float16[B,H,4,64] k, float16[B,H,4,64] v)=> (float16[B,H,4,64] y)
  { y = Attention (q, k, v) }
many matrices: {"a": ((70_000, 4, 5), "float32"), "b": ((70_000, 5, 6), "float32")}, "", 2
  agraph (float[B,4,5] a, float[B,5,6] b) => (float[B,4,6] y) { y = MatMul (a, b) }
many groups: {"x": ((1, 70_000, 4, 4), "float32"), "w": ((70_000, 1, 3, 3), "float32")}, "", 1
  agraph (float[1,C,4,4] x, float[C,1,3,3] w) => (float[1,C,2,2] y){ y = Conv <group = 70000> (x, w)
  }
a product over 2^31: dict.fromkeys("xz", ((2**31 + 8, 1), "float16")),
"simt: a dimension of 2^31 or more", 0
  agraph (float16[N,C] x, float16[N,C] z) => (float16[C,C] y){ t = Transpose <perm = [1, 0]> (x)
  y = MatMul (t, z) }
a running sum of 2^31 rows: {"x": ((2**31 + 8, 1), "float16")},
"blocks along x, of 1 to 2147483647", 0
  agraph (float16[N,C] x) => (float16[N,C] y) <int64 a = {1}> { y = CumSum (x, a) }
one-hot rows: {"x": ((2**31 + 8,), "int32")}, "", 1
  agraph (int32[N] x) => (float[N,C] y) <int64[1] d = {2}, float[2] v = {0.0, 1.0}>{ y = OneHot (x,
  d, v) }
""")


@pytest.mark.parametrize("hw", [H200, A100], ids=lambda hw: hw.arch)
@pytest.mark.parametrize("name", BEYOND)
def test_a_launch_beyond_a_grid_is_split_or_refused_with_the_reason(name: str, hw) -> None:
    text, shapes, reason, launches = BEYOND[name]
    text = f'<ir_version: 10, opset_import: ["" : 23]>\n{text}'
    program = lower(text_model(text), shapes, hw)
    assert spec.violations(program, hw) == []
    assert sum(len(call.launches) for call in program.calls) == launches
    assert reason in "".join(program.fallbacks)
    assert bool(program.fallbacks) == bool(reason)


def test_another_shape_with_too_many_blocks_does_not_meet_the_guards() -> None:
    from onnx_fuse.program.open import SymbolicProgram

    trace = Trace()
    batch = trace.symbol("batch", 60_000)
    text, _, _, _ = BEYOND["attention of a large batch"]
    model = text_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    shapes = dict.fromkeys("qkv", ((batch, 1, 4, 64), "float16"))
    program = lower(model, shapes, H200)
    opened = SymbolicProgram(program, trace)
    assert not opened.holds({"batch": 70_000})


def test_no_kernel_is_said_with_the_reasons() -> None:
    problem = GemmProblem.of("Gemm", m=2**31, n=1, k=1)
    assert select("Gemm", problem, H200) is None
    assert refusals("Gemm", problem, H200)["simt"] == "a dimension of 2^31 or more"
    call = Call.of("MatMul", ("y",), problem, {}, {})
    with pytest.raises(ModelError, match=r"MatMul \(y\): no kernel serves it at this size: .*simt"):
        passes.select_kernels([call], H200)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch", [(70_000,), (3, 70_000), (70_000, 2, 3), (300, 300)])
def test_parts_of_a_batch_begin_where_their_first_matrix_stands(batch, dtype) -> None:
    m, n, k = 4, 6, 5
    problem = GemmProblem.of(
        "Gemm", m=m, n=n, k=k, batch=batch, dtype=dtype, save_z=True, act="relu",
        b_strides=(0,) * (len(batch) - 1) + (k * n,),
    )  # fmt: skip
    simt = next(kernel for kernel in candidates("Gemm") if kernel.name == "simt")
    size = 4 if dtype == "float32" else 2
    done = 0
    for launch in simt.launch(problem, KernelConfig.of(tile=32), H200):
        offsets = {a.name: a.offset for a in launch.args if isinstance(a, Ptr)}
        at = np.unravel_index(done, batch)
        for name, dense in (("a", m * k), ("b", k * n), ("y", m * n)):
            steps = problem.batch_strides(name, dense)[3 - len(batch) :]
            assert offsets[name] == size * sum(i * s for i, s in zip(at, steps, strict=True))
        assert offsets["y"] == offsets["z"]
        done += launch.grid[2]
    assert done == np.prod(batch)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("batch", [(70_000, 8), (2, 70_000)])
@pytest.mark.parametrize("kind", [Attention, AttentionGrad])
def test_parts_of_attention_begin_where_their_first_head_stands(kind, batch, group) -> None:
    m, n, d = 3, 5, 8
    strides = {f"{name}_strides": (d * 16 * batch[1], d * 16, d) for name in "qkv"}
    problem = kind(m, n, d, batch, "float32", d, group=group, mask=(7, 11, 0, 1), **strides)
    simt = next(kernel for kernel in candidates(problem.op) if kernel.name == "simt")
    (how, *_) = simt.configs(problem, H200)
    first: dict[str, tuple[int, int]] = {}
    done: dict[str, int] = {}
    for launch in simt.launch(problem, how, H200):
        if launch.entry == "sdpa_delta":
            continue
        each = group if launch.entry == "sdpa_dkv" else 1
        offsets = {a.name: a.offset for a in launch.args if isinstance(a, Ptr)}
        b, h = first.get(launch.entry, (0, 0))
        for name in offsets.keys() & {"q", "k", "v", "y", "dy", "dq", "dk", "dv"}:
            steps = problem.layout(name)[1]
            head = h // group if name[-1] in "kv" else h
            assert offsets[name] == 4 * (b * steps[0] + head * steps[1]), name
        assert offsets["mask"] == 4 * (7 * b + 11 * h)
        assert offsets["lse"] == 8 * m * (b * batch[1] + h)
        assert offsets.get("workspace", offsets["lse"] // 2) == offsets["lse"] // 2
        _, heads, images = launch.grid
        heads *= each
        first[launch.entry] = (b, h + heads) if h + heads < batch[1] else (b + images, 0)
        done[launch.entry] = done.get(launch.entry, 0) + heads * images
    assert set(done.values()) == {batch[0] * batch[1]}


# ---- sizes below zero ----------------------------------------------------------------------------

SHORT = {
    "Conv": "y = Conv (x, w)",
    "AveragePool": "y = AveragePool <kernel_shape = [9]> (x)",
    "MaxPool": "y = MaxPool <kernel_shape = [9]> (x)",
    "Pad": "p = Constant <value_ints = [0, 0, -3, 0, 0, -3]> () y = Pad (x, p)",
    "Split": "n = Constant <value_ints = [3]> () y = Split <axis = 2> (x, n)",
}


@pytest.mark.parametrize("op", SHORT)
def test_a_size_that_cannot_be_is_one_sentence_when_it_is_lowered(op: str) -> None:
    model = text_model(f"""agraph (float[1,1,T] x, float[4,1,9] w) => (float[N,C,L] y)
        {{ {SHORT[op]} }}""")
    with pytest.raises(ModelError, match=rf"node 'y' \({op}\).*(negative|parts have 3)"):
        lowered(model, size=4)
