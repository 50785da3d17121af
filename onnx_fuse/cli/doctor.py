"""`onnx-fuse doctor`: versions, devices and settings of this installation."""

from __future__ import annotations

from onnx_fuse import __version__
from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import with_options
from onnx_fuse.errors import (
    INSTALL_CUBLASLT,
    INSTALL_CUDA,
    INSTALL_DISTRIBUTED,
    INSTALL_TEXT,
    INSTALL_TORCH,
    INSTALL_YAML,
)

_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "ml-dtypes", "safetensors")
_CUDA = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
_OPTIONAL = {
    _CUDA: (
        "--device cuda, compile and tuning do not work; the CPU needs none of them",
        INSTALL_CUDA,
    ),
    ("nvmath-python", "nvidia-cublas"): (
        "cuBLASLt is not tried for matrix multiplications: this package's kernels compute all",
        INSTALL_CUBLASLT,
    ),
    ("nccl4py",): (
        "training works on one GPU only; several need NCCL's bindings",
        INSTALL_DISTRIBUTED,
    ),
    ("torch",): ("onnx_fuse.torch cannot be imported; nothing else needs PyTorch", INSTALL_TORCH),
    ("tensorboardx",): (
        "onnx-fuse train --tensorboard does not work; --csv and --html do",
        'pip install ".[tensorboard]"',
    ),
    ("tokenizers", "jinja2"): (
        "onnx-fuse generate takes no prompts of text; --ids works",
        INSTALL_TEXT,
    ),
    ("pillow",): (
        "onnx-fuse train --data reads no folders of images; files of arrays and tables work",
        'pip install ".[images]"',
    ),
    ("wandb",): ("onnx-fuse train --wandb does not work", 'pip install ".[wandb]"'),
    ("mlflow-skinny",): ("onnx-fuse train --mlflow does not work", 'pip install ".[mlflow]"'),
    ("pyyaml",): ("onnx-fuse train --config reads only TOML files", INSTALL_YAML),
}
"""What does not work without some packages, and the command that installs them."""


EXAMPLES = ("onnx-fuse doctor", "onnx-fuse doctor --json doctor.json")


@with_options()
def doctor(*, reports: show.Reports) -> None:
    """Show versions, devices and settings, run a small model, and say what is missing."""
    import platform
    from importlib import metadata

    from onnx_fuse import config
    from onnx_fuse.runtime import ort

    files.check_paths({}, reports.paths)
    printer = show.printer()
    installed = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions()}
    versions = {"python": platform.python_version(), "onnx-fuse": __version__}
    optional = [name for group in _OPTIONAL for name in group]
    listed = (*_PACKAGES, *optional)
    versions |= {name: installed.get(name, "not installed") for name in listed}
    printer.table("versions", ["package", "version"], [[k, v] for k, v in versions.items()])
    absent = [
        (", ".join(name for name in group if name not in installed), *advice)
        for group, advice in _OPTIONAL.items()
    ]
    absent = [row for row in absent if row[0]]
    if absent:
        head = ["missing", "without it", "install, in a checkout"]
        printer.table("optional packages", head, absent, left=3)
    values = {
        v.name: int(v.value) if isinstance(v.value, bool) else v.value for v in config.VARIABLES
    }
    variables = {
        v.name: ("" if values[v.name] is None else str(values[v.name]), v.help)
        for v in config.VARIABLES
    }
    rows = [[name, value, text] for name, (value, text) in variables.items()]
    printer.table("settings", ["variable", "value", "meaning"], rows, left=3)
    cpu = ort.guarded(_try_onnxruntime, "onnxruntime")
    gpu = _gpu()
    printer.text(f"cpu: {cpu}", *(f"cuda: {line}" for line in gpu))
    data = {
        "versions": versions,
        "missing": [
            {"packages": names.split(", "), "without": cost, "install": command}
            for names, cost, command in absent
        ],
        "settings": {name: value for name, (value, _) in variables.items()},
        "cpu": cpu,
        "cuda": gpu,
    }
    reports.write(printer, data)


def _try_onnxruntime() -> str:
    """Run a small fused model, so that a broken installation shows here."""
    import numpy as np

    from onnx_fuse.ir.build import text_model
    from onnx_fuse.session import InferenceSession

    model = text_model("agraph (float[N] x) => (float[N] y) { y = Relu(x) }")
    [y] = InferenceSession(model).run(None, {"x": np.array([-1, 2], np.float32)})
    return "ok" if y.tolist() == [0, 2] else f"wrong: Relu([-1, 2]) gave {y.tolist()}"


def _gpu() -> list[str]:
    from onnx_fuse.cuda import nvrtc
    from onnx_fuse.runtime import calibration, device

    if faults := device.faults():
        return [f"not usable: {fault}" for fault in faults]
    calibrated = calibration.of()
    hw = calibrated.hw
    driver = f"{hw.driver // 1000}.{hw.driver % 1000 // 10}"
    rates = f"{hw.rate('bfloat16') / 1e12:.0f} TFLOP/s in bfloat16, {hw.bandwidth / 1e12:.2f} TB/s"
    return [
        f"ok: {hw.name} ({hw.arch}), driver for CUDA {driver}, NVRTC {nvrtc.check_compiler()}",
        f"ok: {rates}, L2 cache of {hw.l2_bytes >> 20} MiB ({calibrated.source})",
    ]
