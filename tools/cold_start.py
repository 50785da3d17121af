"""Cold start: seconds from a new process to the first result of a model.

    python tools/cold_start.py [--device cuda] [--repeat 5] [--precision fp16] [--bert] [--no-parts]

Every measurement is a whole new Python process on a file of the model: interpreter, imports,
optimizing, compiling, the first run, the copy back. The model is LayerNorm and Linear (fp32,
x [128, 768], w [768, 1024]), or with --bert a BERT-base encoder of 110M weights in fp32 on 128
tokens. "empty" has an empty cache folder, "warm" one that the process before it filled, "compiled"
is a file of onnx-fuse compile. The files are in the page cache. The byte code of the installed
packages is made beforehand, as pip does at installation. The parts are of further processes, which
also lower once more; a second thread makes the CUDA context all the while, and "waiting" is what is
left of that when the kernels are compiled.
"""

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

from _paths import ROOT

M, K, N = 128, 768, 1024
IDS = ("input_ids", "attention_mask", "token_type_ids")


def child(model: str, device: str, precision: str, in_parts: bool) -> None:
    """One cold start; prints when its parts ended as JSON."""
    begun = time.time()
    marks: list[tuple[str, float]] = []

    def mark(part: str) -> None:
        marks.append((part, time.time()))

    from onnx_fuse import InferenceSession

    mark("import")
    session = InferenceSession(model, device=device, precision=precision)
    mark("session")
    import numpy as np

    if session.get_inputs()[0].name == "x":
        feeds = {"x": np.random.default_rng(0).standard_normal((M, K), np.float32)}
    else:
        feeds = {name: np.ones((1, M), np.int64) for name in IDS}
    if device == "cuda" and in_parts:
        from onnx_fuse.cuda import nvrtc
        from onnx_fuse.runtime import device as gpu

        program = session._executable.program(
            {name: (array.shape, array.dtype.name) for name, array in feeds.items()}
        )
        mark("lower")
        nvrtc.compile_all(
            (x for c in program.calls for x in c.launches), session._executable.hw.arch
        )
        mark("compile")
        gpu.start()
        mark("waiting")
    y = session.run(None, feeds)[0]
    mark("first run")
    print(json.dumps({"ok": abs(float(y.std()) - 1) < 0.5, "began": begun, "parts": marks}))


def measure(
    model: Path, device: str, precision: str, cache: Path, *options: str
) -> dict[str, float]:
    """Seconds by part of one process, from its start to its end."""
    environment = {
        **os.environ,
        "ONNX_FUSE_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--child", str(model), "--device", device, *options]
    command += ["--precision", precision]
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


def write_model(path: Path, bert: bool) -> None:
    """A BERT-base encoder with random weights, or LayerNormalization and a product."""
    import bench_session
    import encoder
    import onnx_ir

    if bert:
        onnx_ir.save(encoder.build(encoder.SIZES["bert-base"]), path)
    else:
        path.write_bytes(bench_session.linear(K, N, norm=True).SerializeToString())


def write_compiled(model: Path, precision: str, path: Path) -> None:
    """What onnx-fuse compile makes of it for this GPU."""
    from onnx_fuse import deploy
    from onnx_fuse.program.problem import Hardware

    bert = dict.fromkeys(IDS, (1, M))
    shapes = bert if model.name == "bert.onnx" else {"x": (M, K)}
    targets = {"cuda": Hardware.detect()}
    deploy.compile(model, path, targets=targets, shapes=[shapes], precision=precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--precision", default="fp32", help="on cuda")
    parser.add_argument(
        "--bert", action="store_true", help="BERT-base, not one LayerNorm and Linear"
    )
    parser.add_argument("--no-parts", action="store_true", help="whole processes alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--parts", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.device, args.precision, args.parts)
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(ROOT / "onnx_fuse", quiet=2)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / ("bert.onnx" if args.bert else "model.onnx")
        write_model(model, args.bert)
        compiled = Path(folder) / "model.fused"
        how = (args.device, args.precision)
        if args.device == "cuda":
            write_compiled(model, args.precision, compiled)
        measure(model, *how, Path(folder) / "first")  # files of the packages into memory
        kinds = {"empty": model, "warm": model}
        if args.device == "cuda":
            kinds["compiled"] = compiled
        whole: dict[str, list[float]] = {kind: [] for kind in kinds}
        parts: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for i in range(args.repeat):
            for kind, file in kinds.items():
                cache = Path(folder) / f"whole{i}"
                whole[kind].append(measure(file, *how, cache)["first result"])
                if not args.no_parts:
                    cache = Path(folder) / f"parts{i}"
                    parts[kind].append(measure(file, *how, cache, "--parts"))
    print(f"seconds to the first result on {args.device}, {args.repeat} processes each")
    print(f"{'':14s}{'median':>10s}{'least':>10s}{'most':>10s}")
    for kind, times in whole.items():
        print(f"{kind:14s}" + "".join(f"{f(times):10.3f}" for f in (statistics.median, min, max)))
    if args.no_parts:
        return
    names = [name for name in parts["empty"][0] if name != "first result"]
    print("\nparts, medians")
    print(f"{'':9s}" + "".join(f"{name:>13s}" for name in names))
    for kind, runs in parts.items():
        medians = [statistics.median(run[name] for run in runs) for name in names]
        print(f"{kind:9s}" + "".join(f"{value:13.3f}" for value in medians))


if __name__ == "__main__":
    main()
