"""The example of a model for Triton's Python backend, on a module that stands for Triton's own."""

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onnx_fuse import InferenceSession

TEXT = """net (float[batch, width] x) => (float[batch, width] y, float[batch, width] z)
    { y = Relu (x)  z = Neg (x) }"""


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array = name, array

    def as_numpy(self) -> np.ndarray:
        return self.array


class InferenceResponse:
    def __init__(self, tensors: list[Tensor], error: Any = None) -> None:
        self.tensors, self.error = {t.name: t.array for t in tensors}, error


@pytest.fixture
def model(
    tmp_path: Path, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, InferenceSession]:
    """The backend's model as the server makes it, and a session of the same file."""
    fake: Any = ModuleType("triton_python_backend_utils")
    fake.Tensor, fake.InferenceResponse, fake.TritonError = Tensor, InferenceResponse, str
    fake.get_input_tensor_by_name = lambda request, name: Tensor(name, request[name])
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    folder = tmp_path / "repository" / "encoder"
    (folder / "1").mkdir(parents=True)
    path = shutil.copy(saved(TEXT), folder / "1" / "model.onnx")
    example = Path(__file__).parents[1] / "examples" / "triton" / "model.py"
    made = runpy.run_path(str(example))["TritonPythonModel"]()
    parameters = {"precision": {"string_value": "fp32"}}
    made.initialize(
        {
            "model_config": json.dumps({"parameters": parameters}),
            "model_repository": str(folder),
            "model_version": "1",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
    return made, InferenceSession(path)


def test_each_request_gets_its_own_rows(model: tuple[Any, InferenceSession]) -> None:
    made, session = model
    shapes = [(1, 3), (2, 5), (3, 3)]
    requests = [{"x": np.full(shape, i - 1, np.float32)} for i, shape in enumerate(shapes)]
    for request, response in zip(requests, made.execute(requests), strict=True):
        assert response.error is None
        expected = dict(zip(("y", "z"), session.run(None, request), strict=True))
        assert response.tensors.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(response.tensors[name], array)


def test_a_fault_is_a_response(model: tuple[Any, InferenceSession]) -> None:
    (response,) = model[0].execute([{"x": np.float32(1)}])
    assert "no common number of rows" in response.error
