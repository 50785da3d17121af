"""What users see of the package, as text: help, the shape of --json, names and signatures."""

import importlib
import inspect
import json
import pkgutil
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import typer
from every_size_models import built
from test_public_api import named

import onnx_fuse
from onnx_fuse.cli.app import app, run_command
from onnx_fuse.importer.save import to_proto

COMMANDS = {
    "optimize": "optimize MODEL -o OUT.onnx --explain",
    "optimize --list": "optimize --list",
    "validate": "validate MODEL",
    "validate --grad": "validate MODEL --grad",
    "run": "run MODEL -o OUT.npz",
    "gradient": "gradient MODEL -o OUT.onnx --loss mse",
    "train": "train MODEL --data DATA --loss mse --epochs 2 --device cpu -o OUT.onnx",
    "bench": "bench MODEL --device cpu",
    "bench --train": "bench MODEL --device cpu --train",
    "inspect": "inspect MODEL",
    "extract": "extract MODEL -o OUT.onnx",
    "doctor": "doctor",
}
"""Command lines whose --json is recorded."""


def record() -> dict[str, dict[str, str]]:
    """The texts by kind and name."""
    return {"help": help_texts(), "json": json_shapes(), "names": names()}


def help_texts() -> dict[str, str]:
    root: Any = typer.main.get_command(app)
    texts = {"onnx-fuse": root.get_help(typer.Context(root, info_name="onnx-fuse"))}
    for name, command in root.commands.items():
        parent = typer.Context(root, info_name="onnx-fuse")
        context = typer.Context(command, parent, info_name=name, terminal_width=100)
        texts[name] = command.get_help(context)
    return texts


def json_shapes() -> dict[str, str]:
    """The keys of --json with the types of their values."""
    shapes = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {"MODEL": "m.onnx", "DATA": "data.npz", "OUT.onnx": "o.onnx", "OUT.npz": "o.npz"}
        paths = {word: str(Path(folder) / file) for word, file in files.items()}
        proto = to_proto(built("mlp", []))
        Path(paths["MODEL"]).write_bytes(proto.SerializeToString())
        np.savez(paths["DATA"], **examples(proto))
        report = Path(folder) / "report.json"
        for name, line in COMMANDS.items():
            report.unlink(missing_ok=True)
            words = [paths.get(word, word) for word in line.split()]
            shown = StringIO()
            with redirect_stdout(shown), redirect_stderr(shown):
                code = run_command([*words, "--json", str(report)])
            lines = [f"exit {code}"]
            if report.exists():
                lines += sorted(set(shape("", json.loads(report.read_text()))))
            else:
                lines.append(shown.getvalue().replace(folder, "FOLDER"))
            shapes[name] = "\n".join(lines)
    return shapes


def examples(proto: Any) -> dict[str, np.ndarray]:
    """Seeded data to train a model with one float input and output."""
    rng = np.random.default_rng(0)
    arrays = {}
    for value, name in ((proto.graph.input[0], ""), (proto.graph.output[0], "labels")):
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim][1:]
        arrays[name or value.name] = rng.standard_normal([16, *dims]).astype(np.float32)
    return arrays


def shape(place: str, value: Any) -> Iterator[str]:
    """A line for each key, without the values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # keys that are data, such as names of operators, are shown as they are
            yield from shape(f"{place}.{key}", inner)
    elif isinstance(value, list):
        for inner in value or ["empty"]:
            yield from shape(f"{place}[]", inner)
    else:
        yield f"{place}: {type(value).__name__}"


def names() -> dict[str, str]:
    """`__all__` of every module, and the signatures of what is public."""
    texts = {}
    for module in pkgutil.walk_packages(onnx_fuse.__path__, "onnx_fuse."):
        if module.name.startswith(("onnx_fuse.torch", "onnx_fuse.__main__")):
            continue  # needs PyTorch; runs the command line
        exported = getattr(importlib.import_module(module.name), "__all__", None)
        if exported is not None:
            texts[f"__all__ of {module.name}"] = "\n".join(sorted(exported))
    for name, value in named().items():
        if not name.startswith("onnx_fuse.torch"):
            texts[name] = signature(value)
    return texts


def signature(value: Any) -> str:
    if isinstance(value, property):
        return "property"
    try:
        lines = str(inspect.signature(getattr(value, "__func__", value)))
    except ValueError:
        lines = "class"
    text = re.sub(r" at 0x[0-9a-f]+", "", lines)
    return text.replace(", ", ",\n") + "\n" + (inspect.getdoc(value) or "")
