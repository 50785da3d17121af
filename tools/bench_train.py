"""Training steps of whole models through `Trainer.step`, beside torch.compile, on one GPU.

    python tools/bench_train.py [--only NAME ...] [--quick | --together] [--layers N] [--profile]
                                [--adapters N] [--limit S] [--json FILE]

Every arm is a process of its own, with random weights and feeds: `Trainer.step` with an empty cache
folder, which gives the first step's seconds and the times, once more with what that left in the
cache, and the same network of torch modules (train_peers.py) under torch.compile with autocast and
fused AdamW. A step is the time between calls of a loop that looks at its last loss, images on the
device; "graph" is the GPU's own time. "first" is from the model in memory to the first loss. Memory
is what the device has in use beside the CUDA context. Every figure is printed as it is found, and
the JSON is written after every arm. An arm that takes longer than `--limit` seconds is ended; the
figures that it found until then stay. `--quick` leaves torch and the warm start out; `--profile`
adds each kernel by itself, L2 warm, launch included. With `--together` all arms start at once, on
all GPUs, and each is timed alone (gpu_turns.py): in minutes, without memory and the warm start, and
the first step beside others that compile. `--adapters 8` trains eight of rank 8 in place of the
weights, each on an eighth of the rows, `--adapters 1` one by its name. ResNet-50 and ConvNeXt need
torchvision.
"""

import argparse
import dataclasses
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
import numpy as np
from gpu_events import host_seconds
from gpu_turns import Found, Turn, devices, say, together, told

Arrays = dict[str, Any]
ROUNDS, SECONDS = 7, 0.25
"""Rounds of steps, and about how long each takes."""


def _tokens(c: Any, batch: int, length: int, rng: np.random.Generator) -> Arrays:
    ids = rng.integers(0, c.vocab, (2, batch, length))
    return {"input_ids": ids[0], "labels": ids[1]}


def _padded(c: Any, batch: int, length: int, rng: np.random.Generator) -> Arrays:
    kept = np.arange(length) < rng.integers(length // 2, length + 1, (batch, 1))
    return {
        "input_ids": rng.integers(0, c.vocab, (batch, length)),
        "attention_mask": kept.astype(np.int64),
        "token_type_ids": rng.integers(0, 2, (batch, length)),
        "labels": rng.integers(0, c.classes, batch),
    }


def _images(c: Any, batch: int, _: int, rng: np.random.Generator) -> Arrays:
    pixels = rng.standard_normal((batch, 3, c.image, c.image), np.float32)
    return {"pixels": pixels, "labels": rng.integers(0, c.classes, batch)}


def _square(c: Any, batch: int, side: int, rng: np.random.Generator) -> Arrays:
    x = rng.standard_normal((batch, 3, side, side), np.float32)
    return {"x": x, "labels": rng.integers(0, c.classes, batch)}


def _vectors(c: Any, batch: int, _: int, rng: np.random.Generator) -> Arrays:
    x = rng.standard_normal((batch, c.widths[0]), np.float32)
    return {"x": x, "labels": rng.integers(0, c.widths[-1], batch)}


@dataclass(frozen=True)
class Row:
    """A model of models/, the batch it trains on, and its torch module.

    `exported`: the model is that module, as PyTorch writes it for training.
    """

    module: str
    size: str
    batch: int
    length: int
    feeds: Callable[[Any, int, int, np.random.Generator], Arrays]
    peer: str
    precision: str = "bf16"
    mode: str = "default"
    more: Mapping[str, int] = dataclasses.field(default_factory=dict)
    exported: bool = False

    def config(self, layers: int) -> Any:
        """The configuration, with fewer layers where that is asked for."""
        found = importlib.import_module(self.module).SIZES[self.size]
        fewer = {"layers": layers} if layers and hasattr(found, "layers") else {}
        return dataclasses.replace(found, **self.more, **fewer)

    def model(self, c: Any) -> Any:
        """The model, with random weights."""
        if self.exported:
            import train_peers

            return train_peers.exported(getattr(train_peers, self.peer)(c), self.length)
        _quick_weights()
        return importlib.import_module(self.module).build(c)


ROWS = {
    "gpt2": Row("gpt", "gpt2-small", 16, 1024, _tokens, "Gpt"),
    "bert": Row("encoder", "bert-base", 32, 128, _padded, "Encoder", more={"classes": 2}),
    "vit": Row("vit", "vit-b16", 64, 0, _images, "Vit"),
    "llama": Row("llama", "llama-8x2048", 4, 2048, _tokens, "Llama"),
    "resnet50": Row("resnet", "resnet50", 64, 224, _square, "ResNet", exported=True),
    "convnext": Row("convnext", "convnext-tiny", 32, 224, _square, "ConvNeXt"),
    "mlp": Row("mlp", "mnist", 256, 0, _vectors, "Perceptron", "fp32", "reduce-overhead"),
}


def in_use() -> int:
    """Bytes of the device's memory that are in use."""
    from cuda.bindings import runtime

    error, free, total = runtime.cudaMemGetInfo()
    assert error == 0, error
    return int(total - free)


def step_time(step: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Seconds a step of a loop that waits for the last one: the median of the rounds."""
    for _ in range(3):
        step()
    wait()
    count = max(1, int(SECONDS / host_seconds(step, 1, wait=wait)[0]))
    return median(host_seconds(step, count, ROUNDS, wait))


def _quick_weights() -> None:
    """Let models/ draw weights in float32, which takes a quarter of the time."""
    import common

    def normal(net: Any, name: str, shape: Any, std: float) -> Any:
        array = net.rng.standard_normal(shape, np.float32) * np.float32(std)
        return net._initializer(net.prefix + name, array)

    common.Net.normal = normal  # type: ignore[assignment]


def on_gpu(array: Any, stream: Any) -> Any:
    """Floats in GPU memory, where torch's feeds are too; the host checks labels, which stay."""
    from onnx_fuse.runtime import device
    from onnx_fuse.runtime.tensor import DeviceTensor

    if array.dtype.kind != "f":
        return array
    memory = device.Memory(array.nbytes, "feeds")
    stream.upload(memory.address, array.ctypes.data, array.nbytes)
    stream.wait("feeds")
    return DeviceTensor(memory.address, array.shape, array.dtype.name, 0, memory)


def ours(row: Row, c: Any, feeds: Arrays, profile: bool, adapters: int) -> None:
    """Say first step, step, memory, graph and kernels of `Trainer.step`."""
    from onnx_fuse import Lora, Trainer, optim

    turn, model, before = Turn(), row.model(c), in_use()
    loras = {f"{i}": Lora(8) for i in range(adapters)}
    feeds |= {"adapter": np.arange(row.batch) % adapters} if adapters else {}
    begun = time.perf_counter()
    trainer = Trainer(
        model, loss="cross_entropy", optimizer=optim.AdamW(lr=1e-4), device="cuda",
        precision=row.precision, lora=loras or None,
    )  # fmt: skip
    losses, last = [float(trainer.step(feeds))], []
    say(first=time.perf_counter() - begun)
    executable = trainer._device._states._executables["update"]  # type: ignore[union-attr]
    feeds = {name: on_gpu(array, executable.stream) for name, array in feeds.items()}

    def step() -> None:
        last[:] = [trainer.step(feeds)]

    float(trainer.step(feeds))
    turn.take()
    say(step=step_time(step, lambda: float(last[0])))
    losses.append(float(last[0]))
    say(losses=losses, **({} if turn.shared else {"bytes": in_use() - before}))
    (instance,) = executable.instances()
    instance.capture()
    graph = median(executable.stream.timed(instance.launch) for _ in range(3))
    say(graph=graph, launches=sum(len(call.launches) for call in instance.program.calls))
    if profile:
        say(kernels=kernel_times(instance))


def kernel_times(instance: Any) -> dict[str, list[float]]:
    """Calls and seconds of each kind of kernel call by itself."""
    kinds: dict[str, list[float]] = {}
    for call, took in instance.profile():
        name = f"{call.kernel[:40]} {call.problem or ''}".strip()[:110]
        kind = kinds.setdefault(f"{name} {call.choice.how if call.choice else call.note}", [0, 0.0])
        kind[:] = kind[0] + 1, kind[1] + took
    return kinds


def torch_network(row: Row, c: Any, feeds: Arrays) -> tuple[Any, Arrays]:
    """The torch module and its feeds on the GPU, images with their channels last."""
    import torch as t
    import train_peers

    with t.device("cuda"):
        net = getattr(train_peers, row.peer)(c)
    train_peers.small_weights(net)
    given = {name: t.from_numpy(array).cuda() for name, array in feeds.items()}
    if row.feeds is _square:
        net = net.to(memory_format=t.channels_last)
        given["x"] = given["x"].contiguous(memory_format=t.channels_last)
    return net, given


def torch_step(row: Row, net: Any, given: Arrays) -> Callable[[], Any]:
    """A step of the module under torch.compile, with fused AdamW, which returns its loss."""
    import torch as t

    run = t.compile(net, mode=row.mode, dynamic=False)
    update = t.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step() -> Any:
        with t.autocast("cuda", t.bfloat16, enabled=row.precision == "bf16"):
            loss = run(**given)
        loss.backward()
        update.step()
        update.zero_grad()
        return loss

    return step


def torch_compiled(row: Row, c: Any, feeds: Arrays) -> None:
    """Say the same of the torch module."""
    import torch as t

    turn = Turn()
    t.cuda.init()
    t.cuda.synchronize()
    before = in_use()
    net, given = torch_network(row, c, feeds)
    begun = time.perf_counter()
    step = torch_step(row, net, given)
    losses = [float(step())]
    say(first=time.perf_counter() - begun, version=t.__version__)
    step()
    turn.take()
    say(step=step_time(step, t.cuda.synchronize))
    losses.append(float(step()))
    say(losses=losses, allocated=t.cuda.max_memory_allocated())
    if not turn.shared:
        say(bytes=in_use() - before)


SHOWN: dict[str, Callable[[Any], str]] = {
    "first": lambda seconds: f"first {seconds:.2f} s",
    "step": lambda seconds: f"step {seconds * 1e3:.3f} ms",
    "bytes": lambda count: f"{count / 2**30:.2f} GiB",
    "losses": lambda losses: "loss " + " to ".join(f"{x:.4f}" for x in losses),
    "graph": lambda seconds: f"graph {seconds * 1e3:.3f} ms",
    "launches": lambda count: f"in {count} launches",
    "error": str,
}
"""How a figure is printed."""


def measured(
    name: str,
    arm: str,
    where: Mapping[str, Any],
    args: argparse.Namespace,
    show: Callable[[str], object],
) -> Found:
    """What a process of one arm found, shown as it comes; Popen is given `where`."""
    command = [sys.executable, __file__, "--child", name, arm, "--layers", str(args.layers)]
    command += ["--adapters", str(args.adapters)]
    command += ["--profile"] if args.profile and arm == "cold" else []

    def shown(key: str, value: Any) -> None:
        if key in SHOWN:
            show(f"  {SHOWN[key](value)}")

    return told(command, where, args.limit, shown)


def in_turn(args: argparse.Namespace, rows: Mapping[str, Found]) -> None:
    """All arms one after another, each alone, printed as its figures come."""
    for name in args.only:
        row = ROWS[name]
        print(f"{name}: {row.batch} x {row.length or 1}, {row.precision}", flush=True)
        with tempfile.TemporaryDirectory() as cache:
            caches = {"ONNX_FUSE_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
            for arm in ("cold",) if args.quick else ("cold", "warm", "torch"):
                print(f"  {arm:6s}", end="", flush=True)
                rows[name][arm] = measured(
                    name, arm, {"env": {**os.environ, **caches}}, args,
                    lambda text: print(text, end="", flush=True),
                )  # fmt: skip
                print(flush=True)
                write(args, rows)
        conclude(rows[name])


def at_once(args: argparse.Namespace, rows: Mapping[str, Found]) -> None:
    """All arms at once but for their timing, on all GPUs, each printed when it has ended."""
    lines = {(name, arm): list[str]() for name in args.only for arm in ("torch", "cold")}

    def measure(name: str, arm: str, where: Mapping[str, Any]) -> Found:
        return measured(name, arm, where, args, lines[name, arm].append)

    for name, arm, found in together(args.only, ("torch", "cold"), measure, devices()):
        rows[name][arm] = found
        print(f"{name:8s} {arm:6s}{''.join(lines[name, arm])}", flush=True)
        if len(rows[name]) == 3:  # with its name
            conclude(rows[name])
        write(args, rows)


def conclude(found: Found) -> None:
    """Print how our step compares with torch.compile's, and what its kernels take."""
    if "step" in found["cold"] and "step" in found.get("torch", {}):
        ratio = found["cold"]["step"] / found["torch"]["step"]
        print(f"  {found['model']}: {ratio:.2f} of torch.compile's step", flush=True)
    for kernel, (count, took) in sorted(
        found["cold"].get("kernels", {}).items(), key=lambda item: -item[1][1]
    ):
        print(f"    {took * 1e6:9.1f} us  {count:3.0f} x  {kernel}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="no torch, no warm start")
    parser.add_argument("--together", action="store_true", help="all at once but for the timing")
    parser.add_argument("--layers", type=int, default=0, help="fewer, for a look")
    parser.add_argument("--adapters", type=int, default=0, help="train so many in their place")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each arm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:  # one arm, in this process
        row = ROWS[args.child[0]]
        c = row.config(args.layers)
        feeds = row.feeds(c, row.batch, row.length, np.random.default_rng(0))
        if args.child[1] == "torch":
            return torch_compiled(row, c, feeds)
        return ours(row, c, feeds, args.profile, args.adapters)
    rows: dict[str, Found] = {name: {"model": name} for name in args.only}
    (at_once if args.together else in_turn)(args, rows)


def write(args: argparse.Namespace, found: Mapping[str, Found]) -> None:
    """Write what is known so far, for the page."""
    if not args.json:
        return
    from performance_page import save

    from onnx_fuse.program.problem import Hardware

    rows = list(found.values())
    version = next((r["torch"].get("version", "") for r in rows if "torch" in r), "")
    save(args.json, Hardware.detect(0).name, version, rows)


if __name__ == "__main__":
    main()
