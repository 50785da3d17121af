"""Fused LayerNorm+Linear and Linear+GELU against cuBLAS and torch.compile, on one GPU, in one run.

    python tools/bench_fused.py [--shape M,K,N ...] [--json FILE] [--quick] [--freeze]

For each shape, in bf16: bare cuBLAS (torch's F.linear), this project's bare GEMM, torch.compile of
LayerNorm->Linear, and the candidate that `select` takes for LayerNormGemm (weights folded before,
as in inference, statistics included). Then forward and backward, all five gradients, against
F.linear's three: the better of folding the weights first (that included) and taking them as they
are. Linear+GELU: the forward that keeps z, what GELU is of; and the program of forward and
backward. At last LayerNorm+Linear in fp16, and fp32 products as sums of bf16 ones against cuBLAS's
IEEE fp32. CUDA-graph replays rotating over operands larger than L2, interleaved, medians. Ratios
hold from run to run better than times. Needs torch.
`--freeze` first tries the likely candidates of each problem; the fastest ship as tuning records.
`python tools/performance_page.py` makes docs/performance.md of the JSON.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import onnx
import torch as t
from gpu_events import launches, rotating
from performance_page import ARMS, fp16_verdict, save, verdict

from onnx_fuse import autodiff, rewrite
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.launch import PlacedLaunch, bind
from onnx_fuse.kernels import Selection, candidates, select, tuning
from onnx_fuse.kernels.norm_launches import fold
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import GemmProblem, Hardware
from onnx_fuse.session import load
from onnx_fuse.tune import TOLERANCE, calls_of, shortlist, tune

SHAPES = (
    (8192, 4096, 4096), (8192, 768, 3072), (8192, 768, 2304), (8192, 1024, 4096),
    (16384, 2048, 8192), (4096, 4096, 14336), (512, 768, 3072), (128, 768, 768),
    (16, 4096, 4096), (1, 4096, 4096), (32, 256, 256),
)  # fmt: skip
BF16 = {"dtype": "bfloat16"}
LARGE = ((8192, 4096, 4096), (8192, 1024, 4096))  # where fp32 products are compared
REST = 4.0  # idle seconds before a cool chip is timed
LINEAR_GELU = """<ir_version: 10, opset_import: ["": 21]>
linear_gelu (bfloat16[M, K] x) => (bfloat16[M, N] y)
{ h = MatMul(x, w)  z = Add(h, c)  y = Gelu(z) }"""


@dataclass
class Operands:
    """A problem's tensors, by the names that its kernels have for them, and bare cuBLAS on them."""

    tensors: dict[str, Any]
    baseline: Callable[[], object]

    def pointers(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}


def operands(problem: GemmProblem, seed: int) -> Operands:
    """Random operands, and room for the results."""
    random = t.Generator(device="cuda").manual_seed(seed)
    dtype, m, n, k = getattr(t, problem.dtype), problem.m, problem.n, problem.k

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (t.randn(shape, device="cuda", generator=random) * scale).to(dtype)

    def empty(*shape: int, dtype: Any = dtype) -> Any:
        return t.full(shape, math.nan, device="cuda", dtype=dtype)

    x, w = normal(m, k), normal(k, n, scale=k**-0.5)
    if problem.op == "Gemm":
        tensors = {"a": x, "b": w, "col0": normal(n), "col1": normal(n), "c": normal(m, n)}
        return Operands(tensors | {"y": empty(m, n), "z": empty(m, n)}, lambda: t.matmul(x, w))
    gamma, beta, c = normal(k) * 0.2 + 1, normal(k, scale=0.2), normal(n, scale=0.2)
    tensors = {"x": x, "gamma": gamma, "beta": beta, "w": w, "c": c, "wq": t.zeros_like(w)}
    tensors |= {"cs": empty(n, dtype=t.float32), "cv": empty(n, dtype=t.float32)}
    if problem.op == "LayerNormGemm":
        tensors |= {"mean": empty(m, dtype=t.float32), "rstd": empty(m, dtype=t.float32)}
        return Operands(
            tensors | {"a": x, "b": w, "y": empty(m, n)},
            lambda: t.nn.functional.linear(x, w.mT, c),
        )
    wide, dy = x.double(), normal(m, n)
    normed = t.nn.functional.layer_norm(wide, (k,), gamma.double(), beta.double())
    tensors |= {
        "mean": wide.mean(-1).float(),
        "rstd": (wide.var(-1, correction=0) + 1e-5).rsqrt().float(),
        "y": (normed @ w.double() + c.double()).to(dtype),
        "dy": dy, "dx": empty(m, k), "dgamma": empty(k), "dbeta": empty(k), "dw": empty(k, n),
        "dc": empty(n),
    }  # fmt: skip
    tensors["z"] = tensors["y"]
    leaves = [v.clone().requires_grad_() for v in (x, w.mT, c)]

    def backward() -> None:
        t.autograd.grad(t.nn.functional.linear(*leaves), leaves, dy)

    return Operands(tensors, backward)


def rotation(problem: GemmProblem, hw: Hardware) -> tuple[int, int]:
    """How many operand sets exceed twice the L2, and how many calls one graph makes."""
    sets = max(2, min(16, 2 * hw.l2_bytes // max(1, problem.bytes) + 1))
    seconds = max(problem.bytes / hw.bandwidth, problem.flops / hw.rate(problem.dtype), 3e-6)
    return sets, max(sets, min(200, int(4e-3 / seconds)))


class Bench:
    """The arms of one shape, bound to their own operand sets."""

    def __init__(self, hw: Hardware, m: int, k: int, n: int, tuned: set[str] | None = None) -> None:
        self.hw, self.shape, self.tuned = hw, (m, k, n), tuned  # the keys of what was tuned
        self.chosen: dict[str, str] = {}

    def sets(self, problem: GemmProblem, most: int = 16) -> tuple[list[Operands], int]:
        """Operand sets of the problem, and how many calls one graph makes."""
        sets, launches = rotation(problem, self.hw)
        return [operands(problem, seed) for seed in range(min(sets, most))], launches

    def ours(self, problem: GemmProblem, sets: list[Any], name: str) -> Any:
        """Calls of the kernel that select takes for `problem`, bound to each operand set."""
        if select(problem.op, problem, self.hw) is None:
            return None
        key = tuning.key(problem.op, problem)
        if self.tuned is not None and key not in self.tuned:
            self.tune(problem, sets)
            self.tuned.add(key)
        choice = select(problem.op, problem, self.hw)
        self.chosen[name] = f"{choice.kernel.name} {choice.config} ({choice.why})"
        return self.bound(choice, problem, sets, name)

    def bound(self, choice: Selection, problem: GemmProblem, sets: list[Any], name: str) -> Any:
        """The choice's calls on each operand set."""
        bound = []
        for op in sets:
            size = max(16, choice.workspace(problem, self.hw))
            op.tensors[f"workspace {name}"] = t.empty(size, dtype=t.uint8, device="cuda")
            pointers = op.pointers()
            pointers["workspace"] = pointers[f"workspace {name}"]
            bound.append([bind(c, pointers, self.hw) for c in choice.launch(problem, self.hw)])
        if problem.folded:  # once, as a session does when it loads a model
            folds = self.fold(sets, problem)
            for i in range(len(sets)):
                folds(i)
            t.cuda.synchronize()
        return enqueued(bound)

    def tune(self, problem: GemmProblem, sets: list[Any]) -> None:
        """Ship the fastest of the likely choices as this GPU's record, if its results agree."""
        choices = shortlist(problem, self.hw)
        calls = (call for choice in choices for call in choice.launch(problem, self.hw))
        nvrtc.compile_all(calls, self.hw.arch, workers=14)
        arms: dict[str, Any] = {}
        truth: dict[str, Any] = {}
        for number, choice in enumerate(choices):
            run = self.bound(choice, problem, sets, f"tune {number}")
            run(0)
            tensors = sets[0].tensors.items()
            floats = {name: v for name, v in tensors if v.is_floating_point()}
            found = {name: v.double().nan_to_num() for name, v in floats.items()}
            truth = truth or found
            bounds = {name: TOLERANCE[str(v.dtype)[6:]] for name, v in floats.items()}
            if all(
                (found[name] - truth[name]).norm() <= bound * truth[name].norm()
                for name, bound in bounds.items()
            ):
                arms[str(number)] = run
        us = rotating(arms, len(sets), max(len(sets), rotation(problem, self.hw)[1]))
        for op in sets:
            for number in range(len(choices)):
                del op.tensors[f"workspace tune {number}"]
        best = min(us, key=us.__getitem__)
        choice = choices[int(best)]
        entry = tuning.record(problem, choice.kernel, choice.config, us[best], self.hw)
        tuning.save([(problem.op, problem, entry)], self.hw, tuning.SHIPPED, candidates)
        print(
            f"tuned {problem}: {len(us)} of {len(choices)} agree, {us['0']:.2f} to {us[best]:.2f}"
        )

    def fold(self, sets: list[Any], problem: GemmProblem) -> Any:
        """The weights' fold, which a training step makes once for both directions."""
        call = fold(problem.k, problem.n, problem.dtype, problem.trans_b, self.hw)
        return enqueued([[bind(call, op.pointers(), self.hw)] for op in sets])

    def forward(self, compiled: bool) -> dict[str, float]:
        """Median us: cublas, gemm (ours, bare), fused, compile."""
        m, k, n = self.shape
        attrs = {"folded": True, "static_b": True, **BF16}
        fused = GemmProblem.of("LayerNormGemm", m=m, k=k, n=n, bias=True, **attrs)
        ops, launches = self.sets(fused)
        bare = GemmProblem.of("Gemm", m=m, k=k, n=n, static_b=True, **BF16)
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
            weights = [op.tensors["w"].mT.contiguous() for op in ops]

            def inductor(i: int) -> None:
                v = ops[i].tensors
                module(v["x"], v["gamma"], v["beta"], weights[i], v["c"])

            arms["compile"] = inductor
        with t.no_grad():
            return rotating(arms, len(ops), launches)

    def gelu(self) -> dict[str, float]:
        """Median us of y = gelu(x w + c) with z kept: cublas (bare), fused."""
        m, k, n = self.shape
        fused = GemmProblem.of("Gemm", m=m, k=k, n=n, bias=True, act="gelu", save_z=True, **BF16)
        ops, launches = self.sets(fused)
        arms = {"cublas": lambda i: ops[i].baseline(), "fused": self.ours(fused, ops, "gelu")}
        return rotating(arms, len(ops), launches)

    def gelu_program(self) -> Program:
        """Forward and backward of Linear+GELU."""
        m, k, n = self.shape
        shapes = {"x": ((m, k), "bfloat16"), "y.grad": ((m, n), "bfloat16")}
        return lower(linear_gelu_gradient(k, n), shapes, self.hw)

    def gelu_training(self) -> dict[str, float]:
        """Median us of forward and backward of Linear+GELU, three gradients each: cublas, fused."""
        m, k, n = self.shape
        program = self.gelu_program()
        if self.tuned is not None:
            made = [(c, c.problem) for c in calls_of(program) if c.problem]
            calls = [c for c, p in made if tuning.key(p.op, p) not in self.tuned]
            for found in tune(calls, self.hw, folder=tuning.SHIPPED):
                self.tuned.add(tuning.key(found.problem.op, found.problem))
            program = self.gelu_program()
        grad = GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=n, **BF16)
        ops, repeats = self.sets(grad, most=4)
        read = {"x": "x", "w": "w", "c": "c", "y.grad": "dy"}
        given = [{name: op.tensors[own] for name, own in read.items()} for op in ops]
        runs = [launches(program, tensors, self.hw) for tensors in given]
        arms = {"cublas": lambda i: ops[i].baseline(), "fused": lambda i: runs[i]()}
        return rotating(arms, len(ops), max(4, repeats // 3))

    def fp16(self) -> dict[str, float]:
        """Median us in fp16: cublas (bare), fused (LayerNorm+Linear); on a rested chip as well."""
        m, k, n = self.shape
        how = {"bias": True, "folded": True, "dtype": "float16"}
        fused = GemmProblem.of("LayerNormGemm", m=m, k=k, n=n, **how)
        ops, launches = self.sets(fused)
        arms = {"cublas": lambda i: ops[i].baseline(), "fused": self.ours(fused, ops, "fp16")}
        us = rotating(arms, len(ops), launches)
        low = [(op.tensors["x"].bfloat16(), op.tensors["w"].bfloat16()) for op in ops]
        arms["cublas bf16"] = lambda i: t.matmul(*low[i])
        rested = rotating(arms, len(ops), launches, rounds=3, rest=REST)
        return us | {f"rested {name}": time for name, time in rested.items()}

    def fp32(self) -> dict[str, float]:
        """Median us of an fp32 product: cublas (IEEE), bf16x3, bf16x6."""
        m, k, n = self.shape
        problems = {
            how: GemmProblem.of("Gemm", m=m, k=k, n=n, dtype="float32", math=how)
            for how in ("bf16x3", "bf16x6")
        }
        ops, _ = self.sets(problems["bf16x3"], most=2)
        arms = {"cublas": lambda i: ops[i].baseline()}
        arms |= {name: self.ours(problem, ops, name) for name, problem in problems.items()}
        return rotating(arms, 2, 2, rounds=5)

    def training(self) -> dict[str, float] | None:
        """Median us of forward and backward: cublas (three gradients), fused (five)."""
        m, k, n = self.shape
        fwd = GemmProblem.of("LayerNormGemm", m=m, k=k, n=n, bias=True, **BF16)
        bwd = GemmProblem.of("LayerNormGemmGrad", m=m, k=k, n=n, **BF16)
        ops, launches = self.sets(bwd, most=8)
        launches = max(launches // 3, len(ops))
        arms = {"cublas": lambda i: ops[i].baseline()}
        fold = self.fold(ops, bwd)
        for way, folded in (("folded", True), ("unfolded", False)):
            forward = self.ours(fwd.replace(folded=folded), ops, f"forward, {way}")
            backward = self.ours(bwd.replace(folded=folded), ops, f"backward, {way}")
            if forward is None or backward is None:
                continue
            calls = [fold, forward, backward] if folded else [forward, backward]
            arms[way] = lambda i, calls=calls: [call(i) for call in calls]
            arms[f"forward, {way}"] = forward
        us = rotating(arms, len(ops), launches)
        ways = [way for way in ("folded", "unfolded") if way in us]
        if not ways:
            return None
        best = min(ways, key=us.__getitem__)
        return us | {"fused": us[best], "forward": us[f"forward, {best}"]}


def enqueued(bound: list[list[PlacedLaunch]]) -> Callable[[int], None]:
    """What enqueues the launches on one operand set."""

    def run(i: int) -> None:
        for call in bound[i]:
            call.enqueue(t.cuda.current_stream().cuda_stream)

    return run


def linear_gelu_gradient(k: int, n: int) -> Any:
    """The fused graph of LINEAR_GELU and its gradients for x, w [k, n] and c [n]."""
    model = onnx.parser.parse_model(LINEAR_GELU)
    for name, shape in (("w", (k, n)), ("c", (n,))):
        zeros = onnx.helper.make_tensor(
            name, onnx.TensorProto.BFLOAT16, shape, bytes(2 * math.prod(shape)), raw=True
        )
        model.graph.initializer.append(zeros)
    graph = load(model)
    rewrite.optimize(graph)
    return autodiff.gradient(graph, wrt=["x", "w", "c"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", help="M,K,N", default=SHAPES,
                        type=lambda s: tuple(map(int, s.split(","))))  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="without torch.compile")
    parser.add_argument("--freeze", action="store_true", help="tune first, ship the records")
    args = parser.parse_args()
    t.backends.cuda.matmul.allow_tf32 = False
    hw = Hardware.detect(0)
    print(f"{hw.name}, torch {t.__version__}, bf16; us, and ratios to bare cuBLAS in the same run")
    rows: list[dict[str, Any]] = []
    tuned: set[str] | None = set() if args.freeze else None
    for m, k, n in args.shape:
        bench = Bench(hw, m, k, n, tuned)
        row: dict[str, Any] = {"shape": [m, k, n], "forward": bench.forward(not args.quick)}
        parts = {"training": bench.training, "gelu": bench.gelu}
        parts["gelu training"] = bench.gelu_training
        if (m, k, n) in LARGE:
            parts["fp32"] = bench.fp32
        if (m, k, n) == LARGE[0]:
            parts["fp16"] = bench.fp16
        for name, measure in parts.items():
            t.cuda.empty_cache()
            if (us := measure()) is not None:
                row[name] = us
        row["chosen"] = bench.chosen
        rows.append(row)
        print(f"{m},{k},{n}")
        for name in ("forward", *parts):
            if name in row:
                base = row[name]["cublas"]
                each = (f"{a} {us:.1f} ({us / base:.2f})" for a, us in row[name].items())
                print(f"    {name}: {' '.join(each)}")
        for name, choice in bench.chosen.items():
            print(f"        {name}: {choice}")
        for line in fp16_verdict(row):
            print(f"    {line}")
        t.cuda.empty_cache()
    for key in (*ARMS, ("fp32", "bf16x3"), ("fp32", "bf16x6")):
        for line in verdict(rows, *key):
            print(line)
    if args.json:
        save(args.json, hw.name, t.__version__, rows)


if __name__ == "__main__":
    main()
