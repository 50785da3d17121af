"""The epilogue of a product: what happens to each element between its sum and its store."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Epilogue:
    """What a product's kernel does with z = a · b before it stores y; without any field, nothing.

    The fields stand in the order in which they are applied. Operands are named as the kernels bind
    them: "c" is [M, N], "col0" to "col3" are rows of N numbers, "row0" to "row3" columns of M.
    """

    alpha: float = 1.0
    """The sum is multiplied by it."""
    layernorm: bool = False
    """A LayerNormalization of a's rows that was left to the epilogue: weights hold its scale."""
    bias: bool = False
    """A number for each column is added."""
    row_bias: bool = False
    """A number for each row is added."""
    bias_dtype: str = ""
    """The dtype of the bias, where it is not the operands'."""
    beta: float = 0.0
    """c is added, times this, before the activation."""
    c_rows: int | None = None
    """The stride of c's rows in elements; None: its rows are dense."""
    c_cols: int = 1
    """The stride of c's columns in elements."""
    save_z: bool = False
    """What the activation is applied to is stored, too."""
    act: str = ""
    """The activation, by its key in `ops.activations`. Of a gradient: the forward's."""
    act_alpha: float = 1.0
    """The activation's number, where it has one."""
    gate: bool = False
    """Half of the columns gate the others: y = act(gate) * other, [M, N / 2]."""
    dact: bool = False
    """The result is multiplied by the slope of the activation at c."""
    layer_scale: bool = False
    """The result is multiplied by a number for each column."""
    residual: bool | str = False
    """c is added last; "norm": its LayerNormalization is."""
    dx: bool = False
    """The result becomes the gradient of a LayerNormalization's input."""
    dw: bool = False
    """The result becomes the gradient of the weights behind a LayerNormalization."""
    accumulate: bool = False
    """The result is added to what y holds."""
    moments: int = 0
    """The stored rows' sums and sums of squares are stored in so many parts; 0: they are not."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not as they are by default, by name."""
        return {k: value for k, default in DEFAULTS.items() if (value := vars(self)[k]) != default}

    def among(self, *names: str) -> list[str]:
        """The names, of those given, whose fields are set."""
        return [name for name in names if getattr(self, name)]


DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Epilogue)}
NONE = Epilogue()
