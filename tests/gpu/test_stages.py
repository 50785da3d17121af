"""Sizes and lengths of loops that data decides, on the GPU, against onnxruntime."""

import numpy as np
import pytest
import test_stages
from support import assert_same, stock

from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime.executable import Executable


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", test_stages.GRAPHS)
def test_stages_run_without_onnxruntime(name: str, on_device: bool) -> None:
    text, feeds = test_stages.GRAPHS[name]
    model = text_model(f"agraph {text}")
    names = [v.name for v in model.graph.outputs]
    reference = stock(model, optimized=True)
    expected = reference.run(names, feeds)
    runner = Executable(model)
    for _ in range(2):  # the second run takes the graphs that the first one made
        got = runner.run(names, feeds, on_device=on_device)
        for output, value, want in zip(names, got, expected, strict=True):
            assert value.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(value), want, err_msg=output)
    assert not any(program.fallbacks for program in runner.programs())


def test_a_loop_that_data_ends_stacks_more_rows_where_data_says_so() -> None:
    text, feeds = test_stages.GRAPHS["a loop that ends by what it computes"]
    model = text_model(f"agraph {text}")
    reference = stock(model, optimized=True)
    runner = Executable(model)
    lengths = set()
    for scale in (1, 0.1, 3):
        given = {**feeds, "x": (feeds["x"] * scale).astype(np.float32)}
        got = runner.run(["y", "z"], given)
        assert_same(got, reference.run(["y", "z"], given), rtol=1e-6)
        lengths.add(len(got[1]))
    assert len(lengths) == 3


@pytest.mark.filterwarnings("ignore:runs on onnxruntime")
def test_strings_between_numbers() -> None:
    model, feeds = text_model(test_stages.STRINGS), {"x": test_stages.X}
    reference = stock(model, optimized=True)
    got = Executable(model).run(None, feeds)
    assert_same(map(np.asarray, got), reference.run(None, feeds))
