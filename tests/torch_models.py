"""A small transformer that tests of torch share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = Any


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor = None) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            layer(x).view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Dropout(0.1),
            nn.Linear(4 * width, width),
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor = None) -> Tensor:
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class Unbound(nn.Module):
    """Attention whose operands are parts of one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        rows = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4)
        q, k, v = rows.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class Gpt(nn.Module):
    """Two blocks over 17 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def losses(model: Any, steps: int = 50) -> list[float]:
    """The loss of each step of AdamW on the same random symbols."""
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 17, (4, 6), generator=generator).to(device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
