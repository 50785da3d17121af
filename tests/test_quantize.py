"""`quantize`: what stays float and why, errors against the float model, and files that run."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowering import interpreted
from support import Cli, answers, stock, sums_saturate

from onnx_fuse import Trainer, load, optim, quantize
from onnx_fuse.errors import CheckFailed, DataError, ModelError, UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import add_initializer, text_model
from onnx_fuse.quantization import calibration, place, quantizer, rounding
from onnx_fuse.validation.quantized import Steps

IMAGES = """<ir_version: 9, opset_import: ["" : 17]>
  g (float[N,3,8,8] x) => (float[N,5] y) {
  a = Conv <pads = [1,1,1,1]> (x, w0) r = Relu (a) p = MaxPool <kernel_shape = [2,2]> (r)
  b = Conv <pads = [1,1,1,1]> (p, w1) n = BatchNormalization (b, gamma, beta, mean, var)
  c = Relu (n) d = Add (c, p) e = Conv (d, w2) f = Relu (e)
  h = GlobalAveragePool (f) i = Flatten (h) y = Gemm <transB = 1> (i, w3, b3) }"""
IMAGE_SIZES = {
    "w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "w2": (16, 8, 1, 1), "w3": (5, 16), "b3": (5,),
    "gamma": (8,), "beta": (8,), "mean": (8,), "var": (8,),
}  # fmt: skip
TEXT = """<ir_version: 9, opset_import: ["" : 17]> g (int64[N,S] ids) => (float[N,S,40] y) {
  x = Gather (table, ids) q = MatMul (x, wq) k = MatMul (x, wk)
  kt = Transpose <perm = [0,2,1]> (k) s = MatMul (q, kt) t = Softmax (s) v = MatMul (t, x)
  a = Add (x, v) n = LayerNormalization (a, gamma, beta)
  u = MatMul (n, w1) f = Relu (u) o = MatMul (f, w2) z = Add (o, a) y = MatMul (z, head) }"""
TEXT_SIZES = {
    "table": (40, 16), "wq": (16, 16), "wk": (16, 16), "w1": (16, 48), "w2": (48, 16),
    "head": (16, 40), "gamma": (16,), "beta": (16,),
}  # fmt: skip
RNG = np.random.default_rng(0)
DATA = {
    "images": {"x": RNG.standard_normal((40, 3, 8, 8)).astype(np.float32)},
    "text": {"ids": RNG.integers(0, 40, (24, 7))},
}


def net(name: str) -> ir.Model:
    text, sizes = {"images": (IMAGES, IMAGE_SIZES), "text": (TEXT, TEXT_SIZES)}[name]
    rng, graph = np.random.default_rng(1), onnx.parser.parse_model(text)
    for weight, shape in sizes.items():
        array = rng.standard_normal(shape) * (1 / np.prod(shape[1:] or 1)) ** 0.5
        array = np.abs(array) + 0.5 if weight in ("gamma", "var") else array
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(array), weight))
    return ir.from_proto(graph)


def chosen(result) -> list[str]:
    return [layer.name for layer in result.layers if layer.to != "float"]


def run_everywhere(result, feeds) -> np.ndarray:
    """The output by onnxruntime as written; its optimized run and the program's agree to steps."""
    model = result.model
    expected = answers(stock(model), feeds)
    optimized = answers(stock(model, optimized=True), feeds)
    program = interpreted(load(model), feeds)
    steps = Steps.of(model)
    for name, y in expected.items():
        limit = 0.02 * np.abs(y).max() if steps is None else steps.limit(name, y)
        if not sums_saturate():  # whose optimized run computes in integers
            np.testing.assert_allclose(optimized[name], y, rtol=0, atol=limit)
        np.testing.assert_allclose(program[name], y, rtol=0, atol=limit)
    return expected["y"]


# the model, the type, and the largest error of an output that it may have
ROWS = [
    ("images", "int8", 0.02), ("images", "fp8", 0.05), ("images", "mixed", 0.01),
    ("text", "int8", 0.03), ("text", "fp8", 0.1), ("text", "int4-weights", 0.2),
    ("text", "mixed", 0.01),
]  # fmt: skip


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("name", "to", "limit"), ROWS)
def test_a_quantized_file_runs(name: str, to: str, limit: float, ends: bool) -> None:
    model = net(name)
    result = quantize(model, to=to, calibrate=DATA[name], ends=ends)
    feeds = {key: array[:5] for key, array in DATA[name].items()}
    expected = answers(stock(model), feeds)["y"]
    found = run_everywhere(result, feeds)
    assert np.linalg.norm(found - expected) < 1.5 * limit * np.linalg.norm(expected)
    assert 0 < result.error < limit
    assert result.bytes[1] < result.bytes[0]
    for layer in result.layers:
        assert layer.why
        assert (layer.error is None) == (layer.to == "float")
    onnx.checker.check_model(onnx.load_from_string(ir.to_proto(result.model).SerializeToString()))


def test_the_ends_and_what_has_no_weight_stay_float() -> None:
    result = quantize(net("images"), calibrate=DATA["images"])
    assert chosen(result) == ["Conv_n", "Conv_e"]
    assert [layer.why[:12] for layer in result.layers if layer.to == "float"] == [
        "a first laye", "a last layer"
    ]  # fmt: skip
    assert len(chosen(quantize(net("images"), calibrate=DATA["images"], ends=True))) == 4
    result = quantize(net("text"), calibrate=DATA["text"], skip=["MatMul_o"])
    assert chosen(result) == ["MatMul_q", "MatMul_k", "MatMul_u"]
    reasons = {layer.name: layer.why for layer in result.layers}
    assert reasons["MatMul_s"] == "it multiplies two computed tensors"
    assert reasons["MatMul_o"] == "it was named to stay float"


def test_mixed_gives_back_what_costs_most() -> None:
    whole = quantize(net("text"), calibrate=DATA["text"], ends=True)
    limit = whole.error / 2
    result = quantize(net("text"), to="mixed", calibrate=DATA["text"], ends=True, max_error=limit)
    assert result.error <= limit
    costs = {layer.name: layer.cost for layer in result.layers if layer.cost is not None}
    kept = chosen(result)
    assert 0 < len(kept) < len(costs)
    rest = set(costs) - set(kept)
    assert max(costs[name] for name in kept) <= min(costs[name] for name in rest)
    with pytest.raises(CheckFailed, match="more than 1e-05"):
        quantize(net("text"), calibrate=DATA["text"], max_error=1e-5)
    everything = quantize(net("text"), to="mixed", calibrate=DATA["text"], max_error=1e-6)
    assert chosen(everything) == []
    assert everything.error <= 1e-6


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_ranges_leave_outliers_out(
    method: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last batch has fewer rows, which onnxruntime's histograms take in a call of its own."""
    result = quantize(net("images"), to=to, calibrate=DATA["images"], method=method, ends=True)
    assert 0 < result.error < 0.2
    run_everywhere(result, {"x": DATA["images"]["x"][:3]})
    assert capsys.readouterr().out == ""  # onnxruntime tells how far it is


# what onnxruntime (1.32) takes for the whole file, or what a file shares with its inputs and ends
SHAPES = {
    # a Relu before a rounding to float8 is dropped, and a Clip fails
    "Relu, moved": """
      a = Conv (x, f) r = Relu (a) p = MaxPool <kernel_shape = [2,2]> (r)
      t = Transpose <perm = [0,1,3,2]> (p) y = Conv <strides = [2,2]> (t, f)""",
    "Clip": "a = Conv (x, f) r = Clip (a, low, high) y = Conv (r, f)",
    # a bias becomes an integer of steps that are too small for it
    "a large bias": "a = Conv (x, tiny, large) y = Conv (a, f)",
    # products of several matrices, by channel, do not run in int8
    "matrices": "a = Conv (x, f) y = MatMul (a, several)",
    "one weight": "a = Conv (x, f) b = Conv (a, f) y = Conv (b, f)",
    "a weight that is an output": "a = Conv (x, f) y = Conv (a, f) z = Identity (f)",
    "depthwise": "a = Conv <group = 3> (x, deep) r = Relu (a) y = Conv (r, f)",
    "channels of zeros": "a = Conv (x, zeros) y = Conv (a, f)",
    "transposed": "a = ConvTranspose <strides = [2,2]> (x, f) y = Conv (a, f)",
}


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_onnxruntime_makes_of_a_file_is_the_file(name: str, to: str) -> None:
    model = text_model(f"""<ir_version: 9, opset_import: ["" : 17]> g (float[N,3,8,8] x)
      => (float[N,3,A,B] y) <float low = {{0}}, float high = {{6}}> {{ {SHAPES[name]} }}""")
    rng = np.random.default_rng(3)
    arrays = {
        **{"f": rng.standard_normal((3, 3, 1, 1)), "deep": rng.standard_normal((3, 1, 3, 3))},
        **{"tiny": rng.standard_normal((3, 3, 1, 1)) * 1e-7, "large": np.full(3, 1e3)},
        **{"several": rng.standard_normal((3, 8, 8)), "zeros": np.zeros((3, 3, 1, 1))},
    }
    for key, array in arrays.items():
        weight = add_initializer(model.graph, f"{key}.", np.float32(array))
        for node in model.graph:
            for i, value in enumerate(node.inputs):
                if value is not None and value.name == key:
                    node.replace_input_with(i, weight)
    if name == "a weight that is an output":
        model.graph.outputs.append(model.graph.initializers["f."])
    result = quantize(model, to=to, calibrate=DATA["images"], ends=True)
    run_everywhere(result, {"x": DATA["images"]["x"][:3]})


@pytest.mark.parametrize(("seconds", "warns"), [((1e-3, 2e-3), True), ((1e-3, 1.1e-3), False)])
def test_a_file_that_is_slower_than_floats_is_said_to_be(
    seconds: tuple[float, float], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(seconds)
    monkeypatch.setattr(quantizer._Work, "_seconds", lambda *_: next(times))
    notes = quantize(net("images"), calibrate=DATA["images"]).notes
    assert any("2.0 times as long as the float" in note for note in notes) == warns


def test_without_data_the_ranges_are_of_random_inputs() -> None:
    result = quantize(net("images"))
    assert any("no calibration data was given" in note for note in result.notes)
    notes = quantize(net("text"), to="int4-weights").notes
    assert not any("calibration" in note for note in notes)


def test_graphs_that_need_a_new_opset_have_uint8_activations() -> None:
    """onnxruntime breaks int8 activations from opset 21 on."""
    model = net("text")
    proto = ir.to_proto(model)
    proto.opset_import[0].version, proto.ir_version = 23, 10
    proto.graph.node.insert(13, onnx.helper.make_node("RMSNormalization", ["z", "gamma"], ["zn"]))
    proto.graph.node[-1].input[0] = "zn"
    assert proto.graph.node[-1].op_type == "MatMul"
    result = quantize(ir.from_proto(proto), calibrate=DATA["text"])
    assert result.model.graph.opset_imports[""] == 23
    zeros = [n.inputs[2] for n in result.model.graph if n.op_type == "QuantizeLinear"]
    assert {zero.dtype for zero in zeros} == {ir.DataType.UINT8}
    run_everywhere(result, {"ids": DATA["text"]["ids"][:4]})


def test_a_quantized_file_trains_and_stays_one(tmp_path: Path) -> None:
    result = quantize(net("images"), calibrate=DATA["images"], ends=True)
    trainer = Trainer(result.model, loss="mse", optimizer=optim.SGD(lr=0.05))
    feeds = {"x": DATA["images"]["x"], "labels": np.zeros((40, 5), np.float32)}
    losses = [trainer.step(feeds) for _ in range(10)]
    assert losses[-1] < losses[0] / 1.2
    trainer.save(tmp_path / "tuned.onnx")
    saved = ir.load(tmp_path / "tuned.onnx")
    assert [n.op_type for n in saved.graph] == [n.op_type for n in result.model.graph]
    found = answers(stock(saved), {"x": feeds["x"]})["y"]
    np.testing.assert_allclose(found, trainer.evaluate(feeds).outputs["y"], atol=0.02)


WRONG = {
    "type": ({"to": "int7"}, UsageError, "unknown type 'int7'"),
    "method": ({"method": "mean"}, UsageError, "unknown calibration method 'mean'"),
    "layer": ({"skip": ["conv"]}, UsageError, "unknown layer 'conv'"),
    "limit": ({"max_error": 0.0}, UsageError, "must be above 0"),
    "no layer": (
        {"to": "int4-weights"}, ModelError,
        r"quantized to int4-weights: weights of 4 bits are matrices .* after it \(--ends\)$",
    ),
    "data of another model": ({"calibrate": DATA["text"]}, ModelError, "no array for input 'x'"),
    "a metric without labels": ({"metric": "f1"}, UsageError, "f1 needs labels that are class"),
    "labels of another shape": (
        {"metric": "accuracy", "data": DATA["images"] | {"labels": np.zeros((40, 2), int)}},
        UsageError, r"'labels' has the shape \[16, 2\] of int64: the classes of 'y' are",
    ),
    "a label that is no class": (
        {"metric": "accuracy", "data": DATA["images"] | {"labels": np.full(40, 5)}},
        DataError, "'labels' holds 5 at .*: the model has the classes 0 to 4",
    ),
    "a metric without data": (
        {"metric": "f1", "calibrate": None}, UsageError, "a metric needs data: give rows",
    ),
    "data without a metric": (
        {"data": DATA["images"]}, UsageError, "data for a metric was given, and no metric",
    ),
    "an unknown metric": ({"metric": "acuracy"}, UsageError, "did you mean 'accuracy'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    options, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        quantize(net("images"), **{"calibrate": DATA["images"], **options})


def test_what_is_quantized_stays_as_it_is() -> None:
    """Other layers can be quantized, though not by onnxruntime's quantizer."""
    first = quantize(net("images"), calibrate=DATA["images"])
    again = quantize(
        first.model, to="fp8", calibrate=DATA["images"] | {"labels": np.zeros(40)}, ends=True
    )
    reasons = {layer.name: layer.why for layer in again.layers}
    assert reasons["Conv_n"] == "it is quantized already"
    assert chosen(again) == ["Conv_a", "Gemm_y"]
    run_everywhere(again, {"x": DATA["images"]["x"][:3]})
    with pytest.raises(ModelError, match="quantized already: give the float model"):
        quantize(first.model, calibrate=DATA["images"])


def spoilt(number: float) -> dict[str, np.ndarray]:
    x = DATA["images"]["x"].copy()
    x[3, 0, 0, 0] = number
    return {"x": x}


@pytest.mark.parametrize("to", ["int8", "fp8", "mixed"])
def test_data_that_tells_no_range_is_refused(to: str) -> None:
    for number, message in ((np.nan, "'x' holds NaN"), (np.inf, "'x' is not finite on the cal")):
        with pytest.raises(ModelError, match=message):
            quantize(net("images"), to=to, calibrate=spoilt(number), ends=True)
    with pytest.raises(UsageError, match="the calibration data has no rows"):
        quantize(net("images"), to=to, calibrate={"x": DATA["images"]["x"][:0]})


@pytest.mark.parametrize("to", ["int8", "fp8", "int4-weights", "mixed"])
def test_a_weight_that_is_no_number_is_refused(to: str) -> None:
    model = net("text")
    weight = model.graph.initializers["w1"]
    array = weight.const_value.numpy().copy()
    array[3, 4] = np.nan
    weight.const_value = ir.tensor(array, name="w1")
    with pytest.raises(ModelError, match=r"the weight 'w1' of 'MatMul_u' is not finite: .* \(skip"):
        quantize(model, to=to, calibrate=DATA["text"])
    result = quantize(model, to="int4-weights", calibrate=DATA["text"], skip=["MatMul_u"])
    assert chosen(result) == ["MatMul_q", "MatMul_k", "MatMul_o"]


def sized(batch: int) -> ir.Model:
    model = net("images")
    model.graph.inputs[0].shape = ir.Shape([batch, 3, 8, 8])
    model.graph.outputs[0].shape = ir.Shape([batch, 5])
    return model


def test_a_fixed_batch_is_measured_on_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = [], calibration.ranges
    monkeypatch.setattr(
        calibration, "ranges", lambda model, feeds, *more: seen.append(feeds)
        or original(model, feeds, *more),
    )  # fmt: skip
    quantize(sized(1))
    [batches] = seen
    assert len({feeds["x"].tobytes() for feeds in batches}) == len(batches) == 16
    for data in (None, DATA["images"]):
        with pytest.raises(ModelError, match="input 'x' takes no row, so that no error can be"):
            quantize(sized(0), calibrate=data)


def test_errors_are_of_what_is_finite() -> None:
    """Of 4 bits, which need no range: a row is infinite, or no number, in both models."""
    result = quantize(net("images"), to="int4-weights", calibrate=spoilt(np.inf), ends=True)
    assert 0 < result.error < 0.1


def test_rows_that_fill_no_batch_are_refused() -> None:
    model = net("images")
    model.graph.inputs[0].shape = ir.Shape([3, 3, 8, 8])
    with pytest.raises(UsageError, match="40 rows, and the model takes batches of 3"):
        quantize(model, calibrate=DATA["images"])
    assert quantize(model, calibrate={"x": DATA["images"]["x"][:6]}).error < 0.02


def test_large_channels_of_a_norm_move_into_weights() -> None:
    """SmoothQuant's case: two channels are 40 times the others, and their weights as much less."""
    model = net("text")
    scale = np.full(16, 0.5, np.float32)
    scale[[3, 7]] = 20
    weight = model.graph.initializers["w1"].const_value.numpy() / scale[:, None]
    for name, array in (("gamma", scale), ("w1", weight)):
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    result = quantize(model, calibrate=DATA["text"], ends=True)
    assert result.error < 0.03  # without it 0.11
    assert any("1 norms scale large channels down" in note for note in result.notes)
    run_everywhere(result, DATA["text"])


def named(model: ir.Model) -> ir.Model:
    for node in model.graph:
        node.name = f"{node.op_type}_{node.outputs[0].name}"
    return model


def test_a_norm_that_others_read_too_stays() -> None:
    model = named(net("text"))
    inputs = rounding.observed(model, ["MatMul_u"], [DATA["text"]], grams=False)
    assert rounding.smoothed(model, inputs)[1] == 1
    model.graph.outputs.append(next(n for n in model.graph if n.op_type[0] == "L").outputs[0])
    assert rounding.smoothed(model, inputs)[1] == 0


def test_biases_take_up_what_rounded_weights_add() -> None:
    """The mean of each channel of a layer's result is the float model's again."""
    bias = "float[6] b = {1, 2, 3, 4, 5, 6}"
    for text, name in (
        ("y = Conv <group = 2> (x, w)", "Conv_y"),
        ("y = Conv <group = 2> (x, w, b)", "Conv_y"),
        ("r = Relu (x) f = Flatten (r) y = Gemm <transB = 1> (f, v, b)", "Gemm_y"),
        ("f = Flatten (x) m = MatMul (f, u) y = Add (b, m)", "MatMul_m"),
    ):
        ends = "float[N,6,1,1] y" if name == "Conv_y" else "float[N,6] y"
        model = named(
            text_model(f"""<ir_version: 10, opset_import: ["" : 21]>
          g (float[N,4,1,1] x) => ({ends}) <{bias}> {{ {text} }}""")
        )
        rng = np.random.default_rng(5)
        data = {"x": rng.standard_normal((30, 4, 1, 1)).astype(np.float32) + 1}
        for key, shape in (("w", (6, 2, 1, 1)), ("v", (6, 4)), ("u", (4, 6))):
            weight = add_initializer(model.graph, f"{key}.", np.float32(rng.standard_normal(shape)))
            for node in model.graph:
                if len(node.inputs) > 1 and node.inputs[1].name == key:
                    node.replace_input_with(1, weight)
        inputs = rounding.observed(model, [name], [data], grams=False)
        rounds = place.in_float8 if name == "Conv_y" else place.in_four_bits
        given = SimpleNamespace(range_value=(-1e-3, 1e3))
        rounded = rounds(model, [name], {"x": given} if name == "Conv_y" else {})
        expected = answers(stock(model), data)["y"].mean(0)
        mended = rounds(
            rounding.shifted(model, rounding.shifts(model, rounded, inputs)), [name],
            {"x": given} if name == "Conv_y" else {},
        )  # fmt: skip
        apart = [np.abs(answers(stock(m), data)["y"].mean(0) - expected).max()
                 for m in (rounded, mended)]  # fmt: skip
        assert apart[0] > 1e-3, text
        assert apart[1] < (0.5 * apart[0] if name == "Conv_y" else 1e-5), text


@pytest.mark.parametrize("shape", [(64, 48), (100, 7), (16, 1), (1, 5)])
def test_codes_change_results_least(shape: tuple[int, int]) -> None:
    """Inputs of few directions, as activations are: rounding each weight by itself loses more."""
    rng, k = np.random.default_rng(0), shape[0]
    x = rng.standard_normal((500, 8)) @ rng.standard_normal((8, k))
    x[:, 0] = 0  # a channel that is never used
    weight = rng.standard_normal(shape).astype(np.float32)
    for axis, array in ((0, weight), (1, weight.T)):
        lost = []
        for gram in (None, x.T @ x / len(x)):
            rounded, stored = place._in_blocks(array, axis, gram)
            codes = stored.codes(rounded.astype(np.float32), {})
            assert codes.min() >= -8
            assert codes.max() <= 7
            apart = stored.floats(codes) - array
            lost.append(np.square(x @ (apart if axis == 0 else apart.T)).sum())
        assert lost[1] <= (0.5 if k > 16 else 1) * lost[0]


def labelled(flip: int = 0) -> dict[str, np.ndarray]:
    """The images, with the classes that the float model gives them; `flip` are wrong."""
    labels = answers(stock(net("images")), DATA["images"])["y"].argmax(1)
    labels[:flip] = (labels[:flip] + 1) % 5
    return DATA["images"] | {"labels": labels}


def test_a_metric_is_measured_before_and_after() -> None:
    data = labelled(flip=4)
    result = quantize(net("images"), calibrate=data, metric="accuracy", ends=True)
    assert result.metric is not None
    name, before, after = result.metric
    assert (name, before) == ("accuracy", 0.9)
    logits = answers(stock(result.model), DATA["images"])["y"]
    assert after == np.mean(logits.argmax(1) == data["labels"])
    assert result.loss == max(before - after, 0)
    assert result.to_dict()["metric"] == {"name": name, "before": before, "after": after}
    other = quantize(net("images"), calibrate=DATA["images"], metric="perplexity", data=data)
    assert other.metric is not None
    assert other.loss == max(other.metric[2] - other.metric[1], 0)
    mine = quantize(net("images"), calibrate=data, metric=lambda y, batch: float(y["y"].mean()))
    assert mine.metric is not None


def test_mixed_holds_a_metric() -> None:
    """4 of 40 rows may become wrong, and none; the fewest layers are given back for it."""
    few, none = (
        quantize(net("images"), to="mixed", calibrate=labelled(), ends=True, metric="accuracy",
                 max_error=limit) for limit in (0.1, 1e-9)
    )  # fmt: skip
    assert few.loss <= 0.1
    assert none.loss == 0
    assert len(chosen(none)) <= len(chosen(few))

    def near(outputs: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> float:
        y = answers(stock(net("images")), {"x": batch["x"]})["y"]
        return -float(np.abs(outputs["y"] - y).max())

    with pytest.raises(CheckFailed, match="worse in near than the float model, more than 1e-09"):
        quantize(net("images"), calibrate=labelled(), metric=near, max_error=1e-9)


def test_the_command(tmp_path: Path, cli: Cli) -> None:
    path, data, out, page = (tmp_path / n for n in ("m.onnx", "d.npz", "q.onnx", "r.html"))
    save(net("images"), path)
    np.savez(data, **DATA["images"])
    common = ("quantize", path, "--calibrate", data, "-o", out, "--explain", "--html", page)
    found = cli.report(*common, "--to", "mixed", "--ends", "--max-error", "0.002")
    assert found["error"] <= found["max_error"] == 0.002
    float_layers = [layer for layer in found["layers"] if layer["to"] == "float"]
    assert "Gemm_y" in {layer["name"] for layer in float_layers}
    assert all("that cost most, for an error of at most" in each["why"] for each in float_layers)
    assert "Errors along the graph" in page.read_text()
    assert answers(stock(str(out)), {"x": DATA["images"]["x"]})["y"].shape == (40, 5)
    out.unlink()
    beyond = (*common, "--to", "fp8", "--max-error", "0.001")
    assert "above --max-error 0.001 (nothing was written)" in cli.fails(3, *beyond)
    assert not out.exists()
    cli.fails(3, *beyond, "--keep")
    assert out.exists()
    np.savez(data, **labelled())
    accurate = cli.report(*common, "--metric", "accuracy", "--max-error", "0.5")
    assert accurate["metric"]["before"] == 1
    assert "accuracy" in page.read_text()
    assert "labels" not in str(accurate["notes"])
    wrong = DATA["images"] | {"labels": (labelled()["labels"] + 1) % 5}
    np.savez(data, **wrong)
    assert cli.report(*common, "--data", data, "--metric", "accuracy")["metric"]["before"] == 0


@pytest.mark.parametrize("to", ["int8", "fp8", "int4-weights"])
def test_an_output_may_be_an_input_and_a_matrix_of_integers_stays(to: str) -> None:
    model = text_model(
        """g (float[N,2] x, int32[N,2] i) => (float[N,2] x, float[N,2] y, int32[N,2] j)
        <int32[2,2] w = {1, 2, 3, 4}, float[2,2] u = {0.5, 1, -1, 0.2}>
        { m = Identity (x)  y = MatMul (m, u)  j = MatMul (i, w) }"""
    )
    feeds = {"x": np.ones((3, 2), np.float32), "i": np.ones((3, 2), np.int32)}
    result = quantize(model, to=to, calibrate=feeds, ends=True)
    assert [layer.to for layer in result.layers] == [to, "float"]
    x, _, j = stock(result.model).run(None, feeds)
    assert np.array_equal(x, feeds["x"])
    assert j.tolist() == [[4, 6]] * 3
