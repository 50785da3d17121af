"""Names of fused operators are read as they are made."""

import pytest

from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops import OPS, fused
from onnx_fuse.ops.activations import ACTIVATIONS

assert fused  # defines the operators


@pytest.mark.parametrize("op_type", sorted(name for domain, name in OPS if domain))
def test_every_operator_of_ours_is_read_as_it_is_made(op_type: str) -> None:
    name = FusedName.of(op_type)
    assert str(name) == name.base == op_type
    if name.family:
        made = FusedName.make(
            name.family, name.activation, norm=name.norm, place=name.place, grad=name.grad
        )
        assert made == name
        assert name.activation in ("", "PRelu", *ACTIVATIONS)
    assert FusedName.of(f"{op_type}_mean_z") == name.exposing("mean", "z")


@pytest.mark.parametrize(
    ("op_type", "parts"),
    [
        ("LayerNormGemmGelu_mean_rstd", ("LayerNorm", False, "", "Gemm", "Gelu", False)),
        ("RMSNormGateLastGemmSilu", ("RMSNorm", False, "GateLast", "Gemm", "Silu", False)),
        ("GemmHardSwishGrad_dz", ("", False, "", "Gemm", "HardSwish", True)),
        ("ConvAddRelu", ("", False, "", "ConvAdd", "Relu", False)),
        ("SkipRMSNormGrad", ("RMSNorm", True, "", "", "", True)),
        ("RMSNormalization_rstd", ("RMSNorm", False, "", "", "", False)),
        ("GroupNormTanh", ("", False, "", "GroupNorm", "Tanh", False)),
        ("SdpaMaskGrad", ("", False, "", "", "", True)),
    ],
)
def test_what_a_name_says(op_type: str, parts: tuple[object, ...]) -> None:
    name = FusedName.of(op_type)
    found = (name.norm, name.skip, name.place, name.family, name.activation, name.grad)
    assert found == parts
