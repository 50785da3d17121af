"""A GPT that learns to write text character by character, trained in one captured step.

    python examples/nn_char_gpt.py

The text is made here: sums such as "17+25=42;", whose answers the network has to work out.
"""

from __future__ import annotations

import numpy as np

import onnx_fuse as of
from onnx_fuse import nn
from onnx_fuse.nn import functional as F

CHARACTERS = "0123456789+=;"
CONTEXT, WIDTH, HEADS, LAYERS = 32, 48, 4, 2


def made_text(length: int, seed: int = 0) -> np.ndarray:
    """Sums of numbers below 10, as indices of characters."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 10, (length // 5 + 1, 2))
    text = "".join(f"{a}+{b}={a + b};" for a, b in pairs)
    return np.array([CHARACTERS.index(c) for c in text[:length]])


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it and a residual around it."""

    def __init__(self) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.perceptron(self.norm2(x))


class GPT(nn.Module):
    """Embeddings of characters and places, blocks, and a score for each next character."""

    def __init__(self) -> None:
        self.characters = nn.Embedding(len(CHARACTERS), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)

    def forward(self, index: nn.Tensor) -> nn.Tensor:
        x = self.characters(index) + self.places.weight[: index.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(steps: int = 300, batch: int = 16) -> tuple[GPT, list[float]]:
    """Train on windows of the text; returns the network and the losses."""
    nn.manual_seed(0)
    text, rng = made_text(20000), np.random.default_rng(0)
    model = GPT()
    optimizer = nn.optim.AdamW(model, lr=of.optim.cosine(3e-3, steps, warmup=20))

    @of.capture
    def step(x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for _ in range(steps):
        starts = rng.integers(0, len(text) - CONTEXT - 1, batch)
        windows = np.stack([text[s : s + CONTEXT + 1] for s in starts])
        losses.append(step(nn.tensor(windows[:, :-1]), nn.tensor(windows[:, 1:])).item())
    return model, losses


def write(model: GPT, prompt: str, count: int) -> str:
    """The prompt, continued by `count` characters, the most likely one each."""
    index = [CHARACTERS.index(c) for c in prompt]
    with nn.no_grad():
        for _ in range(count):
            scores = model(nn.tensor([index[-CONTEXT:]]))
            index.append(int(scores[0, -1].argmax()))
    return "".join(CHARACTERS[i] for i in index)


if __name__ == "__main__":
    model, losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(write(model, "3+4=7;8+1=", 12))
