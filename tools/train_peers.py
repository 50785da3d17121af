"""The networks of models/ as PyTorch modules, for what is timed against torch.compile."""

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch as t
from torch.nn import functional as fn


class Rotary(t.nn.Module):
    """x cos + (-x2, x1) sin for the halves x1, x2 of each head of x [B, heads, T, size]."""

    def __init__(self, size: int, longest: int, base: int) -> None:
        super().__init__()
        rates = base ** (-t.arange(0, size, 2) / size)
        at = t.outer(t.arange(longest), t.cat([rates, rates]))
        self.register_buffer("cos", at.cos())
        self.register_buffer("sin", at.sin())

    def forward(self, x: Any) -> Any:
        first, second = x.chunk(2, -1)
        cos, sin = (a[: x.shape[2]].to(x.dtype) for a in (self.cos, self.sin))
        return x * cos + t.cat([-second, first], -1) * sin


class Attention(t.nn.Module):
    """Attention of `heads` queries and `kv_heads` keys and values: x [B, T, width] -> the same."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, bias: bool, causal: bool, rotary: Any = None
    ) -> None:
        super().__init__()
        self.size, self.causal, self.rotary = width // heads, causal, rotary
        self.ends = (width, kv_heads * self.size, kv_heads * self.size)
        self.grouped = heads != kv_heads
        self.qkv = t.nn.Linear(width, sum(self.ends), bias)
        self.out = t.nn.Linear(width, width, bias)

    def forward(self, x: Any, mask: Any = None) -> Any:
        parts = self.qkv(x).split(self.ends, -1)
        q, k, v = (p.unflatten(-1, (-1, self.size)).transpose(1, 2) for p in parts)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        y = fn.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=self.grouped
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Feed(t.nn.Module):
    """down(act(up(x))), or down(silu(gate(x)) up(x))."""

    def __init__(self, width: int, hidden: int, act: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.act, bias = act, act is not None
        self.up = t.nn.Linear(width, hidden if bias else 2 * hidden, bias)
        self.down = t.nn.Linear(hidden, width, bias)

    def forward(self, x: Any) -> Any:
        y = self.up(x)
        if self.act is not None:
            return self.down(self.act(y))
        gate, up = y.chunk(2, -1)
        return self.down(fn.silu(gate) * up)


class Block(t.nn.Module):
    """Attention and feed-forward, each behind its norm (`before`), or with it behind their sum."""

    def __init__(self, attention: Any, feed: Any, norm: Callable[[], Any], before: bool) -> None:
        super().__init__()
        self.attention, self.feed, self.before = attention, feed, before
        self.norm1, self.norm2 = norm(), norm()

    def forward(self, x: Any, mask: Any = None) -> Any:
        if self.before:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.feed(x))


def blocks(
    c: Any,
    hidden: int,
    act: Callable[[Any], Any] | None,
    norm: Callable[[], Any],
    *,
    causal: bool,
    before: bool,
    rotary: Any = None,
) -> t.nn.ModuleList:
    """The blocks of a network; without `act`, feed-forwards are gated and nothing has a bias."""
    sizes = (c.width, c.heads, getattr(c, "kv_heads", c.heads))
    return t.nn.ModuleList(
        Block(
            Attention(*sizes, act is not None, causal, rotary),
            Feed(c.width, hidden, act),
            norm,
            before,
        )
        for _ in range(c.layers)
    )


def tanh_gelu(x: Any) -> Any:
    return fn.gelu(x, approximate="tanh")


class Gpt(t.nn.Module):
    """models/gpt.py with its head tied to the tokens."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.wte, self.wpe = t.nn.Embedding(c.vocab, c.width), t.nn.Embedding(c.context, c.width)
        norm = partial(t.nn.LayerNorm, c.width)
        self.blocks = blocks(c, 4 * c.width, tanh_gelu, norm, causal=True, before=True)
        self.norm = norm()

    def forward(self, input_ids: Any, labels: Any) -> Any:
        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = fn.linear(self.norm(x), self.wte.weight)
        return fn.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Encoder(t.nn.Module):
    """models/encoder.py with a classifier."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        sizes = (c.vocab, c.types, c.context)
        self.word, self.kind, self.place = (t.nn.Embedding(n, c.width) for n in sizes)
        self.norm = t.nn.LayerNorm(c.width, 1e-12)
        norm = partial(t.nn.LayerNorm, c.width, 1e-12)
        self.blocks = blocks(c, 4 * c.width, fn.gelu, norm, causal=False, before=False)
        self.pooler = t.nn.Linear(c.width, c.width)
        self.classifier = t.nn.Linear(c.width, c.classes) if c.classes else None

    def encoded(self, input_ids: Any, token_type_ids: Any, mask: Any) -> tuple[Any, Any]:
        """The hidden states and what the pooler makes of the first."""
        x = self.word(input_ids) + self.kind(token_type_ids)
        x = self.norm(x + self.place.weight[: input_ids.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        return x, t.tanh(self.pooler(x[:, 0]))

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any, labels: Any) -> Any:
        mask = attention_mask[:, None, None].bool()
        _, pooled = self.encoded(input_ids, token_type_ids, mask)
        return fn.cross_entropy(self.classifier(pooled).float(), labels)


class Vit(t.nn.Module):
    """models/vit.py."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.patch = t.nn.Conv2d(3, c.width, c.patch, c.patch)
        count = (c.image // c.patch) ** 2 + 1
        self.token = t.nn.Parameter(t.zeros(1, 1, c.width))
        self.places = t.nn.Parameter(0.02 * t.randn(1, count, c.width))
        norm = partial(t.nn.LayerNorm, c.width, 1e-6)
        self.blocks = blocks(c, 4 * c.width, fn.gelu, norm, causal=False, before=True)
        self.norm = t.nn.LayerNorm(c.width, 1e-6)
        self.head = t.nn.Linear(c.width, c.classes)

    def forward(self, pixels: Any, labels: Any) -> Any:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = t.cat([self.token.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return fn.cross_entropy(self.head(self.norm(x)[:, 0]).float(), labels)


class Llama(t.nn.Module):
    """models/llama.py."""

    def __init__(self, c: Any, longest: int = 4096) -> None:
        super().__init__()
        self.tokens = t.nn.Embedding(c.vocab, c.width)
        rotary = Rotary(c.width // c.heads, longest, c.base)
        norm = partial(t.nn.RMSNorm, c.width, 1e-5)
        self.blocks = blocks(c, c.hidden, None, norm, causal=True, before=True, rotary=rotary)
        self.norm = norm()
        self.head = t.nn.Linear(c.width, c.vocab, False)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return fn.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Perceptron(t.nn.Module):
    """models/mlp.py."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        layers: list[Any] = []
        for i, (n_in, n_out) in enumerate(zip(c.widths, c.widths[1:], strict=False)):
            layers += [t.nn.GELU()] if i else []
            layers += [t.nn.LayerNorm(n_in), t.nn.Linear(n_in, n_out)]
        self.layers = t.nn.Sequential(*layers)

    def forward(self, x: Any, labels: Any) -> Any:
        return fn.cross_entropy(self.layers(x), labels)


class Vision(t.nn.Module):
    """A classifier of torchvision's with its loss."""

    def __init__(self, net: t.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any, labels: Any) -> Any:
        return fn.cross_entropy(self.net(x).float(), labels)


class ResNet(Vision):
    """ResNet-50 with its batch normalizations."""

    def __init__(self, c: Any) -> None:
        from torchvision.models import resnet50

        super().__init__(resnet50(num_classes=c.classes))


class ConvNeXt(Vision):
    """models/convnext.py at its size "convnext-tiny"."""

    def __init__(self, c: Any) -> None:
        from torchvision.models import convnext_tiny

        super().__init__(convnext_tiny(num_classes=c.classes, stochastic_depth_prob=0.0))


def exported(peer: Vision, side: int) -> Any:
    """The network of images [batch, 3, side, side] as ONNX, for training."""
    import onnx

    file = io.BytesIO()
    t.onnx.export(
        peer.net,
        (t.zeros(2, 3, side, side),),
        file,
        input_names=["x"],
        dynamic_axes={"x": {0: "batch"}},
        training=t.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        dynamo=False,
    )
    return onnx.load_from_string(file.getvalue())


def small_weights(net: Any) -> None:
    """Matrices of deviation 0.02, so that no loss overflows."""
    for weight in net.parameters():
        if weight.ndim > 1:
            t.nn.init.normal_(weight, std=min(0.02, 1 / math.sqrt(weight.shape[-1])))
