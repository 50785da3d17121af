"""Fused LayerNorm+Linear against cuBLAS and torch.compile, on one GPU, in one run.

    python tools/bench_fused.py [--json FILE] [--quick]

For each shape (M,K,N): bare cuBLAS (torch's F.linear), this project's bare GEMM, torch.compile of
LayerNorm->Linear, and the candidate that `select` takes for LayerNormGemm (weights folded before,
as in inference, statistics included). Then forward and backward, all five gradients, against
F.linear's three: the better of folding the weights first (that included) and taking them as they
are. CUDA-graph replays rotating over operands larger than
L2, interleaved, medians. Ratios hold from run to run better than times.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch as t
from kernel_lab import SHAPES, Case, interleaved, make, prepare, rotation

from onnx_fuse.kernels import jit, select
from onnx_fuse.kernels.rows import fold, fold_parts
from onnx_fuse.problem import Hardware, Problem

BF16 = {"dtype": "bfloat16"}


class Bench:
    """The arms of one shape, bound to their own operand sets."""

    def __init__(self, hw: Hardware, m: int, k: int, n: int) -> None:
        self.hw, self.shape = hw, (m, k, n)
        self.case = Case("bench", m, k, n)
        self.chosen: dict[str, str] = {}

    def ours(self, problem: Problem, sets: list[Any], name: str) -> Any:
        """Calls of the kernel that select takes for `problem`, bound to each operand set."""
        choice = select(problem.op, problem, self.hw)
        if choice is None:
            return None
        self.chosen[name] = f"{choice.kernel.name} {choice.config} ({choice.why})"
        bound = []
        for op in sets:
            size = max(16, choice.workspace(problem, self.hw))
            op.inputs[f"workspace {name}"] = t.empty(size, dtype=t.uint8, device="cuda")
            pointers = {key: v.data_ptr() for key, v in (op.inputs | op.outputs).items()}
            pointers["workspace"] = pointers[f"workspace {name}"]
            if problem.attr("folded"):
                prepare(problem, pointers, self.hw)
            bound.append([jit.Bound(c, pointers, self.hw) for c in choice.launch(problem, self.hw)])

        def run(i: int) -> None:
            for call in bound[i]:
                call.enqueue(t.cuda.current_stream().cuda_stream)

        return run

    def fold(self, sets: list[Any], k: int, n: int) -> Any:
        """The weights' fold, which a training step makes once for both directions."""
        bound = []
        for op in sets:
            scratch = t.empty(8 * fold_parts(k, False) * n, dtype=t.uint8, device="cuda")
            op.inputs["fold scratch"] = scratch
            pointers = {key: v.data_ptr() for key, v in op.inputs.items()}
            pointers["workspace"] = scratch.data_ptr()
            calls = fold(k, n, "bfloat16", False)
            bound.append([jit.Bound(call, pointers, self.hw) for call in calls])

        def run(i: int) -> None:
            for call in bound[i]:
                call.enqueue(t.cuda.current_stream().cuda_stream)

        return run

    def forward(self, compiled: bool) -> dict[str, float]:
        """Median us: cublas, gemm (ours, bare), fused, compile."""
        m, k, n = self.shape
        attrs = {"folded": True, "static_b": True, **BF16}
        fused = Problem.of("LayerNormGemm", m=m, k=k, n=n, bias=True, **attrs)
        sets, launches = rotation(fused, self.hw)
        ops = [make(fused, self.case, seed, oracle=False) for seed in range(sets)]
        for op in ops:
            op.inputs |= {"a": op.inputs["x"], "b": op.inputs["w"]}
        bare = Problem.of("Gemm", m=m, k=k, n=n, static_b=True, **BF16)
        arms = {
            "cublas": lambda i: ops[i].baseline(),
            "gemm": self.ours(bare, ops, "gemm"),
            "fused": self.ours(fused, ops, "fused"),
        }
        if compiled:
            t._dynamo.reset()
            module = t.compile(
                lambda x, g, b, w, c: t.nn.functional.linear(
                    t.nn.functional.layer_norm(x, (k,), g, b), w, c
                ),
                dynamic=False,
            )
            weights = [op.inputs["w"].mT.contiguous() for op in ops]

            def inductor(i: int) -> None:
                v = ops[i].inputs
                module(v["x"], v["gamma"], v["beta"], weights[i], v["c"])

            arms["compile"] = inductor
        with t.no_grad():
            return interleaved(arms, sets, launches)

    def training(self) -> dict[str, float] | None:
        """Median us of forward and backward: cublas (three gradients), fused (five)."""
        m, k, n = self.shape
        fwd = Problem.of("LayerNormGemm", m=m, k=k, n=n, bias=True, **BF16)
        bwd = Problem.of("LayerNormGemmGrad", m=m, k=k, n=n, **BF16)
        sets, launches = rotation(bwd, self.hw)
        sets, launches = min(sets, 8), max(1, launches // 3)
        launches = max(launches, sets)
        ops = [make(bwd, self.case, seed, oracle=False) for seed in range(sets)]
        for op in ops:
            op.inputs["y"] = op.inputs["z"]
            op.inputs["wq"] = t.empty_like(op.inputs["w"])
            op.inputs["cs"], op.inputs["cv"] = (t.empty(n, device="cuda") for _ in range(2))
        arms = {"cublas": lambda i: ops[i].baseline()}
        fold = self.fold(ops, k, n)
        for way, folded in (("folded", True), ("unfolded", False)):
            forward = self.ours(fwd.having(folded=folded), ops, f"forward, {way}")
            backward = self.ours(bwd.having(folded=folded), ops, f"backward, {way}")
            if forward is None or backward is None:
                continue
            calls = [fold, forward, backward] if folded else [forward, backward]
            arms[way] = lambda i, calls=calls: [call(i) for call in calls]
            arms[f"forward, {way}"] = forward
        us = interleaved(arms, sets, launches)
        ways = [way for way in ("folded", "unfolded") if way in us]
        if not ways:
            return None
        best = min(ways, key=us.__getitem__)
        return us | {"fused": us[best], "forward": us[f"forward, {best}"], "fold": best == "folded"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    args = parser.parse_args()
    hw = Hardware.detect(0)
    print(f"{hw.name}, torch {t.__version__}, bf16; us, and ratios to bare cuBLAS in the same run")
    rows: list[dict[str, Any]] = []
    for m, k, n in SHAPES:
        bench = Bench(hw, m, k, n)
        us = bench.forward(not args.quick)
        base = us["cublas"]
        row: dict[str, Any] = {"shape": [m, k, n], "forward": us, "chosen": bench.chosen}
        line = f"{m},{k},{n}: cuBLAS {base:.1f} " + " ".join(
            f"{name} {value:.1f} ({value / base:.2f})"
            for name, value in us.items()
            if name != "cublas"
        )
        t.cuda.empty_cache()
        if (both := bench.training()) is not None:
            row["training"] = both
            line += (
                f" | fwd+bwd cuBLAS {both['cublas']:.1f} fused {both['fused']:.1f}"
                f" ({both['fused'] / both['cublas']:.2f}), weights"
                f" {'folded first' if both['fold'] else 'as they are'},"
                f" of it forward {both['forward']:.1f}"
            )
        rows.append(row)
        print(line)
        for name, choice in bench.chosen.items():
            print(f"    {name}: {choice}")
        t.cuda.empty_cache()
    for name in ("gemm", "fused", "compile"):
        ratios = [r["forward"][name] / r["forward"]["cublas"] for r in rows if name in r["forward"]]
        if ratios:
            print(f"geomean forward {name}: {geometric_mean(ratios):.3f}, worst {max(ratios):.2f}")
    ratios = [r["training"]["fused"] / r["training"]["cublas"] for r in rows if "training" in r]
    if ratios:
        print(f"geomean forward+backward: {geometric_mean(ratios):.3f}, worst {max(ratios):.2f}")
    if args.json:
        args.json.write_text(json.dumps({"gpu": hw.name, "driver": hw.driver, "rows": rows}))


if __name__ == "__main__":
    main()
