"""The interface of `onnx.backend.base.Backend`, which the ONNX backend tests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend as Base
from onnx.backend.base import BackendRep, Device, DeviceType, namedtupledict

from onnx_fuse.errors import DeviceError, ModelError
from onnx_fuse.importer.inference import inferred
from onnx_fuse.ir.constants import CANONICAL_OPSET
from onnx_fuse.session import InferenceSession, load

__all__ = [
    "Backend",
    "Rep",
    "is_compatible",
    "prepare",
    "run_model",
    "run_node",
    "supports_device",
]
__dir__ = __all__.copy

_DEVICES = {DeviceType.CPU: "cpu", DeviceType.CUDA: "cuda"}


class Rep(BackendRep):
    """A model that `prepare` has made ready to run, as `session`, an InferenceSession."""

    def __init__(self, session: InferenceSession) -> None:
        self.session = session

    def run(self, inputs: object, **kwargs: object) -> tuple[Any, ...]:
        """Run the model on a list of arrays (in the order of the inputs), one array, or a dict.

        `kwargs` may have "run_options", for `InferenceSession.run`. Returns the outputs as a named
        tuple. Raises ValueError for too few inputs, and the errors of `InferenceSession.run`.
        """
        names = [v.name for v in self.session.get_inputs()]
        if not isinstance(inputs, dict):
            values = inputs if isinstance(inputs, list | tuple) else [inputs]
            if len(values) < len(names):
                raise ValueError(f"{len(values)} inputs given, the model takes {len(names)}")
            inputs = dict(zip(names, values, strict=False))
        outputs = [v.name for v in self.session.get_outputs()]
        return namedtupledict("Outputs", outputs)(
            *self.session.run(None, inputs, kwargs.get("run_options"))
        )


class Backend(Base):
    """The class methods that onnx.backend asks for; `device` is "CPU" or "CUDA:0"."""

    @classmethod
    def is_compatible(
        cls, model: onnx.ModelProto | bytes | str, device: str = "CPU", **kwargs: object
    ) -> bool:
        """Whether the model is valid, its operators are known, and the device is usable.

        `kwargs` are accepted for the interface's sake, and ignored.
        """
        try:
            load(model)
        except ModelError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(
        cls, model: onnx.ModelProto | bytes | str, device: str = "CPU", **kwargs: Any
    ) -> Rep:
        """Make a model ready to run; `kwargs` are those of InferenceSession.

        Raises ModelError or DeviceError.
        """
        return Rep(InferenceSession(model, device=_DEVICES[Device(device).type], **kwargs))

    @classmethod
    def run_model(
        cls,
        model: onnx.ModelProto | bytes | str,
        inputs: object,
        device: str = "CPU",
        **kwargs: object,
    ) -> tuple[Any, ...]:
        """Run a model once on `inputs`, those of `Rep.run`; `kwargs` are those of `prepare`."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: object,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node; `inputs` has an array for each of its inputs that is not left out ("").

        `outputs_info` is ignored. `kwargs` may have "opset", the version of the node's operator;
        the others are those of `prepare`.
        """
        arrays = [np.asarray(x) for x in (inputs if isinstance(inputs, list | tuple) else [inputs])]
        names = [name for name in node.input if name]
        ends = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in zip(names, arrays, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        # The opset of the operator's newest definition, if that is newer than what models use.
        since = onnx.defs.get_schema(node.op_type, node.domain).since_version
        opset = kwargs.pop("opset", None) or max(since, 1 if node.domain else CANONICAL_OPSET)
        imports = [helper.make_opsetid(node.domain, opset)]
        graph = helper.make_graph([node], node.op_type, ends, outputs)
        model = helper.make_model(
            graph, opset_imports=imports, ir_version=helper.find_min_ir_version_for(imports)
        )
        model = inferred(model, data_prop=False)
        return cls.run_model(model, dict(zip(names, arrays, strict=True)), device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether `device` ("CPU", "CUDA", "CUDA:1") can run models on this machine."""
        kind = Device(device).type
        if kind == DeviceType.CUDA:
            from onnx_fuse.runtime import device as gpu

            try:
                gpu.start(Device(device).device_id)
            except DeviceError:
                return False
        return kind in _DEVICES


is_compatible = Backend.is_compatible
prepare = Backend.prepare
run_model = Backend.run_model
run_node = Backend.run_node
supports_device = Backend.supports_device
