"""float32 graphs made float16: a mask's lowest number still outweighs every score."""

import numpy as np
import onnx_ir as ir
import pytest
from lowering import interpreted
from support import table
from test_attention import session

from onnx_fuse import autodiff, rewrite
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.rewrite.precision import lower_precision
from onnx_fuse.validation.compare import COMPUTED

LOW = -3.4028234663852886e38
SIZES = {"B": 2, "H": 2, "S": 8, "T": 16}
QKV = "float[B,H,S,16] q, float[B,H,T,16] k, float[B,H,T,16] v"
HEAD = "kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) "
TAIL = " p = Softmax (z) y = MatMul (p, v)"

# what makes z of the scores s; inputs; what -65504 stands for in the mask of the attention: 0 for
# itself, None: there is no attention
GRAPHS = table(globals())("""
one less the mask, times the lowest: "float[B,1,1,T] keep", LOW
  one = Constant <value = float {1.0}> ()
  low = Constant <value = float {$LOW}> () g = Sub (one, keep) m = Mul (g, low)
  z = Add (s, m)
chosen by a condition: "bool[B,1,S,T] seen", LOW
  zero = Constant <value = float {0.0}> ()
  low = Constant <value = float {$LOW}> () m = Where (seen, zero, low)
  n = Identity (m) z = Add (s, n)
an input: "float[B,1,S,T] mask", LOW
  z = Add (s, mask)
an input with a bias: "float[B,1,S,T] mask, float[1,H,S,T] bias", LOW
  w = Add (mask, bias) z = Add (s, w)
a number that leaves scores their digits: "bool[B,1,S,T] seen", -1e5
  zero = Constant <value = float {0.0}> () low = Constant <value = float {-100000.0}> ()
  m = Where (seen, zero, low) z = Add (s, m)
a number within the range: "bool[B,1,S,T] seen", 0.0
  zero = Constant <value = float {0.0}> () low = Constant <value = float {-10000.0}> ()
  m = Where (seen, zero, low) z = Add (s, m)
what is chosen in place of scores: "bool[B,1,S,T] seen", 0.0
  low = Constant <value = float {$LOW}> () z = Where (seen, s, low)
a bound of the sum: "", None
  low = Constant <value = float {$LOW}> () m = Max (s, low) z = Clip (m, low)
made by ConstantOfShape: "bool[B,1,S,T] seen", -1e9
  shape = Shape (s) low = ConstantOfShape <value = float[1] {-1e9}> (shape)
  zero = Constant <value = float {0.0}> () m = Where (seen, zero, low) z = Add (s, m)
""")


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    """Scores of some 30, whose rows 0 and 3 are masked whole."""
    rng, feeds = np.random.default_rng(3), {}
    for value in model.graph.inputs:
        shape = [d if isinstance(d, int) else SIZES[str(d)] for d in value.shape]
        name = str(value.name)
        feeds[name] = rng.standard_normal(shape).astype(np.float32) * (3 if name in "qk" else 1)
        if name in ("keep", "seen", "mask"):
            seen = rng.random(shape) < 0.7
            seen[:1] &= shape[2] > 1
            seen[..., [0, 3 % shape[2]], :] &= shape[2] == 1
            feeds[name] = seen if name == "seen" else seen.astype(np.float32)
        if name == "mask":
            feeds[name] = np.where(seen, np.float32(0), np.float32(LOW))
    return feeds


def model_of(graph: str) -> ir.Model:
    between, inputs, _ = GRAPHS[graph]
    more = f", {inputs}" if inputs else ""
    text = f"agraph ({QKV}{more}) => (float[B,H,S,16] y) {{ {HEAD}{between}{TAIL} }}"
    return text_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_row_masked_whole_attends_as_in_float32(graph: str, fused: bool) -> None:
    model = model_of(graph)
    feeds = feeds_of(model)
    expected = session(model)(feeds)
    rewrite.optimize(model, skip=() if fused else ["Sdpa"])
    lower_precision(model, ir.DataType.FLOAT16)
    floors = [n.attributes.get_float("floor", 0.0) for n in model.graph if "Sdpa" in n.op_type]
    floor = GRAPHS[graph][2]
    assert floors == ([pytest.approx(floor)] if fused and floor is not None else [])
    found = interpreted(model, feeds)["y"] if floors else session(model)(feeds)
    bound = COMPUTED["fp16"]
    # a score of 30 is rounded to 2^-6 where it is stored in float16
    atol = bound.atol + bound.rtol * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=atol)


def test_a_graph_of_float16_keeps_its_own_lowest() -> None:
    text = f"agraph ({QKV}, float[B,1,1,T] mask) => (float[B,H,S,16] y) {{ {HEAD}"
    text = (text + f" z = Add (s, mask) {TAIL} }}").replace("float[", "float16[")
    model = text_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    rewrite.optimize(model)
    lower_precision(model, ir.DataType.FLOAT16)
    (node,) = [n for n in model.graph if "Sdpa" in n.op_type]
    assert "floor" not in node.attributes


@pytest.mark.parametrize("learned", [False, True])
def test_a_mask_that_learns_has_no_floor(learned: bool) -> None:
    """The gradient of a mask is the body's, which takes -65504 for what it is."""
    head = f"agraph ({QKV}, bool[B,1,S,T] seen) => (float[B,H,S,16] y)"
    head += " <float[1,2,1,1] bias = {1, 2}>" if learned else ""
    body = f"low = Constant <value = float {{{LOW}}}> () {HEAD}"
    body += "zero = Constant <value = float {0}> () m = Where (seen, zero, low) "
    body += "n = Add (m, bias)" if learned else "n = Identity (m)"
    model = text_model(
        f'<ir_version: 10, opset_import: ["" : 18]>\n{head} {{ {body} z = Add (s, n){TAIL} }}'
    )
    rewrite.optimize(model, training=True)
    infer_shapes(model)
    lower_precision(model, ir.DataType.FLOAT16, masters=True)
    (node,) = [n for n in model.graph if "Sdpa" in n.op_type]
    assert ("floor" in node.attributes) != learned
    graph = autodiff.gradient(model, ["q", "bias"] if learned else ["q"]).graph
    grads = [n for n in graph if n.op_type.startswith("SdpaMaskGrad")]
    assert grads
    assert {"floor" in n.attributes for n in grads} == {not learned}
