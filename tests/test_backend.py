"""onnx_fuse.backend against the ONNX backend tests: what stock onnxruntime passes, we pass."""

import unittest
import warnings
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.backend.base import Backend as Base
from onnx.backend.base import BackendRep
from onnx.backend.test import BackendTest
from support import parsed

from onnx_fuse import backend
from onnx_fuse.errors import ModelError

# Opset 8's Scan has a batch axis that no later Scan has.
REFUSED = {"test_scan_sum_cpu"}


class StockRep(BackendRep):
    def __init__(self, session: Any) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        names = [v.name for v in self.session.get_inputs()]
        return self.session.run(None, dict(zip(names, inputs, strict=False)))


class Stock(Base):
    """onnxruntime as it is."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> StockRep:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        data = model.SerializeToString()
        return StockRep(ort.InferenceSession(data, options, ["CPUExecutionProvider"]))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


@cache
def suites(base: type[Base]) -> dict[str, type[unittest.TestCase]]:
    return BackendTest(base, __name__).test_cases


def outcomes(base: type[Base], kind: str, only: Collection[str] | None = None) -> dict[str, str]:
    """'' for each backend test that passes, else the fault; of all, or of some."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = suites(base)[f"OnnxBackend{kind}Test"]
        names = sorted(n for n in dir(suite) if n.startswith("test_") and n.endswith("_cpu"))
        names = names if only is None else sorted(only)
        return {name: fault(getattr(suite(name), name)) for name in names}


def fault(test: Callable[[], None]) -> str:
    try:
        test()
    except (unittest.SkipTest, Exception) as error:  # noqa: BLE001 - any fault counts
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


LEAST = {"NodeModel": 900, "SimpleModel": 10, "PyTorchConvertedModel": 50}


@pytest.mark.parametrize(("kind", "least"), LEAST.items())
def test_what_onnxruntime_passes_we_pass(kind: str, least: int) -> None:
    ours = outcomes(backend.Backend, kind)
    failed = {name: fault for name, fault in ours.items() if fault and name not in REFUSED}
    stock = outcomes(Stock, kind, failed)
    assert not {name: fault for name, fault in failed.items() if not stock[name]}
    assert sum(not fault for fault in ours.values()) >= least


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        *(("SimpleModel", f"gradient_of_{n}") for n in ("add", "add_and_mul")),
        *(("NodeModel", f"{n}{m}") for n in ("adam", "adagrad") for m in ("", "_multiple")),
        *(("NodeModel", n) for n in ("momentum", "momentum_multiple", "nesterov_momentum")),
    ],
)
def test_the_standards_own_cases(suite, name):
    """Which stock onnxruntime has no kernels for."""
    cases = suites(backend.Backend)[f"OnnxBackend{suite}Test"]
    getattr(cases(f"test_{name}_cpu"), f"test_{name}_cpu")()


def test_run_node_takes_arrays_in_order() -> None:
    node = helper.make_node("Gemm", ["a", "b", ""], ["y"], transB=1)
    a, b = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)
    y = backend.run_node(node, [a, b])
    np.testing.assert_allclose(y.y, a @ b.T)


def test_prepare_and_run_model_agree_and_name_outputs() -> None:
    model = parsed("g (float[N] x) => (float[N] y, float[N] z) { y = Relu(x)  z = Neg(x) }")
    x = np.array([-1, 2], np.float32)
    for outputs in (backend.prepare(model).run([x]), backend.run_model(model, {"x": x})):
        np.testing.assert_array_equal(outputs.y, [0, 2])
        np.testing.assert_array_equal(outputs.z, [1, -2])
    with pytest.raises(ValueError, match="0 inputs given"):
        backend.prepare(model).run([])


def test_devices_and_compatibility() -> None:
    assert backend.supports_device("CPU")
    model = parsed("g (float[N] x) => (float[N] y) { y = Relu(x) }")
    assert backend.is_compatible(model)
    model.graph.node[0].op_type = "Reluu"
    assert not backend.is_compatible(model)
    with pytest.raises(ModelError, match="no operator 'Reluu'"):
        backend.prepare(model)
