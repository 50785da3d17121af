"""The ONNX backend tests on the GPU: how many pass with no case on onnxruntime, and which do not.

    python tools/backend_suite.py [--workers 8] [--json FILE] [--names PATTERN] [--numpy]

Counted are the cases whose ends are tensors of float32, float16, bfloat16, int64, int32 or bool
(no strings, sequences, optionals, ai.onnx.ml). A case passes where every output has its dtype,
shape and values (rtol 1e-3, atol 1e-7, or the case's own) and nothing ran on onnxruntime. Three
kinds of cases are held against something else, and are named in the end with what was found:
  - those whose own values are wrong, against the right ones (WRONG_IN_SUITE says why);
  - those of random numbers, whose generator the standard leaves open, against what their operator
    promises of any numbers (RANDOM);
  - 16-bit results that are more than rtol off, which is less than a rounding of bfloat16: they pass
    where they are nearer than the suite's to the same operator in float64.
"""

import argparse
import json
import multiprocessing
import warnings
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import numpy as np
import onnx
from lowering import interpreted
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import model as model_cases
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.loader import load_model_tests

from onnx_fuse.autodiff import expand_training_ops
from onnx_fuse.errors import OnnxFuseError
from onnx_fuse.ir.build import defaults
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.session import load

TYPES = {
    *(TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16),
    *(TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL),
}


def _inverse_dft(model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
    x = inputs[0].astype(np.float64)
    y = np.fft.ifft(x[..., 0] + 1j * x[..., 1], axis=1)
    return [np.stack([y.real, y.imag], -1).astype(np.float32)]


def _onnxruntime(model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [x.name for x in session.get_inputs()]
    found: list[Any] = session.run(None, dict(zip(names, inputs, strict=True)))
    return found


# Case -> the right outputs. The two transforms are taken by NumPy, from 2.0 on in float32: the
# imaginary part of row 5 of 10, which is that of a sum of reals with signs in turn and so 0, is
# 1.9e-7 there, beyond the limit of 1e-7. The two Resizes divide by a length that is not rounded
# down to whole elements (2.4 - 1 for two); the standard's `length_resized` is that of the resized
# tensor, so that the last element is the last of x: 4 and 10, not the suite's 3.14 and 9.37.
WRONG_IN_SUITE = {
    "test_dft_inverse": _inverse_dft,
    "test_dft_inverse_opset19": _inverse_dft,
    "test_resize_downsample_scales_linear_align_corners": _onnxruntime,
    "test_resize_downsample_scales_cubic_align_corners": _onnxruntime,
}


def _bernoulli(inputs: list[Any], outputs: list[Any]) -> bool:
    return bool(np.isin(outputs[0], (0, 1)).all())


def _dropout(inputs: list[Any], outputs: list[Any]) -> bool:
    """Each element is x / (1 - ratio) or 0, and the mask, where there is one, says which."""
    x, ratio = inputs[0], float(inputs[1]) if len(inputs) > 1 else 0.5
    y, kept = outputs[0], outputs[1] if len(outputs) > 1 else outputs[0] != 0
    want = np.where(kept, x / (1 - ratio), 0)
    return bool(np.allclose(y, want, rtol=1e-6)) and 0 < kept.sum() < kept.size


RANDOM = {
    **dict.fromkeys(("test_bernoulli_seed", "test_bernoulli_seed_expanded"), _bernoulli),
    **dict.fromkeys(
        [
            f"test_training_dropout{default}{mask}"
            for default in ("", "_default")
            for mask in ("", "_mask")
        ],
        _dropout,
    ),
}
"""Case -> whether outputs are what its operator promises of any random numbers."""


@cache
def operators() -> dict[str, onnx.ModelProto]:
    """The model of every node case by its name."""
    return {case.name: case.model for case in node_cases.collect_testcases(None)}


def nearer(name: str, inputs: list[Any], got: Any, want: Any, i: int) -> bool:
    """Whether output `i` is as near as `want` to what the case's operator gives in float64.

    That of a case written out in other operators is the operator itself.
    """
    from onnx.reference import ReferenceEvaluator

    model = operators().get(name.removesuffix("_expanded"))
    if model is None:
        return False
    wide = [x.astype(np.float64) if x.dtype.kind in "fV" else x for x in inputs]
    names = [v.name for v in model.graph.input]
    exact = ReferenceEvaluator(model).run(None, dict(zip(names, wide, strict=False)))[i]
    if exact.dtype != np.float64:  # a Cast within rounds
        return False
    ours, theirs = (np.abs(v.astype(np.float64) - exact).max() for v in (got, want))
    return bool(ours <= theirs)


def cases() -> list[Any]:
    """Node and model cases, which come with their data; and those of PyTorch's old exporter."""
    kinds = ("simple", "pytorch-converted", "pytorch-operator")
    found = list(node_cases.collect_testcases(None)) + list(model_cases.collect_testcases())
    for kind in kinds:
        found += load_model_tests(kind=kind)
    return found


def counted(model: onnx.ModelProto) -> bool:
    """Whether the case is one of those that are counted."""
    ends = [v.type for v in (*model.graph.input, *model.graph.output)]
    plain = all(t.HasField("tensor_type") and t.tensor_type.elem_type in TYPES for t in ends)
    return plain and all(o.domain != "ai.onnx.ml" for o in model.opset_import)


def data(case: Any) -> tuple[onnx.ModelProto, list[Any], list[Any]] | None:
    """Model, inputs, outputs; None for what is no tensor, or is to be downloaded."""
    if case.model is not None and case.data_sets:
        inputs, outputs = case.data_sets[0]
        pair = [[_array(x) for x in part] for part in (inputs, outputs)]
        if any(x is None for part in pair for x in part):
            return None
        return case.model, pair[0], pair[1]
    if case.model_dir is None:
        return None
    folder = Path(case.model_dir)
    stored = folder / "test_data_set_0"
    parts = []
    for kind in ("input", "output"):
        count = len(list(stored.glob(f"{kind}_*.pb")))
        files = [stored / f"{kind}_{i}.pb" for i in range(count)]
        parts.append([numpy_helper.to_array(onnx.load_tensor(str(f))) for f in files])
    return onnx.load(folder / "model.onnx"), parts[0], parts[1]


def _array(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.ndarray | np.generic | float | int) else None


def outcome(case: Any, *, by_numpy: bool = False) -> tuple[str, str]:
    """(pass, fallback, wrong, error or uncounted; the reason, or what a pass was held against)."""
    loaded = data(case)
    if loaded is None or not counted(loaded[0]):
        return "uncounted", ""
    model, inputs, outputs = loaded
    if case.name in WRONG_IN_SUITE:
        outputs = WRONG_IN_SUITE[case.name](model, inputs)
    try:
        graph = load(model)
        expand_training_ops(graph)  # as a session does
        names = [v.name for v in graph.graph.inputs]
        feeds = defaults(graph) | dict(zip(names, inputs, strict=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner = None if by_numpy else Executable(graph)
            if runner is None:
                found = interpreted(graph, feeds)
                got = [found[v.name] for v in graph.graph.outputs]
            else:
                got = runner.run(None, feeds)
    except (OnnxFuseError, ValueError, RuntimeError) as error:
        return "error", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    except Exception as error:  # noqa: BLE001 - onnxruntime's faults share no base
        return "error", f"{type(error).__name__}: {str(error)[:160]}"
    if case.name in RANDOM and RANDOM[case.name](inputs, got):
        outputs = got
    rtol, atol = case.rtol or 1e-3, case.atol or 1e-7
    note = "held against what the tool says" if case.name in {**WRONG_IN_SUITE, **RANDOM} else ""
    for i, (y, want) in enumerate(zip(got, outputs, strict=False)):
        if y.dtype != want.dtype or y.shape != want.shape:
            return "wrong", f"output {i} is {y.dtype}{list(y.shape)}"
        a, b = (v.astype(np.float64) if v.dtype.kind in "fV" else v for v in (y, want))
        if not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            if y.dtype.itemsize == 2 and nearer(case.name, inputs, y, want, i):
                note = f"output {i} is nearer to float64 than the suite's"
                continue
            return "wrong", f"output {i} differs by {np.nanmax(np.abs(a * 1.0 - b * 1.0)):.2g}"
    fallbacks = {f for i in runner.programs() for f in i.fallbacks} if runner else set()
    return ("fallback", "; ".join(sorted(fallbacks))) if fallbacks else ("pass", note)


def share(part: tuple[int, int, str, bool]) -> dict[str, tuple[str, str]]:
    """Every n-th case from the k-th on."""
    k, n, pattern, by_numpy = part
    chosen = [c for i, c in enumerate(cases()) if i % n == k and fnmatch(c.name, pattern)]
    return {case.name: outcome(case, by_numpy=by_numpy) for case in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", default="*")
    parser.add_argument("--numpy", action="store_true", help="what an H200 would run, by NumPy")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    how = options.workers, options.names, options.numpy
    parts = [(k, *how) for k in range(options.workers)]
    with context.Pool(options.workers) as pool:
        results = {k: v for found in pool.map(share, parts) for k, v in found.items()}
    for name, (kind, why) in sorted(results.items(), key=lambda item: (item[1][0], item[0])):
        if why:
            print(f"{kind:9} {name}: {why}")
    counts = Counter(kind for kind, _ in results.values())
    total = sum(n for kind, n in counts.items() if kind != "uncounted")
    print(
        f"{counts['pass']} of {total} pass ({counts['pass'] / max(total, 1):.1%}); {dict(counts)}"
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
