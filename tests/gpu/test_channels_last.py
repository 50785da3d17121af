"""Stretches of convolutions on a GPU against onnxruntime, every candidate by its rule."""

import group_norms
import numpy as np
import onnxruntime
import pytest
from lowering import arrays
from test_channels_last import GROUP_NORM, STRETCHES

from onnx_fuse import InferenceSession
from onnx_fuse.importer.save import inline, to_proto
from onnx_fuse.ir.build import text_model


def text_of(name: str) -> str:
    shapes, y, nodes, _ = STRETCHES[name]
    given = ", ".join(f"float16[{','.join(map(str, s))}] {n}" for n, s in shapes.items())
    return f"agraph ({given}) => (float16[{','.join(map(str, y))}] y) {{ {nodes} }}"


@pytest.mark.parametrize("name", [*STRETCHES, "a group norm"])
def test_a_stretch_gives_onnxruntimes_results(name: str) -> None:
    """Twice the same bits, and onnxruntime's results but for roundings of sums."""
    model = to_proto(text_model(GROUP_NORM if name == "a group norm" else text_of(name)))
    shapes = {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in model.graph.input
    }
    feeds = {n: a.astype(np.float16) for n, a in arrays(**shapes).items()}
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    session = InferenceSession(model, device="cuda")
    first, second = (session.run(None, feeds)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    scale = np.abs(want.astype(np.float64)).max()
    assert np.abs(first.astype(np.float64) - want).max() <= 4e-3 * scale


@pytest.mark.parametrize("act", ["", "Silu"])
@pytest.mark.parametrize("row", group_norms.GROUPED, ids=str)
def test_the_gradient_of_a_group_norm_gives_onnxruntimes(row: tuple[int, ...], act: str) -> None:
    """Twice the same bits, and onnxruntime's results but for roundings of sums."""
    model = text_model(group_norms.GRAD.format(act=act, **dict(zip("nhcg", row, strict=True))))
    shapes = {str(v.name): tuple(v.shape.numpy()) for v in model.graph.inputs}
    feeds = {n: a.astype(np.float16) for n, a in arrays(**shapes).items()}
    plain = to_proto(inline(model)).SerializeToString()
    wanted = onnxruntime.InferenceSession(plain).run(None, feeds)
    session = InferenceSession(to_proto(model), device="cuda")
    first, second = (session.run(None, feeds) for _ in range(2))
    for got, twice, want in zip(first, second, wanted, strict=True):
        np.testing.assert_array_equal(got, twice)
        scale = np.abs(want.astype(np.float64)).max()
        assert np.abs(got.astype(np.float64) - want).max() <= 4e-3 * scale
