"""Cold start: seconds from a new process to the first result of LayerNormalization -> Gemm.

    python tools/cold_start.py [--device cuda] [--repeat 5]

Every measurement is a whole new Python process on a file of the model (fp32, x [128, 768], w
[768, 1024]): interpreter, imports, optimizing, compiling, the first run, the copy back. "empty" has
an empty kernel cache, "warm" one that the process before it filled. The byte code of the installed
packages is made beforehand, as pip does at installation. The parts are of further processes, which
also lower once more; a second thread makes the CUDA context all the while, and "waiting" is what is
left of that when the kernels are compiled.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
M, K, N = 128, 768, 1024


def child(model: str, device: str, in_parts: bool) -> None:
    """One cold start; prints when its parts ended as JSON."""
    begun = time.time()
    marks: list[tuple[str, float]] = []

    def mark(part: str) -> None:
        marks.append((part, time.time()))

    from onnx_fuse import InferenceSession

    mark("import")
    session = InferenceSession(model, device=device)
    mark("session")
    import numpy as np

    feeds = {"x": np.random.default_rng(0).standard_normal((M, K), np.float32)}
    if device == "cuda" and in_parts:
        from onnx_fuse.kernels import jit
        from onnx_fuse.runtime import device as gpu

        program = session._executable.program({"x": ((M, K), "float32")})
        mark("lower")
        jit.compile_all((x for c in program.calls for x in c.launches), session._executable.hw.arch)
        mark("compile")
        gpu.start()
        mark("waiting")
    [y] = session.run(None, feeds)
    mark("first run")
    print(json.dumps({"ok": abs(float(y.std()) - 1) < 0.5, "began": begun, "parts": marks}))


def measure(model: Path, device: str, cache: Path, *options: str) -> dict[str, float]:
    """Seconds by part of one process, from its start to its end."""
    environment = {
        **os.environ,
        "ONNX_FUSE_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--child", str(model), "--device", device, *options]
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    total = time.time() - started
    if done.returncode:
        sys.exit(f"the process failed:\n{done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["ok"], "the result is wrong"
    parts, last = {"interpreter": answer["began"] - started}, answer["began"]
    for name, at in answer["parts"]:
        parts[name], last = at - last, at
    return {**parts, "exit": started + total - last, "first result": last - started}


def write_model(path: Path) -> None:
    """LayerNormalization -> Gemm whose results have a standard deviation of about 1."""
    import numpy as np
    import onnx
    from onnx import helper

    rng = np.random.default_rng(1)
    arrays = {
        "scale": np.ones(K, np.float32),
        "bias": np.zeros(K, np.float32),
        "w": rng.standard_normal((K, N), np.float32) / np.float32(K**0.5),
        "c": np.zeros(N, np.float32),
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["n"], axis=-1),
        helper.make_node("Gemm", ["n", "w", "c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "cold_start",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", K])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", N])],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--parts", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.device, args.parts)
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(ROOT / "onnx_fuse", quiet=2)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        write_model(model)
        measure(model, args.device, Path(folder) / "first")  # files of the packages into memory
        whole: dict[str, list[float]] = {"empty": [], "warm": []}
        parts: dict[str, list[dict[str, float]]] = {"empty": [], "warm": []}
        for i in range(args.repeat):
            for kind in whole:
                cache = Path(folder) / f"whole{i}"
                whole[kind].append(measure(model, args.device, cache)["first result"])
                cache = Path(folder) / f"parts{i}"
                parts[kind].append(measure(model, args.device, cache, "--parts"))
    print(f"seconds to the first result on {args.device}, {args.repeat} processes each")
    print(f"{'kernel cache':14s}{'median':>10s}{'least':>10s}{'most':>10s}")
    for kind, times in whole.items():
        print(f"{kind:14s}" + "".join(f"{f(times):10.3f}" for f in (statistics.median, min, max)))
    names = [name for name in parts["empty"][0] if name != "first result"]
    print("\nparts, medians")
    print(f"{'':8s}" + "".join(f"{name:>13s}" for name in names))
    for kind, runs in parts.items():
        medians = [statistics.median(run[name] for run in runs) for name in names]
        print(f"{kind:8s}" + "".join(f"{value:13.3f}" for value in medians))


if __name__ == "__main__":
    main()
