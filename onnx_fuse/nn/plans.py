"""`plan`: one fused operator made ready for operands of given shapes, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.errors import UsageError, did_you_mean
from onnx_fuse.ir.constants import BODIES, CANONICAL_OPSET, FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.nn import dispatch
from onnx_fuse.nn.arrays import DType, is_float, np_name
from onnx_fuse.nn.dispatch import apply, no_grad, op_call
from onnx_fuse.nn.operation import Operation
from onnx_fuse.nn.tensor import Tensor
from onnx_fuse.ops import OPS
from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.ops.bodies import body_of
from onnx_fuse.ops.formula import written_out
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.program.call import dtype_of

__all__ = ["OperatorPlan", "plan"]
__dir__ = __all__.copy


class OperatorPlan:
    """A fused operator that is made ready once and run many times; `plan` makes it.

    The operands of each run are arrays, Tensors, or tensors of any library with DLPack, which are
    read where they are.

    Args:
        op: The operator; `shapes`, `dtypes`, `save`, `attributes`, `device`, `alpha` and `beta` are
            those of `plan`.
    """

    def __init__(
        self,
        op: str,
        shapes: Mapping[str, Sequence[int]],
        dtypes: DType | Mapping[str, DType],
        save: Sequence[str],
        attributes: Mapping[str, Any],
        device: str,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        body = body_of(op)
        if FusedName.of(op).exposed or body is None:
            names = (name for domain, name in BODIES if domain == FUSE)
            raise UsageError(f"there is no fused operator '{op}'{did_you_mean(op, names)}")
        function = body((), CANONICAL_OPSET, "")
        self.operands = [str(value.name) for value in function.inputs]
        """The names of the operands, in the order of `forward`."""
        text = written_out(OPS[FUSE, op].body)
        head = f'<opset_import: ["" : {CANONICAL_OPSET}], domain: "{FUSE}">'
        proto = onnx.parser.parse_function(head + text)
        inner = {name for node in proto.node for name in node.output}
        if set(shapes) != set(self.operands):
            raise UsageError(f"{op} has the operands {', '.join(self.operands)}: shapes differ")
        for name in save:
            if name not in inner:
                raise UsageError(f"{op} has no inner value '{name}' to save")
        for name in attributes:
            if name not in function.attributes:
                raise UsageError(f"{op} has no attribute '{name}'")
        self._saves, self._device = tuple(save), device
        self._type = str(FusedName.of(op).exposing(*save))
        self._attributes = dict(attributes)
        self._scaled: Operation | None = None
        if (alpha, beta) != (1.0, 1.0):
            self._scaled = _scaled(op, float(alpha), float(beta), attributes, self._saves)
        kinds = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(self.operands, dtypes)
        self._ends = [
            (tuple(shapes[name]), dtype_of(np_name(kinds[name]))) for name in self.operands
        ]
        self._result: Any = None
        self._leaves: list[Tensor] = []
        self.saved: dict[str, Tensor] = {}
        """The inner values of the last `forward` that were asked for, by name."""
        self.forward(*(np.zeros(shape, dtype) for shape, dtype in self._ends))

    def forward(self, *operands: object) -> Tensor:
        """Run the operator on `operands` of the plan's shapes and dtypes, and return its result.

        Raises UsageError for an operand of another shape or dtype.
        """
        leaves = []
        for name, operand, (shape, dtype) in zip(self.operands, operands, self._ends, strict=True):
            leaf = Tensor(operand, device=self._device).detach()
            if leaf._data.shape != shape or leaf._data.dtype != dtype:
                wanted = f"{dtype.name}{list(shape)}"
                actual = f"{leaf._data.dtype.name}{list(leaf._data.shape)}"
                raise UsageError(f"the plan's {name} is {wanted}, not {actual}")
            leaves.append(leaf.requires_grad_(is_float(dtype)))
        outputs = (
            op_call(self._type, leaves, self._attributes, FUSE, outputs=1 + len(self._saves))
            if self._scaled is None
            else apply(self._scaled, leaves)
        )
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        self._leaves, self._result = leaves, results[0]
        self.saved = {
            name: value.detach() for name, value in zip(self._saves, results[1:], strict=True)
        }
        return results[0].detach()

    def backward(self, dy: object) -> dict[str, Tensor]:
        """The gradients of the last `forward` by operand, for the gradient `dy` of its result."""
        edge, index = self._result._edge, self._result._index
        with no_grad():
            seed = Tensor(dy, device=self._device)
            grads = dispatch.gradients(edge, index, seed._data)
        names = {id(leaf): name for leaf, name in zip(self._leaves, self.operands, strict=True)}
        return {names[id(leaf)]: Tensor(array) for leaf, array in grads}


def _scaled(
    op: str, alpha: float, beta: float, attributes: Mapping[str, Any], saves: Sequence[str]
) -> Operation:
    """act(alpha x w + beta c) as ONNX's Gemm and the activation, which one kernel computes."""
    name = FusedName.of(op)
    if name.family != "Gemm" or name.norm or name.place:
        raise UsageError(f"only Gemm takes alpha and beta, not {op}")
    row = ACTIVATIONS.get(name.activation)
    for other in set(saves) - ({"z"} if row else set()):
        raise UsageError(f"{op} with alpha or beta has no inner value '{other}' to save")

    def build(make: Writer, x: ir.Value, w: ir.Value, c: ir.Value | None) -> Any:
        z = make.node("Gemm", [x, w, c], attributes={"alpha": alpha, "beta": beta})
        if row is None:
            return z
        how = dict(row.fixed) | dict(attributes)
        y = make.node(row.op_type, [z], domain=row.domain, attributes=how)
        return (y, *[z] * len(saves)) if saves else y

    return Operation(op, build, domains={FUSE: 1})


def plan(
    op: str,
    shapes: Mapping[str, Sequence[int]],
    dtypes: DType | Mapping[str, DType] = "float32",
    *,
    save: Sequence[str] = (),
    attributes: Mapping[str, Any] | None = None,
    device: str = "cpu",
    alpha: float = 1.0,
    beta: float = 1.0,
) -> OperatorPlan:
    """Make a fused operator ready to run: kernels are chosen and compiled, memory is planned.

    Args:
        op: The operator, such as "LayerNormGemmGelu".
        shapes: The shape of each operand, by the names in the operator's body.
        dtypes: The element type of all operands, or of each by name.
        save: Inner values that `forward` keeps, such as "mean", "rstd" and "z".
        attributes: The operator's attributes.
        device: "cpu", "cuda" or "cuda:N".
        alpha: The factor of a matrix multiplication without a norm: z = alpha x w + beta c
            of matrices x and w.
        beta: What c is multiplied by there.

    Returns:
        A plan with `forward(*operands)`, `saved` and `backward(dy)`.

    Raises:
        UsageError: There is no such operator, operand, attribute or inner value.
    """
    return OperatorPlan(op, shapes, dtypes, save, dict(attributes or {}), device, alpha, beta)
