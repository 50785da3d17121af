"""Slices that take a tensor apart, as one Split."""

import numpy as np
import onnx_ir as ir
import pytest
from support import assert_same

from onnx_fuse import session
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.rewrite.slices import slices_as_splits
from onnx_fuse.runtime import ort

MANY = 9223372036854775807
# (start, end, axis, step) of each Slice of a float[2,6,N]: whether they become a Split
ROWS: dict[str, tuple[tuple[tuple[int, int, int, int], ...], bool]] = {
    "halves": (((0, 3, 1, 1), (3, 6, 1, 1)), True),
    "out of order, from the end, and beyond it": (((-2, MANY, -2, 1), (-MANY, 4, 1, 1)), True),
    "one part twice": (((0, 2, 1, 1), (2, 6, 1, 1), (0, 2, 1, 1)), True),
    "three": (((0, 1, 1, 1), (1, 2, 1, 1), (2, 6, 1, 1)), True),
    "a gap": (((0, 2, 1, 1), (3, 6, 1, 1)), False),
    "an overlap": (((0, 4, 1, 1), (3, 6, 1, 1)), False),
    "no end": (((0, 2, 1, 1), (2, 5, 1, 1)), False),
    "no start": (((1, 2, 1, 1), (2, 6, 1, 1)), False),
    "other axes": (((0, 3, 1, 1), (1, 2, 0, 1)), False),
    "a step": (((0, 3, 1, 2), (3, 6, 1, 1)), False),
    "backwards": (((2, -MANY, 1, -1), (3, 6, 1, 1)), False),
    "an empty part": (((0, 0, 1, 1), (1, 6, 1, 1)), False),
    "all of it": (((0, 6, 1, 1),), False),
    "an open size": (((0, 3, 2, 1), (3, MANY, 2, 1)), False),
}


@pytest.mark.parametrize("made", [False, True], ids=["of an input", "of an inner value"])
@pytest.mark.parametrize("name", ROWS)
def test_slices_that_part_a_tensor_are_a_split(name: str, made: bool) -> None:
    rows, splits = ROWS[name]
    outputs = ", ".join(f"float[A{i},B{i},C{i}] y{i}" for i in range(len(rows)))
    body = ["v = Neg(x)" if made else "unused = Neg(x)"]
    for i, row in enumerate(rows):
        body += [
            f"{kind}{i} = Constant <value = int64[1] {{{number}}}> ()"
            for kind, number in zip("seap", row, strict=True)
        ]
        body.append(f"z{i} = Slice({'v' if made else 'x'}, s{i}, e{i}, a{i}, p{i})")
        body.append(f"y{i} = Abs(z{i})")
    text = f"agraph (float[2,6,N] x) => ({outputs}) {{ {' '.join(body)} }}"
    model = session.load(text_model(text))
    x = np.random.default_rng(0).standard_normal((2, 6, 5)).astype(np.float32)
    wanted = _run(model, x)
    slices_as_splits(model)
    kinds = [node.op_type for node in model.graph]
    assert ("Split" in kinds) == splits
    assert ("Slice" in kinds) != splits
    assert_same(_run(model, x), wanted)


def _run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    proto = to_proto(model, shapes=False)
    found: list[np.ndarray] = ort.session(ir.from_proto(proto)).run(None, {"x": x})
    return found


def test_slices_that_are_results_stay() -> None:
    text = """agraph (float[4] x) => (float[2] y, float[2] z)
    <int64[1] a = {0}, int64[1] b = {2}, int64[1] c = {4}>
    { y = Slice(x, a, b, a) z = Slice(x, b, c, a) }"""
    model = session.load(text_model(text))
    slices_as_splits(model)
    assert [node.op_type for node in model.graph] == ["Slice", "Slice"]
    assert [v.name for v in model.graph.outputs] == ["y", "z"]
