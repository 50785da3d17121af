"""Attention over a cache in int8 that QuantizeLinear fills and DequantizeLinear reads."""

from dataclasses import dataclass

import numpy as np
import onnx_ir
import pytest
from support import formula_model
from test_caches import Layer, agree

from onnx_fuse.program.contractions import Attention
from onnx_fuse.validation.inputs import Feeds


@dataclass(frozen=True)
class Coded(Layer):
    """Attention over a buffer of 15 places in int8, which QuantizeLinear fills: 4 heads over 2."""

    name: str
    axis: int | None = None
    """Of the scales; None: one for all."""
    zero: int = 0
    kind: str = "float16"
    scale: float = 0.02
    ROOM, SAMPLE = 15, (2, 1, 9)

    @property
    def limit(self) -> float:
        """The oracle rounds keys of up to 5 to halves: logits move by 5e-3. A GPU does not."""
        return 1e-2 if self.kind == "float16" else super().limit

    def model(self) -> onnx_ir.Model:
        kind, count = self.kind, {None: 1, 1: 2, 3: 16}[self.axis]
        inputs = [f"{kind}[B,{h},S,16] {x}" for x, h in (("q", 4), ("k", 2), ("v", 2))]
        inputs += [f"int8[B,2,P,16] past_{x}" for x in "kv"]
        inputs += [f"{kind}[B,1,S,P] m", "int64[B,S] at"]
        each = "" if self.axis is None else f"[{count}]"
        body, values = "", np.linspace(self.scale, 2 * self.scale, count).tolist()
        held = f"<float{each} scale = {{{', '.join(map(str, values))}}},"
        held += f" int8{each} zero = {{{', '.join([str(self.zero)] * count)}}}>"
        how = "" if self.axis is None else f"<axis = {self.axis}>"
        for x in "kv":
            body += f"""
                {x}s = Cast <to = {10 if kind == "float16" else 1}> (scale)
                {x}q = QuantizeLinear {how} ({x}, {x}s, zero)
                {x}i = Expand (Unsqueeze (at, [1, 3]), Shape ({x}q))
                present_{x} = ScatterElements <axis = 2> (past_{x}, {x}i, {x}q)
                {x}f = DequantizeLinear {how} (present_{x}, {x}s, zero)
            """
        return formula_model(f"""<ir_version: 11, opset_import: ["" : 24]>
            coded ({", ".join(inputs)}) => ({kind}[B,4,S,16] y,
                int8[B,2,P,16] present_k, int8[B,2,P,16] present_v) {held} {{
            {body}
            y = Attention <scale = 0.25> (q, kf, vf, m)
        }}""")

    def feeds(self, batch: int, new: int, past: int, rng: np.random.Generator) -> Feeds:
        feeds, room = super().feeds(batch, new, past, rng), self.ROOM
        before = np.minimum(past + np.arange(batch), room - new)
        feeds["at"] = before[:, None] + np.arange(new)
        hidden = np.arange(room) > feeds["at"][:, None, :, None]
        feeds["m"] = np.where(hidden, -np.inf, 0).astype(self.dtype)
        for x in ("past_k", "past_v"):
            feeds[x] = rng.integers(-128, 128, feeds[x].shape).astype(np.int8)
        feeds["k"][-1, 0] = 1e4  # beyond every step
        return feeds


CODED = [
    Coded("codes"),
    Coded("codes of heads", 1),
    Coded("codes of columns", 3),
    Coded("codes with a zero point", 1, zero=3),
    Coded("codes float", 3, kind="float"),
    Coded("codes beyond float16", scale=600.0),
]


@pytest.mark.parametrize("row", CODED, ids=lambda row: row.name)
def test_attention_of_a_token_reads_a_cache_in_codes(row: Coded) -> None:
    for _, program, (_, new, _) in agree(row, 6, ((1, 1, 3), (2, 1, 9), (3, 1, 0), (2, 2, 5))):
        one = new == 1 and row in CODED[:3]
        found = [c.problem.cache for c in program.calls if isinstance(c.problem, Attention)]
        assert found == ["int8" if one else ""] or (row.kind == "float" and not found)
