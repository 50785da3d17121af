"""Programs as plain data for a file: `encode` writes lists, numbers and strings, `decode` checks.

A file may be damaged or made by somebody else, so `decode` believes nothing: every size, name and
index is checked, and every view must lie inside its buffer. What passes cannot make the runtime
read or write beyond its own allocations on its own account; what the machine code of a kernel does
with its arguments no check of the data can tell, so a file is to be trusted as a program is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from onnx_fuse.errors import ModelError
from onnx_fuse.program.call import Buffer, Call, Program, Tensor, dense_strides, dtype_of
from onnx_fuse.program.formula import Numbers
from onnx_fuse.program.problem import ITEMSIZE, Arg, Launch, Num, Ptr, Table, TensorMap
from onnx_fuse.program.size import Size, expression, number, text_of

FORMAT = 2
"""Version of what `encode` writes; a reader takes this one alone."""

Modules = Sequence[tuple[str, tuple[tuple[str, str], ...]]]
"""(source, defines) of each compiled module: a launch names its own by the index."""
T = TypeVar("T")

_KINDS = ("input", "output", "weight", "constant", "temp", "random")
_NUMBERS = {
    "i32": (-(2**31), 2**31 - 1),
    "u32": (0, 2**32 - 1),
    "i64": (-(2**63), 2**63 - 1),
    "f32": None,
    "f64": None,
}
_LARGEST = 2**46  # bytes of a buffer, as lowering has it
_GRID = (2**31 - 1, 65535, 65535)  # blocks of a grid by axis: CUDA's own limits
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)


# ---- writing ------------------------------------------------------------------------------------


def encode(
    program: Program, modules: Modules, store: Callable[[np.ndarray[Any, Any]], str]
) -> dict[str, Any]:
    """The program as data. `store` keeps an array and gives back the name it is read by.

    The program must have no call of onnxruntime, no later stage and no library's product, which are
    no data: `deploy` refuses them by name. A call loses its `problem` or `expression`, which
    only passes over the program read.
    """
    index = {module: i for i, module in enumerate(modules)}

    def launch(x: Launch) -> dict[str, Any]:
        made: dict[str, Any] = {
            "module": index[x.source, x.defines],
            "entry": x.entry,
            "grid": list(x.grid),
            "block": list(x.block),
            "args": [_arg(arg) for arg in x.args],
        }
        rare = {"smem": x.smem, "sync": x.sync, "cooperative": x.cooperative}
        rare = {k: v for k, v in rare.items() if isinstance(v, Size) or v}
        return made | rare | {"cluster": x.cluster}

    def call(x: Call) -> dict[str, Any]:
        made: dict[str, Any] = {
            "kernel": x.kernel,
            "nodes": list(x.nodes),
            "launches": [launch(one) for one in x.launches],
            "reads": [[name, _tensor(t)] for name, t in x.reads],
            "writes": [[name, _tensor(t)] for name, t in x.writes],
            "inplace": [list(pair) for pair in x.inplace],
        }
        plain = ("workspace", "flops", "bytes", "why")
        return made | {name: getattr(x, name) for name in plain}

    return {
        "buffers": [[b.id, b.kind, b.nbytes, b.name] for b in program.buffers],
        "setup": [call(x) for x in program.setup],
        "calls": [call(x) for x in program.calls],
        "inputs": [[name, _tensor(t)] for name, t in program.inputs],
        "outputs": [
            [name, _tensor(t) if isinstance(t, Tensor) else _array(t, store)]
            for name, t in program.outputs
        ],
        "constants": [[k, store(v)] for k, v in program.constants.items()],
        "sequential": program.sequential,
    }


def _tensor(t: Tensor) -> list[Any]:
    dense = list(map(expression, t.strides)) == list(map(expression, dense_strides(t.shape)))
    return [t.buffer, t.dtype, list(t.shape), None if dense else list(t.strides), t.offset]


def _array(
    array: np.ndarray[Any, Any] | None, store: Callable[[np.ndarray[Any, Any]], str]
) -> dict[str, Any]:
    assert array is not None, "an output of a later stage"
    return {"array": store(array), "dtype": array.dtype.name, "shape": list(array.shape)}


def _arg(arg: Arg) -> list[Any]:
    if isinstance(arg, Ptr):
        return ["ptr", arg.name, arg.offset]
    if isinstance(arg, Num):
        if _NUMBERS[arg.ctype] is None:
            return ["num", arg.ctype, _number(float(arg.value))]
        return ["num", arg.ctype, number(arg.value)]
    if isinstance(arg, TensorMap):
        sizes = [list(arg.shape), list(arg.strides), list(arg.box)]
        window = [list(arg.window)] if arg.window else []
        return ["map", arg.ptr.name, arg.ptr.offset, arg.dtype, *sizes, arg.swizzle, *window]
    return ["table", [[w.name, w.offset] if isinstance(w, Ptr) else w for w in arg.words]]


def _number(value: float) -> float | str:
    """JSON has no infinities and no NaN: those are words."""
    return value if np.isfinite(value) else str(value)


_MARK = "\x01"
"""Before the number of a formula, where a size stands in the text of an open program."""
_MARKED = re.compile(r'"\\u0001(\d+)"')


def template(data: Any) -> tuple[str, list[str]]:
    """What `encode` made of a program over open sizes, as text, and the formulas of its sizes.

    Raises ModelError where a name in it could be taken for a size.
    """
    formulas: dict[str, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Size):
            return f"{_MARK}{formulas.setdefault(text_of(value.terms), len(formulas))}"
        if isinstance(value, list):
            return [plain(part) for part in value]
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, str) and _MARK in value:
            raise ModelError(f"the name {value!r} has a control character")
        return value

    return json.dumps(plain(data), separators=(",", ":"), allow_nan=False), list(formulas)


# ---- reading ------------------------------------------------------------------------------------


def decode(data: Any, modules: Modules, array: Callable[[str], np.ndarray[Any, Any]]) -> Program:
    """The program that `encode` wrote. `array` gives the bytes kept under a name, as uint8.

    Constants stay bytes. Raises ModelError, without the file's name, for anything that no program
    of `encode` has.
    """
    try:
        return _Decoder(modules, array).program(data)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ModelError(f"its programs are damaged ({type(error).__name__}: {error})") from error


class Template:
    """A program over open sizes of a file: its text with formulas in the place of sizes.

    Raises ModelError as `decode` does.
    """

    def __init__(
        self,
        text: str,
        formulas: Sequence[str],
        modules: Modules,
        array: Callable[[str], np.ndarray[Any, Any]],
    ) -> None:
        self._modules, self._array = modules, array
        parts = _MARKED.split(text)
        self._text, self._which = parts[::2], [int(n) for n in parts[1::2]]
        if any(n >= len(formulas) for n in self._which):
            raise _fault("a formula is missing")
        try:
            self._numbers = Numbers(formulas)
        except ValueError as error:
            raise _fault(str(error)) from error

    def at(self, values: Mapping[str, int]) -> Program:
        """The program for these sizes, checked as any other."""
        try:
            numbers = [str(n) for n in self._numbers.at(values)]
            filled = (numbers[n] for n in self._which)
            data = json.loads("".join(chain(*zip(self._text, chain(filled, ("",)), strict=True))))
        except (ValueError, RecursionError) as error:
            raise _fault(str(error)) from error
        return decode(data, self._modules, self._array)


def _fault(what: str) -> ModelError:
    return ModelError(f"its programs are damaged ({what})")


def _whole(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _fault(f"{what} is {str(value)[:40]!r}")
    return value


def _sizes(values: Any, low: int, high: int, what: str) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise _fault(f"{what} is no list")
    return tuple(_whole(v, low, high, what) for v in values)


def _word(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _fault(f"{what} is no text")
    return value


def _identifier(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _IDENTIFIER.match(value):
        raise _fault(f"{what} is no name")
    return value


def _yes(value: Any, what: str) -> bool:
    if type(value) is not bool:
        raise _fault(f"{what} is neither true nor false")
    return value


class _Decoder:
    def __init__(self, modules: Modules, array: Callable[[str], np.ndarray[Any, Any]]) -> None:
        self.modules, self.array = modules, array
        self.buffers: dict[int, Buffer] = {}

    def program(self, data: Any) -> Program:
        for id_, kind, nbytes, name in data["buffers"]:
            _whole(id_, 0, 2**31, "a buffer's number")
            if kind not in _KINDS or id_ in self.buffers:
                raise _fault(f"buffer {id_} is of the kind {str(kind)[:40]!r}, or there twice")
            size = _whole(nbytes, 0, _LARGEST, "a buffer's size")
            self.buffers[id_] = Buffer(id_, kind, size, _word(name, "a buffer's name"))
        constants = {}
        for id_, name in data["constants"]:
            found = self.array(_word(name, "a constant's name"))
            if id_ not in self.buffers or found.nbytes != self.buffers[id_].nbytes:
                raise _fault(f"constant {id_} does not fit its buffer")
            constants[id_] = found
        setup = tuple(self._call(x) for x in data["setup"])
        made = {t.buffer for call in setup for _, t in call.writes}
        for b in self.buffers.values():
            if b.kind == "constant" and b.id not in constants and b.id not in made:
                raise _fault(f"constant {b.id} has no data")
        outputs: list[tuple[str, Tensor | np.ndarray[Any, Any] | None]] = []
        for name, value in data["outputs"]:
            whole = self._known(value) if isinstance(value, dict) else self._tensor(value)
            outputs.append((_word(name, "an output's name"), whole))
        return Program(
            tuple(self._call(x) for x in data["calls"]),
            tuple(self.buffers.values()),
            tuple((_word(n, "an input's name"), self._tensor(t)) for n, t in data["inputs"]),
            tuple(outputs),
            constants,
            setup=setup,
            sequential=bool(data.get("sequential")),  # of files before recomputing: no
        )

    def _tensor(self, data: Any) -> Tensor:
        buffer, dtype, shape, strides, offset = data
        if buffer not in self.buffers or type(buffer) is not int or dtype not in ITEMSIZE:
            raise _fault(f"a tensor is of buffer {str(buffer)[:20]}, {str(dtype)[:20]}")
        shape = _sizes(shape, 0, _LARGEST, "a tensor's shape")
        if strides is None:
            strides = dense_strides(shape)
        else:
            strides = _sizes(strides, -_LARGEST, _LARGEST, "a tensor's strides")
        tensor = Tensor(buffer, dtype, shape, strides, _whole(offset, 0, _LARGEST, "an offset"))
        spans = [(d - 1) * s for d, s in zip(shape, strides, strict=True)]
        low = tensor.offset + sum(s for s in spans if s < 0)
        high = tensor.offset + sum(s for s in spans if s > 0) + 1
        # one without elements reads nothing, wherever it stands
        if tensor.size and (low < 0 or high * ITEMSIZE[dtype] > self.buffers[buffer].nbytes):
            raise _fault(f"a tensor reaches beyond buffer {buffer}")
        return tensor

    def _known(self, data: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        if data["dtype"] not in ITEMSIZE:
            raise _fault(f"an output is of type {str(data['dtype'])[:40]!r}")
        dtype, shape = dtype_of(data["dtype"]), _sizes(data["shape"], 0, _LARGEST, "a shape")
        return self.array(_word(data["array"], "an output's array")).view(dtype).reshape(shape)

    def _call(self, data: Any) -> Call:
        reads = tuple((_word(n, "an operand"), self._tensor(t)) for n, t in data["reads"])
        writes = tuple((_word(n, "a result"), self._tensor(t)) for n, t in data["writes"])
        workspace = _whole(data["workspace"], 0, _LARGEST, "a workspace")
        tensors = dict((*reads, *writes))
        room = {name: self.buffers[t.buffer].nbytes - t.offset * ITEMSIZE[t.dtype]
                for name, t in tensors.items()}  # fmt: skip
        room["workspace"] = workspace
        read, written = dict(reads), dict(writes)
        inplace = tuple((_word(y, "a result"), _word(x, "an operand")) for y, x in data["inplace"])
        if any(y not in written or x not in read for y, x in inplace):
            raise _fault("a call writes in place what it does not have")
        return Call(
            _word(data["kernel"], "a kernel's name"),
            tuple(_word(n, "a node's name") for n in data["nodes"]),
            tuple(self._launch(x, room) for x in data["launches"]),
            reads,
            writes,
            workspace,
            _whole(data["flops"], 0, 2**80, "a count of operations"),
            _whole(data["bytes"], 0, 2**80, "a count of bytes"),
            _word(data["why"], "a reason"),
            inplace,
        )

    def _launch(self, data: Any, room: Mapping[str, int]) -> Launch:
        source, defines = self.modules[_whole(data["module"], 0, len(self.modules) - 1, "a module")]
        grid, block = (_sizes(data[k], 1, 2**31 - 1, f"a {k}") for k in ("grid", "block"))
        fits = len(grid) == len(block) == 3 and all(map(int.__le__, grid, _GRID))
        if not fits or block[0] * block[1] * block[2] > 1024:
            raise _fault(f"a launch of {list(grid)} blocks of {list(block)} threads")
        sync = _whole(data.get("sync", 0), 0, 1 << 30, "a launch's own memory")
        room = {**room, "sync": sync}
        return Launch(
            source,
            _identifier(data["entry"], "a kernel"),
            (grid[0], grid[1], grid[2]),
            (block[0], block[1], block[2]),
            tuple(self._arg(arg, room) for arg in data["args"]),
            defines,
            _whole(data.get("smem", 0), 0, 1 << 20, "a launch's shared memory"),
            _whole(data["cluster"], 1, 16, "a cluster"),
            sync,
            _yes(data.get("cooperative", False), "whether a launch is cooperative"),
        )

    def _arg(self, data: Any, room: Mapping[str, int]) -> Arg:
        kind, *rest = data
        if kind == "ptr":
            return _pointer(room, *rest)
        if kind == "num":
            ctype, value = rest
            bounds = _NUMBERS[ctype]
            if bounds is None:
                return Num(ctype, float(value))
            return Num(ctype, _whole(value, *bounds, "an argument"))
        if kind == "table":
            words = [
                _whole(w, -(2**63), 2**64 - 1, "an argument")
                if type(w) is int
                else _pointer(room, *w)
                for w in rest[0]
            ]
            return Table(tuple(words))
        if kind != "map":
            raise _fault(f"an argument is a {str(kind)[:40]!r}")
        name, offset, dtype, shape, strides, box, swizzle, *windows = rest
        if dtype not in ("bfloat16", "float16", "float32") or swizzle not in (0, 128):
            raise _fault("a tensor map of an unknown kind")
        made = TensorMap(
            _pointer(room, name, offset),
            dtype,
            _sizes(shape, 1, 2**32, "a tensor map's shape"),
            _sizes(strides, 0, 2**40, "a tensor map's strides"),
            _sizes(box, 1, 256, "a tensor map's box"),
            swizzle,
            _sizes(windows[0], -128, 127, "a tensor map's window") if windows else (),
        )
        rank = len(made.shape)
        images = (len(made.box), len(made.window)) == (2, 3 * (rank - 2)) and rank in (4, 5)
        boxed = images if made.window else len(made.box) == rank
        if not boxed or not rank == len(made.strides) + 1 <= 5:
            raise _fault("a tensor map of unequal ranks")
        last = sum((d - 1) * s for d, s in zip(made.shape[1:], made.strides, strict=True))
        reach = offset + last + made.shape[0] * ITEMSIZE[dtype]
        if name in room and reach > room[name]:
            raise _fault(f"a tensor map reaches beyond {name}")
        return made


def _pointer(room: Mapping[str, int], name: Any, offset: Any) -> Ptr:
    """An operand that is not bound is a null pointer, which some kernels take for its absence."""
    high = room.get(_word(name, "a pointer"), 0)
    return Ptr(name, _whole(offset, 0, high, f"the offset into {name}"))
