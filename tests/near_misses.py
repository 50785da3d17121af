"""Rows of FUSION_CASES with one thing changed, sorted by the condition of a rule that this breaks.

Each change leaves the graph valid for the most part; what onnxruntime refuses says nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import onnx_ir as ir
from cases import FusionCase, fusion_rows

from onnx_fuse.ir.build import const_array

ROWS = tuple(
    fusion_rows("""
rows_turned_before_a_product:
  (float[6,4,8] x, float[8,24] w) => (float[24,24] y)
  to = int64[2] {24, 24}  t = Transpose <perm = [1, 0, 2]> (x)  m = MatMul (t, w)
  y = Reshape (m, to)
rows_turned_around_a_gemm:
  (float[6,4,8] x, float[8,24] w, float[24] c) => (float[6,4,24] y)
  flat = int64[2] {24, 8}  to = int64[3] {4, 6, 24}  t = Transpose <perm = [1, 0, 2]> (x)
  f = Reshape (t, flat)  z = Gemm (f, w, c)  s = Reshape (z, to)
  y = Transpose <perm = [1, 0, 2]> (s)
axes_merged_and_split_again:
  (float[2,3,4,5] x) => (float[4,2,3,5] y)
  flat = int64[3] {6, 4, 5}  to = int64[4] {4, 2, 3, 5}  f = Reshape (x, flat)
  t = Transpose <perm = [1, 0, 2]> (f)  y = Reshape (t, to)
one_row_of_a_product:
  (float[B,5,8] x, float[8,24] w, float[24] c) => (float[B,1,24] y)
  i = int64[1] {-1}  m = MatMul (x, w)  z = Add (m, c)  r = Relu (z)  y = Gather <axis = 1> (r, i)
scale_of_a_product_in_half: level 3
  (float16[B,T,16] x, float16[16,24] w, float16[24] c, float16[24] s) => (float16[B,T,24] v)
  m = MatMul (x, w)  z = Add (m, c)  o = Mul (z, s)  y = Identity (o)  v = Neg (o)
swish_of_opset_28: opset 28
  (float[B,T,24] x)
  y = Swish <alpha = 1.702> (x)
""")
)
"""Rows for rules that leave no operator of ours, or run at level 3 or from a newer opset alone."""

_SPARES = {
    "norm_written_out_without_affine": (
        (
            "signed_zero",
            "onnxruntime's LayerNormalization starts the sum of a row at +0, so that its mean of "
            "negative zeros is +0 and -0 - (+0) is -0; its ReduceMean gives -0, and the difference "
            "+0. A bias of +0 would turn the -0 of other rows round (a test measures both)",
        ),
    )
}
"""What the rows hide from their outputs, and their inner values show."""

Change = Callable[[ir.Model], None]


@dataclass(frozen=True)
class NearMiss(FusionCase):
    """A row whose graph is changed so that it breaks one condition."""

    row: FusionCase | None = None
    condition: str = "readers"
    change: Change = lambda model: None
    ones: str = ""
    """The input and axis ("x:1") that is fed a single element."""

    def model(self, seed: int = 0) -> ir.Model:
        model = super().model(seed)
        self.change(model)
        return model

    def feeds(self, **sizes: int) -> dict[str, np.ndarray]:
        feeds = self.row.feeds(**sizes)
        weights = self.row.model().graph.initializers
        for value in self.model().graph.inputs:
            if value.name not in feeds:
                held = weights.get(value.name) or _value(self.row.model(), value.name)
                array = const_array(held)
                feeds[value.name or ""] = array.copy()
        if self.ones:
            name, axis = self.ones.split(":")
            feeds[name] = feeds[name].take([0], int(axis))
        return feeds


def near_misses(row: FusionCase) -> Iterator[NearMiss]:
    """Every change to a row, one at a time."""
    same = {field.name: getattr(row, field.name) for field in fields(FusionCase)}
    model = row.model()
    for condition, name, change in _changes(model):
        spares = _SPARES.get(row.name, ()) if condition == "readers" else ()
        title = {"name": f"{row.name}-{name}", "spares": (*row.spares, *spares)}
        yield NearMiss(**same | title, row=row, condition=condition, change=change)
    for k, value in enumerate(model.graph.inputs):
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, int):
                for ones in ("", f"{value.name}:{axis}"):
                    name = f"{row.name}-{value.name}.{axis}-open{'-fed-1' if ones else ''}"
                    yield NearMiss(
                        **same | {"name": name},
                        row=row,
                        condition="sizes",
                        change=partial(_open, k, axis),
                        ones=ones,
                    )


def _changes(model: ir.Model) -> Iterator[tuple[str, str, Change]]:
    nodes, outputs = list(model.graph), set(model.graph.outputs)
    for k, node in enumerate(nodes):
        name = node.outputs[0].name
        if node.op_type == "Constant":
            for way in ("doubled", "one-ulp"):
                yield "constants", f"{name}-{way}", partial(_constant, k, way)
            yield "weights", f"{name}-is-an-input", partial(_fed, k)
            continue
        if len(node.outputs) == 1 and node.outputs[0] not in outputs:
            yield "readers", f"{name}-is-an-output", partial(_output, k)
            yield "types", f"{name}-is-cast", partial(_cast, k)
        if len(node.outputs) == 1 and node.inputs:
            yield "body", f"{name}-in-a-branch", partial(_branch, k)
    for value in model.graph.initializers.values():
        yield "weights", f"{value.name}-is-an-input", partial(_input, value.name or "")
    for k, value in enumerate(model.graph.inputs):
        if value.shape:
            yield "ranks", f"{value.name}-without-shape", partial(_shapeless, k)


def _value(model: ir.Model, name: str | None) -> ir.Value:
    return next(v for node in model.graph for v in node.outputs if v.name == name)


def _fed(k: int, model: ir.Model) -> None:
    node = model.graph[k]
    array = const_array(node.outputs[0])
    name, dtype = node.outputs[0].name, ir.DataType.from_numpy(array.dtype)
    fed = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape))
    node.outputs[0].replace_all_uses_with(fed)
    model.graph.remove(node, safe=True)
    model.graph.inputs.append(fed)


def _constant(k: int, way: str, model: ir.Model) -> None:
    node = model.graph[k]
    array = const_array(node.outputs[0])
    if array.dtype.kind == "f":
        other = array * 2 if way == "doubled" else np.nextafter(array, np.inf)
    else:
        other = ~array if array.dtype == bool else array + 1
    node.attributes.clear()
    node.attributes.add(ir.AttrTensor("value", ir.tensor(other.astype(array.dtype))))


def _output(k: int, model: ir.Model) -> None:
    model.graph.outputs.append(model.graph[k].outputs[0])


def _cast(k: int, model: ir.Model) -> None:
    node = model.graph[k]
    value = node.outputs[0]
    wide = ir.node("Cast", [value], {"to": ir.DataType.DOUBLE.value})
    back = ir.node("CastLike", [wide.outputs[0], value])
    wide.outputs[0].name, back.outputs[0].name = f"{value.name}.wide", f"{value.name}.back"
    for user, index in list(value.uses()):
        if user not in (wide, back):
            user.replace_input_with(index, back.outputs[0])
    model.graph.insert_after(node, [wide, back])


def _branch(k: int, model: ir.Model) -> None:
    node = model.graph[k]
    value = node.outputs[0]
    bodies = []
    for side in ("then", "else"):
        copy = ir.Node(node.domain, node.op_type, node.inputs, node.attributes.values())
        copy.outputs[0].name = f"{value.name}.{side}"
        copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
        bodies.append(
            ir.AttrGraph(f"{side}_branch", ir.Graph([], copy.outputs, nodes=[copy], name=side))
        )
    source = model.graph.inputs[0]
    count = ir.node("Size", [source])
    flag = ir.node("Cast", [count.outputs[0]], {"to": ir.DataType.BOOL.value})
    made = ir.Node("", "If", [flag.outputs[0]], bodies)
    for each, name in ((count, "count"), (flag, "flag"), (made, "if")):
        each.outputs[0].name = f"{value.name}.{name}"
    name, made.outputs[0].type, made.outputs[0].shape = value.name, value.type, value.shape
    model.graph.insert_before(node, [count, flag, made])
    value.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    made.outputs[0].name = name


def _input(name: str, model: ir.Model) -> None:
    value = model.graph.initializers.pop(name)
    value.const_value = None
    model.graph.inputs.append(value)


def _shapeless(k: int, model: ir.Model) -> None:
    model.graph.inputs[k].shape = None
    for value in model.graph.outputs:
        value.shape = None


def _open(k: int, axis: int, model: ir.Model) -> None:
    value = model.graph.inputs[k]
    dims = list(value.shape)
    dims[axis] = ir.SymbolicDim(f"{value.name}{axis}")
    value.shape = ir.Shape(dims)
    for output in model.graph.outputs:
        output.shape = None
