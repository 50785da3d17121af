"""A token of a decoder with a cache, beside torch.compile in a CUDA graph with a static cache.

    python tools/bench_decoder.py [--batch 1 8] [--bits 16 4] [--layers 16] [--tokens 1000]
                                  [--cache float16 int8 float8e4m3fn]
    python tools/bench_decoder.py --prompt 512 [--bits 16 4]
    python tools/bench_decoder.py --users   # what of.Generator, of.Batcher and a new process give

The file is models/llama_cache.py's llama-1b, as onnxruntime-genai exports it, with float16 weights
or 4 bits in blocks of 32. Past and present are bound to one place of 2,048 tokens, logits to
another; each run has one token more, as a user's loop has ("same": all have so many). "floor" is
the time that weights and cached tokens take at the memory's rate, "of torch" the part of torch's
time; --quick leaves torch out. A prompt fills an empty cache in one run, and gives the logits of
its last token.

--users: tokens a second of models/gpt_cache.py's GPT-2 in float16 by of.Generator, with a fixed and
with a growing cache; of llama-1b by of.Batcher, 64 requests of 100 to 1,000 tokens, 200 new ones
each, the first time and again; and the seconds to a Generator of llama-1b's file and to the first
token behind a prompt of 100, in a process each: with nothing in the cache, and with what that left.
--quick leaves those processes out, and 4 layers of llama-1b get 16 requests.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
import bench_session
import gpt_cache
import llama_cache
import numpy as np
import onnx_ir as ir
from gpu_events import host_seconds

import onnx_fuse as of
from onnx_fuse import InferenceSession
from onnx_fuse.importer.save import save
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import device

CACHES = ("float16", "int8", "float8e4m3fn")
ROOM = 2048
"""Tokens that the cache has room for."""
ROUNDS = 128


def repeated(net: Any, name: str, shape: tuple[int, ...], std: float) -> Any:
    """Random weights of which a million are drawn: to draw all takes a minute."""
    drawn = (net.rng.standard_normal(1 << 20) * std).astype(net.dtype)
    return net.initializer(name, np.resize(drawn, shape))


def bound(
    session: Any, places: bench_session.Places, c: llama_cache.Config, batch: int, prompt: int
) -> tuple[Callable[[int], None], Any]:
    """A function that runs `prompt` tokens, the last of so many, and its binding.

    All tensors stand in `places`.
    """
    head = c.width // c.heads
    shape = (batch, c.kv_heads, ROOM, head)
    kept = ir.DataType[c.cache.upper()].numpy()
    size = kept.itemsize * int(np.prod(shape))
    binding = session.io_binding()
    for layer in range(c.layers):
        for kind in ("key", "value"):
            place = places.new(size)
            device.Stream().fill(place, 0, size)
            past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
            binding.bind_input(past, "cuda", 0, kept, shape, place)
            binding.bind_output(present, "cuda", 0, kept, shape, place)
    logits = places.new(4 * batch * c.vocab)
    binding.bind_output("logits", "cuda", 0, np.float32, (batch, 1, c.vocab), logits)
    ids, ones = np.zeros((batch, prompt), np.int64), np.ones((batch, ROOM), np.int64)
    stream = device.Stream()
    at = {name: places.new(array.nbytes) for name, array in (("ids", ids), ("ones", ones))}
    stream.upload(at["ids"], ids.ctypes.data, ids.nbytes)
    stream.upload(at["ones"], ones.ctypes.data, ones.nbytes)
    stream.wait("a decoder's inputs")
    binding.bind_input("input_ids", "cuda", 0, np.int64, (batch, prompt), at["ids"])

    def token(total: int) -> None:
        binding.bind_input("attention_mask", "cuda", 0, np.int64, (batch, total), at["ones"])
        session.run_with_iobinding(binding, synchronize=False)

    return token, binding


def measured(
    token: Callable[[int], None], wait: Callable[[], None], first: int, step: int
) -> float:
    """Microseconds a token, the median of rounds of 16; each token is `step` longer."""
    lengths = itertools.count(first, step)
    times = host_seconds(lambda: token(next(lengths)), 16, 1 + ROUNDS // 16, wait)
    return 1e6 * median(times[1:])


def ours(c: llama_cache.Config, batch: int, tokens: int, prompt: int) -> dict[str, float]:
    """Microseconds a token, and seconds to the first one."""
    device.start()
    stream, model = device.Stream(), llama_cache.build(c)
    begun = time.perf_counter()
    session = InferenceSession(model, device="cuda")
    made = time.perf_counter() - begun
    places = bench_session.Places()
    token, binding = bound(session, places, c, batch, prompt)

    def wait() -> None:
        binding.synchronize_outputs()
        stream.wait("a token")

    begun = time.perf_counter()
    token(tokens)
    wait()
    first = time.perf_counter() - begun
    row = {"same": measured(token, wait, tokens, 0), "session s": made, "first s": first}
    return row if prompt > 1 else {"us": measured(token, wait, tokens, 1), **row}


def theirs(c: llama_cache.Config, batch: int, tokens: int, prompt: int) -> float:
    """Microseconds of torch.compile's CUDA graph of the same decoder in float16."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    head, kv = c.width // c.heads, c.kv_heads * (c.width // c.heads)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(c.width, c.width + 2 * kv, bias=False)
            self.o = nn.Linear(c.width, c.width, bias=False)
            self.gate_up = nn.Linear(c.width, 2 * c.hidden, bias=False)
            self.down = nn.Linear(c.hidden, c.width, bias=False)
            self.norms = nn.ModuleList(nn.RMSNorm(c.width, 1e-5) for _ in range(2))
            for name in ("keys", "values"):
                self.register_buffer(name, torch.zeros(batch, c.kv_heads, ROOM, head))

        def forward(self, x: Any, at: Any, cos: Any, sin: Any, mask: Any) -> Any:
            q, k, v = self.qkv(self.norms[0](x)).split((c.width, kv, kv), -1)
            q, k, v = (t.view(batch, prompt, -1, head).transpose(1, 2) for t in (q, k, v))

            def turned(t: Any) -> Any:
                one, two = t.chunk(2, -1)
                return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

            self.keys.index_copy_(2, at, turned(k))
            self.values.index_copy_(2, at, v)
            y = F.scaled_dot_product_attention(
                turned(q), self.keys, self.values, attn_mask=mask, enable_gqa=True
            )
            x = x + self.o(y.transpose(1, 2).reshape(batch, prompt, c.width))
            gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(c.vocab, c.width)
            self.layers = nn.ModuleList(Layer() for _ in range(c.layers))
            self.norm, self.head = nn.RMSNorm(c.width, 1e-5), nn.Linear(c.width, c.vocab, False)
            angles = torch.arange(ROOM)[:, None] * c.base ** (-torch.arange(0, head, 2) / head)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, ids: Any, at: Any) -> Any:
            x = self.tokens(ids)
            cos, sin = self.cos[at], self.sin[at]
            mask = (torch.arange(ROOM, device="cuda") <= at[:, None])[None, None]
            for layer in self.layers:
                x = layer(x, at, cos, sin, mask)
            return self.head(self.norm(x[:, -1:])).float()

    with torch.device("cuda"), torch.no_grad():
        torch.set_default_dtype(torch.float16)
        step = torch.compile(Decoder(), mode="reduce-overhead")
        torch.set_default_dtype(torch.float32)
        ids = torch.zeros(batch, prompt, dtype=torch.int64)
        places = [torch.arange(n, n + prompt) for n in range(ROOM + 1 - prompt)]
        wait, further = torch.cuda.synchronize, int(prompt == 1)
        return measured(lambda n: step(ids, places[n - prompt]), wait, tokens, further)


def generated(size: str) -> float:
    """Tokens a second of GPT-2 by of.Generator, without the first ones."""
    model = gpt_cache.build(gpt_cache.SIZES[size])
    tokens = of.Generator(model, [5], max_new_tokens=460, device="cuda", precision="fp16")
    for _ in range(60):
        next(tokens)
    begun = time.perf_counter()
    return sum(1 for _ in tokens) / (time.perf_counter() - begun)


def batched(model: Path, requests: int = 64, new: int = 200, turns: int = 3) -> list[float]:
    """Tokens a second of all requests together, turn by turn."""
    rates, rng = [], np.random.default_rng(0)
    lengths = rng.integers(100, 1001, requests)
    prompts = [rng.integers(0, 128256, length).tolist() for length in lengths]
    with of.Batcher(model, device="cuda", max_tokens=1280, max_sequences=requests) as batcher:
        for _ in range(turns):
            begun = time.perf_counter()
            waiting = [batcher.submit(prompt, max_new_tokens=new) for prompt in prompts]
            count = sum(len(request.result()) for request in waiting)
            rates.append(count / (time.perf_counter() - begun))
    return rates


FIRST = """
import sys, time
sys.path.insert(0, sys.argv[2])
import onnx_fuse as of
begun = time.perf_counter()
tokens = of.Generator(sys.argv[1], list(range(5, 105)), max_new_tokens=8, device="cuda")
made = time.perf_counter()
next(tokens)
first = time.perf_counter()
list(tokens)
print(made - begun, first - made, time.perf_counter() - first)
"""


def users(layers: int, quick: bool) -> Iterator[tuple[str, float]]:
    """The rows of --users, as they come."""
    for name, size in (("fixed", "gpt2-small-fixed"), ("growing", "gpt2-small")):
        yield f"GPT-2 {name} tokens/s", generated(size)
    layers = min(layers, 4) if quick else layers
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "llama.onnx")
        config = replace(llama_cache.SIZES["llama-1b"], layers=layers, context=ROOM)
        save(llama_cache.build(config), path)
        environment = {
            **os.environ,
            "ONNX_FUSE_CACHE_DIR": str(Path(folder, "cache")),
            "PYTHONPYCACHEPREFIX": str(Path(folder, "python")),  # as installed packages have it
            "PYTHONDONTWRITEBYTECODE": "",
        }
        for name in () if quick else ("cold", "again"):
            command = [sys.executable, "-c", FIRST, str(path), str(Path(of.__file__).parents[1])]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            times = map(float, done.stdout.split())
            keys = ("session s", "first s", "7 more s")
            yield from ((f"{name}: {key}", value) for key, value in zip(keys, times, strict=True))
        first, *rest = batched(path, 16, 100, 2) if quick else batched(path)
        yield "Batcher first tokens/s", first
        yield "Batcher tokens/s", max(rest)


def floor(c: llama_cache.Config, batch: int, tokens: int, hw: Hardware) -> float:
    """Microseconds of reading all weights and the cached keys and values once."""
    kv = c.kv_heads * (c.width // c.heads)
    layer = c.width * (2 * c.width + 2 * kv + 3 * c.hidden)
    size = 2 if c.bits == 16 else 0.5 + 2 / llama_cache.BLOCK
    cached = 2 * ir.DataType[c.cache.upper()].itemsize * batch * tokens * kv
    read = c.layers * (layer * size + cached) + 2 * c.width * c.vocab
    return 1e6 * read / hw.bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--bits", type=int, nargs="+", choices=(16, 4), default=[16, 4])
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=CACHES[:1])
    parser.add_argument("--layers", type=int, default=16, help="fewer, for a look")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=1, help="tokens a run, all there are")
    parser.add_argument("--quick", action="store_true", help="without torch")
    parser.add_argument("--users", action="store_true", help="whole texts instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llama_cache.Net.normal = repeated
    if options.users:
        row = {}
        for name, value in users(options.layers, options.quick):
            row[name] = value
            print(f"{name} {value:,.4g}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([row], indent=1))
        return
    prompt, tokens = options.prompt, options.tokens if options.prompt == 1 else options.prompt
    hw, rows = Hardware.detect(), []
    for bits, cache in itertools.product(options.bits, options.cache):
        c = replace(
            llama_cache.SIZES["llama-1b"], bits=bits, layers=options.layers, last=prompt > 1,
            cache=cache,
        )  # fmt: skip
        for batch in options.batch:
            row = {"bits": bits, "cache": cache, "batch": batch}
            row |= ours(c, batch, tokens, prompt)
            if prompt == 1:
                row["floor"] = floor(c, batch, tokens, hw)
            if not options.quick and bits == 16 and cache == "float16":
                row["torch"] = theirs(c, batch, tokens, prompt)
                row["of torch"] = row.get("us", row["same"]) / row["torch"]
            rows.append(row)
            cells = (f"{v:,.4g}" if isinstance(v, float | int) else v for v in row.values())
            print(", ".join(map(" ".join, zip(row, cells, strict=True))), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
