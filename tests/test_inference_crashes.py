"""Graphs on which ONNX's inference ends the process are refused in one sentence."""

import os
import signal
import sys

import onnx
import pytest

import onnx_fuse
from onnx_fuse.errors import ModelError
from onnx_fuse.validation.check import check_outputs
from onnx_fuse.validation.gradients import compare_gradients

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
SLICED = "o = Constant <value_ints = [0]> () p = Constant <value_ints = [2]> () y = Slice (c, o, p)"
REFUSED = {
    "pool": """g (float[1,3,2,2] x) => (float[?,?,?,?] y)
    { c = AveragePool <kernel_shape = [5, 5]> (x)
      o = Constant <value_ints = [2]> () p = Constant <value_ints = [3]> ()
      y = Slice (c, o, p, o) }""",
    "expand": f"""g (float[1] x) => (float[?] y)
    {{ s = Constant <value_ints = [-5]> () c = Expand (x, s) {SLICED} }}""",
    "subtraction": f"""g (float[2,3] x, float[1] w) => (float[?] y)
    {{ s = Shape <end = 1> (x) f = Constant <value_ints = [7]> () d = Sub (s, f)
       c = Expand (w, d) {SLICED} }}""",
    "pooled indices": """g (float[3,3] x, float[1,2,2] i) => (float[?,?] y)
    { s = AveragePool <kernel_shape = [7]> (i) j = Cast <to = 7> (s) y = GatherND (x, j) }""",
    "gather": """g (float[2,3] x, int64[2,1] i) => (float[?] y)
    { y = GatherND <batch_dims = -1> (x, i) }""",
    "axis": """g (float[2,3] x, float[3] s) => (float[?,?] y, float[?,?] m)
    { y, m = LayerNormalization <axis = 2147483648> (x, s) }""",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_size_below_0_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ModelError, match=r"size below 0|out of range") as error:
        onnx_fuse.optimize(onnx.parser.parse_model(HEAD + REFUSED[name]))
    assert "\n" not in str(error.value)


def test_inference_that_runs_out_of_memory_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", out_of_memory)
    with pytest.raises(ModelError, match=r"crashed .*\(out of memory\).* size below 0"):
        onnx_fuse.optimize(onnx.parser.parse_model(HEAD + REFUSED["pool"]))


UNTYPED = {
    "EyeLike": "y = EyeLike <dtype = 1> (a)",
    "RegexFullMatch": 'y = RegexFullMatch <pattern = "a"> (a)',
    "LabelEncoder": 'y = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_int64s = [1]> (a)',
    "DictVectorizer": "y = ai.onnx.ml.DictVectorizer <int64_vocabulary = [1]> (a)",
}


@pytest.mark.parametrize("name", UNTYPED)
def test_an_operand_without_a_type_stays_without_one(name: str) -> None:
    head = '<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 2, "custom": 1]>\n'
    body = f"g (float[2] x) => (y, z) {{ a = custom.Op (x) {UNTYPED[name]} z = Abs (x) }}"
    graph = onnx_fuse.optimize(onnx.parser.parse_model(head + body)).graph
    assert [node.op_type for node in graph.node] == ["Op", name, "Abs"]


MALFORMED = {
    "strides of one axis": "y = AveragePool <kernel_shape = [2, 2], strides = [1]> (x)",
    "no kernel": "y = MaxPool <kernel_shape : ints = []> (x)",
    "stride of 0": "y = Conv <strides = [0, 1]> (x, x)",
    "pads of one side": "y = ConvTranspose <pads = [1, 1]> (x, x)",
    "no image": "r = Flatten (x) y = Conv (r, x)",
    "kernel of three axes": "y = LpPool <kernel_shape = [2, 2, 2]> (x)",
    "high is below low": "y = RandomUniformLike <low = 2.0> (x)",
    "no deviation": "y = RandomNormal <scale = 0.0, shape = [2]> ()",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_attributes_that_onnxruntime_refuses_or_dies_of_are_refused(name: str) -> None:
    text = f"g (float[1,2,5,5] x) => (float y) {{ {MALFORMED[name]} }}"
    with pytest.raises(ModelError, match=r"fits no windows|can be drawn"):
        onnx_fuse.optimize(onnx.parser.parse_model(HEAD + text))


def test_a_run_that_ends_the_process_ends_no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    model = onnx.parser.parse_model(HEAD + "g (float[2] x) => (float[2] y) { y = Abs (x) }")
    for check in (check_outputs, compare_gradients):
        monkeypatch.setattr(sys.modules[check.__module__], check.__name__, die)
    for ask in (onnx_fuse.validate, onnx_fuse.check_gradients):
        with pytest.raises(ModelError, match="onnxruntime crashed on this graph"):
            ask(model)


@pytest.mark.parametrize("dims", ["1099511627776,0,2147483648", "0,4611686018427387904"])
def test_a_size_of_0_hides_no_other_that_is_too_large(dims: str) -> None:
    for text in (f"g (int64[{dims}] x) => (y) {{ y = Abs (x) }}",
                 f"g () => (y) <int64[{dims}] x = {{}}> {{ y = Abs (x) }}"):  # fmt: skip
        with pytest.raises(ModelError, match="overflows"):
            onnx_fuse.optimize(onnx.parser.parse_model(HEAD + text))


def test_validation_takes_a_list_of_arrays_that_differ_in_shape() -> None:
    text = "g (float[2] a, float[3,1] b) => (y) { y = SequenceConstruct (a, b) }"
    assert onnx_fuse.validate(onnx.parser.parse_model(HEAD + text)).ok


def test_validation_takes_an_input_that_is_fed_at_another_rank() -> None:
    head = '<ir_version: 10, opset_import: ["": 9]>\n'
    text = "g (float[N] x, float[] s) => (y) { y = Upsample (x, s) }"
    assert onnx_fuse.validate(onnx.parser.parse_model(head + text)).ok
