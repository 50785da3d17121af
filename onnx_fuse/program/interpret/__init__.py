"""The meaning of programs: NumPy's answer to each problem, by which lowering is checked."""

from onnx_fuse.program.interpret.run import interpret

__all__ = ["interpret"]
