"""What a user of InferenceSession waits for, beside torch where it is installed, on one GPU.

    python tools/bench_session.py [--only NAME ...] [--json FILE]

Each row is printed as it is measured: host time of a run of a small layer, a large layer bound in
place back to back, BERT-base at one length and at lengths never seen, GPT-2 token by token with a
growing and a fixed cache, its training step at lengths never seen, and the start of a process.
Models have random weights (models/).
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
import encoder
import gpt
import gpt_cache
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from gpu_events import captured, host_seconds, in_turns

from onnx_fuse import InferenceSession, Trainer, optim
from onnx_fuse.cuda import nvrtc
from onnx_fuse.runtime import device, precompile

Row = tuple[str, str, float, float | None]
"""(what, unit, ours, torch's)."""


def torch() -> Any:
    """torch where it is installed and sees the GPU."""
    try:
        import torch as found
    except ImportError:
        return None
    return found if found.cuda.is_available() else None


def each(work: Callable[[], object], repeats: int, rounds: int = 7) -> float:
    """Microseconds of one call: the median of rounds of so many."""
    work()
    return 1e6 * median(host_seconds(work, repeats, rounds))


def linear(k: int, n: int, *, norm: bool = False, half: str = "") -> Any:
    """[LayerNorm and] Linear of [N, k], as an exporter writes it: a ModelProto."""
    rng = np.random.default_rng(0)
    kind, dtype = ("bfloat16", ml_dtypes.bfloat16) if half else ("float", np.float32)
    product = "h = LayerNormalization (x, g, b)  p = MatMul (h, w)" if norm else "p = MatMul (x, w)"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> layer ({kind}[N,{k}] x) => ({kind}[N,{n}] y) '
        f"{{ {product}  y = Add (p, c) }}"
    )
    weights = {"w": rng.standard_normal((k, n)) / k**0.5, "c": np.zeros(n)}
    weights |= {"g": np.ones(k), "b": np.zeros(k)} if norm else {}
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), name))
    return model


class Places:
    """GPU memory that a binding names by address."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def new(self, nbytes: int) -> int:

        device.start()
        self.kept.append(device.Memory(nbytes, "a place"))
        return int(self.kept[-1].address)


def bound(session: Any, places: Places, **ends: tuple[Any, tuple[int, ...], int]) -> Any:
    """A binding of each input and output by name: (type, shape, address or 0)."""
    binding = session.io_binding()
    inputs = {end.name for end in session.get_inputs()}
    for name, (kind, shape, address) in ends.items():
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        place = address or places.new(size)
        bind = binding.bind_input if name in inputs else binding.bind_output
        bind(name, "cuda", 0, kind, shape, place)
    return binding


def small(_: argparse.Namespace) -> Iterator[Row]:
    """Host time of a run of a 64 x 64 Linear."""
    session, places = InferenceSession(linear(64, 64), device="cuda"), Places()
    x = np.ones((64, 64), np.float32)
    kind = (np.float32, (64, 64), 0)
    binding = bound(session, places, x=kind, y=kind)

    def asynchronous() -> None:
        session.run_with_iobinding(binding, synchronize=False)

    t = torch()
    theirs: list[float | None] = [None, None, None]
    if t is not None:
        layer = t.nn.Linear(64, 64, device="cuda")
        given = t.ones(64, 64, device="cuda")
        with t.no_grad():

            def waited() -> None:
                layer(given)
                t.cuda.synchronize()

            theirs[0] = each(waited, 300)
            theirs[1] = each(lambda: layer(given), 300)
            t.cuda.synchronize()
            theirs[2] = each(lambda: layer(t.from_numpy(x).cuda()).cpu().numpy(), 300)
    for _ in range(5):
        session.run_with_iobinding(binding)
    found = each(lambda: session.run_with_iobinding(binding), 1000)
    yield "64x64 Linear, bound, synchronous", "us", found, theirs[0]
    found = each(asynchronous, 300)
    binding.synchronize_outputs()
    yield "64x64 Linear, bound, asynchronous", "us", found, theirs[1]
    found = each(lambda: session.run(None, {"x": x}), 1000)
    yield "64x64 Linear, NumPy feeds", "us", found, theirs[2]
    (y,) = session.run(None, {"x": x})
    assert np.isfinite(y).all()


def large(_: argparse.Namespace) -> Iterator[Row]:
    """LayerNorm+Linear in bf16, bound in place and back to back, against torch's bare Linear."""
    t = torch()
    for m, k, n in ((8192, 768, 3072), (512, 768, 3072), (16, 4096, 4096)):
        session = InferenceSession(linear(k, n, norm=True, half="bf16"), device="cuda")
        kind = ml_dtypes.bfloat16
        places = Places()
        binding = bound(session, places, x=(kind, (m, k), 0), y=(kind, (m, n), 0))
        arms = {"ours": partial(session.run_with_iobinding, binding, synchronize=False)}
        if t is not None:
            x = t.randn(m, k, device="cuda", dtype=t.bfloat16)
            w, c = t.randn(n, k, device="cuda", dtype=t.bfloat16), t.zeros(n, device="cuda")
            arms["torch"] = partial(t.nn.functional.linear, x, w, c.bfloat16())
        for _ in range(5):
            session.run_with_iobinding(binding)
        us = in_turns({name: partial(back_to_back, arm, binding) for name, arm in arms.items()})
        name = f"LayerNorm+Linear bf16 {m},{k},{n}, back to back"
        yield name, "us", us["ours"], us.get("torch")


def back_to_back(work: Callable[[], object], binding: Any, calls: int = 200) -> float:
    """Microseconds of a call of so many, all streams awaited at the end."""
    return 1e6 * host_seconds(work, calls, wait=binding.synchronize_inputs)[0]


def _encoder() -> Any:
    model = encoder.build(encoder.SIZES["bert-base"])
    return InferenceSession(model, device="cuda", precision="fp16")


def _tokens(length: int, seed: int = 0) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(0, 30522, (1, length))
    return {
        "input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)
    }  # fmt: skip


def bert(_: argparse.Namespace) -> Iterator[Row]:
    """BERT-base in fp16 at one length, then at lengths never seen."""
    session, places = _encoder(), Places()
    feeds, long = _tokens(128), (np.int64, (1, 128), 0)
    began = time.time()
    [hidden, pooled] = session.run(None, feeds)
    binding = bound(
        session, places, input_ids=long, attention_mask=long, token_type_ids=long,
        last_hidden_state=(np.float32, hidden.shape, 0),
        pooler_output=(np.float32, pooled.shape, 0),
    )  # fmt: skip
    _write(binding, feeds)
    for _ in range(5):
        session.run_with_iobinding(binding)
    found = each(lambda: session.run_with_iobinding(binding), 100)
    for got, want in zip(binding.copy_outputs_to_cpu(), (hidden, pooled), strict=True):
        np.testing.assert_array_equal(got, want)
    yield "BERT-base fp16 B1 T128, bound, synchronous", "us", found, _peer()
    yield from lengths(session, began)


def _write(binding: Any, feeds: dict[str, Any]) -> None:
    """Fill what a binding names."""
    stream = device.Stream()
    for name, array in feeds.items():
        stream.upload(binding.feeds[name].address, array.ctypes.data, array.nbytes)
    stream.wait("feeds")


def _peer() -> float | None:
    """The same network of torch modules in a CUDA graph (bench_bert.py has torch.compile's)."""
    t = torch()
    if t is None:
        return None
    from bench_bert import Peer

    with t.device("cuda"), t.no_grad():
        peer = Peer(encoder.SIZES["bert-base"]).half().eval()
        ids = t.zeros(1, 128, dtype=t.int64)
        given = (ids, t.ones_like(ids), ids)
        graph = captured(lambda: peer(*given))

    def once() -> None:
        graph.replay()
        t.cuda.synchronize()

    return each(once, 100)


def prepared(executable: Any, feeds: dict[str, Any]) -> float:
    """The time at which the last program for other lengths of these feeds came into the cache.

    It waits until all are there, two minutes at most.
    """
    shapes = {name: (array.shape, array.dtype.name) for name, array in feeds.items()}
    shapes = {**executable._resident(), **shapes}
    specializer = executable.specializer
    (symbol,) = precompile.likely_to_vary(specializer.symbols(shapes))
    wanted = {symbol: precompile.largest_size(0)}
    deadline = time.monotonic() + 120
    while specializer.programs is None or precompile.missing(specializer, shapes, wanted):
        if time.monotonic() > deadline:
            return float("inf")
        time.sleep(0.2)
    return max(path.stat().st_mtime for path in specializer.programs.folder.rglob("*.program"))


def lengths(session: Any, began: float) -> Iterator[Row]:
    """60 random lengths after 12, which have compiled kernels, after a first run that `began`."""
    compiled, inner = [0], nvrtc._nvrtc

    def counted(*given: Any) -> Any:
        compiled[0] += 1
        return inner(*given)

    nvrtc._nvrtc = counted
    known = (1, 2, 8, 16, 32, 64, 96, 129, 200, 300, 400, 512)
    for length in known:
        session.run(None, _tokens(length))
    compiled[0] = 0
    rng = np.random.default_rng(1)
    fresh = rng.permutation(np.setdiff1d(np.arange(1, 513), (128, *known)))
    times = []
    for length in fresh[:60]:
        feeds = _tokens(int(length))
        started = time.perf_counter()
        session.run(None, feeds)
        times.append((time.perf_counter() - started) * 1e3)
    nvrtc._nvrtc = inner
    yield "BERT-base, a new length, median of 60", "ms", median(times), None
    yield "BERT-base, a new length, the worst", "ms", max(times), None
    yield "BERT-base, NVRTC compiles for 60 new lengths", "", compiled[0], None
    seconds = prepared(session._executable, _tokens(128)) - began
    yield "BERT-base, from a run until all lengths are prepared", "s", seconds, None


def decode(_: argparse.Namespace) -> Iterator[Row]:
    """GPT-2 with a cache, batch 1, token by token: the cache never leaves the GPU."""
    for name, what in (("gpt2-small", "growing"), ("gpt2-small-fixed", "fixed")):
        c = gpt_cache.SIZES[name]
        session = InferenceSession(gpt_cache.build(c), device="cuda", precision="fp16")
        seconds = (_fixed if c.capacity else _growing)(session, c, TOKENS)
        yield f"GPT-2 124M, {TOKENS} tokens, {what} cache", "tokens/s", TOKENS / seconds, None


TOKENS = 256


def _growing(session: Any, c: Any, tokens: int) -> float:
    """Seconds of so many tokens, once the kernels are compiled."""
    steps = growing(session, c)
    for _ in range(2):
        next(steps)
    return tokens * host_seconds(lambda: next(steps), tokens)[0]


def growing(session: Any, c: Any) -> Iterator[None]:
    """Token by token: each a length of its own, what it gives the next one's past."""
    names = [f"{kind}.{layer}" for layer in range(c.layers) for kind in ("key", "value")]
    places, head = Places(), c.width // c.heads
    first = places.new(2 * c.width)
    binding = session.io_binding()
    for name in names:
        binding.bind_input(f"past_{name}", "cuda", 0, np.float16, (1, c.heads, 1, head), first)
        binding.bind_output(f"present_{name}", "cuda")
    binding.bind_output("logits")
    device.Stream().fill(first, 0, 2 * c.width)
    token = 1
    for position in itertools.count(1):
        binding.bind_cpu_input("input_ids", np.array([[token]]))
        binding.bind_cpu_input("position", np.array([position]))
        session.run_with_iobinding(binding, synchronize=False)
        *caches, logits = binding.get_outputs()
        token = int(logits[0, 0].argmax())
        for name, cache in zip(names, caches, strict=True):
            binding.bind_ortvalue_input(f"past_{name}", cache)
        yield


def _fixed(session: Any, c: Any, tokens: int) -> float:
    """Seconds: the cache in one place, where each run adds a token to it."""
    names = [f"{kind}.{layer}" for layer in range(c.layers) for kind in ("key", "value")]
    shape = (1, c.heads, c.capacity, c.width // c.heads)
    places, size = Places(), 2 * int(np.prod(shape))
    ids, position = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    binding = session.io_binding()
    for name in names:
        place = places.new(size)
        device.Stream().fill(place, 0, size)
        binding.bind_input(f"past_{name}", "cuda", 0, np.float16, shape, place)
        binding.bind_output(f"present_{name}", "cuda", 0, np.float16, shape, place)
    binding.bind_cpu_input("input_ids", ids)
    binding.bind_cpu_input("position", position)
    binding.bind_output("logits")
    began = 0.0
    for i in range(tokens + 8):
        if i == 8:
            began = time.perf_counter()
        position[0] = i
        session.run_with_iobinding(binding, synchronize=False)
        logits = binding.get_outputs()[-1]
        ids[0, 0] = int(logits[0, 0].argmax())
    return time.perf_counter() - began


def train(_: argparse.Namespace) -> Iterator[Row]:
    """GPT-2's step in bfloat16, batch 4, at lengths never seen after one of each class.

    Then at lengths of classes that never came, once they are prepared.
    """
    c = gpt.SIZES["gpt2-small"]
    trainer = Trainer(
        gpt.build(c), loss="cross_entropy", optimizer=optim.AdamW(), precision="bf16", device="cuda"
    )
    rng = np.random.default_rng(1)

    def step(length: int) -> float:
        ids = rng.integers(0, c.vocab, (4, length))
        started = time.perf_counter()
        float(trainer.step({"input_ids": ids, "labels": ids}))
        return (time.perf_counter() - started) * 1e3

    began = time.time()
    for length in (250, 180, 100):
        step(length)
    fresh = rng.permutation(np.setdiff1d(np.arange(65, 257), (250, 180, 100)))[:30]
    new = [step(int(length)) for length in fresh]
    known = median(step(int(length)) for length in fresh)
    yield "GPT-2 bf16, a training step of a known length", "ms", known, None
    yield "GPT-2 bf16, more for a new length, median of 30", "ms", median(new) - known, None
    yield "GPT-2 bf16, more for a new length, the worst", "ms", max(new) - known, None
    backend: Any = trainer._device
    (executable,) = backend._states._executables.values()
    ids = np.zeros((4, 100), np.int64)
    seconds = prepared(executable, {"input_ids": ids, "labels": ids}) - began
    yield "GPT-2 bf16, from a step until all lengths are prepared", "s", seconds, None
    others = (20, 40, 300, 350, 400, 500)
    more = max(step(length) - step(length) for length in others)
    yield "GPT-2 bf16, more for a length of another class, the worst", "ms", more, None


def start(_: argparse.Namespace) -> Iterator[Row]:
    """A new process from its start to the first result of BERT-base: cold, then warm."""
    from cold_start import measure

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bert.onnx"
        ir.save(encoder.build(encoder.SIZES["bert-base"]), path)
        for name in ("cold", "warm"):
            parts = measure(path, "cuda", "fp16", Path(folder) / "cache")
            yield f"BERT-base, a new process, {name} cache", "s", parts["first result"], None


ROWS = {
    "small": small, "large": large, "bert": bert, "decode": decode, "train": train, "start": start,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    print(f"{'':58s}{'onnx_fuse':>12s}{'torch':>12s}")
    for name in args.only:
        for what, unit, ours, theirs in ROWS[name](args):
            beside = f"{theirs:12.2f}" if theirs is not None else f"{'-':>12s}"
            print(f"{what:58s}{ours:12.2f}{beside} {unit}", flush=True)
            found.append({"what": what, "unit": unit, "onnx_fuse": ours, "torch": theirs})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
