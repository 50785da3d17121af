"""The epilogue of a product: what happens to each element between its sum and its store."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

EXP_COLUMNS = 192
"""The columns whose exponentials are summed by themselves: the widest tile of large products."""


@dataclass(frozen=True)
class Epilogue:
    """What a product's kernel does with z = a · b before it stores y; without any field, nothing.

    The fields stand in the order in which they are applied. Operands are named as the kernels bind
    them: "c" is [M, N], "col0" to "col3" are rows of N numbers, "row0" to "row3" columns of M.
    """

    alpha: float = 1.0
    """The sum is multiplied by it."""
    row_scale: bool = False
    """The sum is multiplied by the column "row0", float32."""
    layernorm: bool = False
    """A LayerNormalization of a's rows that was left to the epilogue: b holds its scale. "row0" is
    rstd and "row1" mean; "col0" is cs and "col1" cv, in float32 (`kernels.layernorm_gemm`)."""
    bias: bool = False
    """The row "col1", of type `bias_dtype`, is added."""
    row_bias: bool = False
    """The column "row0", of type `bias_dtype`, is added; not with bias, layernorm, dx or dw."""
    bias_dtype: str = ""
    """The dtype of the bias, where it is not the operands'."""
    beta: float = 0.0
    """c is added, times this number, before the activation: the C of ONNX's Gemm."""
    c_rows: int | None = None
    """The stride of c's rows in elements; None: its rows are dense."""
    c_cols: int = 1
    """The stride of c's columns in elements."""
    exp: bool = False
    """y is exp(v - row0), with "row0" in units of log 2, and 0 from column n on. "part" [ceil(n /
    EXP_COLUMNS), m], float32, takes the sums of so many columns of each row, as they are stored.
    This goes with a bias alone."""
    save_z: bool = False
    """The pre-activation is stored to "z"; with dx, (x - mean) rstd is."""
    act: str = ""
    """The activation, by its key in `ops.activations`. Of a gradient: the forward's."""
    act_alpha: float = 1.0
    """The activation's number, where it has one."""
    gate: bool = False
    """y [M, N / 2] is act(gate) times the other half. The columns of b and of the bias stand in
    blocks of 16: 8 gates and the 8 that they let through, in pairs (`lower.gated.interleaved`).
    """
    dact: bool = False
    """The result is multiplied by act'(c) instead: c is the stored pre-activation."""
    save_act: bool = False
    """act(c) is stored to "z" as well; this goes with dact."""
    layer_scale: bool = False
    """The result is multiplied by the row "col0", of the bias's type; only with a bias."""
    residual: bool | str = False
    """c is added last; "norm": (c - mean) rstd gamma is, with "row0" rstd, "row1" mean and "col0"
    gamma. "col0" and "col1" are float32 then, and beta is in the bias."""
    dx: bool = False
    """The result becomes the gradient of a LayerNormalization's input: "row0" to "row3" are rstd,
    mean, c1 and c2, and c is x."""
    dw: bool | str = False
    """The result becomes the gradient of the weights behind a LayerNormalization: "row0" is gamma,
    "row1" beta, of the operands' type, "col1" dbias in float32, and c is W. "part" [tiles of n, 2,
    m] takes the row sums of dgamma and dbeta. "turned": of the transposed weights; "row0" is dbias,
    "col0" gamma, "col1" beta, and "part" [m / 16, 2, n] takes sums of columns."""
    accumulate: bool = False
    """The result is rounded and added to what y holds."""
    moments: int = 0
    """The number of tiles of n, for each of which "part" [moments, m] takes the mean and the sum of
    squared deviations of each row of y; 0: none."""
    column_sums: bool = False
    """"part" [m / 64, k], float32, takes the sums of the columns of a, of 64 rows each: the
    gradient of a bias, where a is that of a layer's output."""
    column_moments: bool = False
    """"part" [m / 64, n, 2], float32, takes the mean and the sum of squared deviations of the
    columns of y, of 64 rows each: what a BatchNormalization in training needs of its input."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not as they are by default, by name."""
        return {k: value for k, default in DEFAULTS.items() if (value := vars(self)[k]) != default}

    def among(self, *names: str) -> list[str]:
        """Those of the given names whose fields are set."""
        return [name for name in names if getattr(self, name)]


DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Epilogue)}
NONE = Epilogue()
