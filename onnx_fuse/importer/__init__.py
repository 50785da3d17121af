"""ONNX files: reading, checking, opsets, contrib operators, inference and writing."""

import onnx_fuse.ir  # noqa: F401  # it imports onnx_ir without sympy
