"""Kernels whose threads exchange numbers, tried without a GPU: their text runs on the host."""

from pathlib import Path

import blocks_on_host
import numpy as np
import pytest
from lowering import with_values
from math_cases import TOLERANCE, cases
from special_values import assert_same, special_row

from onnx_fuse.kernels.gemm_integer import BlocksOfPixels
from onnx_fuse.program.problem import CHIPS, KernelConfig
from onnx_fuse.program.problems import PixelBlocks

SOURCES = {
    "Det-float32-3x5x5": "linalg/det_rows.cu",
    "DFT-float64-3x60x2-{'inverse': 0}": "linalg/fourier.cu",
    "DFT-float32-2x1024x5x1-columns": "linalg/fourier.cu",
    "STFT-float32-2x100x1-{'onesided': 1}": "linalg/fourier.cu",
    "Einsum-float32-3000x64_3000x64-ij,ij->i": "reduce/reduce.cu",
    "Einsum-float32-70x33_70x33-ij,ij->j": "reduce/reduce.cu",
    "Resize-float32-1x2x6x8-cubic half_pixel": "pool/resample.cu",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_kernels_text_gives_float64s_results(name: str, tmp_path: Path) -> None:
    case = next(case for case in cases() if case.name == name)
    arrays, truths, program = case.arrays(), case.oracle(), case.program()
    assert {x.source for call in program.calls for x in call.launches} == {SOURCES[name]}
    feeds = {key: array for i, array in enumerate(arrays) if (key := f"x{i}") and array is not None}
    found = blocks_on_host.run(program, feeds, tmp_path)
    for i, truth in enumerate(truths):
        assert np.abs(found[f"y{i}"] - truth).max() <= TOLERANCE[case.dtype] * np.abs(truth).max()


@pytest.mark.parametrize("quantize", [(0.25, 3), ()])
def test_blocks_of_pixels_are_codes_in_a_border(quantize: tuple, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(-300, 300, (2, 3, 4, 9)) / 8
    images[0, 0, 0, :4] = np.nan, np.inf, -np.inf, -0.0
    kind = "float32" if quantize else "int8"
    x = (images if quantize else np.nan_to_num(images, nan=0, posinf=9, neginf=-9)).astype(kind)
    strides = (108, 36, 9, 1)
    problem = PixelBlocks(2, 3, (2, 1), 2, 8, 5, 11, 1, 2, strides, kind, "int8", -7, quantize)
    (launch,) = BlocksOfPixels().launch(problem, KernelConfig.of(), CHIPS["H200"])
    y = blocks_on_host._aligned(2 * 5 * 11 * 16).view(np.int8)
    blocks_on_host._launch(launch, {"x": x.reshape(-1), "y": y}, tmp_path)
    blocks = y[: 2 * 5 * 11 * 16].reshape(2, 5, 11, 16)
    codes = np.clip(np.rint(images / quantize[0]) + quantize[1], -128, 127) if quantize else x
    codes = np.where(np.isnan(codes), -128, codes)[..., :8]
    inside = codes.reshape(2, 3, 2, 2, 8).transpose(0, 2, 4, 3, 1).reshape(2, 2, 8, 6)
    wanted = np.full((2, 5, 11, 16), -7)
    wanted[:, 1:3, 2:10, :6] = inside
    np.testing.assert_array_equal(blocks, wanted)


@pytest.mark.parametrize("how", ["exclusive = 0", "exclusive = 1"])
def test_a_running_sum_begins_with_onnxruntimes_zero(how: str, tmp_path: Path) -> None:
    model, feeds, wanted = special_row(how, "float")
    found = blocks_on_host.run(with_values(model, feeds), feeds, tmp_path)
    assert_same(found["y"], wanted["y"])
