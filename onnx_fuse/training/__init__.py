"""Training: optimizers, the graph of a step, the Trainer that runs it, epochs over data."""

import onnx_fuse.ir  # noqa: F401  # it imports onnx_ir without sympy
