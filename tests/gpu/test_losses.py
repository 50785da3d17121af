"""Losses by name and their gradients on the GPU."""

import numpy as np
import pytest
from support import answers, stock
from test_losses import HOSTILE, NAMED, gradient_graph

from onnx_fuse import InferenceSession


@pytest.mark.parametrize("case", [*NAMED, *HOSTILE])
def test_a_loss_by_name_and_its_gradient(case: str) -> None:
    """As on onnxruntime; on the GPU all of it, since nothing falls back."""
    row = NAMED.get(case) or (*HOSTILE[case][:4], None, "")
    graph, feeds = gradient_graph(row, np.float32)
    expected = answers(stock(graph, optimized=True), feeds)
    session = InferenceSession(graph, device="cuda")
    found = dict(zip(expected, session.run(list(expected), feeds), strict=True))
    for name, want in expected.items():
        tolerance = 1e-6 + 1e-5 * np.nan_to_num(np.abs(want), posinf=0).max(initial=0)
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=tolerance, err_msg=name)
