"""The case tables that tests share: real exported graphs, and a small graph for each fusion.

More real graphs can be added without touching code: every `NAME__VARIANT.onnx` with its `.npz` in
the folder that ONNX_FUSE_CASES names is one more case.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state
from support import entries, with_weights

from onnx_fuse.ir.build import text_model

DATA = Path(__file__).parent / "data"


def _newest_opset() -> int:
    """The newest ai.onnx opset that the installed onnxruntime loads."""
    newest = 21
    for opset in range(22, onnx.defs.onnx_opset_version() + 1):
        model = text_model(
            f'<ir_version: 10, opset_import: ["" : {opset}]>\n'
            "agraph (float[N] x) => (float[N] y) { y = Relu (x) }"
        )
        try:
            onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
        except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
            return newest
        newest = opset
    return newest


NEWEST_OPSET = _newest_opset()


@dataclass(frozen=True)
class RealCase:
    """One exported graph with stored feeds, outputs and gradients (tests/data/README.md)."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.path.with_suffix(".npz")) as stored:
            return {key: stored[key] for key in stored.files}

    @property
    def opset(self) -> int:
        model = onnx.load(self.path, load_external_data=False)
        return next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))

    def _named(self, prefix: str) -> dict[str, np.ndarray]:
        return {k[len(prefix) :]: v for k, v in self.arrays.items() if k.startswith(prefix)}

    @property
    def feeds(self) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """(inputs, expected outputs) of the two stored feeds, whose dynamic sizes differ."""
        return [
            (self._named("in_"), self._named("out_")),
            (self._named("in1_"), self._named("out1_")),
        ]

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        return self._named("grads_")


def real_cases() -> list[RealCase]:
    folders = [DATA, *map(Path, filter(None, [os.environ.get("ONNX_FUSE_CASES")]))]
    paths = {path.name: path for folder in folders for path in sorted(folder.glob("*__*.onnx"))}
    return [case for case in map(RealCase, paths.values()) if case.opset <= NEWEST_OPSET]


@dataclass(frozen=True)
class FusionCase:
    """A graph in ONNX text and the fused operators it becomes.

    Inputs beside those in `fed` are weights: random initializers. `fused` are the operators of
    domain onnx_fuse in the result, in order; `reason` is that of a near miss, see `support.says`;
    `gone` are ai.onnx operators that must not be left. `spares` are hostile numbers left out, with
    the reason: a feed of hostile.py ("empty"), a type ("float16"), or both ("float16:huge").
    """

    name: str
    inputs: str
    body: str
    fused: tuple[str, ...] = ()
    reason: str = ""
    fed: tuple[str, ...] = ("x",)
    output: str = "float[B,T,24] y"
    level: int = 2
    opset: int = 21
    gone: tuple[str, ...] = ()
    spares: tuple[tuple[str, str], ...] = ()

    def spared(self, feed: str, dtype: str) -> str:
        """Why hostile numbers of this kind are left out, or nothing; see `spares`."""
        keys = [f"{dtype}:{feed}", feed or dtype]
        return next((reason for key, reason in self.spares if key in keys), "")

    def model(self, seed: int = 0) -> ir.Model:
        imports = f'["" : {self.opset}, "com.microsoft" : 1]'
        lines = "\n".join(f"  {line.strip()}" for line in self.body.splitlines() if line.strip())
        model = text_model(
            f"<ir_version: 10, opset_import: {imports}>\n"
            f"agraph ({self.inputs}) => ({self.output}) {{\n{lines}\n}}"
        )
        rng = np.random.default_rng(seed)
        weights = {}
        for value in [v for v in model.graph.inputs if v.name not in self.fed]:
            array = rng.standard_normal(value.shape.numpy()) * 0.5 + (value.name == "g")
            weights[value.name] = array.astype(value.dtype.numpy())
        return with_weights(model, weights)

    def feeds(self, **sizes: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        result = {}
        for value in self.model().graph.inputs:
            shape = [d if isinstance(d, int) else sizes[str(d)] for d in value.shape]
            kind = value.dtype.numpy()
            whole = kind in (np.bool_, np.int64)
            draw = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
            result[value.name or ""] = np.asarray(draw, kind)
        return result


def fusion_rows(text: str, **parts: str) -> Iterator[FusionCase]:
    """Rows written as

        name: Fused Operators; fed x r; gone Add; stays ranks; level 1  # a comment
          (inputs) => (output)
          nodes, where `c = float {0.5}` and `axes = [1]` stand for a Constant
          spares empty: the reason

    $NAME stands for a text of `parts` or of PARTS.
    """
    parts = PARTS | parts
    tensor, numbers = r"(?<!value )= (\w+(?:\[[\d,]*\])? \{[^}]*\})", r"= (\[[^\]]*\])(?=\s|$)"
    for name, about, row in entries(re.sub(r"(?m)  #.*$", "", text)):
        lines = Template(row).substitute(parts).splitlines()
        said = [re.fullmatch(r"spares (\S+): (.*)", line) for line in lines]
        options: dict[str, Any] = {"spares": tuple(m.groups() for m in said if m)}
        for word, *values in (part.split() for part in about.split(";") if part.strip()):
            if word in ("level", "opset"):
                options[word] = int(values[0])
            elif word == "stays":
                options["reason"] = " ".join(values)
            elif word in ("fed", "gone"):
                options[word] = tuple(values)
            else:
                options["fused"] = (word, *values)
        graph = "\n".join(line for line, m in zip(lines, said, strict=True) if not m)
        ends = re.match(r"\(([^)]*)\)\s*(?:=>\s*\(([^)]*)\))?", graph)
        assert ends, name
        if ends[2] is not None:
            options["output"] = ends[2]
        body = re.sub(tensor, r"= Constant <value = \1> ()", graph[ends.end() :])
        body = re.sub(numbers, r"= Constant <value_ints = \1> ()", body)
        yield FusionCase(name, ends[1], body, **options)


PARTS = {
    "X": "float[B,T,16] x",
    "LIN": "float[16,24] w, float[24] c",
    "AFFINE": "float[16] g, float[16] b",
    "IN": "float[B,T,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c",
    "LN": "n = LayerNormalization <axis = -1> (x, g, b)",
    "LINEAR": "m = MatMul (n, w)  z = Add (m, c)",
    "PLAIN": "m = MatMul (x, w)  z = Add (m, c)",
    "PADDED": "m = MatMul (v, w)  y = Add (m, c)",
    "CENTRE": "mu = ReduceMean (x, axes)  d = Sub (x, mu)",
    "BIAS": "q = Mul (p, g)  n = Add (q, b)",
    "ERF": "r2 = float {1.41421356}  half = float {0.5}  one = float {1.0}"
    "  u = Div (z, r2)  e = Erf (u)  e1 = Add (e, one)",
    "TANH": "half = float {0.5}  one = float {1.0}  three = float {3.0}"
    "  k = float {0.7978845608}  a = float {0.044715}",
    "QKV": "float[B,H,S,8] q, float[B,H,T,8] k, float[B,H,T,8] v",
    "SCORES": "kt = Transpose <perm = [0,1,3,2]> (k)  s = MatMul (q, kt)",
    "SCALE": "f = float {0.35355339}",
    "PADDED_NORM": "pads = int64[8] {0, 1, 2, 0, 0, 3, 1, 0}  cut = int64[6] {-1, 2, 3, 2, 3, 16}"
    "  flat = int64[3] {-1, 9, 16}"
    "  none = float[24] {0, -0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}"
    "  n = LayerNormalization <axis = -1> (x, g, b)  p = Pad (n, pads)  t = Reshape (p, cut)"
    "  u = Transpose <perm = [0,1,3,2,4,5]> (t)  v = Reshape (u, flat)",
    "NUMBERS": "axes = int64[1] {-1}  two = float {2.0}  one = float {1.0}  eps = float {1e-12}",
    "STD": "v = ReduceMean (sq, axes)  ve = Add (v, eps)  std = Sqrt (ve)",
    "IMAGE_NORM": "t = Transpose <perm = [0,2,3,1]> (x)  n = LayerNormalization (t, g, b)"
    "  u = Transpose <perm = [0,3,1,2]> (n)",
    "GELU_OF_X": "u = Mul (x, r)  e = Erf (u)  e1 = Add (e, one)  p = Mul (x, e1)"
    "  y = Mul (p, half)",
    "ERF_OF_X": "u = Mul (x, r)  e = Erf (u)  e1 = Add (e, one)",
    "ROWS_OF_6": "var = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}  flat = int64[2] {-1, 6}"
    "  m = MatMul (x, w)",
    "VARIANCE": "var = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}",
}
"""Parts of the graphs' texts."""
