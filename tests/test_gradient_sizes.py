"""Every gradient rule where an axis of open size has no element, or one, at run time.

Each row of `test_gradients` is differentiated once, with every axis dynamic; then each axis alone,
and all axes of one size together, are 0 and 1. What onnxruntime computes then has gradients of the
shapes of its inputs, and the slope of central differences.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import onnx
import pytest
from gradient_rows import F32, rng, within
from support import parsed, stock, table
from test_gradients import ROWS, STEP, TOLERANCE, build, draw, session

import onnx_fuse
from onnx_fuse import autodiff, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.guard import in_child
from onnx_fuse.runtime import ort

# Rows by the start of their names, with the sizes that are left out, and why.
EXCEPT = {
    "Einsum bhid": (0, "onnxruntime's Einsum dies of an empty matrix (SIGFPE, 1.32)"),
    "ConvTranspose": (0, "onnxruntime's ConvTranspose does not end, or dies, without places"),
    "Squeeze all": (0, 1, "another rank than the graph's output has"),
    "GroupNormalization, then the largest": (1, "two of the largest are nearly equal"),
    "GatherND batch": (1, "indices for more batches than there are"),
    "Concat": (0, "onnxruntime leaves out what has no element, whatever its other sizes"),
    "AveragePool 3-D": (1, "onnxruntime dies of a window larger than the image"),
    "LpNormalization": (1, "one number over its own size has a kink at 0"),
    "RMSNormalization": (1, "one number over its own size has a kink at 0"),
}


def variants(case):
    """(size, the axes that have it) as pairs of an input's name and an axis."""
    spots = [
        (name, axis)
        for name, value in case.inputs.items()
        if isinstance(value, tuple) and name not in (*case.static, *case.fixed)
        for axis in range(len(value))
        if case.dynamic is True or axis in (case.dynamic or ())
    ]
    together = defaultdict(list)
    for name, axis in spots:
        together[case.inputs[name][axis]].append((name, axis))
    sets = dict.fromkeys([*map(tuple, together.values()), *((spot,) for spot in spots)])
    left_out = [s for name, (*s, _) in EXCEPT.items() if case.name.startswith(name)]
    return [
        (size, chosen)
        for chosen in sets
        for size in (0, 1)
        if not any(size in sizes for sizes in left_out)
        and any(case.inputs[name][axis] != size for name, axis in chosen)
    ]


@pytest.mark.parametrize("case", [c for c in ROWS if variants(c)], ids=lambda case: case.name)
def test_axes_of_no_element_and_of_one(case):
    arrays = draw(case)
    model = build(case, arrays, dynamic=True)
    forward = session(model)
    fed = {i.name for i in forward.get_inputs()}
    wrt = [name for name in fed if arrays[name].dtype.kind == "f"]
    for value in model.graph.output:  # a rank, and no sizes: the input's tell them
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    backward = session(autodiff.gradient(model, wrt=wrt))
    for size, chosen in variants(case):
        shapes = {n: list(v) for n, v in case.inputs.items() if isinstance(v, tuple)}
        for name, axis in chosen:
            shapes[name][axis] = size
        inputs = {n: tuple(shapes.get(n, ())) if n in shapes else v for n, v in case.inputs.items()}
        drawn = draw(replace(case, inputs=inputs))
        feeds = {name: array for name, array in drawn.items() if name in fed}
        try:
            outputs = forward.run(list(case.outputs), feeds)
        except Exception as error:
            if not ort.is_fault(error):
                raise
            continue  # no valid sizes
        compare(case, forward, backward, feeds, outputs, wrt, f"{size} at {chosen}")


def compare(case, forward, backward, feeds, outputs, wrt, where):
    generator = rng(11)
    dys = [np.asarray(generator.standard_normal(y.shape), case.dtype) for y in outputs]
    given = {f"{name}.grad": dy for name, dy in zip(case.outputs, dys, strict=True)}
    names = [f"{name}.grad" for name in wrt]
    grads = dict(zip(wrt, backward.run(names, {**feeds, **given}), strict=True))
    for name in wrt:
        assert grads[name].shape == feeds[name].shape, (name, where)
    scale = sum(float(np.abs(dy * y).sum()) for dy, y in zip(dys, outputs, strict=True)) + 1
    if not np.isfinite(scale):  # a mean of nothing
        return
    direction = {n: np.asarray(generator.uniform(-1, 1, feeds[n].shape)) for n in wrt}
    h, f = STEP[case.dtype], []
    for step in (-2 * h, -h, h, 2 * h):
        moved = {n: np.asarray(feeds[n] + step * d, case.dtype) for n, d in direction.items()}
        found = forward.run(list(case.outputs), {**feeds, **moved})
        pairs = zip(dys, found, strict=True)
        f.append(sum(float(np.vdot(np.float64(dy), np.float64(y))) for dy, y in pairs))
    expected = (8 * (f[2] - f[1]) - (f[3] - f[0])) / (12 * h)
    got = sum(float(np.vdot(direction[n], np.float64(grads[n]))) for n in wrt)
    # the drawn numbers are others than in `test_gradients`, and fewer: a wider margin
    wide = 30 if case.dtype is F32 else 4
    assert got == pytest.approx(expected, abs=wide * TOLERANCE[case.dtype] * scale), where


VECTORS = table(globals(), at=1)("""
a bias of a product: "float[3, 5] x, float[5, 2] w, float[D] s",
{"x": (3, 5), "w": (5, 2), "s": (1,)}
  h = Gemm (x, w, s) y = Relu (h)
a row as a product's bias: "float[3, 5] x, float[5, 2] w, float[1, D] s",
{"x": (3, 5), "w": (5, 2), "s": (1, 1)}
  h = Gemm (x, w, s) y = Relu (h)
a norm's scale: "float[4, 4] x, float[D] s, float[4] b", {"x": (4, 4), "s": (1,), "b": (4,)}
  y = LayerNormalization (x, s, b)
a norm's bias: "float[4, 4] x, float[4] s, float[D] b", {"x": (4, 4), "s": (4,), "b": (1,)}
  y = LayerNormalization (x, s, b)
a norm over two axes: "float[2, 3, 4] x, float[C, D] s, float[E] b",
{"x": (2, 3, 4), "s": (3, 1), "b": (1,)}
  y = LayerNormalization <axis = 1> (x, s, b)
a norm before a product: "float[4, 4] x, float[D] s, float[E] b, float[4, 2] w, float[F] c",
{"x": (4, 4), "s": (1,), "b": (1,), "w": (4, 2), "c": (1,)}
  n = LayerNormalization (x, s, b) h = MatMul (n, w) y = Add (h, c)
a norm of a sum: "float[4, 4] x, float[4, 4] r, float[D] s, float[E] b",
{"x": (4, 4), "r": (4, 4), "s": (1,), "b": (1,)}
  a = Add (x, r) n = LayerNormalization (a, s, b) y = Add (n, a)
an image of padding alone: "float[1, 2, H] x, float[3, 2, K] w", {"x": (1, 2, 0), "w": (3, 2, 3)}
  y = Conv <pads = [2, 2]> (x, w)
RMSNormalization: "float[4, 4] x, float[D] s, float[4, 2] w", {"x": (4, 4), "s": (1,), "w": (4, 2)}
  n = RMSNormalization (x, s) y = MatMul (n, w)
""")


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_whose_open_size_is_one_gets_a_sum(name, level):
    inputs, nodes, shapes = VECTORS[name]
    model = parsed(f"g ({inputs}) => (float[?, ?] y) {{ {nodes} }}", 23)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {n: within(-1, 1, *shape).astype(F32) for n, shape in shapes.items()}
    forward = session(model)
    (y,) = forward.run(None, feeds)
    fused = load(model)
    rewrite.optimize(fused, level=level, training=True)
    dy = within(-1, 1, *y.shape).astype(F32)
    grads = session(autodiff.gradient(fused, wrt=[*feeds])).run(
        [f"{n}.grad" for n in feeds], {**feeds, "y.grad": dy}
    )
    for (key, array), grad in zip(feeds.items(), grads, strict=True):
        assert grad.shape == array.shape
        step = F32(2.0**-8) * within(-1, 1, *array.shape).astype(F32)
        up, down = (forward.run(None, {**feeds, key: array + k * step})[0] for k in (1, -1))
        slope = np.vdot(np.float64(up) - down, dy) / 2
        assert slope == pytest.approx(np.vdot(step, np.float64(grad)), rel=2e-3, abs=2e-5)


@pytest.mark.parametrize(
    ("steps", "direction"), [("T", "forward"), ("0", "reverse"), ("T", "bidirectional")]
)
@pytest.mark.parametrize(("kind", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_recurrences_without_steps(kind, gates, direction, steps):
    many = 1 + (direction == "bidirectional")
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[{steps},2,2] x,
        float[{many},{3 * gates},2] w, float[{many},{3 * gates},3] r, float[{many},2,3] h0)
        => (float[{steps},{many},2,3] y, float[{many},2,3] h)
        {{ y, h = {kind} <hidden_size = 3, direction = "{direction}"> (x, w, r, , , h0) }}"""
    model = onnx.parser.parse_model(text)
    shapes = {"x": (0, 2, 2), "w": (many, 3 * gates, 2), "r": (many, 3 * gates, 3)}
    feeds = {n: within(-1, 1, *shape).astype(F32) for n, shape in shapes.items()}
    h0, dh = within(-1, 1, 2, many, 2, 3).astype(F32)
    forward = ort.session(load(model))
    results = [forward.run(["h"], {**feeds, "h0": h})[0] for h in (h0, h0 + 1)]
    gradient = autodiff.gradient(model, wrt=["x", "w", "r", "h0"])
    dy = np.zeros((0, many, 2, 3), F32)
    given = {**feeds, "h0": h0, "y.grad": dy, "h.grad": dh}
    *grads, dh0 = ort.session(gradient).run([f"{n}.grad" for n in (*feeds, "h0")], given)
    for array, grad in zip(feeds.values(), grads, strict=True):
        np.testing.assert_array_equal(grad, np.zeros_like(array))
    np.testing.assert_allclose(dh0, dh * (results[1] - results[0]), rtol=1e-6)


# opset, inputs, shapes that onnxruntime takes and that leave nothing of y
NOTHING = table({}, at=3)("""
an image of no channel: 21, "float[N,C,C,4] x, float[2] s, float[2] b", {"x": (5, 0, 0, 4)}
  y = GroupNormalization <num_groups = 1> (x, s, b)
no channel, its scale one number: 21, "float[N,C,H,4] x, float[2] s, float[1] b",
{"x": (2, 0, 0, 4)}
  y = GroupNormalization <num_groups = 1> (x, s, b)
fewer channels than groups: 21, "float[N,C,H,4] x, float[2] s, float[2] b", {"x": (2, 1, 0, 4)}
  y = GroupNormalization <num_groups = 2> (x, s, b)
groups of no channel: 18, "float[N,C,H,4] x, float[2] s, float[1] b", {"x": (2, 0, 0, 4)}
  y = GroupNormalization <num_groups = 2> (x, s, b)
no sequence: 21, "float[T,B,2] x, float[2,12,2] w, float[2,12,3] r", {"x": (2, 0, 2)}
  y, h, c = LSTM <hidden_size = 3, direction = "bidirectional"> (x, w, r)
no sequence of some lengths: 21,
"float[T,B,2] x, float[1,9,2] w, float[1,9,3] r, float[1,18] b, int32[B] l",
{"x": (2, 0, 2), "l": (0,)}
  y = GRU <hidden_size = 3, linear_before_reset = 1> (x, w, r, b, l)
""")


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_has_gradients_of_zeros(name):
    opset, inputs, shapes, nodes = NOTHING[name]
    model = parsed(f"g ({inputs}) => (float y) {{ {nodes} }}", opset)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {}
    for value in model.graph.input:
        declared = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        kind = np.int32 if value.name == "l" else F32
        feeds[value.name] = np.ones(shapes.get(value.name, declared), kind)
    wrt = [name for name, x in feeds.items() if x.dtype == F32]

    def run():
        (y,) = ort.session(load(model)).run(["y"], feeds)
        assert not y.size
        backward = ort.session(autodiff.gradient(load(model), wrt=wrt))
        return backward.run([f"{name}.grad" for name in wrt], {**feeds, "y.grad": y})

    for name, grad in zip(wrt, in_child(run), strict=True):
        x = feeds[name]
        np.testing.assert_array_equal(grad, np.zeros_like(x), strict=True)


OPTIMIZED = {
    "the type of a norm between": """
        g (float[N,4,3] x, float[4] s, float[4] b) => (float[N,4,3] y) {
            v = GroupNormalization <num_groups = 2> (x, s, b) w = Exp (v)
            z = GroupNormalization <num_groups = 4> (v, s, b) y = Add (z, w) }""",
    "one query and the rows of a mask": """
        g (float[2,4,One,4] q, float[2,2,N,4] k, float[2,2,N,4] v) => (float[2,4,3,4] y)
        <bool[3,2] m = {1, 1, 0, 1, 0, 0}> { y = Attention <is_causal = 1> (q, k, v, m) }""",
    "one value of all keys": """
        g (float[2,4,3,4] q, float[2,2,N,4] k, float[2,2,One,4] v) => (float[2,4,3,4] y) {
            y = Attention <softcap = 2.0> (q, k, v) }""",
    "a mask of another type": """
        g (float[2,4,3,4] q, float[2,2,N,4] k, float[2,2,N,4] v, double[3,N] m)
        => (float[2,4,3,4] y) { y = Attention <is_causal = 1> (q, k, v, m) }""",
    "a mask of 16 bits": """
        g (float[2,4,3,4] q, float[2,2,N,4] k, float[2,2,N,4] v, float16[3,N] m)
        => (float[2,4,3,4] y) { y = Attention (q, k, v, m) }""",
    "the rank of a sum over axes that sizes decide": """
        g (float[5,N,4] x, float[1,12,4] w, float[1,12,3] r) => (float[2,5,1,N,3] y)
        <int64[5] to = {2, 1, 1, 1, 1}> { h = LSTM <hidden_size = 3> (x, w, r) y = Expand (h, to) }
        """,
}


@pytest.mark.parametrize("name", OPTIMIZED)
def test_an_optimized_file_has_the_gradients_of_the_file(name):
    opset = 26 if "Attention" in OPTIMIZED[name] else 21
    proto = parsed(OPTIMIZED[name], opset)
    feeds = {}
    for value in (*proto.graph.input, *proto.graph.output):
        kind = value.type.tensor_type
        shape = [d.dim_value or {"N": 2, "One": 1}[d.dim_param] for d in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[value.name] = rng().standard_normal(shape).astype(dtype)
    feeds["y.grad"] = feeds.pop("y")
    wrt = [v.name for v in proto.graph.input]
    found = []
    for level in (0, 2):
        graph = onnx_fuse.gradient(onnx_fuse.optimize(proto, level=level), wrt=wrt)
        grads = [f"{x}.grad" for x in wrt]
        found.append(stock(graph, optimized=True).run(grads, feeds))
    for x, plain, fused in zip(wrt, *found, strict=True):
        np.testing.assert_allclose(fused, plain, atol=1e-5, err_msg=x)


# shapes that a file declares for its values, and its nodes: of a batch of one that was set free
STALE = table({}, at=2)("""
a norm: "float[1,1,4] n", "B,S,4"
  { n = LayerNormalization(x, w) y = Mul(n, x) }
rows of a product: "float[1,4] f, float[1,4] p", "B,S,4"
  { t = Constant<value_ints = [-1, 4]>() f = Reshape(x, t) p = Mul(f, w) d = Shape(x)
  y = Reshape(p, d) }
a mean: "float[1,1,1] m, float[1,1,4] c", "B,S,4"
  { a = Constant<value_ints = [-1]>() m = ReduceMean(x, a) c = Sub(x, m) y = Mul(c, w) }
another rank: "float[7] s", "B,S,4"
  { s = Add(x, w) y = Tanh(s) }
a row that broadcasts: "float[1,4] r", "B,S,4"
  { zero = Constant<value_int = 0>() one = Constant<value_ints = [1]>()
  r = Gather<axis = 1>(x, zero) u = Unsqueeze(r, one) s = Mul(x, u) y = Add(s, w) }
parts put together: "float[7,2,4] c", "5,S,4"
  { c = Concat<axis = 0>(x, x) r = Neg(c) y = Mul(r, w) }
an output named as an input: "", "B,S,4"
  { c = Concat<axis = 0>(x, x) y = Mul(c, w) }
an output of one row: "", "1,S,4"
  { c = Concat<axis = 0>(x, x) y = Mul(c, w) }
an output of another rank: "", "4"
  { c = Concat<axis = 0>(x, x) y = Mul(c, w) }
""")


@pytest.mark.parametrize("name", STALE)
def test_a_stale_shape_in_the_file_changes_no_gradient(name):
    declared, output, nodes = STALE[name]
    feeds = {"x": within(-1, 1, 3, 2, 4).astype(F32), "w": within(-1, 1, 4).astype(F32)}
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[B,S,4] x, float[4] w) => '
    results = []
    for shape, values in (("?,?,?", ""), (output, f"<{declared}>" if declared else "")):
        model = onnx.parser.parse_model(f"{head} (float[{shape}] y) {values} {nodes}")
        if not results:
            feeds["y.grad"] = stock(model).run(["y"], feeds)[0]
        results.append(stock(autodiff.gradient(load(model), wrt=["x", "w"])).run(None, feeds))
    for right, stale in zip(*results, strict=True):
        np.testing.assert_array_equal(stale, right)


BRANCHES = """k = Size (x) zero = Constant <value_int = 0> () c = Greater (k, zero) y = If (c)
    <then_branch = t () => (float[N,3] a) { a = Mul (n, z) },
    else_branch = e () => (float[N,3] b) { b = Neg (n) }>"""


@pytest.mark.parametrize("nodes", ["y = Mul (n, z)", BRANCHES], ids=["node", "branches"])
@pytest.mark.parametrize("declared", ["float[N,3] y", "float[1,3] y"])
@pytest.mark.parametrize("rows", [(4, 1), (1, 4), (1, 1)])
def test_an_output_declared_as_an_operand_has_the_size_of_its_broadcast(declared, rows, nodes):
    model = parsed(f"g (float[N,3] x, float[M,3] z) => ({declared}) {{ n = Neg (x) {nodes} }}")
    x, z = (within(-1, 1, n, 3).astype(F32) for n in rows)
    dy = within(-1, 1, max(rows), 3).astype(F32)
    session = stock(autodiff.gradient(model, wrt=["x", "z"]))
    grads = session.run(["x.grad", "z.grad"], {"x": x, "z": z, "y.grad": dy})
    for array, grad, each in zip((x, z), grads, (-dy * z, -dy * x), strict=True):
        right = each if len(array) == max(rows) else each.sum(0, keepdims=True)
        np.testing.assert_allclose(grad, right, rtol=1e-5, atol=1e-6)


# inputs whose name N onnxruntime takes sizes for that differ, the sizes of axes named M being 2
ONE_NAME = table({}, at=1)("""
a sum: {"x": "N,4", "z": "N,4"}
  y = Add(x, z)
behind what is no sum: {"x": "N,4", "z": "N,4", "w": "4"}
  a = Mul(x, w) s = Softmax<axis = 0>(a) y = Add(s, z)
matrices of a batch: {"x": "N,2,4", "z": "N,4,2"}
  y = MatMul(x, z)
an input of fewer axes: {"x": "N,4", "z": "M,N,4"}
  y = Mul(x, z)
in a branch: {"x": "N,4", "z": "N,4"}
  c = Constant <value = bool {1}> ()
  y = If (c) <then_branch = t () => (float a) { a = Add(x, z) }, else_branch = e () => (float b)
  { b = Mul(x, z) }>
""")


@pytest.mark.parametrize("name", ONE_NAME)
def test_sizes_of_one_name_are_equal_or_a_node_says_so(name):
    shapes, nodes = ONE_NAME[name]
    sessions = []
    for first in ("N", "K"):
        named = {**shapes, "x": shapes["x"].replace("N", first)}
        inputs = ", ".join(f"float[{shape}] {key}" for key, shape in named.items())
        model = parsed(f"g ({inputs}) => (float y) {{ {nodes} }}")
        model.graph.output[0].type.tensor_type.ClearField("shape")
        sessions.append(stock(autodiff.gradient(load(model), wrt=[*shapes])))
    for n, m in ((3, 3), (1, 1), (3, 1), (1, 3)):
        feeds = {}
        for key, shape in shapes.items():
            sizes = {"N": n if key == "x" else m, "M": 2, "4": 4, "2": 2}
            feeds[key] = within(0, 1, *(sizes[d] for d in shape.split(","))).astype(F32)
        feeds["y.grad"] = stock(model).run(["y"], feeds)[0]
        *_, right = (session.run(None, feeds)[1:] for session in sessions[1:])
        assert [dx.shape for dx in right] == [feeds[key].shape for key in shapes]
        if n != m:
            with pytest.raises(Exception, match="must be equal: both are named 'N'"):
                sessions[0].run(None, feeds)
            continue
        for dx, answer in zip(sessions[0].run(None, feeds)[1:], right, strict=True):
            np.testing.assert_array_equal(dx, answer)


def test_inputs_that_never_meet_have_sizes_of_their_own() -> None:
    """Of u, v and w one name is N: v and w meet, by their sums."""
    model = parsed("""g (float[N,4] u, float[N,4] v, float[N,4] w) => (float[N,4] y, float z)
      { y = Exp (u) a = ReduceSum <keepdims = 0> (v) b = ReduceMean <keepdims = 0> (w)
        z = Mul (a, b) }""")
    runner = stock(onnx_fuse.gradient(model, ["u", "v", "w"]))
    u, v, w = (within(-1, 1, rows, 4).astype(F32) for rows in (1, 3, 3))
    feeds = {"u": u, "v": v, "w": w, "y.grad": u, "z.grad": np.array(1, F32)}
    du, dv, _ = runner.run(["u.grad", "v.grad", "w.grad"], feeds)
    np.testing.assert_allclose(du, u * np.exp(u), rtol=1e-6)
    np.testing.assert_allclose(dv, np.full((3, 4), w.mean()), rtol=1e-5)
    with pytest.raises(Exception, match="axis 0 of 'v' and axis 0 of 'w' must be equal"):
        runner.run(None, {**feeds, "w": u})


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("kind", "attributes"),
    [("LSTM", ""), ("LSTM", "clip = 0.5"), ("LSTM", "input_forget = 1"), ("RNN", "clip = 0.5")],
)
def test_no_step_of_a_recurrence_gives_zeros(kind: str, attributes: str, direction: str) -> None:
    """onnxruntime's last state of no step is 0, not h0 (its GRU ends the process)."""
    gates, ways = {"LSTM": 4, "RNN": 1}[kind] * 3, 1 + (direction == "bidirectional")
    attributes = ", ".join(filter(None, ["hidden_size = 3", attributes]))
    model = parsed(f"""
      g (float[T,2,2] x, float[{ways},{gates},2] w, float[{ways},{gates},3] r, float[{ways},2,3] s)
      => (float[T,{ways},2,3] y, float[{ways},2,3] h)
      {{ y, h = {kind} <{attributes}, direction = "{direction}"> (x, w, r, , , s) }}""")
    shapes = {"x": (0, 2, 2), "w": (ways, gates, 2), "r": (ways, gates, 3), "s": (ways, 2, 3)}
    feeds = {name: within(-1, 1, *shape).astype(F32) for name, shape in shapes.items()}
    outputs = stock(model).run(["y", "h"], feeds)
    runner = stock(onnx_fuse.gradient(model, [*shapes]))
    feeds |= {"y.grad": outputs[0], "h.grad": np.ones((ways, 2, 3), F32)}
    found = dict(zip([y.name for y in runner.get_outputs()], runner.run(None, feeds), strict=True))
    np.testing.assert_array_equal(found["h"], outputs[1])
    for name, shape in shapes.items():
        np.testing.assert_array_equal(found[f"{name}.grad"], np.zeros(shape, F32))


def test_an_instance_norm_of_nothing_reads_what_is_fed() -> None:
    """onnxruntime dies of one of an empty tensor that a node has computed."""
    model = parsed("""
      f (float[N,1,M] x, float[N,N,N,N] z, float[1] a) => (float[N,1,M] y, float[N,N,N,N] w)
      { y = InstanceNormalization (x, a, a)  w = Neg (z) }""")
    runner = stock(onnx_fuse.gradient(model, ["x", "z"]))
    feeds = {"x": np.ones((2, 1, 0), "f"), "z": np.ones((2, 2, 2, 2), "f"), "a": np.ones(1, "f")}
    feeds |= {"y.grad": feeds["x"], "w.grad": feeds["z"]}
    np.testing.assert_array_equal(runner.run(["z.grad"], feeds)[0], -feeds["z"])


@pytest.mark.parametrize("size", [0, 2])
def test_one_tuple_of_gather_nd_reads_a_tensor_that_may_be_empty(size: int) -> None:
    model = parsed(
        "f (float[B,C,4] x) => (float[C,4] y) <int64[1] i = {-3}> { y = GatherND (x, i) }"
    )
    runner = stock(onnx_fuse.gradient(model, ["x"]))
    feeds = {"x": np.ones((3, size, 4), "f"), "y.grad": np.full((size, 4), 2, "f")}
    expected = np.zeros((3, size, 4), "f")
    expected[0] = 2
    np.testing.assert_array_equal(runner.run(["x.grad"], feeds)[0], expected)
