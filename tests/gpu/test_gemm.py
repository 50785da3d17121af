"""The Gemm and LayerNormGemm candidates on a GPU: each legal one against NumPy in float64."""

import os

import numpy as np
import on_device
import pytest
from curves import CURVES, gelu
from on_device import TOLERANCE, TYPES, error, poison, random, results, turned, wide
from test_kernels_compile import LIKELIEST, launches, spills

from onnx_fuse.cuda.launch import bind
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, cublaslt
from onnx_fuse.kernels.norm_launches import fold_columns
from onnx_fuse.lower.gated import interleaved
from onnx_fuse.program.problem import GemmProblem, Hardware
from onnx_fuse.runtime.executable import Executable

GEMMS = (
    [
        GemmProblem.of("Gemm", m=m, n=n, k=k, dtype=dtype, trans_a=ta, trans_b=tb, **attrs)
        for m, n, k in ((128, 256, 64), (257, 384, 264), (5, 41, 23))
        for ta, tb in ((False, False), (False, True), (True, False), (True, True))
        for dtype, attrs in (
            ("bfloat16", {"bias": True, "act": "gelu", "save_z": True}),
            *((kind, {}) for kind in ("float16", "float64", "int32")),
            ("float32", {"alpha": 0.5}),
            ("float32", {"math": "tf32"}),
            ("float32", {"math": "bf16x3", "bias": True}),
        )
    ]
    + [
        GemmProblem.of(
            "Gemm", m=60, n=72, k=40, batch=(2, 3), dtype="float16", a_strides=(0, 60 * 40)
        ),
        GemmProblem.of("Gemm", m=60, n=72, k=40, batch=(4,), dtype="bfloat16", trans_b=True),
        GemmProblem.of("Gemm", m=60, n=72, k=40, beta=2.0, c_rows=0),
        GemmProblem.of("Gemm", m=136, n=264, k=1, dtype="bfloat16", trans_a=True),  # one row's dW
        GemmProblem.of("Gemm", m=40, n=1, k=264, dtype="float16", trans_b=True),
        GemmProblem.of("Gemm", m=100, n=768, k=4096, dtype="bfloat16", accumulate=True),
        GemmProblem.of("Gemm", m=100, n=144, k=264, dtype="float16", trans_b=True, accumulate=True),
        GemmProblem.of("Gemm", m=100, n=77, k=33, dtype="bfloat16", accumulate=True),
        GemmProblem.of("Gemm", m=60, n=72, k=40, batch=(4,), dtype="int32", accumulate=True),
    ]
    + [  # whole tiles, a narrow one, columns that no TMA stores
        GemmProblem.of("Gemm", m=200, n=n, k=264, dtype="float16", bias=True, act="gelu", **attrs)
        for n in (384, 144, 77)
        for attrs in ({}, {"save_z": True}, {"residual": True})
    ]
    + [
        GemmProblem.of("Gemm", m=m, n=384, k=1000, dtype="float16", static_b=True, **attrs)
        for m in (1, 100)
        for attrs in ({"bias": True}, {"residual": True}, {"out_dtype": "float32"})
    ]
    + [
        GemmProblem.of("Gemm", m=m, n=264, k=128, dtype=dtype, trans_b=True, **attrs)
        for m in (8, 200)
        for dtype in ("bfloat16", "float32")
        for attrs in ({"residual": True, "act": "gelu"}, {"dact": True, "act": "gelu"})
    ]
    + [  # TMA and wgmma round to tf32; k is shared out where tiles are few
        GemmProblem.of("Gemm", m=m, n=n, k=k, math="tf32", trans_b=True, **attrs)
        for m, n, k in ((5, 66, 20), (200, 264, 776), (1160, 1800, 264))
        for attrs in (
            {"bias": True, "act": "gelu", "save_z": True},
            {"bias": True, "beta": 0.5, "act": "relu"},
            {"residual": True, "act": "silu"},
            {"dact": True, "act": "gelu"},
            {"accumulate": True},
        )
    ]
    + [  # operands that are transposed first
        GemmProblem.of("Gemm", m=m, n=n, k=k, math=math, trans_a=a, trans_b=b, **attrs)
        for math in ("tf32", "ieee")
        for m, n, k in ((100, 66, 131), (200, 264, 776), (1160, 1800, 264))
        for a, b in ((True, False), (False, False), (True, True))
        for attrs in ({}, {"bias": True, "act": "gelu", "save_z": True}, {"beta": 0.5})
    ]
    + [
        GemmProblem.of(
            "Gemm", m=m, n=n, k=264, dtype=dtype, bias=True, residual="norm", static_b=True
        )
        for m, n in ((5, 256), (128, 768), (257, 264))
        for dtype in ("float16", "bfloat16")
    ]
    + [
        GemmProblem.of("Gemm", m=m, n=n, k=k, dtype=dtype, trans_a=True, accumulate=True, **attrs)
        for m, n, k in ((8, 264, 264), (200, 784, 264), (1160, 1800, 776))  # steps are shared
        for dtype, attrs in (
            ("bfloat16", {"bias": True}),
            ("bfloat16", {"out_dtype": "float32"}),
            ("float16", {"residual": True}),
            ("float32", {}),
        )
    ]
    + [  # one row
        GemmProblem.of("Gemm", m=1, n=n, k=k, dtype=dtype, trans_b=turned, bias=True, **attrs)
        for n, k in ((264, 136), (1000, 3072), (8, 8))
        for turned in (False, True)
        for dtype, attrs in (
            ("float16", {"residual": True, "act": "gelu"}),
            ("bfloat16", {"static_b": True, "layer_scale": True}),
            ("float16", {"alpha": 0.5, "beta": 2.0, "c_rows": 0, "save_z": True}),
        )
    ]
    + [  # layer scale
        GemmProblem.of("Gemm", m=m, n=n, k=k, dtype=dtype, bias=True, layer_scale=True, **attrs)
        for m, n, k in ((5, 264, 128), (200, 384, 264), (1000, 768, 1032), (61, 77, 33))
        for dtype, math in (("bfloat16", {}), ("float16", {"trans_b": True}), ("float32", {}))
        for attrs in ({"residual": True, **math}, {"act": "gelu", **math})
    ]
    + [  # a bias a row, as a convolution's; what is added before the activation
        GemmProblem.of("Gemm", m=m, n=n, k=264, dtype=dtype, row_bias=True, **batch, **attrs)
        for m, n in ((136, 392), (60, 49))
        for dtype, math in (("bfloat16", {}), ("float16", {}), ("float32", {"math": "bf16x3"}))
        for batch in (math, {"batch": (3,), "a_strides": (0,), **math})
        for attrs in ({"residual": True}, {"beta": 1.0, "act": "gelu"})
    ]
    + [  # a bias a row, as a product's
        GemmProblem.of("Gemm", m=m, n=n, k=264, dtype=dtype, row_bias=True, **math, **attrs)
        for m, n in ((136, 392), (60, 49))
        for dtype, math in (("bfloat16", {"trans_b": True}), ("float16", {}), ("float32", {}))
        for attrs in ({}, {"act": "gelu", "save_z": True})
    ]
)


@pytest.mark.parametrize("problem", GEMMS, ids=str)
def test_gemm(problem: GemmProblem, hw: Hardware) -> None:
    rng = np.random.default_rng(7)
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    a, b = random(rng, dtype, *problem.batch, m, k), random(rng, dtype, *problem.batch, k, n)
    if problem.a_strides[:1] == (0,):
        a[1:] = a[:1]
    by_row = bool(problem.epilogue.row_bias)
    dense = bool(problem.epilogue.beta) and problem.epilogue.c_rows is None
    full = problem.epilogue.residual or problem.epilogue.dact or by_row or dense
    bias = random(rng, dtype, n)
    c = random(rng, dtype, *((*problem.batch, m, n) if full else (n,)))
    gamma = random(rng, dtype, n)
    want = wide(a) @ wide(b) * problem.epilogue.alpha
    if problem.epilogue.bias and problem.epilogue.residual != "norm":
        want = want + wide(bias)
    row0, row1 = (random(rng, dtype if by_row else "float32", m) for _ in range(2))
    want = want + (wide(row0)[:, None] if by_row else 0)
    want = want + problem.epilogue.beta * wide(c) * bool(problem.epilogue.beta)
    z = want
    if problem.epilogue.dact:
        want = z * gelu(wide(c))[1]
    elif problem.epilogue.act:
        want = CURVES[problem.epilogue.act](z)[0]
    if problem.epilogue.layer_scale:
        want = want * wide(gamma)
    if problem.epilogue.residual == "norm":
        bias, gamma = (random(rng, "float32", n) for _ in range(2))
        want = z + wide(bias) + (wide(c) - wide(row1)[:, None]) * wide(row0)[:, None] * wide(gamma)
    elif problem.epilogue.residual:
        want = want + wide(c)
    held = random(rng, problem.out, *want.shape) if problem.epilogue.accumulate else None
    if held is not None:
        want = want + wide(held)
    given = {"a": turned(a, problem.trans_a), "b": turned(b, problem.trans_b), "c": c,
             "col0": gamma, "col1": bias, "row0": row0, "row1": row1}  # fmt: skip
    blank = dict.fromkeys("yz", poison(problem.out, *want.shape))
    blank |= {"y": held} if held is not None else {}
    bound = TOLERANCE[dtype if dtype != "float32" else problem.math]
    for name, found in results(problem, hw, given, blank):
        assert error(found["y"], want) <= bound, name
        if problem.epilogue.save_z:
            assert error(found["z"], z) <= bound, f"{name}: z"


@pytest.mark.skipif(isinstance(cublaslt.version(), str), reason=str(cublaslt.version()))
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cublaslt_is_a_call_of_the_captured_graph(dtype: str, layout: str) -> None:
    m, k, n, rng = 200, 264, 136, np.random.default_rng(1)
    a, b = random(rng, dtype, m, k), random(rng, dtype, k, n)
    want = np.tanh(2 / 16 * (wide(a) @ wide(b)))
    transposed = {"a": layout[0] == "T", "b": layout[1] == "T"}
    feeds = {"a": turned(a, transposed["a"]), "b": turned(b, transposed["b"])}
    shapes = {name: "{}[{},{}]".format({"float32": "float"}.get(dtype, dtype), *v.shape)
              for name, v in feeds.items()}  # fmt: skip
    flags = ", ".join(f"trans{name.upper()} = {on:d}" for name, on in transposed.items())
    kind = shapes["a"].partition("[")[0]
    model = text_model(
        f"agraph ({shapes['a']} a, {shapes['b']} b) => ({kind}[{m},{n}] y) {{"
        f" twice = Add(a, a) p = Gemm <alpha = 0.0625, {flags}> (twice, b) y = Tanh(p) }}"
    )
    runs = []
    for _ in range(2):  # two graphs, each replayed
        executable = Executable(model, prefs={"Gemm": "cublaslt"})
        runs += [executable.run(None, feeds)[0] for _ in range(2)]
        calls = executable.programs()[0].calls
        assert sum(x.product is not None for call in calls for x in call.launches) == 1
        assert len(calls) == 3  # a kernel of ours before it and, since it has no tanh, one after
    assert error(runs[0], want) <= TOLERANCE[dtype if dtype != "float32" else "ieee"]
    assert {run.tobytes() for run in runs} == {runs[0].tobytes()}


GATED = [
    GemmProblem.of(op, m=m, k=k, n=n, dtype=dtype, math=math, bias=True, act=act, gate=True)
    for op in ("Gemm", "LayerNormGemm")
    for dtype, math, act in (
        ("bfloat16", "ieee", "silu"),
        ("float16", "ieee", "gelu"),
        ("float32", "ieee", "gelu_tanh"),
        ("float32", "tf32", "sigmoid"),
        ("float32", "bf16x3", "silu"),
    )
    # a few rows, ragged tiles; more tiles than a chip has multiprocessors, k shared out
    for m, k, n in ((5, 264, 208), (200, 136, 560), (2100, 264, 2064), (100, 4096, 384))
    if m * k < 1 << 18 or dtype == "bfloat16"
]
GATED += [
    p.replace(folded=True, static_b=True, rms=p.dtype == "bfloat16")
    for p in GATED
    if p.op == "LayerNormGemm" and p.dtype != "float32"
]


@pytest.mark.parametrize("problem", GATED, ids=str)
def test_gated_gemm(problem: GemmProblem, hw: Hardware) -> None:
    m, k, n, dtype = problem.m, problem.k, problem.n, problem.dtype
    rng = np.random.default_rng(11)
    x = random(rng, dtype, m, k)
    w, c = (random(rng, "float64", k, n) * k**-0.5).astype(TYPES[dtype]), random(rng, dtype, n)
    gamma, beta = random(rng, dtype, k), random(rng, dtype, k)
    beta = beta * (not problem.rms)
    rows = wide(x)
    if problem.op == "LayerNormGemm":
        mean, rstd = on_device.statistics(x, problem.rms)
        rows = (rows - mean) * rstd * wide(gamma) + wide(beta)
    gate, through = np.split(rows @ wide(w) + wide(c), 2, -1)
    want = CURVES[problem.epilogue.act](gate)[0] * through
    given = on_device.norm_operands(gamma, beta, w, c)
    given |= {name: interleaved(given[name], "GateFirst") for name in ("w", "c", "wq", "cs", "cv")}
    given |= {"x": x, "a": x, "b": given["w"], "col1": given["c"]}
    # two factors, each of a bound of its own
    bound = 2 * TOLERANCE[dtype if dtype != "float32" else problem.math]
    for name, found in results(problem, hw, given, on_device.norm_results(problem)):
        assert error(found["y"], want) <= bound, name


NORMS = [
    GemmProblem.of("LayerNormGemm", m=m, k=k, n=n, dtype=dtype, math=math, bias=True)
    for m, k, n in ((16, 768, 256), (257, 264, 384), (3, 520, 72))
    for dtype, math in (
        *(("bfloat16", "ieee"), ("float16", "ieee")),
        *(("float32", "ieee"), ("float32", "bf16x3")),
    )
] + [
    GemmProblem.of("LayerNormGemm", m=40, k=136, n=264, dtype=dtype, bias=True, trans_b=True)
    for dtype in ("bfloat16", "float32")
]
NORMS += [
    GemmProblem.of("LayerNormGemm", m=24, k=101, n=77, dtype="bfloat16", bias=True, trans_b=trans)
    for trans in (False, True)  # rows of weights that are not 16-byte aligned
]
NORMS += [p.replace(folded=True, static_b=True) for p in NORMS if p.dtype != "float32"]
NORMS += [
    GemmProblem.of("LayerNormGemm", m=m, k=136, n=264, dtype="bfloat16", bias=True, **attrs)
    for m in (200, 4500)  # a tile a block, and more
    for attrs in ({"folded": True}, {"folded": True, "rms": True}, {"rms": True})
]
NORMS += [p.replace(out_dtype="float32") for p in NORMS if p.dtype == "float16" and p.folded]


NORMS += [  # one row
    GemmProblem.of(
        "LayerNormGemm", m=1, k=k, n=n, dtype=dtype, bias=True, folded=True, trans_b=turned, **attrs
    )
    for k, n in ((768, 2304), (1000, 264))
    for turned in (False, True)
    for dtype, attrs in (
        ("float16", {"static_b": True}),
        ("bfloat16", {"rms": True}),
        ("float16", {"out_dtype": "float32"}),
    )
]


@pytest.mark.parametrize("ratio", [0, 10, 1000])
@pytest.mark.parametrize("problem", NORMS, ids=str)
def test_layernorm_gemm(problem: GemmProblem, ratio: int, hw: Hardware) -> None:
    m, k, n, dtype = problem.m, problem.k, problem.n, problem.dtype
    rng = np.random.default_rng(5)
    x = (random(rng, "float32", m, k) + ratio).astype(TYPES[dtype])
    varied = m - 1 or 1
    x[varied:] = 3.0  # a constant row
    gamma, beta = random(rng, dtype, k), random(rng, dtype, k)
    gamma[::5] = 0
    w, c = (random(rng, "float64", k, n) * k**-0.5).astype(TYPES[dtype]), random(rng, dtype, n)
    beta = beta * (not problem.rms)
    mean, rstd = on_device.statistics(x, problem.rms)
    want = ((wide(x) - mean) * rstd * wide(gamma) + wide(beta)) @ wide(w) + wide(c)
    # a float32 mean is off by 2^-24 of itself, which is ratio standard deviations
    bound = TOLERANCE[dtype if dtype != "float32" else problem.math] + 6e-8 * ratio
    given = {"x": x} | on_device.norm_operands(gamma, beta, w, c, problem.trans_b)
    spread = np.sqrt(mean**2 + rstd**-2)[:, 0]
    for name, found in results(problem, hw, given, on_device.norm_results(problem)):
        assert error(found["y"], want) <= bound, name
        assert np.all(np.abs(found["mean"] - mean[:, 0]) <= 2e-6 * spread), name
        assert error(found["rstd"][:varied], rstd[:varied, 0]) <= 1e-5, name


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem.of("Gemm", m=m, n=n, k=264, dtype=dtype, math=math, bias=True, act="relu")
        for m, n in ((5, 72), (200, 384))
        for dtype, math in (
            *(("bfloat16", "ieee"), ("float16", "ieee"), ("float64", "ieee")),
            *(("float32", "ieee"), ("float32", "tf32"), ("float32", "bf16x3")),
        )
    ],
    ids=str,
)
def test_relu_of_nan_is_nan(problem: GemmProblem, hw: Hardware) -> None:
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    rng = np.random.default_rng(3)
    a, b, c = random(rng, dtype, m, k), random(rng, dtype, k, n), random(rng, dtype, n)
    a[1, 7], c[3] = np.nan, np.nan
    spoilt = np.zeros((m, n), bool)
    spoilt[1], spoilt[:, 3] = True, True
    given, blank = {"a": a, "b": b, "col1": c}, {"y": poison(problem.out, m, n)}
    for name, found in results(problem, hw, given, blank):
        np.testing.assert_array_equal(np.isnan(found["y"]), spoilt, name)


@pytest.mark.parametrize("problem", [p for p in NORMS if p.m in (16, 200)], ids=str)
def test_rows_that_have_no_norm_are_nan(problem: GemmProblem, hw: Hardware) -> None:
    """A NaN or an infinity spoils its row whole; a variance past float32 leaves beta W + c."""
    m, k, n, dtype = problem.m, problem.k, problem.n, problem.dtype
    rng = np.random.default_rng(6)
    x = random(rng, dtype, m, k)
    x[0, 0], x[1, -1], x[2, 3], x[3, k // 2] = np.nan, np.nan, np.inf, -np.inf
    if dtype == "bfloat16":
        x[4] = (wide(x[4]) * 1e30).astype(x.dtype)
    gamma, w = random(rng, dtype, k), np.abs(random(rng, dtype, k, n))
    beta, c = np.zeros_like(gamma), random(rng, dtype, n)
    given = {"x": x} | on_device.norm_operands(gamma, beta, w, c, problem.trans_b)
    for name, found in results(problem, hw, given, on_device.norm_results(problem)):
        y = wide(found["y"])
        assert np.isnan(y[:4]).all(), name
        assert np.isfinite(y[4:]).all(), name
        if dtype == "bfloat16":
            np.testing.assert_allclose(y[4], wide(c), rtol=1e-2, err_msg=name)


@pytest.mark.launches("norm/fold.cu", "fold_columns", "W", "float")
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize(
    "shapes", [((264, 136), (72, 520), (8, 72)), ((1160, 136), (1032, 8)), ((33, 77),)]
)
def test_weights_fold_together(
    shapes: tuple[tuple[int, int], ...], master: bool, hw: Hardware
) -> None:
    rng, dtype = np.random.default_rng(12), "bfloat16"
    given, blank = {}, {}
    for i, (k, n) in enumerate(shapes):
        given |= {f"w.{i}": random(rng, "float32" if master else dtype, k, n),
                  f"gamma.{i}": random(rng, dtype, k)}  # fmt: skip
        if i:  # the first has none
            given |= {f"beta.{i}": random(rng, dtype, k), f"c.{i}": random(rng, dtype, n)}
        blank |= {f"{name}.{i}": poison(dtype, k, n) for name in ("low", "wq")}
        blank |= {f"{name}.{i}": poison("float32", n) for name in ("cs", "cv")}
    call = fold_columns(shapes, dtype, hw, master=master)
    bits = []
    for _ in range(2):
        memory = on_device.Memory(given | blank)
        pointers = {name: buffer.address for name, buffer in memory.buffers.items()}
        # one alone has no number
        pointers |= {name.removesuffix(".0"): address for name, address in pointers.items()}
        bind(call, pointers, hw).enqueue(memory.stream.handle)
        memory.stream.wait("fold")
        bits.append([memory.read(name).tobytes() for name in blank])
    assert bits[0] == bits[1]
    for i, (k, n) in enumerate(shapes):
        w = given[f"w.{i}"].astype(TYPES[dtype])
        wq = (wide(given[f"gamma.{i}"])[:, None] * wide(w)).astype(TYPES[dtype])
        cv = wide(given.get(f"beta.{i}", np.zeros(k))) @ wide(w) + given.get(f"c.{i}", np.zeros(n))
        np.testing.assert_array_equal(memory.read(f"wq.{i}"), wq)
        if master:
            np.testing.assert_array_equal(memory.read(f"low.{i}"), w)
        assert error(memory.read(f"cs.{i}"), wide(wq).sum(0)) <= TOLERANCE["ieee"]
        assert error(memory.read(f"cv.{i}"), cv) <= TOLERANCE["ieee"]


MOMENTS = [
    GemmProblem.of("Gemm", m=m, n=n, k=264, dtype=dtype, bias=True, moments=moments, **attrs)
    for m, n, moments in ((300, 768, 4), (300, 768, 12), (64, 256, 1), (40, 1152, 8))
    for dtype, attrs in (("float16", {"residual": "norm"}), ("bfloat16", {"residual": True}))
]


@pytest.mark.parametrize("ratio", [0, 10, 1000])
@pytest.mark.parametrize("problem", MOMENTS, ids=str)
def test_moments_of_a_product_are_the_statistics_of_the_next(
    problem: GemmProblem, ratio: int, hw: Hardware
) -> None:
    m, n, dtype = problem.m, problem.n, problem.dtype
    rng, width = np.random.default_rng(11), 384
    bound = TOLERANCE[dtype] + 6e-8 * ratio
    c, beta = random(rng, dtype, m, n), np.full(n, ratio, "float32")
    scaled = problem.epilogue.residual == "norm"
    given = {
        "a": random(rng, dtype, m, 264), "b": random(rng, dtype, 264, n), "c": c,
        "row0": random(rng, "float32", m), "row1": random(rng, "float32", m),
        "col0": random(rng, "float32", n), "col1": beta if scaled else beta.astype(TYPES[dtype]),
    }  # fmt: skip
    w = (random(rng, "float64", n, width) * n**-0.5).astype(TYPES[dtype])
    after = {"wq": w, "cs": wide(w).sum(0).astype(np.float32), "cv": random(rng, "float32", width)}
    parts = problem.epilogue.moments
    blank = {"y": poison(dtype, m, n), "part": poison("float32", parts, m, 2)}
    for how, found in results(problem, hw, given, blank):
        x, part = found["y"], found["part"]
        tiles = wide(x).reshape(m, parts, -1)
        mean, rstd = wide(x).mean(-1), (wide(x).var(-1) + 1e-5) ** -0.5
        scale = np.sqrt((tiles**2).mean(-1)).T
        assert np.all(np.abs(part[..., 0] - tiles.mean(-1).T) <= 2e-6 * scale), how
        assert error(part[..., 1], tiles.var(-1).T * tiles.shape[-1]) <= 1e-5, how
        want = (wide(x) - mean[:, None]) * rstd[:, None] @ wide(w) + wide(after["cv"])
        norm = GemmProblem.of(
            "LayerNormGemm", m=m, k=n, n=width, dtype=dtype, bias=True, folded=True, parts=parts
        )
        read = {"x": x, "part": part} | after
        for reader, normed in results(norm, hw, read, on_device.norm_results(norm)):
            assert error(normed["y"], want) <= bound, reader
            spread = np.sqrt(mean**2 + rstd**-2)
            assert np.all(np.abs(normed["mean"] - mean) <= 2e-6 * spread), reader
            assert error(normed["rstd"], rstd) <= 1e-5, reader


SLOPE = {"act": "gelu", "dact": True, "save_act": True}
BESIDE = [
    GemmProblem.of("Gemm", m=m, n=n, k=264, dtype=dtype, trans_b=True, **attrs)
    for m, n in ((300, 384), (513, 72), (40, 1156))
    for dtype, attrs in (
        ("float16", {"column_sums": True}), ("float16", SLOPE),
        ("bfloat16", {**SLOPE, "column_sums": True}),
    )
]  # fmt: skip


@pytest.mark.parametrize("problem", BESIDE, ids=str)
def test_a_product_leaves_sums_of_its_operand_and_an_activation(
    problem: GemmProblem, hw: Hardware
) -> None:
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    rng = np.random.default_rng(5)
    given = {"a": random(rng, dtype, m, k), "b": random(rng, dtype, n, k)}
    want = wide(given["a"]) @ wide(given["b"]).T
    if problem.epilogue.dact:
        given["c"] = random(rng, dtype, m, n)
        activated, slope = CURVES["gelu"](wide(given["c"]))
        want = want * slope
    sums = np.add.reduceat(wide(given["a"]), np.arange(0, m, 64), axis=0)
    blank = dict.fromkeys("yz", poison(dtype, m, n)) | {"part": poison("float32", *sums.shape)}
    for how, found in results(problem, hw, given, blank):
        assert error(found["y"], want) <= TOLERANCE[dtype], how
        if problem.epilogue.column_sums:
            assert error(found["part"], sums) <= 1e-6, how  # of 64 float32 terms
        if problem.epilogue.save_act:
            assert error(found["z"], activated) <= TOLERANCE[dtype], how


@pytest.mark.parametrize(("m", "k"), [(257, 264), (5000, 1032)])
def test_bound_statistics_are_those_of_each_run(m: int, k: int, hw: Hardware) -> None:
    # flags that a launch leaves behind must not pass for the next one's
    rng, n, dtype = np.random.default_rng(9), 384, "bfloat16"
    problem = GemmProblem.of("LayerNormGemm", m=m, k=k, n=n, dtype=dtype, bias=True)
    w = (random(rng, "float64", k, n) * k**-0.5).astype(TYPES[dtype])
    given = {"gamma": random(rng, dtype, k), "beta": random(rng, dtype, k), "w": w,
             "c": random(rng, dtype, n)}  # fmt: skip
    for kernel, how in on_device.each(problem, hw):
        blank = {"x": poison(dtype, m, k), "y": poison(dtype, m, n),
                 "mean": poison("float32", m), "rstd": poison("float32", m)}  # fmt: skip
        memory = on_device.Memory(given | blank)
        bound = memory.bind(kernel, problem, how, hw)
        for scale in (1.0, 30.0, 0.2):
            x = (wide(random(rng, dtype, m, k)) * scale + scale).astype(TYPES[dtype])
            memory.write("x", x)
            for call in bound:
                call.enqueue(memory.stream.handle)
            mean, std = wide(x).mean(-1, keepdims=True), wide(x).std(-1, keepdims=True)
            rows = (wide(x) - mean) / np.sqrt(std**2 + 1e-5) * wide(given["gamma"])
            want = (rows + wide(given["beta"])) @ wide(w) + wide(given["c"])
            assert error(memory.read("y"), want) <= TOLERANCE[dtype], f"{kernel.name} {how} {scale}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(512, 784, 256), (77, 50, 33), (5, 130, 64)], ids=str)
def test_leaf_norm_grad(shape: tuple[int, int, int], transposed: bool, hw: Hardware) -> None:
    """All gradients of a weight behind a norm whose x needs none; the same bits each time."""
    n, features, rows = shape
    rng = np.random.default_rng(12)
    dt, xh = random(rng, "float32", rows, n), random(rng, "float32", rows, features)
    w = random(rng, "float32", *((features, n) if transposed else (n, features)))
    gamma, beta = random(rng, "float32", features), random(rng, "float32", features)
    gamma[1] = 0
    g, dc = wide(dt).T @ wide(xh), wide(dt).sum(0)
    wn = wide(w).T if transposed else wide(w)
    dw = wide(gamma) * g + dc[:, None] * wide(beta)
    want = {"dw": dw.T if transposed else dw, "dgamma": (wn * g).sum(0), "dbeta": dc @ wn, "dc": dc}
    m, k = (features, n) if transposed else (n, features)
    problem = GemmProblem.of("LayerNormLeafGrad", m=m, n=k, k=rows, trans_a=True, turned=transposed)
    a, b = (xh, dt) if transposed else (dt, xh)
    given = {"a": a, "b": b, "w": w, "gamma": gamma, "beta": beta}
    blank = {name: poison("float32", *value.shape) for name, value in want.items()}
    kernels = candidates(problem.op)
    assert [kernel.supports(problem, hw) for kernel in kernels] == [None] * len(kernels)
    ways = [(kernel, how) for kernel in kernels for how in kernel.configs(problem, hw)]
    for how, found in results(problem, hw, given, blank, ways):
        for name, value in want.items():
            assert error(found[name], value) < TOLERANCE["ieee"], (how, name)


def test_every_configuration_compiles_without_spills() -> None:
    hw = Hardware.detect()
    assert spills(launches(hw, LIKELIEST), hw, os.cpu_count() or 2) == []
