"""Programs as data, as the cache and compiled files hold them: faults are one error, never code."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from support import setting

from onnx_fuse.cuda.arguments import MAP_BYTES
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.walk import lower
from onnx_fuse.program import formula, template
from onnx_fuse.program.call import Program
from onnx_fuse.program.launch import Launch, Num, Ptr, TensorMap
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.problem import CHIPS, Collective, GemmProblem
from onnx_fuse.program.size import Trace
from onnx_fuse.runtime import encoding, schedule


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("(-1*((-768*s1)//2048))", 48),
        ("not (1+-1*s0) == 0", False),
        ("not (1+-1*s0) < 0", True),
        ("not s1 <= 128", False),
        ("2 <= s0 <= 16", False),
        ("min((s1),(3+s0))+max(s0,7)", 11),
        ("((s1)%8)", 0),
    ],
)
def test_expressions_over_sizes(text: str, wanted: int) -> None:
    table = formula.Formulas.of([text], ["s0", "s1"])
    read = formula.Formulas.read(table.data, conditions=isinstance(wanted, bool))
    assert table.at([1, 128]) == read.at([1, 128]) == [wanted]
    assert read.hold({"s0": 1, "s1": 128}) is bool(wanted)


def test_a_division_by_zero_is_no_value() -> None:
    table = formula.Formulas.of(["s1//s0", "1 == s1%s0"], ["s0", "s1"])
    guards = formula.Formulas.of(["1 == s1%s0"], ["s0", "s1"])
    assert table.at([2, 5]) == [2, True]
    assert guards.hold({"s0": 2, "s1": 5})
    assert not guards.hold({"s0": 0, "s1": 5})
    assert not guards.hold({"s1": 5})
    with pytest.raises(ValueError, match="no value"):
        table.at([0, 5])


@pytest.mark.parametrize(
    "text",
    ["s0.real", "__import__('os')", "s0 ** s1", "1 << s0", "s0 s1", "(s0)(s1)", "s0 is s1",
     "lambda: 0", "[s0]", "'a'", "min", "True", "s0 if s1 else s0", "", "s1(3)", "1 // 0"],
)  # fmt: skip
def test_nothing_else_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match=r"no expression|no value"):
        formula.Formulas.of([text], ["s0", "s1"]).at([1, 2])


# [symbols, constants, flat rows of (operation, a, b), roots]: s0 + 1 and its faults
TABLES: dict[str, tuple[Any, bool]] = {
    "a number": ([["s0"], [1], [0, 1, 0], [2]], True),
    "a condition": ([["s0"], [1], [7, 1, 0], [2]], False),
    "text": ("s0 + 1", False),
    "an operation of text": ([["s0"], [1], ["add", 1, 0], [2]], False),
    "an operation that is none": ([["s0"], [1], [99, 1, 0], [2]], False),
    "an operand that comes later": ([["s0"], [1], [0, 2, 0], [2]], False),
    "an operand before the first": ([["s0"], [1], [0, -1, 0], [2]], False),
    "a root that is not there": ([["s0"], [1], [0, 1, 0], [3]], False),
    "a row that is cut": ([["s0"], [1], [0, 1], [1]], False),
    "a constant of yes": ([["s0"], [True], [0, 1, 0], [2]], False),
    "a symbol that is a number": ([[0], [1], [0, 1, 0], [2]], False),
    "the square of a square, again and again": (
        [["s0"], [1], [x for i in range(99) for x in (2, i + 1, i + 1)], [100]],
        False,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_expressions_is_checked(name: str) -> None:
    data, right = TABLES[name]
    if right:
        assert formula.Formulas.read(data).at([41]) == [42]
        return
    with pytest.raises(ValueError, match=r"\w"):
        formula.Formulas.read(data)


@cache
def softmaxes() -> Program:
    text = (
        "agraph (float[2,4] x) => (float[2,4] y, float[2,4] z)"
        "{ s = Softmax(x) y = Tanh(s) z = Softmax<axis = 0>(y) }"
    )
    return lower(text_model(text), {"x": ((2, 4), "float32")}, CHIPS["H200"])


def put(*path: Any, to: Any) -> Callable[[Any], Any]:
    """Change one part of an object of dataclasses and tuples."""

    def change(value: Any) -> Any:
        key, *rest = path
        if isinstance(value, tuple):
            new = put(*rest, to=to)(value[key]) if rest else to
            return (*value[:key], new, *value[key + 1 :])
        new = put(*rest, to=to)(getattr(value, key)) if rest else to
        return replace(value, **{key: new})

    return change


def exchange(*names: str, **fields: Any) -> Launch:
    """NCCL's call for the operands of the first Softmax, whose tensors have 8 elements."""
    given = {"kind": "AllReduce", "sizes": (8,), "dtypes": ("float32",), "ranks": 2, "bucket": 0}
    pointers = tuple(map(Ptr, names or ("x", "y")))
    problem = Collective(**{**given, **fields})
    return Launch("", "nccl", (1, 1, 1), (1, 1, 1), pointers, collective=problem)


def test_an_exchange_of_ranks_comes_back() -> None:
    program = put(*_LAUNCH, to=exchange())(softmaxes())
    assert read(stored(program)).calls[0].launches[0] == exchange()


_LAUNCH = ("calls", 0, "launches", 0)
BAD_PROGRAMS = {
    "a buffer of negative size": put("buffers", 0, "nbytes", to=-1),
    "a buffer too small": put("buffers", 0, "nbytes", to=4),
    "a buffer twice": lambda p: replace(p, buffers=(*p.buffers, p.buffers[0])),
    "a kind of buffer": put("buffers", 0, "kind", to="file"),
    "a view beyond its buffer": put("inputs", 0, 1, "offset", to=1),
    "a shape of text": put("inputs", 0, 1, "shape", to="12"),
    "a size of yes": put("inputs", 0, 1, "shape", to=(True, 4)),
    "a size of 2^70": put("inputs", 0, 1, "shape", to=(2**70, 4)),
    "an unknown dtype": put("inputs", 0, 1, "dtype", to="float7"),
    "a buffer that is not there": put("inputs", 0, 1, "buffer", to=99),
    "an input that is a buffer": lambda p: put("inputs", 0, 1, to=p.buffers[0])(p),
    "strides beyond": put("calls", 0, "reads", 0, 1, "strides", to=(1 << 30, 1)),
    "strides before": put("calls", 0, "reads", 0, 1, "strides", to=(-4, 1)),
    "a module that is not there": put(*_LAUNCH, "source", to="elsewhere.cu"),
    "a kernel's name": put(*_LAUNCH, "entry", to="a b"),
    "no blocks": put(*_LAUNCH, "grid", to=(0, 1, 1)),
    "a grid of two axes": put(*_LAUNCH, "grid", to=(1, 1)),
    "too many threads": put(*_LAUNCH, "block", to=(1024, 2, 1)),
    "an offset beyond": put(*_LAUNCH, "args", 0, to=Ptr("x", 1 << 20)),
    "an argument of another kind": put(*_LAUNCH, "args", 0, to=("file", "x")),
    "an argument of text": put(*_LAUNCH, "args", 0, to=Num("i32", "1")),  # type: ignore[arg-type]
    "an argument too large": put(*_LAUNCH, "args", 0, to=Num("i32", 2**31)),
    "a number of no type": put(*_LAUNCH, "args", 0, to=Num("i7", 1)),
    "a map of seven axes": put(
        *(*_LAUNCH, "args", 0), to=TensorMap(Ptr("x"), "float32", (1,) * 7, (4,) * 6, (1,) * 7)
    ),
    "a map beyond its tensor": put(
        *(*_LAUNCH, "args", 0), to=TensorMap(Ptr("x"), "float32", (4, 9), (16,), (4, 8))
    ),
    "a wait that is none": put(*_LAUNCH, "waits", to="always"),
    "a time of text": put("calls", 0, "choice", "seconds", to="1"),
    "a configuration of numbers": put("calls", 0, "choice", "config", "attrs", to=((1, 2),)),
    "a launch of a library": put(*_LAUNCH, "product", to=GemmProblem("Gemm", 8, 8, 8)),
    "an exchange of ranks beyond": put(*_LAUNCH, to=exchange(sizes=(9,))),
    "an exchange of ranks to nowhere": put(*_LAUNCH, to=exchange("x", "z")),
    "an exchange of no kind": put(*_LAUNCH, to=exchange(kind="Send")),
    "an exchange of all ranks' parts": put(*_LAUNCH, to=exchange(kind="AllGather")),
    "an exchange of texts": put(*_LAUNCH, to=exchange(dtypes=("str",))),
    "an exchange of more than its operands": put(*_LAUNCH, to=exchange(sizes=(4, 4))),
    "an exchange of no ranks": put(*_LAUNCH, to=exchange(ranks=0)),
    "a workspace of -1": put("calls", 0, "workspace", to=-1),
    "in place of nothing": put("calls", 0, "inplace", to=(("y", "nothing"),)),
    "a copy of nothing": put("calls", 0, "copies", to=(("nothing", "y"),)),
    "a constant that is not there": put("constants", to={0: np.zeros(3)}),
    "no calls": put("calls", to=None),
    "a tuple": lambda p: (p,),
}
BAD_DATA: dict[str, Callable[[Any], Any]] = {
    "a list": lambda d: [d],
    "no words": lambda d: d.pop("words"),
    "a word less": lambda d: d["words"].pop(),
    "a word of text": setting("words", 0, to="os"),
    "a word of 2^80": setting("words", 0, to=2**80),
    "words in a list": lambda d: d.update(words=[d["words"]]),
    "an object that comes later": lambda d: d.update(words=[10**6, *d["words"][1:]]),
    "an object before the first": lambda d: d.update(words=[-1, *d["words"][1:]]),
    "a class of Python's": setting("groups", 0, 0, to="os.system"),
    "a class of ours that no program has": setting("groups", -1, 0, to="Session"),
    "a field that is none": setting("groups", -1, 1, to=["__class__"]),
    "a count of text": setting("groups", 0, -1, to="1"),
    "a negative count": setting("groups", 0, -1, to=-1),
    "a count of 2^40": setting("groups", 0, -1, to=2**40),
    "a value of another type": setting("plain", 0, to={"a": 1}),
    "no whole": lambda d: d.update(recipes={}),
    "a result that comes later": lambda d: d["recipes"][""].__setitem__(-1, 10**6),
    "a recipe too short": lambda d: d["recipes"][""].pop(),
}


def stored(program: Any) -> Any:
    """What a file holds of a program."""
    return json.loads(
        json.dumps(template.write(SymbolicProgram(program, Trace()), lambda array: "none"))
    )


def read(data: Any) -> Program:
    """The program of these data, whose kernels the file has."""
    modules = {(x.source, x.defines) for call in softmaxes().calls for x in call.launches}
    guards = SymbolicProgram(None, Trace()).guards
    return encoding.read(data, guards, lambda *given: np.zeros(3), modules).at({})


def test_a_program_comes_back_as_it_was() -> None:
    program = softmaxes()
    assert repr(read(stored(program))) == repr(program)


def test_a_copy_is_one_in_a_file_too() -> None:
    """What copies a tensor to where it stands is left out, and may share memory (`schedule`)."""
    text = "agraph (float[2,4] x) => (float[2,4] y, float[4,2] z) {y=Identity(x) z=Transpose(x)}"
    program = lower(text_model(text), {"x": ((2, 4), "float32")}, CHIPS["H200"])
    guards = SymbolicProgram(None, Trace()).guards
    back = encoding.read(stored(program), guards, lambda *given: np.zeros(3)).at({})
    assert {*map(schedule.copies, back.calls)} == {(("a0", "y0"),), ()}


@pytest.mark.parametrize("dtype", MAP_BYTES)
def test_a_map_of_each_element_type_comes_back(dtype: str) -> None:
    tensor_map = TensorMap(Ptr("x"), dtype, (1, 1), (16,), (1, 1))
    program = put(*_LAUNCH, "args", 0, to=tensor_map)(softmaxes())
    assert read(stored(program)).calls[0].launches[0].args[0] == tensor_map


@pytest.mark.parametrize("fault", [*BAD_PROGRAMS, *BAD_DATA])
def test_a_program_that_nobody_lowered_is_refused(fault: str) -> None:
    if fault in BAD_PROGRAMS:
        data = stored(BAD_PROGRAMS[fault](softmaxes()))
    else:
        data = copy.deepcopy(stored(softmaxes()))
        changed = BAD_DATA[fault](data)
        data = changed if fault == "a list" else data
    with pytest.raises(ModelError, match="damaged") as caught:
        read(data)
    assert "\n" not in str(caught.value)


def test_no_other_class_is_written() -> None:
    """What could not be read again is not written."""
    with pytest.raises(ModelError, match="a file cannot hold"):
        stored((print,))
