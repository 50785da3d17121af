"""A model of Triton's Python backend, which runs an ONNX file on this package's kernels.

It stands in the model repository as `encoder/1/model.py`, beside `encoder/1/model.onnx`; in
`encoder/config.pbtxt`, `instance_group` says on how many GPUs, and the parameter "precision" in
which precision. Requests that Triton hands over together run as one batch where their shapes allow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as triton

import onnx_fuse as of
from onnx_fuse.replicas import run_together


class TritonPythonModel:
    """One instance, which Triton makes for each GPU and each of its counts."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model on the instance's GPU, or on the CPU."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        precision = parameters.get("precision", {}).get("string_value", "fp32")
        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = of.InferenceSession(path, device=device, precision=precision)
        self.inputs = [x.name for x in self.session.get_inputs()]
        self.outputs = [y.name for y in self.session.get_outputs()]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """The responses to requests, in their order; a fault is that of all of them."""
        try:
            feeds = [
                {name: triton.get_input_tensor_by_name(r, name).as_numpy() for name in self.inputs}
                for r in requests
            ]
            found = run_together(self.session, feeds)
        except of.OnnxFuseError as error:
            fault = triton.TritonError(str(error))
            return [triton.InferenceResponse([], fault) for _ in requests]
        return [
            triton.InferenceResponse(
                [triton.Tensor(*pair) for pair in zip(self.outputs, arrays, strict=True)]
            )
            for arrays in found
        ]
