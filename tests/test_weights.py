"""Large initializers are read beside the protobuf: the same model as its parser gives, always."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import ENCODER, parsed

from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer import weights
from onnx_fuse.importer.load import external_files, read
from onnx_fuse.importer.save import save


@pytest.fixture(autouse=True)
def all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SMALL_FILE", 0)
    monkeypatch.setattr(weights, "LARGE", 64)


def joined(path: Path) -> onnx.ModelProto:
    """What `parts` has taken apart, whole again."""
    rest, apart = weights.parts(path)
    proto = onnx.ModelProto.FromString(rest)
    for tensor in proto.graph.initializer:
        entries = {e.key: e.value for e in tensor.external_data}
        if apart is not None and entries.get("location") == apart.location:
            array = apart._arrays[int(entries["offset"])]
            at, nbytes = apart.places[int(entries["offset"])]
            assert array.tobytes() == path.read_bytes()[at : at + nbytes]
            tensor.raw_data = array.tobytes()
            del tensor.external_data[:]
            tensor.ClearField("data_location")
    return proto


def model() -> onnx.ModelProto:
    """Initializers of every way to store one, some of them with fields after their data."""
    rng = np.random.default_rng(0)
    proto = parsed("agraph (float[4] x) => (float[4] y) { y = Relu(x) }")
    for i, dtype in enumerate((np.float32, np.int64, np.float16, np.uint8, bool)):
        array = rng.integers(0, 2, (7, 31)).astype(dtype)
        tensor = onnx.numpy_helper.from_array(array, f"t{i}")
        tensor.doc_string = "after"
        proto.graph.initializer.append(tensor)
    for kind, values in (
        (onnx.TensorProto.FLOAT, rng.random(99)),
        (onnx.TensorProto.INT64, range(9)),
    ):
        proto.graph.initializer.append(
            onnx.helper.make_tensor(f"typed{kind}", kind, [len(values)], values)
        )
    int4 = onnx.TensorProto(name="i4", data_type=onnx.TensorProto.INT4, dims=[200])
    int4.raw_data = bytes(range(100))
    text = onnx.helper.make_tensor("s", onnx.TensorProto.STRING, [9], [b"0123456789"] * 9)
    proto.graph.initializer.extend([int4, text])
    return proto


def test_every_kind_of_tensor_is_the_one_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model().SerializeToString())
    rest, apart = weights.parts(path)
    assert len(apart.places) == 5
    assert len(rest) < path.stat().st_size - 5 * 200
    assert joined(path) == model()


def test_a_message_in_pieces_and_its_graph(tmp_path: Path) -> None:
    path, other = tmp_path / "m.onnx", tmp_path / "n.onnx"
    save(load(ENCODER), path)  # large weights stand in ModelProtos of their own
    whole = load(path)
    other.write_bytes(ENCODER.read_bytes())
    for found in (load(other), load(ENCODER.read_bytes())):
        for name, value in found.graph.initializers.items():
            ours = whole.graph.initializers[name].const_value
            assert ours.dtype == value.const_value.dtype
            np.testing.assert_array_equal(ours.numpy(), value.const_value.numpy())
    assert joined(path) == onnx.ModelProto.FromString(path.read_bytes())


def test_changed_bytes_are_read_or_refused_as_by_the_parser(tmp_path: Path) -> None:
    """Lengths, tags and varints that lie: what is no message for the parser is none here."""
    path = tmp_path / "m.onnx"
    whole = model().SerializeToString()
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        data = data[: rng.integers(1, 2 * len(data))]
        path.write_bytes(data)
        try:
            want = onnx.ModelProto.FromString(bytes(data))
        except Exception:  # noqa: BLE001 - whatever the parser raises
            refused += 1
            with pytest.raises(ModelError):
                load(path)
            continue
        assert joined(path) == want
    assert 20 < refused < 380


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_refused(saved: Callable[..., Path]) -> None:
    proto = model()
    proto.graph.initializer[0].dims[0] = 8
    with pytest.raises(ModelError, match="tensor 't0' holds 868 bytes, but its shape needs 992"):
        load(saved(proto))


def test_lazy_weights_are_those_of_the_file_until_it_is_written_to(
    saved: Callable[..., Path],
) -> None:
    path, other = saved(model()), saved(model(), "other.onnx")
    lazy, whole = (read(path, lazy=by).graph.initializers for by in (True, False))
    for name, value in whole.items():
        np.testing.assert_array_equal(lazy[name].const_value.numpy(), value.const_value.numpy())
    again = read(other, lazy=True).graph.initializers["t0"].const_value
    os.replace(other, path)
    assert lazy["t0"].const_value.numpy().any()
    assert again.numpy().any()
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ModelError, match="has been written to"):
        again.numpy()


def test_a_file_cannot_name_what_is_in_memory(saved: Callable[..., Path]) -> None:
    proto = model()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", weights.WEIGHTS), ("offset", "0")):
        tensor.external_data.add(key=key, value=value)
    with pytest.raises(ModelError, match="external data"):
        load(saved(proto))


def test_a_file_of_zeros_is_left_to_the_general_parser_at_its_first_field(tmp_path):
    with pytest.raises(weights._Unusual):
        next(weights._fields(bytes(4), 0, 4))
    path = tmp_path / "zeros.onnx"
    path.write_bytes(bytes(1 << 21))
    with pytest.raises(ModelError, match=r"zeros.onnx: not an ONNX file"):
        load(path)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_files_that_a_model_names(limit: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Those of its external tensors; weights cut out of its own file are in none."""
    monkeypatch.setattr(weights, "_SMALL_FILE", limit)
    proto, path = model(), tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    assert external_files(path) == []
    tensor = proto.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "apart.bin")
    tensor.ClearField("raw_data")
    path.write_bytes(proto.SerializeToString())
    assert external_files(path) == [tmp_path / "apart.bin"]
    path.write_bytes(b"no model")
    assert external_files(path) == []
