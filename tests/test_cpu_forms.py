"""The forms that a CPU's training graph takes: onnxruntime's answers of the graph as it came."""

import numpy as np
import pytest
from support import assert_same, run

from onnx_fuse import autodiff
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.cpu_forms import take_faster_forms

MASK = "g (float[N,6] x, bool[N,6] kept) => (float[N,6] y) { z = Constant <value = float {%s}> () "
TRANSPOSE = (
    "g (float[N,4,%s] x, float[4,5,%s] w) => (float[N,5,%s] y) { y = ConvTranspose <%s> (x, w) }"
)
ROWS = {
    "mask": (MASK % "0" + "y = Where (kept, x, z) }", "If"),
    "1-D": (TRANSPOSE % ("7", "3", "7", "pads = [1, 1]"), "Col2Im"),
    "2-D": (TRANSPOSE % ("3,2", "2,3", "3,3", "pads = [1, 1, 0, 0]"), "Col2Im"),
    "strides": (
        TRANSPOSE % ("3,2", "3,3", "6,7", "strides = [2, 3], pads = [1, 0, 1, 0], "
                     "output_padding = [1, 1]"), "Col2Im"),
    "dilated": (TRANSPOSE % ("2,2", "2,3", "4,4", "dilations = [2, 1], pads = [0, 0, 0, 0]"),
                "Col2Im"),
}  # fmt: skip
KEPT = {
    "other than 0": (MASK % "1" + "y = Where (kept, x, z) }", "Where"),
    "0 where true": (MASK % "0" + "y = Where (kept, z, x) }", "Where"),
    "many places": (TRANSPOSE % ("9,9", "1,1", "9,9", "group = 1"), "ConvTranspose"),
}
"""What stays: the form would be wrong, or slower."""


def feeds_of(text: str, batch: int, special: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch)
    feeds = {}
    for value in text_model(text).graph.inputs:
        sizes = [d if isinstance(d, int) else batch for d in value.shape]
        drawn = rng.standard_normal(sizes, np.float32)
        feeds[value.name] = drawn > 0 if value.name == "kept" else drawn
    if feeds["x"].size:
        feeds["x"].flat[[0, -1]] = special, -special
    return feeds


@pytest.mark.parametrize("special", [0.0, 3e38, np.inf, np.nan])
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("row", [*ROWS, *KEPT])
def test_results_are_those_of_the_usual_form(row: str, batch: int, special: float) -> None:
    text, expected = (ROWS | KEPT)[row]
    model = text_model(text)
    take_faster_forms(model)
    assert expected in [node.op_type for node in model.graph]
    feeds = feeds_of(text, batch, special)
    (fast,), (usual,) = run(model, feeds), run(text_model(text), feeds)
    # sums of up to 36 products in another order
    np.testing.assert_allclose(fast, usual, rtol=1e-5, atol=1e-6)


LSTM = """g (float[%s,N,2] x, float[D,12,2] w, float[D,12,3] r, float[D,24] b, float[D,N,3] h0,
    float[D,N,3] c0%s) => (%s) { %s = LSTM <hidden_size = 3%s> (%s) }"""
ALL = "float[T,D,N,3] y, float[D,N,3] h, float[D,N,3] c"
RECURRENT = {
    "states": ("3", "", ALL, "y, h, c", "", "x, w, r, b, , h0, c0"),
    "one step": ("1", "", ALL, "y, h, c", "", "x, w, r, b, , h0, c0"),
    "reverse": ("3", "", ALL, "y, h, c", ', direction = "reverse"', "x, w, r, b"),
    "both ways": ("3", "", ALL, "y, h, c", ', direction = "bidirectional"', "x, w, r, b, , h0, c0"),
    "last c": ("3", "", "float[D,N,3] c", ", , c", "", "x, w, r, , , h0"),
}
USUAL = {
    "steps unknown": ("T", "", ALL, "y, h, c", "", "x, w, r, b"),
    "lengths": ("3", ", int32[N] n", ALL, "y, h, c", "", "x, w, r, b, n"),
}


@pytest.mark.parametrize(
    ("batch", "special"), [(0, 0.0), (1, 0.0), (2, 0.0), (1, 3e38), (2, np.inf), (2, np.nan)]
)
@pytest.mark.parametrize("row", [*RECURRENT, *USUAL])
def test_an_lstm_that_keeps_its_derivatives(row: str, batch: int, special: float) -> None:
    parts = (RECURRENT | USUAL)[row]
    text = (LSTM % parts).replace("[D,", "[2," if row == "both ways" else "[1,")
    model = text_model(text.replace(",D,N", ",2,N" if row == "both ways" else ",1,N"))
    used = [name for name in ("x", "w", "r", "b", "h0", "c0") if name in parts[-1].split(", ")]
    usual = autodiff.gradient(model, wrt=used)
    kept = usual.clone()
    take_faster_forms(kept)
    assert (row in USUAL) == ("LSTM" in [node.op_type for node in kept.graph])
    rng, feeds = np.random.default_rng(batch), {}
    for value in usual.graph.inputs:
        sizes = [d if isinstance(d, int) else {"N": batch, "T": 3}[d.value] for d in value.shape]
        drawn = rng.uniform(-1, 1, sizes).astype(np.float32)
        feeds[value.name] = drawn
        # products of two such numbers overflow in one order and not in another
        if drawn.size and value.name in (("x",) if special == 3e38 else ("x", "c0", "y.grad")):
            drawn.flat[-1] = special
    if "n" in feeds:
        feeds["n"] = np.arange(batch, dtype=np.int32) * 3
    hidden = np.isnan(special) and row in RECURRENT  # by onnxruntime's LSTM, as limits
    names = [v.name for v in usual.graph.outputs if not hidden or v.name.endswith(".grad")]
    expected = ort.run(ort.session(usual), feeds, names)
    assert_same(ort.run(ort.session(kept), feeds, names), expected, rtol=1e-5, atol=1e-6)
