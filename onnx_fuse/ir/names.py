"""Names that are new to a graph, and those of the fused operators."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import onnx_ir as ir


class Names:
    """Gives names that nothing else has: a stem, or `stem_1`, `stem_2`, …

    Args:
        taken: Names that are not given.
    """

    def __init__(self, taken: Iterable[str | None] = ()) -> None:
        self._taken, self._numbers = set(taken), dict[str, int]()

    @classmethod
    def of(cls, graph: ir.Graph) -> Names:
        """Names that no value and no node of a graph and of its bodies has."""
        names = cls()
        names.add(graph)
        return names

    def add(self, graph: ir.Graph) -> None:
        """Give none of the names of a graph, too."""
        for each in (graph, *graph.subgraphs()):
            self._taken.update(v.name for v in (*each.inputs, *each.initializers.values()))
            for node in each:
                self._taken.update((node.name, *(v.name for v in node.outputs)))

    def fresh(self, stem: str) -> str:
        """A name that begins with `stem`, which is taken from then on."""
        name, number = stem, self._numbers.get(stem, 0)
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._numbers[stem] = number
        self._taken.add(name)
        return name


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
    match = _PARTS.fullmatch(base)
    if match is None:  # such as a path
        return FusedName(op_type)
    part = {key: text or "" for key, text in match.groupdict().items()}
    return FusedName(
        base.removesuffix("Grad"), part["norm"], bool(part["skip"]), part["place"], part["family"],
        part["rest"] if part["family"] else "", bool(part["grad"]), tuple(exposed),
    )  # fmt: skip
