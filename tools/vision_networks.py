"""A diffusion model's UNet and its autoencoder's decoder, for tools/bench_vision.py.

They have the shape of Stable Diffusion 1.5, whose package need not be installed, and random
weights. Images are [batch, channels, height, width].
"""

from itertools import pairwise
from math import log

import torch as t
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (320, 640, 1280, 1280)
TEXT = 768
HEADS = 8


class Residual(nn.Module):
    """Two convolutions behind group normalizations, with the time's embedding between them."""

    def __init__(self, channels: int, filters: int, time: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, channels), nn.GroupNorm(32, filters)
        self.inside = nn.Conv2d(channels, filters, 3, padding=1)
        self.outside = nn.Conv2d(filters, filters, 3, padding=1)
        self.time = nn.Linear(time, filters) if time else None
        self.short = nn.Conv2d(channels, filters, 1) if channels != filters else nn.Identity()

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = self.inside(functional.silu(self.first(x)))
        if self.time is not None and time is not None:
            y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.short(x) + self.outside(functional.silu(self.second(y)))


class Attention(nn.Module):
    """Several heads over [batch, tokens, width]; the keys are those of `others` where given."""

    def __init__(self, width: int, others: int = 0, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(others or width, width, bias=False)
        self.v = nn.Linear(others or width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, others: Tensor | None = None) -> Tensor:
        others = x if others is None else others
        parts = (self.q(x), self.k(others), self.v(others))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """A block over the pixels: attention to themselves, to the text, and a gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, eps=1e-6)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = Attention(width), Attention(width, TEXT)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        y = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        y = y + self.own(self.norms[0](y))
        y = y + self.text(self.norms[1](y), text)
        value, gate = self.up(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(value * functional.gelu(gate))
        return x + self.leave(y.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """The noise in latents [batch, 4, h, w] at times [batch], given text [batch, tokens, 768]."""

    def __init__(self) -> None:
        super().__init__()
        time = 4 * WIDTHS[0]
        self.embed = nn.Sequential(nn.Linear(WIDTHS[0], time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, WIDTHS[0], 3, padding=1)
        down: list[nn.Module] = []
        kept, width = [WIDTHS[0]], WIDTHS[0]
        for level, filters in enumerate(WIDTHS):
            for _ in range(2):
                down.append(Residual(width, filters, time))
                if level < 3:
                    down.append(Transformer(filters))
                kept.append(width := filters)
            if level < 3:
                down.append(nn.Conv2d(filters, filters, 3, stride=2, padding=1))
                kept.append(filters)
        self.down = nn.ModuleList(down)
        self.middle = nn.ModuleList(
            (Residual(width, width, time), Transformer(width), Residual(width, width, time))
        )
        up: list[nn.Module] = []
        for level, filters in reversed([*enumerate(WIDTHS)]):
            for _ in range(3):
                up.append(Residual(width + kept.pop(), filters, time))
                width = filters
                if level < 3:
                    up.append(Transformer(filters))
            if level:
                up.append(nn.Conv2d(filters, filters, 3, padding=1))
        self.up = nn.ModuleList(up)
        self.norm, self.leave = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
        half = WIDTHS[0] // 2
        steps = t.exp(t.arange(half, device=x.device) * (-log(10000) / half))
        angles = times[:, None].float() * steps
        time = self.embed(t.cat((angles.cos(), angles.sin()), -1).to(x.dtype))
        x = self.enter(x)
        kept = [x]
        for layer, after in pairwise((*self.down, None)):
            x = _applied(layer, x, time, text)
            if not isinstance(after, Transformer):
                kept.append(x)
        for layer in self.middle:
            x = _applied(layer, x, time, text)
        for layer in self.up:
            if isinstance(layer, Residual):
                x = t.cat((x, kept.pop()), 1)
            elif isinstance(layer, nn.Conv2d):
                x = functional.interpolate(x, scale_factor=2.0)
            x = _applied(layer, x, time, text)
        return self.leave(functional.silu(self.norm(x)))


def _applied(layer: nn.Module, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
    if isinstance(layer, Residual):
        return layer(x, time)
    return layer(x, text) if isinstance(layer, Transformer) else layer(x)


class Decoder(nn.Module):
    """An image [batch, 3, 8 h, 8 w] of latents [batch, 4, h, w]."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 512, 3, padding=1))
        self.first, self.second = Residual(512, 512), Residual(512, 512)
        self.norm, self.attention = nn.GroupNorm(32, 512), Attention(512, heads=1)
        layers: list[nn.Module] = []
        width = 512
        for level, filters in enumerate((512, 512, 256, 128)):
            for _ in range(3):
                layers.append(Residual(width, filters))
                width = filters
            if level < 3:
                layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width, 3, padding=1)]
        self.up = nn.Sequential(*layers)
        self.leave = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.enter(x))
        pixels = self.attention(self.norm(x).flatten(2).transpose(1, 2))
        x = x + pixels.transpose(1, 2).unflatten(2, x.shape[2:])
        return self.leave(self.up(self.second(x)))
