"""Pointwise ops: one table of expressions; chains of them become one generated kernel.

An Expression is straight-line code over the elements of an iteration space. Its loads and stores
are the reads and writes of its Call, as views of that space (stride 0 on broadcast axes), so the
copies that Transpose, Concat, Slice or Expand need are Expressions too. The text of a kernel holds
the structure alone; sizes, strides and scalars are arguments, so other shapes compile nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.quantizing import WIDE_CODE, in_steps, quantizing, to_float8
from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.program import size as sizes
from onnx_fuse.program.call import INT32_LIMIT, Call, Tensor
from onnx_fuse.program.expression import Expression, Operation, Row
from onnx_fuse.program.launch import Arg, Launch, Num, Ptr, Table
from onnx_fuse.program.problem import ITEMSIZE

THREADS = 256
ROWS_AT_ONCE, SUM_BLOCKS = 8, 1024
"""Of a kernel that also sums a result: rows that a block takes at a time, blocks of a launch."""
REGISTERS = 96
"""Elements of all operands together that a thread may hold: more would spill."""
FEW_ELEMENTS = 1 << 18
"""Elements that a kernel may handle one by one: it takes little longer than its launch."""
STORAGE = {
    "float64": "double", "float32": "float", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "int", "int16": "short", "int8": "signed char",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8", "bool": "bool",
}  # fmt: skip
NARROW_FLOATS = {
    "float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2fnuz": "e5m2fnuz", "float8_e8m0fnu": "e8m0fnu", "float4_e2m1fn": "e2m1fn",
}  # fmt: skip
NARROW_INTS = {"int4": ("i4", 15), "uint4": ("u4", 15), "int2": ("i2", 3), "uint2": ("u2", 3)}
"""dtype -> its C type and the mask of its bits, in quant/narrow.cuh."""
LARGEST = {
    "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0,
    "float8_e5m2fnuz": 57344.0, "float4_e2m1fn": 6.0,
}  # fmt: skip
"""The narrow floats that values are rounded to, and the largest value of each."""
STORAGE |= NARROW_FLOATS | {name: ctype for name, (ctype, _) in NARROW_INTS.items()}
FLOATS = ("float64", "float32", "float16", "bfloat16")

# name -> C expression of operands {0}, {1}, ...; {t} is the result's C type. Attributes that
# ATTRIBUTES lists are the operands after the node's inputs.
TABLE: dict[str, str] = {
    **{row.name: row.pointwise for row in ACTIVATIONS.values()},
    "Identity": "{0}",
    "Cast": "({t}){0}",
    "CastFloat16": "round_f16({0})",
    "CastBFloat16": "round_bf16({0})",
    "CastBool": "({0} != 0)",
    **{f"Cast{name}": f"widen(from_float<{NARROW_FLOATS[name]}>({{0}}))" for name in LARGEST},
    "Abs": "m_abs({0})",
    "Acos": "m_acos({0})",
    "Acosh": "m_acosh({0})",
    "Add": "{0} + {1}",
    "And": "{0} && {1}",
    "Asin": "m_asin({0})",
    "Asinh": "m_asinh({0})",
    "Atan": "m_atan({0})",
    "Atanh": "m_atanh({0})",
    "BitwiseAnd": "{0} & {1}",
    "BitwiseNot": "~{0}",
    "BitwiseOr": "{0} | {1}",
    "BitwiseXor": "{0} ^ {1}",
    "Ceil": "m_ceil({0})",
    "Celu": "m_max({0}, ({t})0) + m_min(({t})0, {1} * m_expm1({0} / {1}))",
    "ClipMax": "{0} > {1} ? {1} : {0}",
    "ClipMin": "{0} < {1} ? {1} : {0}",
    "Code": "code_bits({0}, {1}, {2}, {3}, {4}, {5})",
    "Cos": "m_cos({0})",
    "Cosh": "m_cosh({0})",
    "Div": "m_div(({t}){0}, ({t}){1})",
    "Equal": "{0} == {1}",
    "Erf": "m_erf({0})",
    "Exp": "m_exp({0})",
    "FMod": "m_fmod(({t}){0}, ({t}){1})",
    "Floor": "m_floor({0})",
    "Greater": "{0} > {1}",
    "GreaterOrEqual": "{0} >= {1}",
    "IsInf": "!is_nan({0}) && is_nan({0} - {0}) && "
    "(({0} < 0 && {1} != 0) || ({0} > 0 && {2} != 0))",
    "Iota": "(i64)i + v",
    "IsNaN": "is_nan({0})",
    "Less": "{0} < {1}",
    "LessOrEqual": "{0} <= {1}",
    "Log": "m_log({0})",
    "Max": "m_max(({t}){0}, ({t}){1})",
    "Min": "m_min(({t}){0}, ({t}){1})",
    "Mod": "m_mod(({t}){0}, ({t}){1})",
    "Mul": "{0} * {1}",
    "Neg": "-{0}",
    "Not": "!{0}",
    "Or": "{0} || {1}",
    "PRelu": "{0} < 0 ? {1} * {0} : {0}",
    "Pow": "m_pow(({t}){0}, ({t}){1})",
    "Quantize": "quantized({0}, {1}, {2}, {3}, {4}, {5})",
    "Reciprocal": "1 / {0}",
    "Round": "m_rint({0})",
    "Saturate": "{0} >= {1} ? {0} < {2} ? {0} : {2} : {1}",  # a NaN becomes the least
    "Scale": "__fmul_rn({0}, {1})",  # rounded, whatever is added to it
    "ShiftLeft": "(u64){1} < 8 * sizeof({t}) ? {0} << {1} : 0",
    "ShiftRight": "m_shift_right({0}, {1})",
    "Shrink": "{0} < -{2} ? {0} + {1} : {0} > {2} ? {0} - {1} : ({t})0",
    "Sign": "is_nan({0}) ? {0} : ({t})(({0} > 0) - ({0} < 0))",
    "Sin": "m_sin({0})",
    "Sinh": "m_sinh({0})",
    "Softsign": "{0} / (1 + m_abs({0}))",
    "Sqrt": "m_sqrt({0})",
    "Square": "{0} * {0}",
    "Sub": "{0} - {1}",
    "Steps": "m_div({0}, {1})",  # in a type whose own steps are rounded to next; {2} is 1 / {1}
    "Swish": "{0} * m_sigmoid({1} * {0})",
    "Tan": "m_tan({0})",
    "ThresholdedRelu": "{0} > {1} ? {0} : ({t})0",
    "Where": "{0} ? {1} : {2}",
    "Xor": "{0} != {1}",
}
ATTRIBUTES: dict[str, tuple[tuple[str, float], ...]] = {
    **{row.name: row.numbers for row in ACTIVATIONS.values() if row.numbers},
    "Celu": (("alpha", 1.0),),
    "IsInf": (("detect_negative", 1), ("detect_positive", 1)),
    "Shrink": (("bias", 0.0), ("lambd", 0.5)),
    "Swish": (("alpha", 1.0),),
    "ThresholdedRelu": (("alpha", 1.0),),
}
COMPARES = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN")


def compute_type(dtype: str) -> str:
    """C type of arithmetic on `dtype`: narrow floats compute in float, sub-byte ints in int."""
    if dtype in NARROW_INTS:
        return "int"
    return "float" if dtype in ("float16", "bfloat16", *NARROW_FLOATS) else STORAGE[dtype]


def includes(expression: Expression, dtypes: Sequence[str]) -> str:
    """The #include lines that the generated source of an expression over these dtypes needs."""
    named = {*dtypes, *(step.dtype for step in expression.steps)}
    named |= {step.name.removeprefix("Cast") for step in expression.steps}
    more = '#include "quant/narrow.cuh"\n' if named & {*NARROW_FLOATS, *NARROW_INTS} else ""
    more += '#include "quant/e4m3.cuh"\n' if "float8_e4m3fn" in named else ""
    return f'#include "pointwise/math.cuh"\n{more}'


# ---- layout and text ----------------------------------------------------------------------------


def collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Drop axes of size 1 and merge neighbours that every operand walks as one."""
    axes = [k for k, d in enumerate(shape) if d != 1]
    dims: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for k in axes:
        d = shape[k]
        if dims and all(m[-1] == s[k] * d for m, s in zip(merged, strides, strict=True)):
            dims[-1] *= d
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[k]
        else:
            dims.append(d)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[k])
    if not dims:
        return [1], [[0] for _ in strides]
    return dims, merged


def vector_width(
    dims: Sequence[int],
    tensors: Sequence[Tensor],
    strides: list[list[int]],
    rows: Sequence[Row] = (),
) -> int:
    """Elements a thread handles: 16-byte accesses wherever the layout allows them."""
    shared = {row.index for row in rows if strides[row.index][-1] == 0}
    width = 16 // max(ITEMSIZE[t.dtype] for i, t in enumerate(tensors) if i not in shared)
    unit = [s[-1] == 1 for s in strides]
    if not any(unit):
        return 1
    while width > 2 and width * len(tensors) > REGISTERS:
        width //= 2
    if len(dims) > 1 and isinstance(dims[-1], sizes.OpenSize):
        # a program for each remainder would be many: only a large tensor is worth them
        few = sizes.upper_bound(prod(dims), sizes.wide_size_class) <= FEW_ELEMENTS
        if few:
            return 1
    steps = [[row.step for row in rows if row.load == i] for i in range(len(tensors))]
    while width > 1:
        aligned = all(
            not u or (t.offset % width == 0 and all(x % width == 0 for x in s[:-1] + more))
            for u, t, s, more in zip(unit, tensors, strides, steps, strict=True)
        )
        # one flat axis may end inside a vector: its tail is masked
        if aligned and (len(dims) == 1 or dims[-1] % width == 0):
            break
        width //= 2
    return width


def _steps(expression: Expression, values: list[str], wide: int = -1) -> list[str]:
    """A statement a step; `values` names the loads and scalars and is extended by the steps.

    The Code that is value `wide` is an integer that saturates to it, a float8 there a float.
    """
    body: list[str] = []
    for i, step in enumerate(expression.steps):
        ctype, text = compute_type(step.dtype), TABLE[step.name]
        if step.name == "Code" and len(values) == wide:
            ctype, text = "int", WIDE_CODE
        text, args = _contracted(expression, step) or quantizing(expression, step, text)
        if step.name == "Castfloat8_e4m3fn":
            text, args = to_float8(expression, step, text, len(values) == wide)
        elif step.name == "Steps" and wide >= 0:
            text, args = in_steps(expression, args)
        text = text.format(*(values[a] for a in args), t=ctype)
        body.append(f"const {ctype} t{i} = ({ctype})({text});")
        values.append(f"t{i}")
    return body


def _contracted(expression: Expression, step: Operation) -> tuple[str, tuple[int, ...]] | None:
    """The FMA of a sum of two products: the compiler would choose which of them joins it by what
    else the kernel computes, and so would the bits. A second one that is a Scale stays rounded.
    """
    fma = {"float": "__fmaf_rn", "double": "__fma_rn"}.get(compute_type(step.dtype))
    if step.name not in ("Add", "Sub") or fma is None:
        return None
    first = expression.loads + len(expression.scalars)
    a, b = step.args[:2]
    products = [expression.steps[at - first] for at in (a, b) if at >= first]
    names = [p.name for p in products if p.dtype == step.dtype]
    if a == b or names not in (["Mul", "Mul"], ["Mul", "Scale"]):
        return None
    return f"{fma}({{0}}, {{1}}, {'-' * (step.name == 'Sub')}{{2}})", (*products[0].args, b)


def inline(expression: Expression, loads: Sequence[str], numbers: Sequence[str] = ()) -> str | None:
    """The one stored value as a C++ expression of `loads`; None where it can't be written.

    Its scalars are called by `numbers`, and are literals where these are none. A code of 8 bits is
    an integer that saturates to it, and a float8 a float.
    """
    if expression.rows or expression.counts:
        return None
    if not np.isfinite([value for _, value in expression.scalars]).all():
        return None
    literals = [f"({SCALAR[ctype]}){value!r}" for ctype, value in expression.scalars]
    values = [*loads, *(numbers or literals)]
    body = _steps(expression, values, expression.stores[0])
    return f"[&] {{ {' '.join(body)} return {values[expression.stores[0]]}; }}()"


def arithmetic(
    expression: Expression, loaded: Sequence[str], stored: Sequence[str], width: int
) -> list[str]:
    """The loop over a vector's elements: loads a<i>v in, stores y<i>v out, by their dtypes."""
    body = [f"#pragma unroll\n    for (int v = 0; v < {width}; v++) {{"]
    values = [f"x{i}" for i in range(expression.loads)]
    values += [f"s{i}" for i in range(len(expression.scalars))]
    body += [f"    const auto x{i} = widen(a{i}v.at[v]);" for i in range(expression.loads)]
    body += [f"    {line}" for line in _steps(expression, values)]
    rounded = {len(values) - n for n, step in enumerate(reversed(expression.steps), 1)
               if step.name == "Castfloat8_e4m3fn"}  # fmt: skip
    for i, (source, dtype) in enumerate(zip(expression.stores, stored, strict=True)):
        text = f"({compute_type(dtype)})({values[source]})"
        if source < expression.loads and loaded[source] == dtype:
            text = f"a{source}v.at[v]"  # the same bits, of a NaN too
        elif dtype == "float8_e4m3fn" and source in rounded:
            text = f"stored<e4m3fn>({text})"
        elif dtype in ("float16", "bfloat16", *NARROW_FLOATS):
            text = f"from_float<{STORAGE[dtype]}>({text})"
        elif dtype in NARROW_INTS:
            ctype, mask = NARROW_INTS[dtype]
            text = f"{ctype}{{(u8)({text} & {mask})}}"
        body.append(f"    y{i}v.at[v] = {text};")
    return [*body, "}"]


def launch_of(expression: Expression, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Launch:
    """The generated kernel of an expression over views of one iteration space."""
    tensors = [*reads, *writes]
    shape = writes[0].shape
    dims, strides = collapse(shape, [t.strides for t in tensors])
    width = vector_width(dims, tensors, strides, expression.rows)
    rows = {row.load: row for row in expression.rows}
    wide = prod(shape) >= 2**31 - THREADS * 16 or any(t.wide for t in tensors)
    wide = wide or any(
        row.size * abs(row.step) + sum(abs(s) * d for s, d in zip(strides[i], dims, strict=True))
        >= INT32_LIMIT
        for i, row in rows.items()
    )
    index = "i64" if wide else "int"
    rank = len(dims)
    names = [f"a{i}" for i in range(len(reads))] + [f"y{i}" for i in range(len(writes))]
    params: list[tuple[str, Arg]] = [
        (f"{'const ' * (name[0] == 'a')}{STORAGE[tensor.dtype]}* {name}", Ptr(name))
        for name, tensor in zip(names, tensors, strict=True)
    ]
    kind = "i64" if wide else "i32"
    params += [*_scalars(expression), (f"{index} n", Num(kind, prod(dims)))]
    params += [(f"{index} d{k}", Num(kind, dims[k])) for k in range(1, rank)]
    body: list[str] = []
    if rank > 1:
        body.append(f"{index} r = i;")
        body += [f"const {index} c{k} = r % d{k}; r /= d{k};" for k in reversed(range(1, rank))]
        body.append(f"const {index} c0 = r;")
    rest = dims[0] % width
    # a flat axis of an open size always masks its tail: a program for each remainder would be many
    tail = rank == 1 and (isinstance(rest, sizes.OpenSize) or rest != 0)
    for name, s, tensor, row in sorted(  # indices before the rows that they choose
        zip(names, strides, tensors, map(rows.get, range(len(tensors))), strict=True),
        key=lambda item: item[3] is not None,
    ):
        terms = []
        for k in range(rank):
            if s[k] == 0:
                continue
            coordinate = "i" if rank == 1 else f"c{k}"
            if s[k] == 1:
                terms.append(coordinate)
            else:
                params.append((f"{index} {name}_{k}", Num(kind, s[k])))
                terms.append(f"{coordinate} * {name}_{k}")
        where = " + ".join([name, *terms])
        vec = f"Vec<{STORAGE[tensor.dtype]}, {width}>"
        step = "0" if s[-1] == 0 else "v" if s[-1] == 1 else f"v * {name}_{rank - 1}"
        one = row is None or strides[row.index][-1] == 0
        inside = "true"
        if row is not None:
            params += [(f"{index} {name}_step", Num(kind, row.step)),
                      (f"i64 {name}_size", Num("i64", row.size))]  # fmt: skip
            at = f"row_at(a{row.index}v.at[{0 if one else 'v'}], {name}_size)"
            inside = f"{name}k >= 0" if one else f"{at} >= 0"
            where += f" + ({index}){f'{name}k' if one else at} * {name}_step"
            if one:
                body.append(f"const i64 {name}k = {at};")
        if name[0] == "y":
            body.append(f"{STORAGE[tensor.dtype]}* const {name}p = {where}; {vec} {name}v;")
        elif width > 1 and s[-1] == 1:
            whole = [f"i + {width} <= n"] * tail + [inside] * (row is not None)
            left = "n - i" if row is None else f"{inside} ? n - i : 0"
            loaded = f"load<{width}>({where})"
            if whole:
                loaded = f"{' && '.join(whole)} ? {loaded} : load_part<{width}>({where}, {left})"
            body.append(f"const {vec} {name}v = {loaded};")
        else:
            guard = "(v == 0 || i + v < n) && " if tail and (s[-1] or not one) else ""
            body.append(
                f"{vec} {name}v = {{}}; for (int v = 0; v < {width}; v++) "
                f"if ({guard}{inside}) {name}v.at[v] = ({where})[{step}];"
            )
    body += arithmetic(expression, [t.dtype for t in reads], [t.dtype for t in writes], width)
    for i, s in enumerate(strides[len(reads) :]):
        if s[-1] == 1 and width > 1:
            full = f"store(y{i}p, y{i}v);"
            part = f"if (i + {width} <= n) {full} else store_part(y{i}p, y{i}v, n - i);"
            body.append(part if tail else full)
        else:
            step = "v" if s[-1] == 1 else "0" if s[-1] == 0 else f"v * y{i}_{rank - 1}"
            guard = "if (i + v < n) " if tail else ""
            body.append(f"for (int v = 0; v < {width}; v++) {guard}y{i}p[{step}] = y{i}v.at[v];")
    lines = "\n    ".join(body)
    source = (
        f"{includes(expression, [t.dtype for t in tensors])}"
        f'extern "C" __global__ void __launch_bounds__({THREADS}) pointwise(\n'
        f"    {', '.join(text for text, _ in params)}) {{\n"
        f"    after_previous_launch();\n"
        f"    const {index} i = (({index})blockIdx.x * {THREADS} + threadIdx.x) * {width};\n"
        f"    if (i >= n) return;\n    {lines}\n}}\n"
    )
    blocks = -(-prod(dims) // (width * THREADS))
    args = tuple(arg for _, arg in params)
    return Launch(source, "pointwise", (blocks, 1, 1), (THREADS, 1, 1), args, waits="first")


def sum_blocks(n: int, width: int) -> tuple[int, int]:
    """Strips of columns, and at most how many parts of rows: blocks where a result is summed."""
    strips = -(-n // (32 * width))
    return strips, max(1, SUM_BLOCKS // strips)


def launch_sums(
    expression: Expression,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    summed: int,
    over: str,
    out_dtype: str,
) -> Launch:
    """The generated kernel of an expression over views [m, n] that also sums a result.

    A block's warps walk down its part of the rows of 32 vectors side by side. It leaves its sums in
    "workspace", and the last block to do so adds up those of all parts, in order.
    """
    m, n = writes[0].shape
    tensors, width = [*reads, *writes], sums_width(reads, writes)
    strips, most = sum_blocks(n, width)
    parts = sizes.minimum(-(-m // ROWS_AT_ONCE), most)
    wide = m * n >= INT32_LIMIT or any(t.wide for t in tensors)
    index, kind = ("i64", "i64") if wide else ("int", "i32")
    names = [f"a{i}" for i in range(len(reads))] + [f"y{i}" for i in range(len(writes))]
    params: list[tuple[str, Arg]] = [
        (f"{'const ' * (name[0] == 'a')}{STORAGE[tensor.dtype]}* {name}", Ptr(name))
        for name, tensor in zip(names, tensors, strict=True)
    ]
    params += [*_scalars(expression), (f"{index} m", Num(kind, m)), (f"{index} n", Num(kind, n)),
              ("float* part", Ptr("workspace")), ("u32* counters", Ptr("sync")),
              (f"{STORAGE[out_dtype]}* sum", Ptr("sum"))]  # fmt: skip
    body = []
    for name, tensor in zip(names, tensors, strict=True):
        down, along = tensor.strides
        where = name
        if down:
            params.append((f"{index} {name}_0", Num(kind, down)))
            where += f" + row * {name}_0"
        if along:
            params.append((f"{index} {name}_1", Num(kind, along)))
            where += f" + column * {name}_1"
        vec = f"Vec<{STORAGE[tensor.dtype]}, {width}>"
        if name[0] == "y":
            body.append(f"{STORAGE[tensor.dtype]}* const {name}p = {where}; {vec} {name}v;")
        elif along == 1:
            body.append(f"const {vec} {name}v = load<{width}>({where});")
        else:
            step = f"v * {name}_1" if along else "0"
            body.append(
                f"{vec} {name}v; for (int v = 0; v < {width}; v++) "
                f"{name}v.at[v] = ({where})[{step}];"
            )
    body += arithmetic(expression, [t.dtype for t in reads], [t.dtype for t in writes], width)
    body += [f"store(y{i}p, y{i}v);" for i in range(len(writes))]
    body.append(f"for (int v = 0; v < {width}; v++) found[v] = to_float(y{summed}v.at[v]);")
    lines = "\n            ".join(body)
    scope = {"columns": "blockIdx.x", "rows": "blockIdx.y", "all": "0"}[over]
    others = {"columns": "gridDim.y", "rows": "gridDim.x", "all": "gridDim.x * gridDim.y"}[over]
    source = (
        f"{includes(expression, [*(t.dtype for t in tensors), out_dtype])}"
        f"constexpr int W = {width};\n"
        f"#define OVER_{over.upper()}\n"
        '#include "pointwise/sums.cuh"\n'
        f'extern "C" __global__ void __launch_bounds__({THREADS}) pointwise_sums(\n'
        f"    {', '.join(text for text, _ in params)}) {{\n"
        f"    after_previous_launch();\n"
        f"    const {index} column = ({index})(blockIdx.x * 32 + threadIdx.x % 32) * W;\n"
        f"    const {index} each = (m + gridDim.y - 1) / gridDim.y, from = blockIdx.y * each;\n"
        f"    const {index} to = from + each < m ? from + each : m;\n"
        f"    float total[W] = {{}};\n"
        f"    for ({index} row = from + threadIdx.x / 32; row < to; row += {THREADS // 32}) {{\n"
        f"        float found[W] = {{}};\n"
        f"        if (column < n) {{\n            {lines}\n        }}\n"
        f"        add_row(total, found, part + blockIdx.x * ({index})m + row);\n"
        f"    }}\n"
        f"    leave_sums(total, part, (i64)n);\n"
        f"    if (!last_to_come(counters + {scope}, {others})) return;\n"
        f"    add_parts(part, (i64)m, (i64)n, (i64)from, (i64)to, sum);\n}}\n"
    )
    count = {"columns": strips, "rows": most, "all": 1}[over]
    args = tuple(arg for _, arg in params)
    grid, block = (strips, parts, 1), (THREADS, 1, 1)
    return Launch(source, "pointwise_sums", grid, block, args, sync=4 * count, waits="first")


def sums_width(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    """Columns that a thread handles: accesses of 16 bytes where all rows are aligned to them."""
    tensors = [*reads, *writes]
    width = 16 // max(ITEMSIZE[t.dtype] for t in tensors)
    while width > 2 and width * len(tensors) > REGISTERS:
        width //= 2
    unit = [t for t in tensors if t.strides[1] == 1]
    while width > 1 and (
        writes[0].shape[1] % width or any(t.offset % width or t.strides[0] % width for t in unit)
    ):
        width //= 2
    return width


def _scalars(expression: Expression) -> list[tuple[str, Arg]]:
    """The parameters and arguments of a kernel for an expression's numbers."""
    pairs = enumerate(expression.scalars)
    return [(f"{SCALAR[ctype]} s{i}", Num(ctype, value)) for i, (ctype, value) in pairs]


def rows_of(tensor: Tensor) -> tuple[int, int] | None:
    """The length of a view's rows and their distance, where gaps of one size are between them."""
    if any(isinstance(n, sizes.OpenSize) for n in (*tensor.shape, *tensor.strides)):
        return None
    dims, (strides,) = collapse(tensor.shape, [tensor.strides])
    if len(dims) != 2 or strides[1] != 1 or strides[0] < dims[1]:
        return None
    return dims[1], strides[0]


def launch_many(
    expression: Expression,
    shared: Sequence[Tensor | None],
    items: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
) -> Launch:
    """One launch of an expression over many flat tensors: (reads, writes) an item.

    Operand r of item t is bound as "r.t", or as "a<r>" where `shared[r]` is one number for all. The
    addresses travel in a Table, one row an item: operands, elements, first block. An operand that
    has gaps between rows (`rows_of`) in one item has them in all; then the length of a row is
    there too, and the gap behind each of these operands' rows.
    """
    reads, writes = items[0]
    dtypes = [t.dtype for t in (*reads, *writes)]
    separate = [r for r in range(len(dtypes)) if r >= len(reads) or shared[r] is None]
    width = 16 // max(ITEMSIZE[dtypes[r]] for r in separate)
    while any((*read, *stored)[r].offset % width for read, stored in items for r in separate):
        width //= 2
    apart = [r for r in separate if not (*reads, *writes)[r].dense]
    words: list[Ptr | int] = []
    blocks = 0
    for i, (read, stored) in enumerate(items):
        n = stored[0].size
        words += [*(Ptr(f"{k}.{i}") for k in separate), n, blocks]
        with_gaps = [each for r in apart if (each := rows_of((*read, *stored)[r])) is not None]
        assert len(with_gaps) == len(apart), "an operand has gaps in every item"
        words += (
            [with_gaps[0][0], *(pitch - length for length, pitch in with_gaps)] if with_gaps else []
        )
        blocks += -(-n // (width * THREADS))
    rows = 1 << (len(items) - 1).bit_length()  # few distinct sources for many counts
    words += [0] * ((rows - len(items)) * (len(words) // len(items)))
    params: list[tuple[str, Arg]] = [
        ("const __grid_constant__ Rows table", Table(tuple(words))),
        ("int rows", Num("i32", len(items))),
        *((f"const {STORAGE[t.dtype]}* a{r}", Ptr(f"a{r}")) for r, t in enumerate(shared) if t),
        *_scalars(expression),
    ]
    body = []
    names = [f"a{i}" for i in range(len(reads))] + [f"y{i}" for i in range(len(writes))]
    if apart:
        body.append("const i64 row = (int)i / (int)table.at[t].length;")
    for column, r in enumerate(separate):
        ctype = STORAGE[dtypes[r]]
        gaps = f" + row * table.at[t].gap[{apart.index(r)}]" if r in apart else ""
        body.append(f"{ctype}* const {names[r]}p = ({ctype}*)table.at[t].p[{column}] + i{gaps};")
    for r, dtype in enumerate(dtypes):
        vec = f"Vec<{STORAGE[dtype]}, {width}> {names[r]}v"
        if r >= len(reads):
            body.append(f"{vec};")
        elif r in separate:
            body.append(
                f"const {vec} = i + {width} <= n ? load<{width}>({names[r]}p) : "
                f"load_part<{width}>({names[r]}p, n - i);"
            )
        else:
            body.append(f"{vec}; for (int v = 0; v < {width}; v++) {names[r]}v.at[v] = *a{r};")
    body += arithmetic(expression, dtypes[: len(reads)], dtypes[len(reads) :], width)
    for i in range(len(writes)):
        body.append(
            f"if (i + {width} <= n) store(y{i}p, y{i}v); else store_part(y{i}p, y{i}v, n - i);"
        )
    lines = "\n    ".join(body)
    more = f" i64 length; i64 gap[{len(apart)}];" if apart else ""
    source = (
        f"{includes(expression, dtypes)}"
        f"struct Row {{ u64 p[{len(separate)}]; i64 n; i64 first;{more} }};\n"
        f"struct Rows {{ Row at[{rows}]; }};\n"
        f'extern "C" __global__ void __launch_bounds__({THREADS}) pointwise_many(\n'
        f"    {', '.join(text for text, _ in params)}) {{\n"
        f"    after_previous_launch();\n"
        f"    int t = 0;\n"
        f"    for (int step = {rows} / 2; step; step /= 2)\n"
        f"        if (t + step < rows && table.at[t + step].first <= blockIdx.x) t += step;\n"
        f"    const i64 n = table.at[t].n, block = blockIdx.x - table.at[t].first;\n"
        f"    const i64 i = (block * {THREADS} + threadIdx.x) * {width};\n"
        f"    if (i >= n) return;\n    {lines}\n}}\n"
    )
    args = tuple(arg for _, arg in params)
    return Launch(source, "pointwise_many", (blocks, 1, 1), (THREADS, 1, 1), args, waits="first")


Ref: TypeAlias = tuple[str, int]
"""An operand of a step of `Code`: "load", "scalar" or "step", and its number."""
SCALAR = {"f32": "float", "f64": "double", "i64": "i64", "i32": "int", "u32": "u32"}


def call_of(
    expression: Expression, reads: Sequence[Tensor], writes: Sequence[Tensor], nodes: Sequence[str]
) -> Call:
    """The Call of an expression."""
    return Call(
        expression.name,
        tuple(nodes),
        (),
        tuple((f"a{i}", t) for i, t in enumerate(reads)),
        tuple((f"y{i}", t) for i, t in enumerate(writes)),
        expression=expression,
    )


# ---- lowering -----------------------------------------------------------------------------------


class Code:
    """Collects one Expression: its loads, scalars and steps are operands of later steps."""

    def __init__(self) -> None:
        self.reads: list[Tensor] = []
        self.rows: list[Row] = []
        self.scalars: list[tuple[str, float]] = []
        self.steps: list[tuple[str, str, tuple[Ref, ...]]] = []

    def load(self, tensor: Tensor) -> Ref:
        """An operand read from memory; `tensor` is a view of the iteration space."""
        if tensor not in self.reads:
            self.reads.append(tensor)
        return "load", self.reads.index(tensor)

    def row(self, table: Tensor, index: Tensor, step: int, size: int) -> Ref:
        """Load row `index` of `table`: its elements lie `step` apart, on an axis of `size`."""
        _, at = self.load(index)
        self.reads.append(table)
        self.rows.append(Row(len(self.reads) - 1, at, step, size))
        return "load", len(self.reads) - 1

    def scalar(self, value: float | np.generic, dtype: str) -> Ref:
        """A number known at lowering, passed as an argument of the kernel."""
        kind = {"float64": "f64", "int64": "i64", "uint64": "i64", "uint32": "i64"}.get(dtype)
        kind = kind or ("f32" if dtype in FLOATS else "i32")
        number = float(value) if kind[0] == "f" else sizes.number(value)
        if dtype == "uint64" and number >= 1 << 63:
            number -= 1 << 64  # the kernel reads the same bits as an i64
        self.scalars.append((kind, number))
        return "scalar", len(self.scalars) - 1

    def step(self, name: str, dtype: str, *args: Ref) -> Ref:
        """Add the step TABLE[name](args), and return a reference to it."""
        self.steps.append((name, dtype, args))
        return "step", len(self.steps) - 1

    def expression(self, *stores: Ref) -> Expression:
        """The Expression of all loads and steps so far, which stores the values `stores`."""
        first = {"load": 0, "scalar": len(self.reads)}
        first["step"] = first["scalar"] + len(self.scalars)

        def number(ref: Ref) -> int:
            return first[ref[0]] + ref[1]

        steps = tuple(Operation(n, d, tuple(map(number, args))) for n, d, args in self.steps)
        stored, rows = tuple(map(number, stores)), tuple(self.rows)
        return Expression(len(self.reads), tuple(self.scalars), steps, stored, rows)


def cast_step(dtype: str) -> str:
    """Name of the step that rounds to `dtype`."""
    if dtype in LARGEST:
        return f"Cast{dtype}"
    special = {"bool": "CastBool", "float16": "CastFloat16", "bfloat16": "CastBFloat16"}
    return special.get(dtype, "Cast")


def rounded(code: Code, value: Ref, dtype: str, saturate: bool) -> Ref:
    """A float rounded to one of LARGEST's dtypes; a NaN stays one where the dtype has it."""
    if saturate:
        value = code.step("ClipMin", "float32", value, code.scalar(-LARGEST[dtype], "float32"))
        value = code.step("ClipMax", "float32", value, code.scalar(LARGEST[dtype], "float32"))
    return code.step(cast_step(dtype), dtype, value)


def dtype_name(dtype: ir.DataType) -> str:
    """problem.ITEMSIZE's name of an ONNX element type; the lower-case ONNX name elsewhere."""
    try:
        return str(dtype.numpy().name)
    except TypeError:
        return dtype.name.lower()
