"""What a kernel is specialised by: C types and -D macros."""

from __future__ import annotations

C_TYPES = {
    "float32": "float", "float64": "double", "float16": "f16", "bfloat16": "bf16",
    "int8": "signed char", "uint8": "u8", "int16": "short", "uint16": "u16",
    "int32": "int", "uint32": "u32", "int64": "i64", "uint64": "u64", "bool": "bool",
    "float8_e4m3fn": "e4m3fn",
}  # fmt: skip
FLOATS = ("float32", "float16", "bfloat16", "float64")
Defines = tuple[tuple[str, str], ...]


def accumulator(dtype: str, reducer: str = "Sum") -> str:
    """C type of sums over `dtype`."""
    if dtype in FLOATS:
        return "double" if dtype == "float64" else "float"
    if reducer in ("L2", "LogSum", "LogCount"):
        return "double"
    return C_TYPES[dtype] if dtype in ("int64", "uint64", "uint32") else "int"


def pow2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def lanes(n: int) -> int:
    """The smallest power of two >= n, but a warp's 32 at most.

    Of an open size that is larger no power of two is kept.
    """
    return 32 if n > 16 else pow2(n)


def defines(**macros: object) -> Defines:
    """-D macros as (name, text), sorted by name; False becomes 0, and None is left out."""
    given = sorted((name, v) for name, v in macros.items() if v is not None)
    return tuple((name, str(int(v) if isinstance(v, bool) else v)) for name, v in given)
