"""A file's training_info is kept, or named where it no longer fits the model."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnx_fuse
from onnx_fuse import Trainer, cli

HEAD = '<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.preview.training": 1]>'
MODEL = """
g (float[2,3] x) => (float[2,3] y) <float[3] w = {1, 2, 3}, float[3,3] m = {1,2,3,4,5,6,7,8,9}> {
  p = MatMul (x, m) z = Add (p, w) y = Relu (z) }"""
STEP = """
step () => (float[3] w_new) <float rate = {0.5}> {
  loss = ReduceSum <keepdims = 0> (y)
  dw = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x"], y = "loss"> (w, x)
  d = Mul (rate, dw) w_new = Sub (w, d) }"""


def with_step(*, opset: int = 21, step: str = STEP) -> onnx.ModelProto:
    """y = Relu (x · m + w), whose training_info is one step of gradient descent on w."""
    head = HEAD.format(opset=opset)
    proto = onnx.parser.parse_model(head + MODEL)
    algorithm = onnx.parser.parse_model(head + step).graph
    binding = {"w": "w_new"} if "w_new" in step else {}
    proto.training_info.append(
        onnx.helper.make_training_info(algorithm, binding.items(), None, None)
    )
    return proto


def written(how: str, proto: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    path, out = folder / "m.onnx", folder / "out.onnx"
    onnx.save(proto, path)
    if how == "train":
        trainer = Trainer(proto, loss="mse")
        trainer.step({"x": np.ones((2, 3), "f"), "labels": np.ones((2, 3), "f")})
        trainer.save(out)
    elif how.startswith("onnx-fuse"):
        assert cli.run_command([how.split()[1], str(path), "-o", str(out)]) == 0
    else:
        made: Any = getattr(onnx_fuse, how.split()[0])(
            proto, **dict.fromkeys(how.split()[1:], "mse")
        )
        onnx.save(made, out)
    ort.InferenceSession(out)
    return onnx.load(out)


WAYS = ["optimize", "gradient", "train", "onnx-fuse optimize", "onnx-fuse gradient"]


@pytest.mark.parametrize("how", WAYS)
def test_training_info_is_kept(how: str, tmp_path: Path) -> None:
    proto = with_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = written(how, proto, tmp_path)
    assert list(result.training_info) == list(proto.training_info)
    assert {o.domain: o.version for o in result.opset_import}["ai.onnx.preview.training"] == 1


def test_training_info_is_kept_beside_external_weights(tmp_path: Path) -> None:
    proto = with_step()
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    trainer = Trainer(tmp_path / "m.onnx", loss="mse")
    trainer.save(tmp_path / "out.onnx")
    assert list(onnx.load(tmp_path / "out.onnx").training_info) == list(proto.training_info)


REASONS = {
    "an older opset": (
        with_step(opset=13),
        "it is written in ai.onnx 13, the model now in 21",
    ),
    "a value that is fused away": (
        with_step(step="step () => (float[2,3] s) { s = Sqrt (z) }"),
        "it refers to 'z', which the model no longer has",
    ),
    "a name of another value": (
        with_step(),
        "its name 'loss' is also one of the model",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_training_info_that_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    proto, why = REASONS[name]
    how = "gradient loss" if "loss" in why else "optimize"
    with pytest.warns(UserWarning, match=f"the model's training_info is left out: {why}"):
        result = written(how, proto, tmp_path)
    assert not result.training_info
