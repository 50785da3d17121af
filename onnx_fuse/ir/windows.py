"""The windows of pools."""

from __future__ import annotations

import onnx_ir as ir


def passes_padding(node: ir.Node, x: ir.Value) -> bool:
    """Whether a pool's window may be larger than the padded image `x`, without `ceil_mode`.

    onnxruntime, which divides towards zero, admits one where its stride is larger than what lacks.
    """
    kernel = node.attributes.get_ints("kernel_shape", ())
    n = len(kernel)
    sizes = [*x.shape][2:] if x.shape else [None] * n
    strides = node.attributes.get_ints("strides", [1] * n)
    dilations = node.attributes.get_ints("dilations", [1] * n)
    lacking = [
        d * (k - 1) + 1 - p - (size if isinstance(size, int) else 1)
        for k, d, p, size in zip(kernel, dilations, around(node, n), sizes, strict=False)
    ]
    if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        lacking = [d - 1 for d in dilations]  # SAME pads for a kernel without holes
    return any(s > 1 and b > 0 for s, b in zip(strides, lacking, strict=False))


def around(node: ir.Node, n: int) -> list[int]:
    """A window's pads on both sides together along `n` axes, where it has them as numbers."""
    explicit = node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    pads = node.attributes.get_ints("pads", ()) if explicit else ()
    return [a + b for a, b in zip(pads, pads[n:], strict=False)] or [0] * n
