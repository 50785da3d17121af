"""Files that are often taken for ONNX models: what each is, and the command that helps."""

from __future__ import annotations

import zipfile
from pathlib import Path

from onnx_fuse.errors import ModelError

_TORCH = "export it with torch.onnx.export(model, args, 'model.onnx') where its code is"
_SAVED_MODEL = "python -m tf2onnx.convert --saved-model FOLDER --output model.onnx converts it"
_KERAS = "export it with model.export('model.onnx', format='onnx') in Keras"
_FETCH = "download the file itself"
_STARTS = {
    b"version https://git-lfs": ("a Git LFS pointer", "git lfs pull fetches the file"),
    b"\x89HDF\r\n": ("an HDF5 file, as of Keras", _KERAS),
    b"<!doctype html": ("an HTML page", _FETCH),
    b"<html": ("an HTML page", _FETCH),
    b"<?xml": ("an XML file, as of OpenVINO", "use the ONNX file that it was converted from"),
    b"{": ("a JSON file", "give the model that stands beside it"),
    b"[": ("a JSON file", "give the model that stands beside it"),
    **{
        bytes([0x80, protocol]): ("a pickle, as of torch.save or scikit-learn", _TORCH)
        for protocol in range(2, 6)
    },
}
"""What no ONNX file starts with."""
_TFLITE = (
    "a TFLite model",
    "python -m tf2onnx.convert --tflite FILE --output model.onnx converts it",
)
_ORT = ("a model in onnxruntime's ORT format", "give the ONNX file that it was made from")
_SAFETENSORS = ("a safetensors file, which has weights and no graph", _TORCH)


def refuse_foreign(source: Path | bytes) -> None:
    """Raise a ModelError that names what a file, a folder or its bytes are, if not ONNX."""
    kind: tuple[str, str] | None = None
    if isinstance(source, bytes):
        kind = _starting(source[:64])
    elif source.name == "saved_model.pb" or (source / "saved_model.pb").is_file():
        kind = ("a SavedModel of TensorFlow", _SAVED_MODEL)
    elif source.is_file():
        with source.open("rb") as file:
            head = file.read(64)
        kind = _in_zip(source) if head.startswith(b"PK\x03\x04") else _starting(head)
    if kind is not None:
        raise ModelError(f"not an ONNX file, but {kind[0]}: {kind[1]}")


def _starting(head: bytes) -> tuple[str, str] | None:
    if not head:
        return "an empty file", "export or download it again"
    if head[2:4] == b"\0\0" and head[4:8] in (b"TFL3", b"ORTM"):
        return _TFLITE if head[4:8] == b"TFL3" else _ORT
    if head[5:8] == b"\0\0\0" and head[8:10] == b'{"':
        return _SAFETENSORS
    text = head.lstrip().lower() if head.lstrip().startswith(b"<") else head
    return next((kind for start, kind in _STARTS.items() if text.startswith(start)), None)


def _in_zip(path: Path) -> tuple[str, str] | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return None  # who opens it says that it is damaged
    if any(name.endswith("data.pkl") for name in names):
        return "a file of torch.save or torch.jit.save", _TORCH
    if "model.weights.h5" in names:
        return "a Keras model", _KERAS
    models = [name for name in names if name.endswith(".onnx") and name != "model.onnx"]
    return ("a zip archive with ONNX files in it", f"unpack {models[0]}") if models else None
