"""`python -m onnx_fuse`: the command onnx-fuse."""

from onnx_fuse.cli import main

main()
