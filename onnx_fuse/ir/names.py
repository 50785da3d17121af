"""The names of the fused operators: the one place where they are read and made."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

_PARTS = re.compile(
    r"(?P<skip>Skip)?(?:(?P<norm>LayerNorm|RMSNorm)(?:alization)?)?(?P<place>GateFirst|GateLast)?"
    r"(?P<family>Gemm|ConvAdd|Conv(?!WeightGrad)|GroupNorm)?(?P<rest>\w*?)(?P<grad>Grad)?"
)


@dataclass(frozen=True)
class FusedName:
    """What an operator's name says: LayerNormGemmGelu_mean_rstd, SkipRMSNormGrad, SdpaMask.

    `norm` is LayerNorm, RMSNorm or nothing, `skip` whether a residual is added before it; `place`
    says for gated products which half is the gate, GateFirst or GateLast; `family` is Gemm, Conv,
    ConvAdd, GroupNorm or nothing; `activation` is what follows the family, a row's name in the
    table of activations; `exposed` are the inner values that the operator returns behind its
    results. `kind` is the name without Grad and without these.
    """

    kind: str = ""
    norm: str = ""
    skip: bool = False
    place: str = ""
    family: str = ""
    activation: str = ""
    grad: bool = False
    exposed: tuple[str, ...] = ()

    @classmethod
    def of(cls, op_type: str) -> FusedName:
        """Read a name; one of no fused operator is all `kind`."""
        return _read(op_type)

    @classmethod
    def make(
        cls, family: str, activation: str = "", *, norm: str = "", place: str = "",
        grad: bool = False, exposed: tuple[str, ...] = (),
    ) -> FusedName:  # fmt: skip
        """The name of a product, a convolution or a GroupNorm."""
        kind = f"{norm}{place}{family}{activation}"
        return cls(kind, norm, False, place, family, activation, grad, exposed)

    @property
    def rms(self) -> bool:
        """Whether its norm has no mean."""
        return self.norm == "RMSNorm"

    @property
    def base(self) -> str:
        """The name without the inner values it exposes."""
        return self.kind + "Grad" * self.grad

    def exposing(self, *values: str) -> FusedName:
        """The operator that returns these inner values."""
        return replace(self, exposed=values)

    def __str__(self) -> str:
        return "_".join((self.base, *self.exposed))


@lru_cache(4096)
def _read(op_type: str) -> FusedName:
    base, *exposed = op_type.split("_")
    found = _PARTS.fullmatch(base)
    assert found is not None  # every part may be absent
    part = {key: text or "" for key, text in found.groupdict().items()}
    return FusedName(
        base.removesuffix("Grad"), part["norm"], bool(part["skip"]), part["place"], part["family"],
        part["rest"] if part["family"] else "", bool(part["grad"]), tuple(exposed),
    )  # fmt: skip
