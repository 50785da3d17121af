"""Predicted times beside measured ones, and tools/predictions.py, which shows both."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import predictions
import pytest

from onnx_fuse import single_op_models
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import select, site
from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.contractions import Attention, AttentionGrad
from onnx_fuse.program.data_movement import Pointwise, ScatterND
from onnx_fuse.program.expression import Expression, Operation, Row
from onnx_fuse.program.problem import CHIPS, AnyProblem, GemmProblem, Hardware
from onnx_fuse.program.problems import Conv, ConvWeightGrad, Fold, NormGrad, Reduce, Window

H200 = CHIPS["H200"]


class Played:
    """An instance of no GPU, whose calls take twice their predicted time."""

    def __init__(self, *calls: Call) -> None:
        self.program = SimpleNamespace(calls=calls)

    def profile(self, wanted: Callable[[Call], bool]) -> list[tuple[Call, float]]:
        return [(c, 2 * site(c, H200).seconds) for c in self.program.calls if wanted(c)]


def call(op: str, *shape: int) -> Call:
    found = [c for c in single_op_models.program_of(op, shape, "fp16", H200).calls if c.problem]
    return found[-1]


def views(dtype: str, *each: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(0, dtype, shape, strides) for shape, strides in each)


ROWS, IDS = ((16, 1024, 768), (786432, 768, 1)), ((16, 1024, 768), (1024, 1, 0))
EMBEDDED = Pointwise(
    Expression(3, (), (Operation("Add", "bfloat16", (1, 2)),), (3,), (Row(1, 0, 768, 50257),)),
    views("int64", IDS) + views("bfloat16", (ROWS[0], (0, 0, 1)), (ROWS[0], (0, 768, 1))),
    views("bfloat16", ROWS),
)
LAST, FIRST = (
    ((64, 28, 28, 512), (401408, 14336, 512, 1)),
    ((64, 28, 28, 512), (401408, 28, 1, 784)),
)
KEPT = Expression(2, (("f32", 0.0),), (Operation("Greater", "float32", (0, 2)),
                  Operation("Where", "float32", (3, 1, 2))), (4, 4))  # fmt: skip
TWO_ORDERS = Pointwise(KEPT, views("bfloat16", LAST, LAST), views("bfloat16", FIRST, LAST))


def window(size: int, stride: int, pad: int) -> Window:
    pads = (0, pad, pad)
    return Window((1, size, size), (1, stride, stride), (1, 1, 1), pads, pads)


def product(m: int, n: int, k: int, dtype: str, **how: bool | float | str) -> GemmProblem:
    return GemmProblem.of("Gemm", m=m, n=n, k=k, dtype=dtype, **how)


STEM = ((1, 224, 224), (1, 112, 112), window(3, 2, 1), "float16")
DEEP = ((1, 56, 56), (1, 56, 56), window(7, 1, 3), "bfloat16", "bfloat16")
SMALL = ((1, 14, 14), (1, 14, 14), window(1, 1, 0), "float16")
MIDDLE = ((1, 28, 28), (1, 28, 28), window(3, 1, 1), "float32")
WINDOWS = Attention(
    49, 49, 32, (1024, 3), "float16", 32, mask=(0, 2401, 49, 1), mask2=(2401, 0, 49, 1)
)
HEADS = AttentionGrad(128, 128, 64, (32, 12), "bfloat16", 64, mask=(128, 0, 0, 1))
FOLDS = ((768, 2304), (768, 3072)) * 12


@pytest.mark.parametrize(
    ("problem", "us"),
    [
        (EMBEDDED, 13.6),  # GPT-2's embeddings: indices and positions are read once
        (TWO_ORDERS, 360.9),  # one result goes two bytes at a time
        (NormGrad(16384, 768, "bfloat16", "bfloat16", "float32", 2048), 38.9),
        (NormGrad(100352, 96, "bfloat16", "bfloat16", "float32", 6336), 45.9),
        (ScatterND(16384, (50257,), 768, "bfloat16", "int64", "add"), 60.1),
        (ScatterND(4096, (30522,), 768, "bfloat16", "int64", "add", fresh=True), 25.2),
        (HEADS, 40.3),  # the same without a mask takes less
        (Fold(FOLDS, "bfloat16", master=True), 102.7),
        (Reduce("Sum", 1, 64, 151296, 64, 64, *["bfloat16"] * 2, 4, short=True), 21.3),
        (ConvWeightGrad(32, 96, 1, 1, *DEEP), 165.2),
        (Conv(32, 1, 3, 32, *STEM, act="silu", channels_last=True, planar=True), 27.0),
        (ConvWeightGrad(32, 1, 1024, 256, *SMALL, "float16"), 11.0),
        (Conv(32, 1, 128, 128, *MIDDLE, act="relu", channels_last=True, math="tf32"), 27.8),
        (product(25088, 128, 512, "float32", trans_b=True, act="relu", math="tf32"), 22.9),
        (product(401408, 256, 64, "float16", trans_b=True, act="relu", beta=1.0, bias=True), 122.0),
        (product(200704, 256, 128, "bfloat16", residual=True), 73.9),
        (product(401408, 64, 16, "float16", trans_b=True, act="relu", bias=True), 41.9),
        (product(100352, 24, 72, "float16", trans_b=True, bias=True, residual=True), 17.9),
        (WINDOWS, 63.8),
        (Attention(4096, 4096, 40, (2, 8), "float16", 40, *(3 * [(1310720, 40, 320)])), 147.8),
    ],
    ids=lambda value: value.op if isinstance(value, AnyProblem) else "",
)
def test_predictions_are_what_was_measured(problem: AnyProblem, us: float) -> None:
    """On an H200, 2026-11, within a factor of 1.5: `python tools/predictions.py` shows more."""
    choice = select(problem.op, problem, H200)
    assert us / 1.5 < 1e6 * choice.seconds < us * 1.5


def test_calls_that_are_alike_are_timed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Hardware, "detect", lambda _: H200)
    large, small = call("Gemm", 4096, 4096, 4096), call("Softmax", 8, 64, 1)
    instance = Played(large, small, replace(large, nodes=("another",)))
    found = predictions.timed(instance)  # type: ignore[arg-type]
    assert [row.count for row in found] == [2, 1]
    assert [row.off for row in found] == pytest.approx([2.0, 2.0])
    predictions.show("model", found, 20.0, 10)
    first, *listed = capsys.readouterr().out.splitlines()
    assert first.startswith("model: 0 of 2 calls over 20 us within 1.5; ")
    assert len(listed) == 1
    assert "2 of  Gemm" in listed[0]
    found = [replace(row, measured=1.4 * row.predicted) for row in found]
    predictions.show("model", found, 20.0, 0)
    assert capsys.readouterr().out.startswith("model: 2 of 2 calls over 20 us")


def test_a_network_that_pytorch_exports_is_exported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network of more than one file is read back whole, its inputs in their order."""
    made: list[SimpleNamespace] = []
    runs: list[tuple[ir.Model, dict[str, np.ndarray]]] = []

    def graph(row: SimpleNamespace) -> ir.Model:
        made.append(row)
        return text_model("g (float[2,3] a, float[3] b) => (float[2,3] y) <float[3] w = {1, 2, 3}> "
                          "{ s = Add (a, b) y = Mul (s, w) }")  # fmt: skip

    class Session:
        """A session of no GPU, which keeps what it was asked to run."""

        def __init__(self, model: ir.Model, device: str, precision: str) -> None:
            self.model = load(model)

        def get_inputs(self) -> list[ir.Value]:
            return list(self.model.graph.inputs)

        def run(self, names: None, feeds: dict[str, np.ndarray]) -> None:
            runs.append((self.model, feeds))

        def _on_cuda(self) -> SimpleNamespace:
            return SimpleNamespace(instance=id)

    rows = {"net": SimpleNamespace(shapes=((2, 3), (3,)), built=None)}
    monkeypatch.setitem(sys.modules, "bench_vision", SimpleNamespace(ROWS=rows, graph=graph))
    monkeypatch.setattr(predictions, "InferenceSession", Session)
    monkeypatch.setattr(predictions, "save", partial(save, external=True))
    for _ in range(2):
        predictions.vision("net", tmp_path)
    assert len(made) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}
    for model, feeds in runs:
        assert {name: a.shape for name, a in feeds.items()} == {"a": (2, 3), "b": (3,)}
        weight = model.graph.initializers["w"].const_value
        assert weight.numpy().tolist() == [1, 2, 3]
    first, second = (feeds for _, feeds in runs)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_every_network_is_a_row_of_the_tool_that_times_it() -> None:
    pytest.importorskip("torch")
    import bench_train
    import bench_vision

    for name, measured in predictions.MODELS.items():
        how = getattr(measured, "func", None)
        if how is predictions.vision:
            assert name in bench_vision.ROWS
        elif how is predictions.step:
            assert name.removesuffix("-step") in bench_train.ROWS
