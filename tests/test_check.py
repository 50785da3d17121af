"""The check is fair: like with like, the original's own spread, steps of quantization, bfloat16."""

import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from support import ENCODER, Cli, parsed, with_weights

from onnx_fuse import autodiff, report
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer import shapes
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import inline, save, to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.graphs import DualGraph
from onnx_fuse.session import InferenceSession
from onnx_fuse.validation import check as check_module
from onnx_fuse.validation import shapes as inferred
from onnx_fuse.validation.check import AS_WRITTEN, OPTIMIZED, check_outputs
from onnx_fuse.validation.compare import tolerance_of
from onnx_fuse.validation.gradients import check_gradients, check_written, compare_gradients
from onnx_fuse.validation.input_sizes import choices
from onnx_fuse.validation.inputs import read_feeds
from onnx_fuse.validation.quantized import COUNT, Steps
from onnx_fuse.validation.request import Request, runnable

PLAIN = (
    "g (float[N,4] x) => (float[N,4] y) {{ c = Constant <value_float = {}> ()  y = Add (x, c) }}"
)


def shifted(by: float) -> onnx_ir.Model:
    return text_model(PLAIN.format(float(by)))


class Off:
    """A session whose floats are off by so much."""

    def __init__(self, inner: Any, by: float) -> None:
        self.inner, self.by = inner, by

    def run(self, names: Any, feeds: Any, options: Any = None) -> list[Any]:
        return [y + np.float32(self.by) for y in self.inner.run(names, feeds, options)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def moving(monkeypatch: pytest.MonkeyPatch, by: float, victim: object = None) -> None:
    """onnxruntime's own optimizations move the results of `victim`, or of every model."""
    plain = ort.session

    def session(model: Any, options: Any = None, *, as_written: bool = False, **more: Any) -> Any:
        with pytest.MonkeyPatch.context() as unpatched:  # it calls itself
            unpatched.setattr(ort, "session", plain)
            made = plain(model, options, as_written=as_written, **more)
        hit = not as_written and (victim is None or getattr(model, "model", model) is victim)
        return Off(made, by) if hit else made

    monkeypatch.setattr(ort, "session", session)


def test_the_originals_own_difference_is_the_floor_of_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moving(monkeypatch, 0.25)
    check = check_outputs(shifted(1), shifted(1))
    assert check.ok
    assert check.worst.max_abs == 0  # like is compared with like
    assert check.worst.limit == pytest.approx(0.25, rel=1e-3)
    assert any("own optimizations change" in note and "0.25" in note for note in check.notes)
    assert check_outputs(shifted(1), shifted(1.2)).ok
    assert not check_outputs(shifted(1), shifted(1.5)).ok


def test_without_it_the_limit_is_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_outputs(shifted(1), shifted(1))
    assert check.raised == {}
    assert not check_outputs(shifted(1), shifted(1.2)).ok


def test_a_notebook_shows_outputs_and_a_log_shows_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "onnx_fuse"):
        check = check_outputs(shifted(1), shifted(2))
    assert ("onnx_fuse", "running the original") in [(r.name, r.message) for r in caplog.records]
    assert "<td>y</td><td>False</td><td>1</td>" in check._repr_html_()
    empty = replace(check.differences[0], where="y", max_abs=0.0, limit=0.0)
    first = replace(empty, where="y[0]", limit=1e-4)
    assert "<td>y[0]</td>" in replace(check, differences=[first, empty])._repr_html_()


def test_sessions_of_a_check_read_large_weights_where_they_are() -> None:
    weight = np.arange(1024, dtype=np.float32).reshape(16, 64)
    text = "g (float[N,16] x) => (float[N,64] y) <float[16,64] w = {0}> { y = MatMul (x, w) }"
    model = text_model(text)
    model.graph.initializers["w"].const_value = onnx_ir.tensor(weight)
    graph = runnable(model)
    (shared, kind) = graph.weights["w"]
    assert np.shares_memory(shared, weight)
    assert (kind, len(graph.data) < weight.nbytes) == (onnx_ir.DataType.FLOAT, True)
    x = np.ones((2, 16), np.float32)
    for as_written in (True, False):
        (y,) = ort.run(ort.session(graph, as_written=as_written), {"x": x})
        np.testing.assert_allclose(y, x @ weight, rtol=1e-6)


def test_sessions_map_the_weights_of_a_file(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((2, 16, 1 << 13), np.float32)
    text = "g (float[N,16] x) => (float[N,M] y, float[N,M] z) <float[16,8192] w = {0}, "
    model = text_model(text + "float[16,8192] v = {0}> { y = MatMul (x, w) z = MatMul (x, v) }")
    for name, weight in zip("wv", weights, strict=True):
        model.graph.initializers[name].const_value = onnx_ir.tensor(weight)
    path, link = tmp_path / "a model.onnx", tmp_path / "link.onnx"
    save(model, path)
    link.symlink_to(path)
    x = np.ones((2, 16), np.float32)
    expected = ort.run(ort.session(path, as_written=True), {"x": x})
    for graph in (DualGraph.of_file(path), DualGraph.of_model(read(path), path)):
        assert isinstance(graph, DualGraph)
        assert not graph.weights
        assert len(graph.data) < weights[0].nbytes
        for as_written in (True, False):
            answers = ort.run(ort.session(graph, as_written=as_written), {"x": x})
            for y, z in zip(answers, expected, strict=True):
                np.testing.assert_array_equal(y, z)
    assert DualGraph.of_file(link) == link
    assert [*DualGraph.of_model(read(link), link).weights] == ["w", "v"]


def test_a_result_that_is_wrong_at_one_level_alone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = shifted(1)
    moving(monkeypatch, 0.5, fused)
    check = check_outputs(shifted(1), fused)
    assert not check.ok
    assert {d.level for d in check.differences if not d.ok} == {OPTIMIZED}
    assert OPTIMIZED in report.check_lines(check)[0]
    assert AS_WRITTEN not in report.check_lines(check)[0]


# (type of y, how it comes from the codes q)
QDQ = (
    "g (float[N,4] x) => ({kind}[N,4] y) {{"
    "  s = Constant <value = float {{0.125}}> ()  z = Constant <value = uint8 {{100}}> ()"
    "  k = Constant <value_float = {shift}> ()  h = Add (x, k)  q = QuantizeLinear (h, s, z)"
    "  {rest} }}"
)
FLOATS = ("float", "y = DequantizeLinear (q, s, z)")
MOVED = ("float", "d = DequantizeLinear (q, s, z)  t = Transpose (d)  y = Transpose (t)")
CODES = ("uint8", "y = Identity (q)")


@pytest.mark.parametrize(
    ("form", "step"), [(FLOATS, 0.125), (MOVED, 0.125), (CODES, 1.0)], ids=["qdq", "moved", "codes"]
)
def test_the_limit_counts_steps_of_quantization(form: tuple[str, str], step: float) -> None:
    def graph(shift: float) -> onnx_ir.Model:
        return text_model(QDQ.format(kind=form[0], rest=form[1], shift=float(shift)))

    steps = Steps.of(graph(0))
    assert steps.scales == {"y": step}
    for moved, ok in ((0, True), (1, True), (COUNT, True), (COUNT + 2, False)):
        check = check_outputs(graph(0), graph(0.125 * moved))
        assert check.ok == ok, moved
        assert any("quantization steps" in note for note in check.notes)


# how far results are off (as written, optimized), the level that a note then speaks of
AT_ONE_LEVEL = [
    ((0, 99), "other integer kernels, change it by 99"),
    ((99, 0), "ties round otherwise and change it by 99"),
    ((1e-3, 99), None),
    ((99, 1e-3), None),
    ((99, 99), None),
    ((np.nan, 99), None),
    ((99, np.nan), None),
]


@pytest.mark.parametrize(("off", "note"), AT_ONE_LEVEL)
def test_equal_bits_at_one_level_are_right_whatever_kernels_the_other_chooses(
    off: tuple[float, float], note: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box that falls out by one step of quantization is another box, far from it."""
    honest = check_module._answers

    def moved(*arguments: Any, as_written: bool = False) -> list[list[Any]]:
        found = honest(*arguments, as_written=as_written)
        return [[y + np.float32(off[not as_written]) for y in ys] for ys in found]

    monkeypatch.setattr(check_module, "_answers", moved)
    model = text_model(QDQ.format(kind="float", rest=FLOATS[1], shift=0.0))
    check = check_outputs(model, model)
    assert check.ok == (note is not None)
    assert check.ok == any(note is not None and note in said for said in check.notes)
    plain = text_model("g (float[N,4] x) => (float[N,4] y) { y = Neg (x) }")
    assert not check_outputs(plain, plain).ok  # without quantization nothing excuses a level


def test_an_output_without_a_scale_takes_a_part_of_its_range() -> None:
    model = text_model(QDQ.format(kind="float", rest="d = DequantizeLinear (q, s, z)  y = Exp (d)",
                                  shift=0.0))  # fmt: skip
    steps = Steps.of(model)
    assert steps.limit("y", np.array([0.0, 255.0], np.float32)) == COUNT
    assert steps.limit("y", np.array([3], np.int64)) == 0
    assert "1/255 of the range" in str(steps)


def test_quantized_weights_alone_are_no_steps() -> None:
    model = text_model(
        "g (float[N,2] x) => (float[N,2] y) <int8[2,2] w = {1,2,3,4}> {"
        "  s = Constant <value = float {0.5}> ()  d = DequantizeLinear (w, s)  y = MatMul (x, d) }"
    )
    assert Steps.of(model) is None


@pytest.mark.parametrize("level", [None, 0, 4])
def test_products_of_four_bits_that_round_their_input_count_its_steps(level: int | None) -> None:
    rng = np.random.default_rng(0)
    weights = {"q": rng.integers(0, 256, (8, 2, 16)).astype(np.uint8), "s": np.ones(16, "f")}
    more = "" if level is None else f", accuracy_level = {level}"
    text = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[N,64] x) => (float[N,8] y) {{ y = com.microsoft.MatMulNBits
        <K = 64, N = 8, bits = 4, block_size = 32{more}> (x, q, s) }}"""
    model = to_proto(with_weights(text_model(text), weights))
    assert (Steps.of(load(model)) is None) == (level != 4)
    assert check_outputs(model, to_proto(inline(load(model)))).ok


def test_tolerances_given_are_all_that_counts() -> None:
    model = text_model(QDQ.format(kind=FLOATS[0], rest=FLOATS[1], shift=0.0))
    other = text_model(QDQ.format(kind=FLOATS[0], rest=FLOATS[1], shift=0.125))
    assert check_outputs(model, other).ok
    assert not check_outputs(model, other, Request(rtol=0, atol=1e-3)).ok


# ---- bfloat16 --------------------------------------------------------------------------------

BF16 = (
    "g (bfloat16[N,4] x, int64[N] i) => (bfloat16[N,4] y, int64[N] j)"
    "<float[4,4] v = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}> { w = Cast <to = 16> (v)"
    "  h = MatMul (x, w)  f = Cast <to = 1> (h)  r = Relu (f)  b = Cast <to = 16> (r)"
    "  y = Add (b, x)  j = Identity (i) }"
)


def test_bfloat16_graphs_run_in_float32_between_ends_of_their_own() -> None:
    session = ort.session(text_model(BF16))
    assert isinstance(session, ort.Widened)
    assert [a.type for a in session.get_inputs()] == ["tensor(bfloat16)", "tensor(int64)"]
    x = np.array([[1, -2, 3, 0.5]], onnx_ir.DataType.BFLOAT16.numpy())
    y, j = ort.run(session, {"x": x, "i": np.array([7])})
    assert y.dtype == x.dtype
    w = np.arange(16) % 8 + 1
    right = np.maximum(x.astype(np.float32) @ w.reshape(4, 4), 0) + x.astype(np.float32)
    np.testing.assert_array_equal(y, right.astype(x.dtype))
    assert j.tolist() == [7]
    check = check_outputs(text_model(BF16), text_model(BF16))
    assert check.ok
    assert ort.Widened.note in check.notes
    with pytest.warns(UserWarning, match="bfloat16"):
        own = InferenceSession(text_model(BF16))
    np.testing.assert_array_equal(own.run(["y"], {"x": x, "i": np.array([7])})[0], y)


@pytest.mark.parametrize("kind", ["float32", "V2"])
def test_bfloat16_is_read_from_a_file_that_has_no_such_type(tmp_path: Path, kind: str) -> None:
    x = np.array([[1, -2, 3, 0.5]], onnx_ir.DataType.BFLOAT16.numpy())
    np.savez(tmp_path / "x.npz", x=x.astype(kind) if kind == "float32" else x, i=np.array([7]))
    found = read_feeds(tmp_path / "x.npz", text_model(BF16))["x"]
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x)


# ---- options ---------------------------------------------------------------------------------

SUM = (
    "g (float[B,past] p, float[B,step] s, float[B,total] m) => (float[B,total] y)"
    " { c = Concat <axis = 1> (p, s)  y = Add (c, m) }"
)


@pytest.mark.parametrize("command", ["optimize", "run", "validate", "bench", "gradient"])
def test_sizes_are_given_by_symbol_shape_or_file(cli: Cli, tmp_path: Path, command: str) -> None:
    path = tmp_path / "m.onnx"
    save(text_model(SUM), path)
    more = {"bench": ["--repeat", 1], "gradient": ["--check", "--wrt", "p"]}.get(command, [])
    if command in ("optimize", "gradient"):
        more = [*more, "-o", tmp_path / "o.onnx"]
    for given in (["--dim", "past=9", "step=2"], ["--input-shapes", "p:-1,9", "s:-1,2"]):
        done = cli.done(command, path, *more, *given)
        if command not in ("gradient", "optimize"):
            batch = 3 if command == "bench" else 2  # it times the last feed
            assert f"p [{batch}, 9], s [{batch}, 2], m [{batch}, 11]" in done
    arrays = {"p": np.ones((1, 5)), "s": np.ones((1, 3)), "m": np.ones((1, 8))}
    arrays |= {"y.grad": np.ones((1, 8))}
    np.savez(tmp_path / "in.npz", **{k: a.astype(np.float32) for k, a in arrays.items()})
    cli.done(command, path, *more, "--inputs", tmp_path / "in.npz")
    err = cli.fails(2, command, path, *more, "--dim", "nothing=3")
    assert "no input has a size named 'nothing'" in err
    assert "past" in err
    assert cli(command, path, *more, "--dim", "past").code == 2


def test_a_gradient_that_onnxruntime_does_not_load_is_not_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "m.onnx", tmp_path / "o.onnx"
    save(text_model(SUM), path)
    monkeypatch.setattr("onnx_fuse.importer.save.save", lambda model, to: to.write_bytes(forged()))
    assert "its gradient: onnxruntime" in cli.fails(1, "gradient", path, "-o", out, "--wrt", "p")
    assert not out.exists()


def forged() -> bytes:
    """A model that sums booleans."""
    proto = parsed("g (bool[2] x) => (bool y) { y = ReduceSum <keepdims = 0> (x) }")
    return bytes(proto.SerializeToString())


def test_a_written_gradient_that_is_wrong_fails_its_check() -> None:
    model = text_model(
        "g (float[N,3] x) => (float[N,2] y) <float[3,2] w = {1,2,3,4,5,6}>"
        " { h = MatMul (x, w)  y = Tanh (h) }"
    )
    written = autodiff.gradient(model)
    assert check_written(written).ok
    with_loss = check_written(autodiff.gradient(model, loss="mse"))
    assert with_loss.ok
    assert [e.tensor for e in with_loss.errors] == ["w"]
    [grad] = [v for v in written.graph.outputs if v.name == "w.grad"]
    twice = onnx_ir.node("Add", [grad, grad])
    written.graph.append(twice)
    grad.name, twice.outputs[0].name = "once", "w.grad"
    twice.outputs[0].type, twice.outputs[0].shape = grad.type, grad.shape
    written.graph.outputs[list(written.graph.outputs).index(grad)] = twice.outputs[0]
    check = check_written(written)
    assert not check.ok
    assert check.failed[0].tensor == "w"


def test_a_gradient_of_an_output_that_stands_twice_is_checked() -> None:
    model = text_model(
        "g (float[N,3] x) => (float[N,2] y, float[N,2] y) <float[3,2] w = {1,2,3,4,5,6}>"
        " { y = MatMul (x, w) }"
    )
    for check in (check_gradients(model), check_written(autodiff.gradient(model))):
        assert check.ok
        assert [e.tensor for e in check.errors] == ["w"]


def test_a_weight_and_an_input_that_are_outputs_are_given_a_gradient_and_have_one() -> None:
    model = text_model(
        "g (float[2,3] x, int64[2] n) => (float[2,2] y, float[3,2] w, float[2,3] x, int64[2] n)"
        " <float[3,2] w = {1,2,3,4,5,6}> { y = MatMul (x, w) }"
    )
    for check in (
        check_gradients(model),
        check_written(autodiff.gradient(model, wrt=["w", "x"])),
        check_written(autodiff.gradient(model, loss="mse")),
    ):
        assert check.ok
        assert "w" in [e.tensor for e in check.errors]


def test_a_cotangent_has_the_shape_of_its_output() -> None:
    """onnxruntime broadcasts one that is smaller, and the slopes would be of other losses."""
    text = """g (float[N,4] x, float[4] w) => (float[M,4] y) <int64[1] last = {-3},
      int64[1] end = {9}, int64[1] axis = {0}> { k = Slice (x, last, end, axis) y = Mul (k, w) }"""
    written = autodiff.gradient(text_model(text), wrt=["w"])
    check = check_written(written)
    assert (check.ok, check.notes) == (True, [])  # no size was tried in vain
    feeds = {"x": np.ones((5, 4), "f"), "w": np.ones(4, "f"), "y.grad": np.ones((1, 4), "f")}
    with pytest.raises(ModelError, match=r"of output 'y' has shape \[1, 4\], the output \[3, 4\]"):
        check_written(written, Request(feeds=[feeds]))


def test_a_gradient_whose_terms_cancel_may_lose_more_digits() -> None:
    text = """g (float[N,4] a, float[N,4] b, float[4] w) => (float[N,4] y)
      { p = Mul (a, w)  q = Mul (b, w)  y = Sub (p, q) }"""
    a = 1e3 + np.random.default_rng(0).standard_normal((3, 4)).astype("f") / 100
    feeds = {"a": a, "b": np.full((3, 4), 1e3, "f"), "w": np.ones(4, "f")}
    written = autodiff.gradient(text_model(text), wrt=["w"])
    check = check_written(written, Request(feeds=[feeds | {"y.grad": np.ones((3, 4), "f")}]))
    assert check.ok
    assert check.errors[0].limit > 1e-5  # 1e-4 of the gradient would be less


def test_integers_that_scales_move_do_not_jump_between_two_losses() -> None:
    """Steps of a difference move some of many values over the edge of a quantization step."""
    text = """g (float[N,32768] x, float[32768] w, float v) => (float y)
      <uint8[8,8] k = {%s}, float s = {0.1}, uint8 z = {3}, int64[2] rows = {-1,8}> {
        h = Mul (x, w)  q, a, b = DynamicQuantizeLinear (h)  r = Reshape (q, rows)
        i = MatMulInteger (r, k, b, z)  f = Cast <to = 1> (i)  t = Mul (s, a)  p = Mul (f, t)
        u = QuantizeLinear (p, s, z)  d = Cast <to = 1> (u)  e = Sin (p)
        sum = Add (d, e)  m = Mul (sum, v)  y = ReduceSum (m) }"""
    model = text_model(text % ",".join(str(i % 7) for i in range(64)))
    check = check_written(autodiff.gradient(model, wrt=["w"]))
    assert check.ok, check.failed
    assert abs(check.errors[0].slope) > 0.1


def test_no_slope_is_compared_with_what_passes_a_rounding_straight_through() -> None:
    model = text_model("""g (float[N,4] x) => (float[N,4] y)
      <float[4] w = {1,2,3,4}, float[4] b = {1,2,3,4}, float s = {0.1}, int8 z = {0}> {
        p = Mul (x, w)  q = QuantizeLinear (p, s, z)  t = Transpose <perm = [1,0]> (q)
        d = DequantizeLinear (t, s, z)  u = Transpose <perm = [1,0]> (d)  y = Mul (u, b) }""")
    written = autodiff.gradient(model, wrt=["w", "b"])
    for check in (check_written(written), compare_gradients(model, Request())):
        assert check.ok, check.failed
        assert [error.tensor for error in check.errors] == ["b"]
        assert "1 of 2 gradients pass quantization straight through" in " ".join(check.notes)


def test_weights_at_a_kink_are_compared_beside_it() -> None:
    """Behind weak layers a bias of 0 puts the kink of a Relu where any step crosses it."""
    text = """g (float[N,4] x) => (float[N,4] y) <float[4,4] w = {1e-20,-2e-20,3e-20,1e-20,
      2e-20,1e-20,-1e-20,3e-20,1e-20,4e-20,2e-20,-2e-20,3e-20,1e-20,-1e-20,2e-20},
      float[4] b = {0,0,0,0}> { h = MatMul (x, w)  z = Add (h, b)  y = Relu (z) }"""
    check = check_written(autodiff.gradient(text_model(text), wrt=["w", "b"]))
    assert check.ok
    assert any("has a kink at" in note for note in check.notes)


@pytest.mark.parametrize("held", ["initializer", "node"])
def test_a_written_gradient_is_right_where_a_mask_hides_a_whole_row(held: str) -> None:
    """In any float the lowest number absorbs the scores: their slope is 0, not their gradient."""
    mask = "float[2,1] {0, -3.4e38}"
    inside = f"mask = Constant <value = {mask}> ()" if held == "node" else ""
    outside = f", {mask.replace('{', 'mask = {')}" if held == "initializer" else ""
    text = f"""g (float[2,4] x) => (float[2,4] y)
      <float[4,4] w = {{1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}}{outside}>
      {{ {inside} h = MatMul (x, w) z = Add (h, mask) y = Softmax (z) }}"""
    check = check_written(autodiff.gradient(text_model(text), wrt=["w"]))
    assert check.ok
    assert any("hide everything" in note for note in check.notes)


def test_sizes_named_as_an_outputs_are_its() -> None:
    model = text_model(
        "g (float[N,4] x, float[M,4] dy) => (float[M,4] y, float[M,4] z)"
        " { y = Concat <axis = 0> (x, x)  z = Exp (dy) }"
    )
    assert next(iter(choices(model))).shapes == {"x": [2, 4], "dy": [4, 4]}


def test_a_norm_with_an_unknown_type_of_statistics_has_a_tolerance() -> None:
    model = text_model(
        "g (float[N,2] x, float[2] s) => (float[N,2] y)"
        " { y = LayerNormalization <stash_type = 99> (x, s) }"
    )
    assert tolerance_of(model).rtol == 5e-5


def test_large_models_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = check_outputs(ENCODER, load(ENCODER)).to_dict()
    monkeypatch.setattr(check_module, "_LARGE", 0)
    assert check_outputs(ENCODER, load(ENCODER)).to_dict() == one_by_one
    monkeypatch.setattr(check_module, "_answers", lambda *_, **__: os._exit(1))
    with pytest.raises(ModelError, match="the fused model: onnxruntime crashed on this graph"):
        check_outputs(ENCODER, load(ENCODER))


def test_an_original_that_dies_of_unequal_sizes_is_compared_on_equal_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_module, "_answer", lambda *_: os.abort())
    check = check_outputs(ENCODER, load(ENCODER))
    assert check.ok
    assert len(check.feeds) == 5  # two sizes, a hidden row, a batch and a sequence of 1
    assert any("crashes where a size is 0 or sizes of one name differ" in n for n in check.notes)


SPECIAL = """g (float[N,4] x) => (float[{rows},4] y) <int64 n = {{{n}}}, int64[1] none = {{0}}> {{
  rows = Shape <start = 0, end = 1> (x)  e = Equal (rows, n)  more = Cast <to = 7> (e)
  pads = Concat <axis = 0> (none, none, more, none)  y = Pad (x, pads) }}"""


@pytest.mark.parametrize(
    ("fused", "where"),
    [
        (SPECIAL.format(n=1, rows="M"), "N is 1"),
        (SPECIAL.format(n=0, rows="M"), "N is 0"),
        (
            "g (float[N,4] x) => (float[M,4] y) <float zero = {0}> "
            "{ n = IsNaN (x)  y = Where (n, zero, x) }",
            "the last row of floats is NaN",
        ),
    ],
    ids=["one", "none", "nan"],
)
def test_a_difference_at_a_rare_size_or_number_is_one(fused: str, where: str) -> None:
    model = text_model("g (float[N,4] x) => (float[N,4] y) { y = Identity (x) }")
    check = check_outputs(model, text_model(fused))
    assert [check.cases.get(i + 1) for i, d in enumerate(check.differences) if not d.ok] == [where]


INSTANCE_NORM = """g (float[2,4,S] x) => (float[2,4,S] y) {{
  one = Constant <value_floats = [1.0, 1.0, 1.0, 1.0]> ()  {given}
  y = InstanceNormalization <epsilon = 0.001> ({read}, one, one) }}"""


def test_a_crash_of_onnxruntime_where_a_size_is_0_is_said() -> None:
    """Its InstanceNormalization (1.32) dies of an empty tensor that another node made."""
    model = text_model(INSTANCE_NORM.format(given="", read="x"))
    copied = text_model(INSTANCE_NORM.format(given="same = Cast <to = 1> (x)", read="same"))
    check = check_outputs(model, copied)
    assert check.ok
    assert any("crashes on the fused model where a size is 0" in n for n in check.notes)
    with_optimizations = text_model(INSTANCE_NORM.format(given="a = Abs (x)", read="a"))
    with pytest.raises(ModelError, match="where a size is 0: onnxruntime crashed"):
        check_outputs(model, with_optimizations)


def test_inputs_on_which_the_original_is_not_steady_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = text_model("agraph (float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
    other = text_model("agraph (float[N,4] x) => (float[N,4] y) { y = Abs (x) }")
    count = len(check_outputs(model, model).feeds)
    monkeypatch.setattr(check_module, "_unsteady", lambda *_: {1})
    found = check_outputs(model, other)
    assert not found.ok  # what is left differs still
    assert len(found.feeds) == count - 1
    assert any("inputs 2 left out" in note for note in found.notes)
    assert len(check_outputs(model, model).feeds) == count  # nothing differs: nobody asks


def test_an_answer_is_steady_where_the_original_gives_it_again() -> None:
    model = text_model("agraph (float[2,4] x) => (float[2,4] y) { y = Relu (x) }")
    x = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
    known = {0: [np.maximum(x, 0)], 1: [np.maximum(x, 0) + 1]}
    args = (model, [{"x": x}, {"x": x}], known, ["y"], tolerance_of(model))
    assert check_module._unsteady(*args) == {1}


RESIZED = """g (float[1,1,20,30] x) => (float[] y) <float[4] sc = {1,1,1.3,1.3}>
{ r = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (x, "", sc)
  y = Neg (r) }"""


def test_inferred_sizes_are_compared_with_actual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model(RESIZED)
    assert check_outputs(model, model).ok
    monkeypatch.setattr(shapes, "infer_actual", lambda proto, infer: infer(proto))  # ONNX's alone
    check = check_outputs(text_model(RESIZED), model)
    assert not check.ok
    assert all(d.ok for d in check.differences)
    first, *others = check.sizes
    assert "(Resize): 'r' has size 26 along axis 2 on onnxruntime, inference says 25" in first
    assert len(others) == 1  # the Neg behind it
    assert check.to_dict()["sizes"] == check.sizes
    assert f"  wrong size: {first}" in report.check_lines(check)
    gradients = check_gradients(text_model(WEIGHED))
    assert not gradients.ok
    assert all(e.ok for e in gradients.errors)
    assert any("(Resize): 'r' has size 26 along axis 2" in each for each in gradients.sizes)
    assert any("  wrong size:" in line for line in report.gradient_lines(gradients))


WEIGHED = """g (float[1,1,20,30] x) => (float[] y) <float[4] sc = {1,1,1.3,1.3}, float[2] w = {1,2}>
{ r = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (x, "", sc)
  m = ReduceMean (r)  y = Mul (m, w) }"""


@pytest.mark.parametrize("equation", ["b...,b...->...", "b...,b...->...b", "...,...", "...b,...b"])
def test_the_axes_of_an_ellipsis_broadcast(equation: str) -> None:
    model = text_model(f"""g (float[B,N] x, float[C,M] z) => (float[] y)
    {{ e = Einsum <equation = "{equation}"> (x, z)  y = Relu (e) }}""")
    ones = {n: np.ones((2, 2), np.float32) for n in "xz"}
    for name, axis in product("xz", (0, 1)):
        feeds = {**ones, name: ones[name].take([0], axis)}
        assert inferred.wrong_sizes(model, [feeds], []) == []


STEPS = """g (int64 n, float[N] x) => (float[K,N] y)
{ go = Constant <value = bool {1}> ()
  h, steps = Loop (n, go, x) <body = b (int64 i, bool run, float[N] a) =>
    (bool on, float[N] c, float[N] d) { on = Identity (run)  c = Neg (a)  d = Identity (c) }>
  y = Relu (steps) }"""


def test_results_of_a_loop_without_a_step_have_sizes_of_0() -> None:
    model = text_model(STEPS)
    for steps in (0, 2):
        feeds = {"n": np.array(steps), "x": np.ones(3, np.float32)}
        assert inferred.wrong_sizes(model, [feeds], []) == []


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (["N", "M"], None),
        (["N", "N"], "has size 4 along axis 1 on onnxruntime, inference says 3 (N)"),
        (["other", "other"], "has size 4 along axis 1 on onnxruntime, inference says 3 (other)"),
        (["N"], "has 2 axes on onnxruntime, inference says 1"),
    ],
)
def test_a_symbol_has_one_size_in_a_run(monkeypatch, said, sentence) -> None:
    def infer(model: onnx_ir.Model) -> None:
        for node in model.graph:
            node.outputs[0].shape = onnx_ir.Shape(said)

    monkeypatch.setattr(inferred, "infer_shapes", infer)
    model = text_model("g (float[N,M] x, float[N,4] z) => (float[N,M] y) { y = Neg (x) }")
    feeds = {"x": np.zeros((3, 4), np.float32), "z": np.zeros((3, 4), np.float32)}
    notes: list[str] = []
    found = inferred.wrong_sizes(model, [feeds], notes)
    assert [sentence in each for each in found] == ([True] if sentence else [])
    feeds["z"] = feeds["z"][:2]  # a symbol that inputs contradict says nothing
    found = inferred.wrong_sizes(model, [feeds], notes)
    assert [sentence in each for each in found] == (
        [True] if sentence and said != ["N", "N"] else []
    )
    assert notes == []
