"""Rows for the tests of gradients: elementwise, products, reductions, shapes, indices."""

from dataclasses import dataclass

import numpy as np
from support import entries

F64, F32 = np.float64, np.float32
OPSET = 24


@dataclass(frozen=True)
class Row:
    """`body` computes `outputs` from the inputs: shapes are drawn, float arrays taken as they are,
    integer and bool arrays constant (inputs where `runtime` names them). `fixed` get no gradient;
    `dynamic` lists the axes that may be dynamic, where not all; inputs in `static` have none.
    """

    name: str
    body: str
    inputs: dict
    dtype: type = F64
    outputs: tuple[str, ...] = ("y",)
    fixed: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    dynamic: bool | tuple[int, ...] = True
    static: tuple[str, ...] = ()
    opset: int = OPSET


OPTIONS = ("dtype", "outputs", "fixed", "runtime", "dynamic", "static", "opset")


def row(name, body, **inputs):
    options = {key: inputs.pop(key) for key in OPTIONS if key in inputs}
    return Row(name, body, inputs, **options)


def rows(text, scope=None):
    """Rows of a name and what `row` takes for its inputs, and of nodes in the lines below it."""
    for name, inputs, body in entries(text):
        yield row(name, body, **eval(f"dict({inputs})", scope or globals()))


def rng(seed=0):
    return np.random.default_rng(seed)


def within(low, high, *shape):
    return rng(1).uniform(low, high, shape)


def apart(*shape):
    """Distinct numbers, 0.1 apart and 0.05 from multiples of 0.1, in random order: within a step
    none reaches another, nor a kink.
    """
    size = int(np.prod(shape))
    return (rng(2).permutation(size).reshape(shape) - size // 2 + 0.5) / 10


def mask(*shape):
    allowed = rng(3).random(shape) > 0.3
    allowed[..., 0] = True
    return allowed


def i64(*values):
    return np.array(values, np.int64)


def scalar(value):
    return np.array(value)


UNARY = [
    row(name, f"y = {name} (x)", x=x if x is not None else (3, 4), dtype=dtype)
    for dtype, names, x in (
        (F64, "Abs Relu Identity", apart(4, 5)),
        (F64, "Neg Exp Sin Cos Tanh Sigmoid Swish", None),
        (F64, "Log Sqrt Reciprocal", within(0.3, 3, 3, 4)),
        (F32, "Erf Atan Softplus Gelu Mish Sinh Cosh Asinh", None),
        (
            F32,
            "LeakyRelu Softsign Elu Selu Celu HardSigmoid HardSwish ThresholdedRelu",
            apart(4, 20),
        ),
        (F32, "Tan Asin Acos Atanh", within(-0.8, 0.8, 3, 4)),
        (F32, "Acosh", within(1.5, 3, 3, 4)),
    )
    for name in names.split()
] + [
    row(call, f"y = {call} (x)", x=apart(4, 20), dtype=F32)
    for call in (
        "LeakyRelu <alpha = 0.3>",
        "Elu <alpha = 0.7>",
        "Celu <alpha = 0.7>",
        "Selu <alpha = 1.5, gamma = 0.8>",
        "ThresholdedRelu <alpha = 0.3>",
        "HardSigmoid <alpha = 0.4, beta = 0.32>",
        'Gelu <approximate = "tanh">',
        "Swish <alpha = 1.7>",
        "Shrink <lambd = 0.3, bias = 0.1>",
    )
]

BINARY = [
    row(f"{op} {what}", f"y = {op} (a, b)", a=a, b=b, dtype=F32 if op == "Mean" else F64)
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum")
    for what, a, b in (
        ("same", (3, 4), within(0.5, 2, 3, 4)),
        ("rows", (2, 3, 4), within(0.5, 2, 4)),
        ("both ways", (2, 1, 4), within(0.5, 2, 3, 1)),
        ("scalar", (2, 3), within(0.5, 2)),
        ("larger right", (3,), within(0.5, 2, 2, 1, 1)),
    )
] + [
    row("Mul square", "y = Mul (x, x)", x=(3, 4)),
    row("Div by itself squared", "z = Mul (x, x)\n y = Div (x, z)", x=within(0.5, 2, 3)),
    row("Max of 3", "y = Max (a, b, c)", a=apart(3, 4), b=apart(4) + 0.033, c=apart(3, 1) + 0.066),
    row("Max ties", "t = Max (a, a)\n y = Mul (t, a)", a=(3, 4)),
    row("Min of 1", "y = Min (a)", a=(3, 4)),
    row("Sum of 3", "y = Sum (a, b, c)", a=(3, 4), b=(4,), c=(2, 1, 1)),
    row("Mean of 3", "y = Mean (a, b, c)", a=(3, 4), b=(4,), c=(2, 1, 1), dtype=F32),
    row("Pow", "y = Pow (a, b)", a=within(0.5, 2, 3, 4), b=(4,)),
    row("Pow integer exponent", "y = Pow (x, e)", x=(3, 4), e=i64(2, 3, 1, 0), runtime=("e",)),
    row("Mod fmod", "y = Mod <fmod = 1> (a, b)", a=apart(4, 5), b=scalar(0.73)),
    row("PRelu", "y = PRelu (x, s)", x=apart(2, 3, 4), s=(3, 1), dtype=F32),
    row("Where", "y = Where (c, a, b)", c=rng().random((3, 4)) > 0.5, a=(3, 4), b=(2, 1, 4)),
    row("Clip", "y = Clip (x, l, h)", x=apart(4, 5), l=scalar(-0.4), h=scalar(0.6)),
    row("Clip below", "y = Clip (x, l)", x=apart(4, 5), l=scalar(-0.4)),
    row("Clip above", "y = Clip (x, , h)", x=apart(4, 5), h=scalar(0.6)),
    row("CastLike", "y = CastLike (x, x)", x=(3,)),
    *rows("""
Pow $e: x=within(0.5, 2, 3, 4); e in 2.0 3.0 0.5 -1.0 1.7 -0.5
  e = Constant <value = double[1] {$e}> ()  y = Pow (x, e)
PRelu, wide slope: x=(2, 3, 4), s=(3, 4), dtype=F32, static="s"
  e = Exp (x) n = Neg (e) y = PRelu (n, s)
Where broadcast condition: c=np.array([[True], [False]]), a=(4,), b=()
  y = Where (c, a, b)
Cast: x=(3,), dtype=F32
  f = Cast <to = 11> (x)  g = Mul (f, f)  y = Cast <to = 1> (g)
fan-out and shared: x=(3,)
  a = Exp (x)  b = Mul (a, x)  c = Add (a, b)  y = Mul (c, a)
"""),
]

MATMUL = (
    [
        row(f"MatMul {a} {b}", "y = MatMul (a, b)", a=a, b=b)
        for a, b in (
            *(((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5))),
            *(((2, 1, 3, 4), (6, 4, 5)), ((3, 4), (2, 4, 5)), ((4,), (4, 5)), ((3, 4), (4,))),
            *(((2, 3, 4), (4,)), ((4,), (2, 4, 5)), ((4,), (4,))),
        )
    ]
    + [
        *rows("""
Gemm transA=0 transB=0 c=(5,): a=(3, 4), b=(4, 5), c=(5,)
  y = Gemm <transA = 0, transB = 0, alpha = 0.7, beta = 1.3> (a, b, c)
Gemm transA=1 transB=0 c=(3, 1): a=(4, 3), b=(4, 5), c=(3, 1)
  y = Gemm <transA = 1, transB = 0, alpha = 0.7, beta = 1.3> (a, b, c)
Gemm transA=0 transB=1 c=(1, 5): a=(3, 4), b=(5, 4), c=(1, 5)
  y = Gemm <transA = 0, transB = 1, alpha = 0.7, beta = 1.3> (a, b, c)
Gemm transA=2 transB=-1 c=(3, 5): a=(4, 3), b=(5, 4), c=(3, 5)
  y = Gemm <transA = 2, transB = -1> (a, b, c)
Gemm transA=1 transB=1 c=(3, 5): a=(4, 3), b=(5, 4), c=(3, 5)
  y = Gemm <transA = 1, transB = 1, alpha = 0.7, beta = 1.3> (a, b, c)
Gemm transA=0 transB=0 c=None: a=(3, 4), b=(4, 5)
  y = Gemm <transA = 0, transB = 0, alpha = 0.7, beta = 1.3> (a, b)
A product that broadcasts a batch: a=(3, 2, 2), b=(3, 2, 2), static=("b",)
  c = Exp (a) z = Tanh (c) y = Einsum <equation = "bij,bij->b"> (z, b)
Scores, heads ahead of the batch: a=(3, 2, 2, 4), b=(5, 2, 2, 4), static=("b",), dynamic=(0,)
  y = Einsum <equation = "ibnd,jbnd->inbj"> (a, b)
Three terms, the last of a batch: a=(2,), b=(4, 2), c=(5, 4, 2), static=("a", "b"), dynamic=(0,)
  y = Einsum <equation = "a,ca,dca->"> (a, b, c)
""")
    ]
    + [
        row(f"Einsum {equation}", f'y = Einsum <equation = "{equation}"> ({names})', **shapes)
        for equation, names, shapes in (
            ("bij,bjk->bik", "a, b", {"a": (2, 3, 4), "b": (2, 4, 5)}),
            ("bhid,bhjd->bhij", "a, b", {"a": (2, 2, 3, 4), "b": (2, 2, 5, 4)}),
            ("ij,jk", "a, b", {"a": (3, 4), "b": (4, 5)}),
            ("...ij,...jk->...ik", "a, b", {"a": (2, 3, 4), "b": (2, 4, 5)}),
            ("ij->j", "a", {"a": (3, 4)}),
            ("ij->ji", "a", {"a": (3, 4)}),
            ("i,j,k->ijk", "a, b, c", {"a": (2,), "b": (3,), "c": (4,)}),
            ("bi,bj->i", "a, b", {"a": (2, 3), "b": (2, 4)}),
        )
    ]
)

REDUCE = [
    row(f"{op} {what}", f"y = {op} <{attributes}> (x{', axes' if axes else ''})", x=x, **axes)
    for op in (
        *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1"),
        *("ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
    )
    for x in (within(0.3, 2, 2, 3, 4) if op == "ReduceLogSum" else apart(2, 3, 4),)
    for what, attributes, axes in (
        ("axes", "keepdims = 1", {"axes": i64(0, 2)}),
        ("last, dropped", "keepdims = 0", {"axes": i64(-1)}),
        ("all", "keepdims = 0", {}),
        ("nothing", "noop_with_empty_axes = 1", {"axes": np.zeros(0, np.int64)}),
        ("all by no axes", "keepdims = 1", {"axes": i64()}),
        ("all by no axes, dropped", "keepdims = 0", {"axes": i64()}),
    )
] + [
    row("Softmax", "y = Softmax (x)", x=(2, 3, 4)),
    row("Softmax axis", "y = Softmax <axis = 1> (x)", x=(2, 3, 4)),
    row("LogSoftmax axis", "y = LogSoftmax <axis = 0> (x)", x=(2, 3, 4)),
    row("CumSum", "y = CumSum (x, a)", x=(2, 5), a=scalar(1)),
    row("DFT", "y = DFT (x)", x=(2, 5, 2), dynamic=(0, 1)),
    row("DFT inverse", "y = DFT <inverse = 1> (x, , a)", x=(3, 4, 2), a=scalar(0), dynamic=(0, 1)),
    row("DFT real", "y = DFT (x, , a)", x=(2, 3, 4, 1), a=scalar(1), dynamic=(0, 1, 2)),
    *(
        row(
            f"STFT {name}",
            f"y = STFT {more} (x, s, {operands})",
            **{"x": x, "s": scalar(3), "n": scalar(4), "w": (4,), "static": ("w",)},
            dtype=F32,
            fixed=() if "w" in operands else ("w",),
            dynamic=(0, 1),
        )
        for name, more, operands, x in (
            ("with a window", "", "w, n", (2, 12, 1)),
            ("with a window of its frames", "", "w", (1, 10)),
            ("whole", "<onesided = 0>", ", n", (2, 11, 1)),
        )
    ),
    row("LpNormalization", "y = LpNormalization (x)", x=(3, 4)),
    row("LpNormalization p=1", "y = LpNormalization <p = 1, axis = 0> (x)", x=apart(3, 4)),
    *rows("""
ReduceProd with zeros: a=i64(1), x=np.array([[0.0, 2, 3], [0, 0, 4], [1, 2, 3]])
  y = ReduceProd (x, a)
ReduceSum run-time axes: x=(2, 3, 4), a=i64(0, 2), runtime=("a",)
  y = ReduceSum (x, a)
ReduceMax no run-time axes: x=apart(2, 3, 4), a=i64(), runtime=("a",)
  y = ReduceMax <noop_with_empty_axes = 1> (x, a)
ReduceProd no run-time axes: x=(2, 3, 4), a=i64(), runtime=("a",)
  y = ReduceProd <noop_with_empty_axes = 1, keepdims = 0> (x, a)
ReduceMean run-time axes: x=(2, 3, 4), a=i64(1), runtime=("a",)
  y = ReduceMean <keepdims = 0> (x, a)
CumSum reverse exclusive: x=(2, 5), a=scalar(-1)
  y = CumSum <reverse = 1, exclusive = 1> (x, a)
"""),
]

SHAPE = [
    row("Reshape", "y = Reshape (x, s)", x=(2, 3, 4), s=i64(4, -1)),
    row("Reshape run-time", "y = Reshape (x, s)", x=(2, 3, 4), s=i64(0, -1, 2), runtime=("s",)),
    row("Flatten", "y = Flatten <axis = 2> (x)", x=(2, 3, 4)),
    row("Squeeze", "y = Squeeze (x, a)", x=(2, 1, 4), a=i64(1)),
    row("Squeeze all", "y = Squeeze (x)", x=(2, 1, 4, 1)),
    row("Unsqueeze", "y = Unsqueeze (x, a)", x=(2, 4), a=i64(0, -1)),
    row("Transpose", "y = Transpose <perm = [2, 0, 1]> (x)", x=(2, 3, 4)),
    row("Transpose default", "y = Transpose (x)", x=(2, 3, 4)),
    row("Trilu", "y = Trilu <upper = 0> (x)", x=(2, 4, 4)),
    row("Trilu k", "y = Trilu (x, k)", x=(3, 4), k=scalar(1)),
    row("Tile", "y = Tile (x, r)", x=(2, 3), r=i64(2, 1)),
    row("Tile run-time", "y = Tile (x, r)", x=(2, 3), r=i64(2, 3), runtime=("r",)),
    row("Expand", "y = Expand (x, s)", x=(3, 1), s=i64(2, 1, 4)),
    row("Expand run-time", "y = Expand (x, s)", x=(3, 1), s=i64(2, 3, 4), runtime=("s",)),
    row("Concat", "y = Concat <axis = 1> (a, b, c)", a=(2, 3), b=(2, 1), c=(2, 2)),
    row("Concat negative axis", "y = Concat <axis = -2> (a, b)", a=(1, 3), b=(2, 3)),
    row("Slice", "y = Slice (x, s, e, a)", x=(4, 5), s=i64(1, -3), e=i64(3, 100), a=i64(0, 1)),
    row("Slice no axes", "y = Slice (x, s, e)", x=(4, 5), s=i64(1, 0), e=i64(-1, 5)),
    row("Slice whole", "y = Slice (x, s, e, a)", x=(4, 5), s=i64(0), e=i64(2**63 - 1), a=i64(1)),
    row("Pad", "y = Pad (x, p)", x=(2, 3), p=i64(1, 0, 0, 2)),
    row("Pad value axes", "y = Pad (x, p, v, a)", x=(2, 3), p=i64(1, 2), v=scalar(0.7), a=i64(-1)),
    row("Pad crop", "y = Pad (x, p)", x=(4, 5), p=i64(-1, 2, 1, -2)),
    row("SpaceToDepth", "y = SpaceToDepth <blocksize = 2> (x)", x=(2, 3, 4, 2)),
    row("Range", "y = Range (a, b, d)", a=scalar(0.3), b=scalar(2.35), d=scalar(0.5)),
    *rows("""
Squeeze all by no axes: x=(2, 1, 4, 1), a=i64()
  y = Squeeze (x, a)
Squeeze all by no axes, at run time: x=(2, 1, 4, 1), a=i64(), runtime=("a",)
  y = Squeeze (x, a)
Pad $mode: x=(2, 4, 5), p=i64(0, 2, 1, 0, 1, 3); mode in reflect edge wrap
  y = Pad <mode = "$mode"> (x, p)
DepthToSpace $mode: x=(2, 8, 2, 3), dynamic=$axes; mode, axes in DCR True | CRD (0, 2, 3)
  y = DepthToSpace <blocksize = 2, mode = "$mode"> (x)
Split: x=(2, 4), s=i64(2, 2), outputs=("y", "b")
  a, b = Split <axis = 1> (x, s)  y = Mul (a, a)
Split, part unused: x=(2, 7)
  a, b, c = Split <axis = -1, num_outputs = 3> (x)  y = Exp (b)
Slice run-time: x=(4, 5), s=i64(-2), e=i64(9), a=i64(1), runtime=("s", "e")
  y = Slice (x, s, e, a)
Slice empty: x=(2, 5), s=i64(7), e=i64(9), a=i64(1)
  z = Slice (x, s, e, a)  y = Concat <axis = 1> (z, x)
Slice steps: x=(4, 7), s=i64(1, -1), e=i64(9, -9), a=i64(1, 0), t=i64(2, -1)
  y = Slice (x, s, e, a, t)
Slice run-time steps: x=(4, 7), s=i64(6), e=i64(0), a=i64(1), t=i64(-2), runtime=("t", "s")
  y = Slice (x, s, e, a, t)
Pad reflect run-time: x=(4, 5), p=i64(2, 1, 1, 3), runtime=("p",)
  y = Pad <mode = "reflect"> (x, p)
Unsqueeze at a number: x=(3, 4), a=np.array(1)
  u = Unsqueeze (x, a)  y = Exp (u)
Unsqueeze at a run-time number: x=(3, 4), a=np.array(-2), runtime=("a",)
  u = Unsqueeze (x, a)  y = Exp (u)
ReverseSequence: x=(3, 4, 2), l=i64(1, 4, 2)
  y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, l)
"""),
]

INDEXING = [
    row("Gather", "y = Gather (x, i)", x=(5, 3), i=np.array([[0, 4, 0], [1, 0, -1]])),
    row("Gather axis -1", "y = Gather <axis = -1> (x, i)", x=(2, 5), i=i64(3, 3, -2)),
    row("Gather one", "y = Gather <axis = -2> (x, i)", x=(2, 5, 3), i=i64(-4)),
    row("Gather one of rank 2", "y = Gather <axis = 1> (x, i)", x=(2, 5, 3), i=np.array([[1]])),
    row("TopK", "y, i = TopK (x, k)", x=apart(3, 5), k=i64(2)),
    *rows("""
Gather int32 axis $axis: x=(2, 5, 3), i=np.int32([[0, 1, 0], [1, 0, -1]]); axis in 0 1
  y = Gather <axis = $axis> (x, i)
Gather int32 axis $axis run-time: x=(2, 5, 3), i=np.int32([[0, 1, 0], [1, 0, -1]]),
runtime=("i",); axis in 0 1
  y = Gather <axis = $axis> (x, i)
Gather scalar $i: x=(2, 5, 3), i=scalar($i); i in 0 2 -1 -2
  y = Gather <axis = 1> (x, i)
ScatterElements $how: x=apart(2, 5), u=apart(2, 2) + 0.033,
i=np.array([[0, 4], [1, 3]]); how in none add mul max min
  y = ScatterElements <axis = 1, reduction = "$how"> (x, i, u)
ScatterND $how: x=apart(4, 3), u=apart(2, 3) + 0.033,
i=np.array([[1], [3]]); how in none add mul max min
  y = ScatterND <reduction = "$how"> (x, i, u)
Compress of $n by 3: x=($n,), c=np.array([True, False, True]), runtime=$runtime;
n, runtime in 4 () | 2 () | 2 ("c",)
  y = Compress (x, c)
Compress of $n by 3<axis = $axis>: x=(2, $n), c=np.array([True, False, True]), runtime=$runtime;
n, runtime in 4 () | 2 () | 2 ("c",); axis in 1 -1
  y = Compress <axis = $axis> (x, c)
Gather run-time: x=(5, 3), i=np.array([[0, 4], [0, -1]]), runtime=("i",)
  y = Gather (x, i)
Gather axis 1: x=(2, 5, 3), i=np.array([[0, 4, 0], [1, 0, 2]])
  y = Gather <axis = 1> (x, i)
GatherElements int32: x=(3, 2), i=np.int32([[0, 2], [0, 1]])
  y = GatherElements (x, i)
Gather scalar run-time: x=(2, 5), i=scalar(3), runtime=("i",)
  y = Gather <axis = 1> (x, i)
GatherElements: x=(2, 5), i=np.array([[0, 4, 0], [1, 0, -1]])
  y = GatherElements <axis = 1> (x, i)
GatherND: x=(3, 4, 2), i=np.array([[[0, 1], [2, -1]], [[0, 1], [1, 1]]])
  y = GatherND (x, i)
GatherND batch: x=(2, 4, 3), i=np.array([[[0], [3], [0]], [[1], [1], [2]]])
  y = GatherND <batch_dims = 1> (x, i)
GatherND of a cube: x=(2, 2, 2), i=np.array([[1], [0], [-1]])
  y = GatherND (x, i)
GatherND batch of a cube: x=(2, 2, 2), i=np.array([[[1], [0]], [[1], [1]]])
  y = GatherND <batch_dims = 1> (x, i)
GatherND batch 2: x=(2, 3, 4), i=rng().integers(0, 4, (2, 3, 2, 1))
  y = GatherND <batch_dims = 2> (x, i)
ScatterElements none twice: x=(4, 2), u=(3, 2), i=np.array([[0, 1], [0, -3], [2, 1]])
  y = ScatterElements (x, i, u)
ScatterND none twice: x=(4, 3), u=(3, 3), i=np.array([[1], [-3], [-1]]), runtime=("i",)
  y = ScatterND (x, i, u)
ScatterElements mul by zeros: x=(4, 1), u=np.array([[0.0], [2], [0], [0], [3]]),
i=np.array([[0], [0], [1], [1], [2]])
  y = ScatterElements <reduction = "mul"> (x, i, u)
ScatterElements add twice: x=(4, 2), u=(3, 2), i=np.array([[0, 1], [0, 1], [2, 1]])
  y = ScatterElements <reduction = "add"> (x, i, u)
ScatterElements max twice: x=apart(4, 2), u=apart(3, 2) + 0.033,
i=np.array([[0, 1], [0, 1], [2, 1]])
  y = ScatterElements <reduction = "max"> (x, i, u)
ScatterND add twice: x=(4, 3), u=(3, 3), i=np.array([[1], [1], [-1]])
  y = ScatterND <reduction = "add"> (x, i, u)
TopK smallest axis 0: x=apart(3, 5), k=i64(2)
  y, i = TopK <axis = 0, largest = 0> (x, k)
OneHot: i=np.array([[0, 2], [1, -1]]), d=i64(3), v=(2,), dtype=F32
  y = OneHot <axis = 1> (i, d, v)
Compress flat: x=(2, 3), c=np.array([True, False, True, False, True])
  y = Compress (x, c)
"""),
]
