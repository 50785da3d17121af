"""The problem of a norm whose statistics are those of groups of channels: its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_fuse.program.problem import ITEMSIZE, AnyProblem


@dataclass(frozen=True)
class GroupGrad(AnyProblem):
    """The gradient of y = act((x - mean) / sqrt(variance + epsilon) scale + bias) in groups.

    x is [images, channels, pixels], or with `last` [images, pixels, channels]; scale and bias are a
    number a channel, mean and variance one for each image's group of `per` channels. In three
    stages: "sums" in `splits` chunks of `chunk` vectors (`last`: rows) of each image's channel,
    "params", which adds them up, and "dx".
    """

    operands = """x dy dx: dtype images channels pixels; scale bias dscale dbias: param channels;
        part: any 2 images channels splits"""
    stage: str
    images: int
    channels: int
    pixels: int
    per: int
    last: bool
    splits: int
    chunk: int
    dtype: str
    param: str
    epsilon: float = 1e-5
    act: str = ""
    act_alpha: float = 0.0

    @property
    def bytes(self) -> int:
        """x and dy read, dx written; or the sums alone."""
        if self.stage == "params":
            wide = 8 if self.dtype == "float64" else 4
            return 2 * wide * self.images * self.channels * self.splits
        tensors = 3 if self.stage == "dx" else 2
        return tensors * self.images * self.channels * self.pixels * ITEMSIZE[self.dtype]
