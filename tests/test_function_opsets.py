"""Local functions that import another ai.onnx opset than the model: each node keeps its meaning.

The specification says that a function's nodes are those of the opset which the function imports.
(onnxruntime 1.32 reads them as the model's opset.) So a call must give what onnxruntime gives for
a model of the function's opset that holds its nodes.
"""

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from support import stock

import onnx_fuse
from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.runtime import ort


@dataclass(frozen=True)
class Function:
    """A function of one input, and its nodes as a model of its opset has them."""

    name: str
    opset: int
    nodes: str
    plain: str = ""  # with the attributes of the call; `nodes` where there are none
    attributes: str = ""
    call: str = ""

    def model(self, opset: int) -> onnx.ModelProto:
        """The call in a model of `opset`, by a function of opset 13 that hands it on."""
        given = f"<{self.call}>" if self.call else ""
        attributes = f"<{self.attributes}>" if self.attributes else ""
        return onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["" : {opset}, "local" : 1]>'
            " g (float[B,3,4] x) => (float[N,M,K] y) { y = local.outer (x) }"
            f' <domain: "local", opset_import: ["" : {self.opset}]>'
            f" f {attributes} (x) => (y) {{ {self.nodes} }}"
            f' <domain: "local", opset_import: ["" : 13, "local" : 1]>'
            f" outer (x) => (y) {{ y = local.f {given} (x) }}"
        )

    def meant(self) -> onnx.ModelProto:
        return onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : {self.opset}]>'
            f" g (float[B,3,4] x) => (float[N,M,K] y) {{ {self.plain or self.nodes} }}"
        )


IF = (
    "c = Constant <value = bool {1}> ()"
    " y = If (c) <then_branch = t () => (float[N,M,K] ty) { ty = Softmax <axis: int = @k> (x) },"
    " else_branch = e () => (float[N,M,K] ey) { ey = Relu (x) }>"
)
FUNCTIONS = [
    *(Function(f"{op} of {v}", v, f"y = {op} {axis} (x)")
      for op in ("Softmax", "LogSoftmax", "Hardmax")
      for v in (11, 12) for axis in ("", "<axis = 1>")),
    Function("Softmax by reference", 11, "y = Softmax <axis: int = @k> (x)", "y = Softmax (x)",
             "k: int = 1"),
    Function("Softmax of the call's axis", 11, "y = Softmax <axis: int = @k> (x)",
             "y = Softmax <axis = 0> (x)", "k: int = 1", "k = 0"),
    Function("Softmax in a branch", 11, IF, "y = Softmax (x)", "k: int = 1"),
    Function("Dropout's mask", 10,
             "z, m = Dropout (x)  n = Cast <to = 1> (m)  y = Add (z, n)"),
    Function("Dropout's ratio", 11, "y = Dropout <ratio: float = @p> (x)", "y = Dropout (x)", "p",
             "p = 0.25"),
    Function("Clip", 10, "y = Clip <min = -0.5, max = 0.5> (x)"),
    Function("Clip by reference", 10, "y = Clip <min: float = @low, max: float = @high> (x)",
             "y = Clip <min = -0.25> (x)", "low, high", "low = -0.25"),
    Function("Squeeze", 11, "u = Unsqueeze <axes = [0]> (x)  y = Squeeze <axes = [0]> (u)"),
    Function("Squeeze by reference", 11,
             "u = Unsqueeze <axes: ints = @a> (x)  y = Squeeze <axes: ints = @a> (u)",
             "u = Unsqueeze <axes = [1]> (x)  y = Squeeze <axes = [1]> (u)", "a", "a = [1]"),
    Function("ReduceSum by reference", 11,
             "s = ReduceSum <axes: ints = @a, keepdims = 1> (x)  y = Add (x, s)",
             "s = ReduceSum <axes = [1], keepdims = 1> (x)  y = Add (x, s)", "a", "a = [1]"),
    Function("ReduceMean", 13, "s = ReduceMean <axes = [1]> (x)  y = Add (x, s)"),
    Function("Split by reference", 11,
             "a, b = Split <axis = 2, split: ints = @s> (x)  y = Concat <axis = 2> (b, a)",
             "a, b = Split <axis = 2, split = [1, 3]> (x)  y = Concat <axis = 2> (b, a)", "s",
             "s = [1, 3]"),
    Function("Pad's value by reference", 10,
             "y = Pad <pads = [0,0,1,0,0,0], value: float = @v> (x)",
             "y = Pad <pads = [0,0,1,0,0,0], value = 2.5> (x)", "v: float = 2.5"),
    Function("Slice", 9, "y = Slice <axes = [1], starts = [1], ends = [3]> (x)"),
    Function("TopK", 9, "v, i = TopK <k = 2, axis = 2> (x)  y = Relu (v)"),
    Function("Upsample", 9,
             "s = Constant <value = float[3] {1, 1, 2}> ()  y = Upsample (x, s)"),
    Function("Resize", 10,
             "s = Constant <value = float[3] {1, 1, 0.6}> ()  y = Resize (x, s)"),
]  # fmt: skip


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda f: f.name)
def test_a_functions_nodes_are_those_of_its_opset(row: Function) -> None:
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}
    [expected] = ort.run(ort.session(row.meant().SerializeToString()), x)
    for opset in sorted({row.opset, 13, 18, 21, 22}):
        model = load(row.model(opset))
        assert not model.functions
        rewrite.optimize(model)
        [found] = ort.run(ort.session(to_proto(model).SerializeToString()), x)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


DIFFERENTIABLE = [f for f in FUNCTIONS if "Hardmax" not in f.name]


@pytest.mark.parametrize("row", DIFFERENTIABLE, ids=lambda f: f.name)
def test_gradients_are_those_of_the_functions_opset(row: Function) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    feeds = {"x": x, "y.grad": stock(row.meant()).run(None, {"x": x})[0]}
    [expected] = stock(onnx_fuse.gradient(row.meant(), ["x"])).run(["x.grad"], feeds)
    for opset in sorted({row.opset, 13, 22}):
        found = stock(onnx_fuse.gradient(row.model(opset), ["x"])).run(["x.grad"], feeds)
        np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


def test_a_constant_whose_number_the_call_does_not_give_is_named() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18, "local" : 1]>'
        " g (float[B] x) => (float[B] y) { y = local.f (x) }"
        ' <domain: "local", opset_import: ["" : 18]>'
        " f <alpha> (x) => (y)"
        " { s = Constant <value_float: float = @alpha> () y = Mul (x, s) }"
    )
    with pytest.raises(ModelError, match=r"'s': a Constant has one attribute, this has 0"):
        load(proto)
