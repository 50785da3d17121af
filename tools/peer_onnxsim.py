"""One training step here and in onnxsim's compile_training_loop, on graphs that both accept.

    pip install onnxsim==0.8.1
    python tools/peer_onnxsim.py [--rounds 5]

Same model, same batches, Adam, same onnxruntime with its default settings. The arms take turns, so
that whatever else the machine does falls on all. Prints the median step times and their ratio to
the peer's, in brackets the ratio of the tenth percentiles, which other load touches least, and the
largest relative difference of the losses over all steps. Give it a quiet machine.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import _paths  # noqa: F401
import numpy as np
import onnx_ir as ir
from common import Net

STEPS, WARM, LR = 120, 20, 1e-3
OURS = ("ours", "ours, fused")
Array = np.ndarray[Any, Any]


def cross_entropy(net: Net, logits: ir.Value, labels: ir.Value) -> ir.Value:
    """-mean over rows of log softmax(logits)·labels, labels one-hot: the peer has no loss ops."""
    p = net.Mul(net.Log(net.Softmax(logits, axis=-1)), labels)
    return net.Neg(net.ReduceMean(net.ReduceSum(p, [-1], keepdims=0), keepdims=0))


def mlp(rows: int, width: int) -> ir.Model:
    """Three layers of LayerNorm, Gemm, Relu on [rows, 64]."""
    net = Net("mlp", 0)
    x, labels = (net.input(n, ir.DataType.FLOAT, [rows, w]) for n, w in (("x", 64), ("t", 10)))
    sizes = [64, width, width, 10]
    for i, (n_in, n_out) in enumerate(pairwise(sizes)):
        with net.scope(f"layers.{i}"):
            x = net.gemm("fc", net.layer_norm("norm", x, n_in), n_in, n_out, n_in**-0.5)
            x = net.Relu(x) if i < 2 else x
    net.output(cross_entropy(net, x, labels), "loss", [])
    return net.model()


def transformer(rows: int, width: int, length: int = 32, heads: int = 4) -> ir.Model:
    """Two pre-norm blocks of attention and an Erf GELU on [rows, length, width]."""
    net = Net("transformer", 0)
    x, labels = (net.input(n, ir.DataType.FLOAT, [rows, length, width]) for n in ("x", "t"))
    head = width // heads
    for i in range(2):
        with net.scope(f"blocks.{i}"):
            h = net.layer_norm("norm_1", x, width)
            q, k, v = (
                net.Transpose(
                    net.Reshape(net.linear(n, h, width, width, 0.05), [rows, length, heads, head]),
                    perm=[0, 2, 3, 1] if n == "k" else [0, 2, 1, 3],
                )
                for n in ("q", "k", "v")
            )
            p = net.Softmax(net.Mul(net.MatMul(q, k), head**-0.5), axis=-1)
            h = net.Transpose(net.MatMul(p, v), perm=[0, 2, 1, 3])
            h = net.linear("proj", net.Reshape(h, [rows, length, width]), width, width, 0.05)
            x = net.Add(x, h)
            h = net.linear("up", net.layer_norm("norm_2", x, width), width, 4 * width, 0.05)
            half = net.Add(net.Erf(net.Mul(h, 0.5**0.5)), 1.0)
            h = net.Mul(net.Mul(h, half), 0.5)
            x = net.Add(x, net.linear("down", h, 4 * width, width, 0.05))
    d = net.Sub(x, labels)
    net.output(net.ReduceMean(net.Mul(d, d), keepdims=0), "loss", [])
    return net.model()


CASES: dict[str, Callable[[], ir.Model]] = {
    "mlp 64 rows, width 128": lambda: mlp(64, 128),
    "mlp 256 rows, width 512": lambda: mlp(256, 512),
    "transformer 4x32, width 64": lambda: transformer(4, 64),
    "transformer 8x32, width 128": lambda: transformer(8, 128),
}


def feeds_of(model: ir.Model, step: int) -> dict[str, Array]:
    rng = np.random.default_rng(step)
    x, t = (tuple(v.shape.numpy()) for v in model.graph.inputs if v.shape is not None)
    labels = np.eye(10)[rng.integers(0, 10, t[0])] if t[-1] == 10 else rng.standard_normal(t)
    return {"x": rng.standard_normal(x).astype(np.float32), "t": labels.astype(np.float32)}


def measure(arm: str, case: str) -> dict[str, list[float]]:
    """Losses and seconds of STEPS steps of one arm."""
    model = CASES[case]()
    if arm == "theirs":
        import onnxsim

        weights = [n for n in model.graph.initializers if not n.startswith("const.")]
        loop = onnxsim.compile_training_loop(ir.serde.serialize_model(model), "loss", weights)

        def step(feeds: dict[str, Array]) -> float:
            return float(loop(feeds, LR))

    else:
        from onnx_fuse.training import optim
        from onnx_fuse.training.trainer import Trainer

        trainer = Trainer(
            model, loss="loss", optimizer=optim.Adam(lr=LR), level=2 if arm == "ours, fused" else 0
        )
        step = trainer.step
    losses, times = [], []
    for i in range(STEPS):
        feeds = feeds_of(model, i)
        start = time.perf_counter()
        losses.append(step(feeds))
        times.append(time.perf_counter() - start)
    return {"losses": losses, "times": times[WARM:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("ARM", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    print(f"{'ms a step':28}{'theirs':>10}" + "".join(f"{n:>14}{'ratio':>15}" for n in OURS))
    for case in CASES:
        times: dict[str, list[float]] = {}
        losses: dict[str, list[float]] = {}
        for i in range(options.rounds):
            for arm in ("theirs", *OURS) if i % 2 else (*OURS, "theirs"):
                # A process each: idle thread pools of the other would take its cores.
                command = [sys.executable, __file__, "--one", arm, case]
                found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
                times.setdefault(arm, []).extend(found["times"])
                losses[arm] = found["losses"]
        low, middle = (
            {arm: float(np.percentile(t, q)) * 1e3 for arm, t in times.items()} for q in (10, 50)
        )
        line = f"{case:28}{middle['theirs']:10.3f}"
        for arm in OURS:
            ratio, best = (at[arm] / at["theirs"] for at in (middle, low))
            line += f"{middle[arm]:14.3f}{ratio:7.3f} [{best:.3f}]"
        apart = np.max(np.abs(1 - np.array(losses[OURS[0]]) / np.array(losses["theirs"])))
        print(f"{line}   losses apart {apart:.1e}", flush=True)


if __name__ == "__main__":
    main()
