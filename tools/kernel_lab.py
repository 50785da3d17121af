"""The kernel lab: every candidate x configuration of an op, checked against float64, then timed.

    python tools/kernel_lab.py LayerNormGemm --shape 8192,4096,4096 --dtype bfloat16
    python tools/kernel_lab.py Gemm --layout TN --top 5 --freeze

Checks come first, on every case of CASES (what each exercises is in its name); only configurations
that passed are timed: CUDA-graph replays, inputs rotating over more than L2, candidate and cuBLAS
interleaved, medians; the ratio to cuBLAS ranks them, since the clock sinks as the chip warms. Each
launch runs in a worker process that is killed when it hangs.
Needs torch (memory, the float64 oracle and cuBLAS), which the package itself never imports.
"""

from __future__ import annotations

import argparse
import json
import pickle
import select as io_select
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from onnx_fuse import tune
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.launch import PlacedLaunch, bind
from onnx_fuse.kernels import candidates, tuning
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig

# relative Frobenius error against float64 on the same stored inputs, output rounding included
TOLERANCE = {
    "bfloat16": 6e-3, "float16": 1e-3, "ieee": 2e-6, "tf32": 1e-3, "bf16x3": 2e-5, "bf16x6": 5e-6,
    "float64": 1e-13,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Shape and the statistics of the rows; `ratio` is |mean| / std."""

    name: str
    m: int
    k: int
    n: int
    ratio: float = 0.0
    what: str = ""


CASES = (
    Case("one tile", 128, 64, 256),
    Case("several tiles", 512, 768, 768),
    Case("odd m, one row over", 257, 256, 384),
    Case("k not of 64", 384, 520, 264),
    Case("ragged all", 190, 136, 200),
    Case("tiny", 5, 24, 40),
    Case("one row", 1, 520, 264),
    Case("few rows, mean 100 std", 16, 768, 4104, 100.0),
    Case("tall", 4096, 128, 128),
    Case("tall and wide: split k, several parts a row", 4096, 128, 2056),
    Case("mean 1 std", 256, 768, 512, 1.0),
    Case("mean 10 std", 256, 768, 512, 10.0),
    Case("mean 100 std", 256, 4096, 512, 100.0),
    Case("mean 1000 std", 256, 4096, 512, 1000.0),
    Case("outlier channel", 256, 768, 512, what="outlier"),
    Case("gamma zero and negative", 256, 768, 512, what="gamma"),
    Case("constant rows", 256, 768, 512, what="constant"),
)
SHAPES = (
    (8192, 4096, 4096), (8192, 768, 3072), (8192, 768, 2304), (8192, 1024, 4096),
    (16384, 2048, 8192), (4096, 4096, 14336), (512, 768, 3072), (128, 768, 768),
    (16, 4096, 4096), (1, 4096, 4096), (32, 256, 256),
)  # fmt: skip
WARM = 0.05  # seconds of replays before anything is timed


# ---- operands and oracles (torch) ---------------------------------------------------------------


@dataclass
class Op:
    """Inputs, poisoned outputs, the float64 truth and the cuBLAS baseline of one problem."""

    inputs: dict[str, Any]
    outputs: dict[str, Any]
    truth: dict[str, Any]
    scale: dict[str, float] = field(default_factory=dict)
    baseline: Any = None


ACT = {
    "relu": lambda t, z, a: t.relu(z),
    "leaky_relu": lambda t, z, a: t.where(z > 0, z, a * z),
    "gelu": lambda t, z, a: t.nn.functional.gelu(z),
    "gelu_tanh": lambda t, z, a: t.nn.functional.gelu(z, approximate="tanh"),
    "quick_gelu": lambda t, z, a: z * t.sigmoid(a * z),
    "silu": lambda t, z, a: z * t.sigmoid(z),
    "sigmoid": lambda t, z, a: t.sigmoid(z),
    "tanh": lambda t, z, a: t.tanh(z),
}


def make(problem: GemmProblem, case: Case, seed: int, oracle: bool = True) -> Op:
    """Random operands of `problem`, their rows as `case` says."""
    import torch as t

    g = t.Generator(device="cuda").manual_seed(seed)
    dt, out = getattr(t, problem.dtype), getattr(t, problem.out)
    m, n, k, act = problem.m, problem.n, problem.k, problem.epilogue.act

    def normal(*shape: int, scale: float = 1.0, dtype: Any = dt) -> Any:
        if not dtype.is_floating_point:
            return t.randint(-9, 9, shape, device="cuda", generator=g).to(dtype)
        return (t.randn(shape, device="cuda", generator=g, dtype=t.float32) * scale).to(dtype)

    def empty(*shape: int, dtype: Any = out) -> Any:
        return t.full(shape, float("nan") if dtype.is_floating_point else -7, device="cuda",
                      dtype=dtype)  # fmt: skip

    def wide(x: Any) -> Any:
        return x.double() if x.dtype.is_floating_point else x.cpu()

    rows = (*problem.batch, m, k)
    x = normal(*rows, dtype=t.float32 if dt.is_floating_point else dt)
    if dt.is_floating_point:
        x = x + case.ratio
        if case.what == "outlier":
            x[..., k // 3] *= 60
        if case.what == "constant":
            x[..., ::2, :] = 3.0
    x = x.to(dt)
    w = normal(*problem.batch, k, n, scale=k**-0.5)
    stored_w = w.mT.contiguous() if problem.trans_b else w
    y = empty(*problem.batch, m, n)

    if problem.op == "LayerNormGemm":
        gamma, beta, c = normal(k) * 0.2 + 1, normal(k, scale=0.2), normal(n, scale=0.2)
        if case.what == "gamma":
            gamma[::3], gamma[1::3] = 0, -gamma[1::3]
        epsilon = problem.epsilon
        given = {"x": x, "gamma": gamma, "beta": beta, "w": stored_w, "c": c}
        outputs = {"y": y, "mean": empty(m, dtype=t.float32), "rstd": empty(m, dtype=t.float32)}
        if problem.folded:
            given |= {"wq": t.empty_like(stored_w), "cs": empty(n, dtype=t.float32),
                      "cv": empty(n, dtype=t.float32)}  # fmt: skip
        if problem.epilogue.save_z:
            outputs["z"] = empty(m, n)
        truth = {}
        if oracle:
            mean = wide(x).mean(-1, keepdim=True)
            rstd = ((wide(x) - mean).square().mean(-1, keepdim=True) + epsilon).rsqrt()
            xh = (wide(x) - mean) * rstd
            z = (xh * wide(gamma) + wide(beta)) @ wide(w) + wide(c)
            truth = {"y": ACT[act](t, z, 1.0) if act else z, "mean": mean[:, 0], "rstd": rstd[:, 0]}
            if problem.epilogue.save_z:
                truth["z"] = z
        linear = stored_w if problem.trans_b else stored_w.mT
        return Op(given, outputs, truth, baseline=lambda: t.nn.functional.linear(x, linear, c))

    if problem.op == "LayerNormGemmGrad":
        gamma, beta, c = normal(k) * 0.2 + 1, normal(k, scale=0.2), normal(n, scale=0.2)
        if case.what == "gamma":
            gamma[::3], gamma[1::3] = 0, -gamma[1::3]
        dy = normal(m, n)
        mean = wide(x).mean(-1, keepdim=True)
        rstd = ((wide(x) - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        xh = (wide(x) - mean) * rstd
        z = (xh * wide(gamma) + wide(beta)) @ wide(w) + wide(c)
        given = {"dy": dy, "x": x, "gamma": gamma, "beta": beta, "w": w, "c": c,
                 "mean": mean[:, 0].float(), "rstd": rstd[:, 0].float(), "z": z.to(dt)}  # fmt: skip
        if problem.folded:
            given |= {"wq": t.empty_like(w), "cs": empty(n, dtype=t.float32),
                      "cv": empty(n, dtype=t.float32)}  # fmt: skip
        outputs = {"dx": empty(m, k), "dgamma": empty(k), "dbeta": empty(k), "dw": empty(k, n),
                   "dc": empty(n)}  # fmt: skip
        truth = {}
        if oracle:
            dz = wide(dy)
            if act:
                leaf = z.clone().requires_grad_()
                dz = dz * t.autograd.grad(ACT[act](t, leaf, 1.0).sum(), leaf)[0]
            gg = dz @ (wide(gamma)[:, None] * wide(w)).mT
            c1, c2 = gg.mean(-1, keepdim=True), (gg * xh).mean(-1, keepdim=True)
            full = xh.mT @ dz
            dc = dz.sum(0)
            truth = {
                "dx": rstd * (gg - c1 - xh * c2), "dgamma": (wide(w) * full).sum(1),
                "dbeta": wide(w) @ dc,
                "dw": wide(gamma)[:, None] * full + wide(beta)[:, None] * dc, "dc": dc,
            }  # fmt: skip
        xl, wl = x.clone().requires_grad_(), w.mT.clone().requires_grad_()
        cl = c.clone().requires_grad_()

        def backward() -> None:
            y = t.nn.functional.linear(xl, wl, cl)
            t.autograd.grad(y, (xl, wl, cl), dy)

        return Op(given, outputs, truth, baseline=backward)

    stored_x = x.mT.contiguous() if problem.trans_a else x
    given, outputs = {"a": stored_x, "b": stored_w}, {"y": y}
    f32 = t.float32
    for name in ("row0", "row1", "row2", "row3"):
        given[name] = normal(
            m, dtype=dt if problem.epilogue.dw or problem.epilogue.row_bias else f32
        )
    normed = problem.epilogue.residual == "norm"
    bias_dtype = f32 if problem.epilogue.layernorm or problem.epilogue.dw or normed else dt
    given |= {"col0": normal(n, dtype=bias_dtype), "col1": normal(n, dtype=bias_dtype)}
    given["c"] = normal(*problem.batch, m, n, dtype=out)
    if problem.epilogue.save_z:
        outputs["z"] = empty(*problem.batch, m, n)
    if problem.epilogue.dw:
        outputs["part"] = t.zeros(-(-n // 64), 2, m, device="cuda")
    truth = {}
    if oracle:
        v = wide(x) @ wide(w)
        r0, r1, r2, r3 = (wide(given[f"row{i}"])[:, None] for i in range(4))
        k0, k1, c = wide(given["col0"]), wide(given["col1"]), wide(given["c"])
        alpha, a = problem.epilogue.alpha, problem.epilogue.act_alpha
        if alpha != 1.0:
            v = alpha * v
        if problem.epilogue.layernorm:
            v = r0 * (v - r1 * k0) + k1
        if problem.epilogue.bias:
            v = v + k1
        if problem.epilogue.row_bias:
            v = v + r0
        if beta := problem.epilogue.beta:
            v = v + beta * c
        if problem.epilogue.save_z:
            z = (c - r1) * r0 if problem.epilogue.dx else v
            truth["z"] = z
        if problem.epilogue.dact:
            z = c.clone().requires_grad_()
            (slope,) = t.autograd.grad(ACT[act](t, z, a).sum(), z)
            v = v * slope
        elif act:
            v = ACT[act](t, v, a)
        if problem.epilogue.layer_scale:
            v = v * k0
        if problem.epilogue.dx:
            v = r0 * (v - r2 - (c - r1) * r0 * r3)
        if problem.epilogue.dw:
            truth["part"] = t.stack([(v * c).sum(-1), (c * k1).sum(-1)])
            v = r0 * v + r1 * k1
        if problem.epilogue.residual:
            v = v + ((c - r1) * r0 * k0 if normed else c)
        truth["y"] = v
    left, right = (
        (stored_x.mT if problem.trans_a else x),
        (stored_w.mT if problem.trans_b else stored_w),
    )
    return Op(given, outputs, truth, baseline=lambda: t.matmul(left, right))


# ---- one job in the worker ----------------------------------------------------------------------


class Runner:
    """One problem, kernel and configuration, bound to torch's memory."""

    def __init__(self, job: dict[str, Any], hw: Hardware) -> None:
        self.problem: GemmProblem = job["problem"]
        self.kernel = next(c for c in candidates(self.problem.op) if c.name == job["kernel"])
        self.config: KernelConfig = job["config"]
        self.hw = hw

    def bind(self, problem: GemmProblem, op: Op) -> list[PlacedLaunch]:
        import torch as t

        size = self.kernel.workspace(problem, self.config, self.hw)
        op.inputs["workspace"] = t.full((max(size, 16),), 127, dtype=t.uint8, device="cuda")
        pointers = {key: v.data_ptr() for key, v in (op.inputs | op.outputs).items()}
        calls = self.kernel.launch(problem, self.config, self.hw)
        if problem.folded:
            prepare(problem, pointers, self.hw)
        return [bind(call, pointers, self.hw) for call in calls]

    def check(self, case: Case) -> dict[str, float] | None:
        """Output -> relative error (None: not legal for this case); raises on a broken promise."""
        import torch as t

        problem = self.problem.replace(m=case.m, k=case.k, n=case.n)
        if self.kernel.supports(problem, self.hw):
            return None
        if self.config not in self.kernel.configs(problem, self.hw):
            return None
        op = make(problem, case, seed=len(case.name))
        bound, stream = self.bind(problem, op), t.cuda.current_stream().cuda_stream
        results = []
        for _ in range(2):
            for name, value in op.outputs.items():
                value.fill_(0 if name == "part" else float("nan")
                            if value.dtype.is_floating_point else -7)  # fmt: skip
            for call in bound:
                call.enqueue(stream)
            t.cuda.synchronize()
            results.append({name: v.clone() for name, v in op.outputs.items()})
        errors = {}
        for name, truth in op.truth.items():
            first, second = results[0][name], results[1][name]
            if name == "part":
                first, second = first.double().sum(0), second.double().sum(0)
            got, want = first.double().to(truth.device), truth.double()
            norm = want.norm()
            if name == "mean":  # against the rows' spread too: a mean may be next to nothing
                norm = (want.square() + op.truth["rstd"].double() ** -2).sum().sqrt()
            if case.what == "constant" and name == "y":
                # a constant row has no signal: the bound is absolute, 1e-4 of |x| = 3 a row
                norm = t.maximum(norm, t.tensor(1e-4 * 3 * want.numel() ** 0.5 / 6e-3))
            errors[name] = float((got - want).norm() / norm) if norm else float((got - want).norm())
            if not t.equal(first, second) and not t.isnan(first).any():
                raise AssertionError(f"{case.name}: {name} differs from run to run")
        return errors

    def tolerance(self, name: str, case: Case) -> float:
        kind = self.problem.dtype if self.problem.dtype != "float32" else self.problem.math
        if name in ("mean", "rstd"):
            return 2e-6
        # a float32 mean of rows with |mean| = ratio std is off by 2^-24 ratio std
        norm = self.problem.op != "Gemm" and self.problem.dtype == "float32"
        return TOLERANCE.get(kind, 0.0) + (6e-8 * case.ratio if norm else 0.0)

    def time(self, sets: int, launches: int, parts: bool) -> dict[str, float]:
        """Median us of one call of the kernel and of cuBLAS, interleaved graph replays."""
        import torch as t

        case = Case("timing", self.problem.m, self.problem.k, self.problem.n)
        ops = [make(self.problem, case, seed, oracle=False) for seed in range(sets)]
        bound = [self.bind(self.problem, op) for op in ops]

        def ours(i: int) -> None:
            for call in bound[i]:
                call.enqueue(t.cuda.current_stream().cuda_stream)

        def theirs(i: int) -> None:
            ops[i].baseline()

        def alone(number: int) -> Any:
            return lambda i: bound[i][number].enqueue(t.cuda.current_stream().cuda_stream)

        arms = {"us": ours, "cublas": theirs}
        if parts:
            arms |= {f"part {i}": alone(i) for i in range(len(bound[0]))}
        return interleaved(arms, sets, launches)


def interleaved(
    arms: dict[str, Any], sets: int, launches: int, rounds: int = 9, rest: float = 0.0
) -> dict[str, float]:
    """Arm -> median us a call: a graph an arm, `launches` calls over `sets` operands.

    The arms take turns after WARM seconds, each round begun by the next: a chip's clock depends on
    what ran before. With `rest`, after as many idle seconds instead: what a cool chip takes.
    """
    import torch as t
    from gpu_events import microseconds

    graphs = {}
    stream = t.cuda.Stream()
    with t.cuda.stream(stream):
        for name, run in arms.items():
            for i in range(sets):
                run(i)
            t.cuda.synchronize()
            graphs[name] = t.cuda.CUDAGraph()
            with t.cuda.graph(graphs[name], stream=stream):
                for i in range(launches):
                    run(i % sets)
        times: dict[str, list[float]] = {name: [] for name in arms}
        t.cuda.synchronize()
        time.sleep(rest)
        until = time.monotonic() + (0 if rest else WARM)
        while time.monotonic() < until:
            for graph in graphs.values():
                graph.replay()
            t.cuda.synchronize()
        names = list(graphs)
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(microseconds(graphs[name].replay) / launches)
    return {name: statistics.median(values) for name, values in times.items()}


def rotation(problem: GemmProblem, hw: Hardware) -> tuple[int, int]:
    """How many operand sets exceed twice the L2, and how many calls one graph makes."""
    sets = max(2, min(16, 2 * hw.l2_bytes // max(1, problem.bytes) + 1))
    seconds = max(problem.bytes / hw.bandwidth, problem.flops / hw.rate(problem.dtype), 3e-6)
    return sets, max(sets, min(200, int(4e-3 / seconds)))


def prepare(problem: GemmProblem, pointers: dict[str, int], hw: Hardware) -> None:
    """Fold the weights once, as a session does when it loads a model."""
    import torch as t

    from onnx_fuse.kernels.norm_launches import fold

    call = fold(problem.k, problem.n, problem.dtype, problem.trans_b, hw)
    bind(call, pointers, hw).enqueue(t.cuda.current_stream().cuda_stream)
    t.cuda.synchronize()


def worker() -> None:
    """Read pickled jobs from stdin, answer one JSON line a job."""
    import torch as t

    t.backends.cuda.matmul.allow_tf32 = False
    hw = Hardware.detect(0)
    jobs = pickle.load(sys.stdin.buffer)
    print(json.dumps({"ready": True}), flush=True)
    for number, job in jobs:
        answer: dict[str, Any] = {"job": number}
        try:
            runner = Runner(job, hw)
            if "case" in job:
                errors = runner.check(job["case"])
                if errors is not None:
                    answer["errors"] = errors
                    answer["ok"] = all(
                        e <= runner.tolerance(key, job["case"]) for key, e in errors.items()
                    )
            else:
                answer |= runner.time(*rotation(job["problem"], hw), parts=job["parts"])
                answer["ok"] = True
        except Exception as error:  # noqa: BLE001 (it is this job's result)
            answer |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)
        t.cuda.empty_cache()
        if "CUDA" in answer.get("error", ""):
            return  # the context is lost: the parent starts a fresh one


def run_jobs(jobs: list[dict[str, Any]], patience: float = 8, until: float = 1e18) -> list[dict]:
    """Answers of all jobs; a worker silent for `patience` seconds is killed and replaced."""
    answers: list[dict[str, Any]] = [{"job": i} for i in range(len(jobs))]
    todo, lost = list(enumerate(jobs)), dict.fromkeys((job["kernel"] for job in jobs), 0)
    while todo and time.time() < until:
        process = subprocess.Popen([sys.executable, __file__, "--worker"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump(todo, process.stdin)
        process.stdin.close()
        ready = False
        while todo and time.time() < until:
            readable, _, _ = io_select.select([process.stdout], [], [], patience if ready else 90)
            line = process.stdout.readline() if readable else b""
            if not line:  # hung or dead: blame the job at hand
                number, job = todo.pop(0)
                what = "died" if readable else "hang"
                answers[number] = answers[number] | {"ok": False, "error": what}
                lost[job["kernel"]] += 1
                todo = [
                    (i, j)
                    for i, j in todo
                    if (j["kernel"], j["config"]) != (job["kernel"], job["config"])
                    # a machine's time is worth more than the rest of a kernel that hung three times
                    and (j["kernel"] != job["kernel"] or lost[job["kernel"]] < 3)
                ]
                break
            answer = json.loads(line)
            if answer.get("ready"):
                ready = True
                continue
            answers[answer["job"]] = answer
            todo.pop(0)
        process.kill()
        process.wait()
    return answers


# ---- the table ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="?", default="Gemm")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shape", action="append", help="M,K,N; all of SHAPES by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", default="", help="dtype of the result")
    parser.add_argument("--layout", default="NT", help="NN, NT, TN or TT")
    parser.add_argument("--math", default="ieee")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--attr", action="append", default=[], help="NAME=VALUE of the problem")
    parser.add_argument("--kernel", action="append", help="only these candidates")
    parser.add_argument("--top", type=int, default=8, help="time only the best N by cost model")
    parser.add_argument("--limit", type=float, default=480, help="seconds in all")
    parser.add_argument("--parts", action="store_true", help="time each of a kernel's calls too")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--freeze", type=Path, nargs="?", const=tuning.SHIPPED, default=None)
    args = parser.parse_args()
    if args.worker:
        return worker()
    until = time.time() + args.limit
    hw = Hardware.detect(0)
    attrs: dict[str, Any] = {}
    for item in args.attr:
        key, _, value = item.partition("=")
        attrs[key] = json.loads(value) if value[:1] in "0123456789-tf[" and value else value
    base = GemmProblem.of(
        args.op, dtype=args.dtype, out_dtype=args.out, math=args.math,
        trans_a=args.layout[0] == "T", trans_b=args.layout[1] == "T",
        batch=(args.batch,) if args.batch else (), **attrs,
    )  # fmt: skip
    shapes = [tuple(map(int, s.split(","))) for s in args.shape or []] or list(SHAPES)
    problems = [base.replace(m=m, k=k, n=n) for m, k, n in shapes]
    kernels = [c for c in candidates(args.op) if not args.kernel or c.name in args.kernel]
    timed: list[dict[str, Any]] = []
    for problem in problems:
        for kernel in kernels:
            if reason := kernel.supports(problem, hw):
                print(f"{problem}: {kernel.name}: {reason}")
            timed += [
                {"problem": problem, "kernel": kernel.name, "config": choice.config,
                 "parts": args.parts}
                for choice in tune.ranked(kernel, problem, hw)[: args.top]
            ]  # fmt: skip
    checks = []
    if not args.no_check:
        seen = set()
        for kernel in kernels:
            for case in CASES:
                problem = base.replace(m=case.m, k=case.k, n=case.n)
                if kernel.supports(problem, hw):
                    continue
                for how in kernel.configs(problem, hw):
                    if (kernel.name, how, case.name) not in seen:
                        seen.add((kernel.name, how, case.name))
                        checks.append({"problem": base, "kernel": kernel.name, "config": how,
                                       "case": case})  # fmt: skip
    by_name = {kernel.name: kernel for kernel in kernels}
    launches = [
        call
        for job in [*timed, *checks]
        for call in by_name[job["kernel"]].launch(
            job["problem"].replace(m=job["case"].m, k=job["case"].k, n=job["case"].n)
            if "case" in job
            else job["problem"],
            job["config"],
            hw,
        )
    ]
    started = time.time()
    nvrtc.compile_all(launches, hw.arch, workers=14)
    modules = len({(call.source, call.defines) for call in launches})
    print(f"{modules} modules compiled in {time.time() - started:.1f} s")

    failed = set()
    if checks:
        started = time.time()
        answers = run_jobs(checks, until=until)
        worst: dict[tuple[str, str], float] = {}
        done = 0
        for job, answer in zip(checks, answers, strict=True):
            if "errors" in answer:
                done += 1
                for key, error in answer["errors"].items():
                    name = (job["kernel"], key)
                    worst[name] = max(worst.get(name, 0.0), error)
            if answer.get("ok") is False:
                failed.add((job["kernel"], job["config"]))
                print(f"FAILED {job['kernel']} {job['config']} {job['case'].name}: "
                      f"{answer.get('errors') or answer.get('error')}")  # fmt: skip
        print(
            f"{base}: {done} checks in {time.time() - started:.1f} s, failed {len(failed)} configs"
        )
        print("  worst errors " + " ".join(f"{k}.{o} {e:.1e}" for (k, o), e in worst.items()))
    if args.no_time:
        return None
    timed = [job for job in timed if (job["kernel"], job["config"]) not in failed]
    answers = run_jobs(timed, until=until)
    records = []
    for problem in problems:
        rows = [
            (answer["us"], answer["cublas"], job, answer)
            for job, answer in zip(timed, answers, strict=True)
            if job["problem"] == problem and "us" in answer
        ]
        for job, answer in zip(timed, answers, strict=True):
            if job["problem"] == problem and answer.get("ok") is False:
                print(f"FAILED {job['kernel']} {job['config']}: {answer.get('error')}")
        floor = problem.floor(hw) * 1e6
        print(f"{problem}: floor {floor:.1f} us")
        for us, cublas, job, answer in sorted(rows, key=lambda row: row[0] / row[1]):
            guess = by_name[job["kernel"]].cost(problem, job["config"], hw) * 1e6
            print(f"  {job['kernel']:12} {job['config']!s:52} {us:8.2f} us"
                  f" {problem.flops / us / 1e6:6.0f} TFLOP/s floor/us {floor / us:.2f}"
                  f" x cuBLAS {us / cublas:.3f} ({cublas:.1f}) model {guess / us:.2f}")  # fmt: skip
            calls = [key for key in answer if key.startswith("part ")]
            if calls:
                names = [c.entry for c in by_name[job["kernel"]].launch(problem, job["config"], hw)]
                print("    " + " ".join(
                    f"{name} {answer[key]:.2f}" for name, key in zip(names, calls, strict=True)
                ))  # fmt: skip
        if rows:
            us, cublas, job, _ = min(rows, key=lambda row: row[0] / row[1])
            us *= statistics.median(row[1] for row in rows) / cublas  # at the common clock
            entry = tuning.record(problem, by_name[job["kernel"]], job["config"], us, hw)
            records.append((args.op, problem, entry))
    if args.freeze:
        print(f"wrote {tuning.save(records, hw, args.freeze, candidates)}")
    return None


if __name__ == "__main__":
    main()
