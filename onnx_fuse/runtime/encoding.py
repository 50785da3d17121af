"""Programs from files: what they say is checked before anything is made of it.

A file may be damaged or made by somebody else, so `check` believes nothing: every size, name and
index is checked, and every view must lie inside its buffer. What passes cannot make the runtime
read or write beyond its own allocations on its own account; what the machine code of a kernel does
with its arguments no check of the data can tell, so a file is to be trusted as a program is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

import numpy as np

from onnx_fuse.cuda.arguments import MAP_BYTES
from onnx_fuse.errors import ModelError
from onnx_fuse.program import template
from onnx_fuse.program.call import Buffer, Call, Program, Tensor
from onnx_fuse.program.formula import Formulas
from onnx_fuse.program.launch import Launch, Num, Ptr, Table, TensorMap, Waits
from onnx_fuse.program.open import EvalPlan, SymbolicProgram
from onnx_fuse.program.problem import ITEMSIZE, Choice, Collective, GemmProblem, KernelConfig
from onnx_fuse.runtime.schedule import at_ends

FORMAT = 7
"""Version of what is written; a reader takes this one alone."""

Module = tuple[str, tuple[tuple[str, str], ...]]
"""(source, defines) of a compiled module."""

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
_MACRO = re.compile(r"[A-Za-z_]\w*(?:\([\w, ]*\))?\Z", re.ASCII)
_SOURCE = re.compile(r"\w+(?:/\w+)*\.cu\Z", re.ASCII)


def read(
    data: Mapping[str, Any],
    guards: Formulas,
    array: Callable[[str, str, tuple[int, ...]], np.ndarray[Any, Any]],
    modules: Collection[Module] | None = None,
    check: Callable[[Program, Mapping[str, int]], None] | None = None,
) -> CheckedOpen:
    """The open program of these data; `array` is as in `template.read`.

    `check` looks at each program as a whole as well, so that it has no parts.

    Raises ModelError, without the file's name, for anything that no program has; a launch of a
    kernel must be of one of the `modules`, or of a source of this package or a text.
    """
    try:
        return CheckedOpen(guards, template.read(data, guards, array), modules, check)
    except (ValueError, TypeError) as error:
        raise _fault(str(error)) from error


class CheckedOpen(SymbolicProgram):
    """An open program of a file, each of whose shapes is checked as it is made."""

    def __init__(
        self,
        guards: Formulas,
        recipes: Mapping[str, EvalPlan],
        modules: Collection[Module] | None,
        check: Callable[[Program, Mapping[str, int]], None] | None,
    ) -> None:
        self.set(guards, {"": recipes[""]} if check else recipes)
        self._modules, self._check = modules, check

    def at(self, values: Mapping[str, int]) -> Program:
        """The program for these sizes. Raises ModelError where it is none."""
        with _damage():
            program: Program = super().at(values)
            _Checker(self._modules).program(program)
        if self._check is not None:
            self._check(program, values)
        return program

    def check_parts(self, values: Mapping[str, int]) -> Program:
        """The program for these sizes, of which all parts are such: so they are for any others."""
        with _damage():
            program: Program = super().at(values)
            checker = _Checker(self._modules)
            checker.program(program)
            sizes, changes = self.part("sizes", values), self.part("changes", values)
            if sizes is not None:
                _sizes(sizes, 0, _LARGEST * len(program.buffers), "a list of sizes")
            for i, j, grid, smem, words, sync in changes or ():
                launch = program.calls[i].launches[j]
                same = (grid, smem, sync) == (launch.grid, launch.smem, launch.sync)
                if not same or type(words) is not tuple:
                    raise _fault("a launch that changes is another")
                if not {*map(type, words)} <= {int, float}:
                    _check_words(words)
            ends = self.part("ends", values)
            if ends is not None:
                _a(ends, Program, "a program's ends")
                checker.ends(ends)
                if ends.calls != at_ends(program):
                    raise _fault("calls at a program's ends")
        return program


def _check_words(words: Iterable[Any]) -> None:
    for word in words:
        if type(word) is tuple:
            (descriptor, offset) = word
            _a(descriptor, TensorMap, "an argument")
            _whole(offset, 0, _LARGEST, "an argument")
        elif type(word) not in (int, float):
            raise _fault("an argument is no number")


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Raise ModelError for what data that no program has lead to."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise _fault(f"{type(error).__name__}: {error}") from error


def _fault(what: str) -> ModelError:
    return ModelError(f"its programs are damaged ({what})")


def _a(value: object, kind: type, what: str) -> None:
    if type(value) is not kind:
        raise _fault(f"{what} is {str(value)[:40]!r}")


def _whole(value: object, low: int, high: int, what: str) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _fault(f"{what} is {str(value)[:40]!r}")


def _sizes(values: tuple[int, ...], low: int, high: int, what: str) -> None:
    _a(values, tuple, what)
    whole = {*map(type, values)} <= {int}
    if not whole or (values and not low <= min(values) <= max(values) <= high):
        raise _fault(f"{what} is {str(values)[:40]}")


def _words(values: tuple[str, ...], what: str) -> None:
    _a(values, tuple, what)
    if not {*map(type, values)} <= {str}:
        raise _fault(f"{what} is {str(values)[:40]}")


_Ends = dict[tuple[str, bool], int]
"""How far a launch reaches into an operand, by a pointer and (True) by a descriptor."""


class _Checker:
    """What many share, such as the shapes of equal layers, is looked at once."""

    def __init__(self, modules: Collection[Module] | None) -> None:
        self.modules = modules
        self.buffers: dict[int, Buffer] = {}
        self.tensors: dict[int, Any] = {}
        self.reaches: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.launches: dict[int, _Ends] = {}
        self.kernels: set[Any] = set()

    def program(self, program: Program) -> None:
        _a(program, Program, "a program")
        _a(program.buffers, tuple, "a list of buffers")
        for b in program.buffers:
            self._buffer(b)
        _a(program.calls, tuple, "a list of calls")
        for call in program.calls:
            self._call(call)
        self.ends(program)

    def ends(self, program: Program) -> None:
        """Check what a program has beside calls and buffers."""
        _a(program.setup, tuple, "a list of calls")
        for call in program.setup:
            self._call(call)
        _a(program.constants, dict, "a list of constants")
        for id_, array in program.constants.items():
            _a(array, np.ndarray, "a constant")
            if id_ not in self.buffers or array.nbytes != self.buffers[id_].nbytes:
                raise _fault(f"constant {id_} does not fit its buffer")
        written = {t.buffer for call in program.setup for _, t in call.writes}
        for b in self.buffers.values():
            if b.kind == "constant" and b.id not in program.constants and b.id not in written:
                raise _fault(f"constant {b.id} has no data")
        self._tensors(program.inputs, "an input")
        _a(program.outputs, tuple, "a list of outputs")
        for name, value in program.outputs:
            _a(name, str, "an output's name")
            if type(value) is not np.ndarray:
                self._tensor(value)
        _a(program.sequential, bool, "whether calls run in line")
        _words(program.fallbacks, "a list of operators")
        _words(program.in_parts, "a list of operators")
        if program.stages != ():
            raise _fault("a program has later stages")

    def _buffer(self, b: Buffer) -> None:
        _a(b, Buffer, "a buffer")
        if not (type(b.id) is type(b.nbytes) is int and 0 <= b.nbytes <= _LARGEST and b.id >= 0):
            raise _fault(f"buffer {str(b.id)[:40]} of {str(b.nbytes)[:40]} bytes")
        if b.kind not in _KINDS or b.id in self.buffers or type(b.name) is not str:
            raise _fault(f"buffer {b.id} is of the kind {str(b.kind)[:40]!r}, or there twice")
        self.buffers[b.id] = b

    def _tensors(self, pairs: tuple[tuple[str, Tensor], ...], what: str) -> None:
        _a(pairs, tuple, what)
        tensors = self.tensors
        for name, tensor in pairs:
            if id(tensor) not in tensors:
                self._tensor(tensor)
            if type(name) is not str:
                raise _fault(f"the name of {what}")

    def _tensor(self, t: Any) -> None:
        _a(t, Tensor, "a tensor")
        if type(t.buffer) is not int or t.buffer not in self.buffers or t.dtype not in ITEMSIZE:
            raise _fault(f"a tensor is of buffer {str(t.buffer)[:20]}, {str(t.dtype)[:20]}")
        if type(t.offset) is not int or not 0 <= t.offset <= _LARGEST:
            raise _fault(f"an offset is {str(t.offset)[:40]}")
        key = id(t.shape), id(t.strides)
        low, high, size = self.reaches.get(key) or self._reach(key, t)
        # one without elements reads nothing, wherever it stands
        inside = (t.offset + high + 1) * ITEMSIZE[t.dtype] <= self.buffers[t.buffer].nbytes
        if size and (t.offset + low < 0 or not inside):
            raise _fault(f"a tensor reaches beyond buffer {t.buffer}")
        self.tensors[id(t)] = t

    def _reach(self, key: tuple[int, int], t: Tensor) -> tuple[int, int, int]:
        """The first and the last element of a tensor from its offset on, and their number."""
        _sizes(t.shape, 0, _LARGEST, "a tensor's shape")
        _sizes(t.strides, -_LARGEST, _LARGEST, "a tensor's strides")
        spans = [(d - 1) * s for d, s in zip(t.shape, t.strides, strict=True)]
        reach = sum(s for s in spans if s < 0), sum(s for s in spans if s > 0), t.size
        self.reaches[key] = reach
        return reach

    def _call(self, call: Any) -> None:
        _a(call, Call, "a call")
        self._tensors(call.reads, "an operand")
        self._tensors(call.writes, "a result")
        numbers = call.workspace, call.flops, call.bytes
        if not {*map(type, numbers)} == {int} or not 0 <= min(numbers) <= max(numbers) < 2**80:
            raise _fault(f"a call of {str(numbers)[:80]}")
        _whole(call.workspace, 0, _LARGEST, "a workspace")
        if call.inplace or call.copies:
            read, written = dict(call.reads), dict(call.writes)
            pairs = [*call.inplace, *((y, x) for x, y in call.copies)]
            if any(y not in written or x not in read for y, x in pairs):
                raise _fault("a call writes in place, or copies, what it does not have")
        if not (type(call.inplace) is type(call.copies) is type(call.launches) is tuple
                and type(call.kernel) is type(call.note) is str):  # fmt: skip
            raise _fault("a call is of no kind")
        if call.choice is not None:
            _choice(call.choice)
        _words(call.nodes, "a list of nodes")
        if call.host != b"" or type(call.problem) not in (type(None), Collective):
            raise _fault("a call holds what no file has")
        for launch in call.launches:
            ends = self.launches.get(id(launch))
            for (name, mapped), end in (self._launch(launch) if ends is None else ends).items():
                room = {"workspace": call.workspace, "sync": launch.sync}
                for operand, t in (*call.reads, *call.writes):
                    room[operand] = self.buffers[t.buffer].nbytes - t.offset * ITEMSIZE[t.dtype]
                if end > room.get(name, end if mapped else 0):
                    raise _fault(f"a launch reaches beyond {name[:40]}")

    def _launch(self, x: Launch) -> _Ends:
        """How far it reaches into its operands, in bytes, as far as its arguments say."""
        _a(x, Launch, "a launch")
        _sizes(x.grid, 1, 2**31 - 1, "a grid")
        _sizes(x.block, 1, 1024, "a block")
        fits = len(x.grid) == len(x.block) == 3 and all(map(int.__le__, x.grid, _GRID))
        if not fits or x.block[0] * x.block[1] * x.block[2] > 1024:
            raise _fault(f"a launch of {list(x.grid)} blocks of {list(x.block)} threads")
        _whole(x.sync, 0, 1 << 30, "a launch's own memory")
        _whole(x.smem, 0, 1 << 20, "a launch's shared memory")
        _whole(x.cluster, 1, 16, "a cluster")
        _a(x.cooperative, bool, "whether a launch is cooperative")
        if x.waits not in get_args(Waits) or x.early != ():
            raise _fault(f"a launch waits {str(x.waits)[:40]!r}")
        _a(x.args, tuple, "a list of arguments")
        ends: _Ends = {}
        for arg in x.args:
            _argument(arg, ends)
        if type(x.collective) is Collective and x.product is None:
            _collective(x.collective, x.args, ends)
        elif not (self.modules is None and type(x.product) is GemmProblem):
            if (x.product, x.collective) != (None, None):
                raise _fault("a launch of a library")
            self._kernel(x)
        self.launches[id(x)] = ends
        return ends

    def _kernel(self, x: Launch) -> None:
        key = x.source, x.defines, x.entry
        if key in self.kernels:
            return
        _a(x.source, str, "a kernel's source")
        _a(x.defines, tuple, "a kernel's macros")
        if not _IDENTIFIER.match(x.entry):
            raise _fault("a kernel is no name")
        if self.modules is not None and (x.source, x.defines) not in self.modules:
            raise _fault("a launch of a module that is not there")
        for name, value in x.defines:
            _a(value, str, "a macro")
            if self.modules is None and not _MACRO.match(name):
                raise _fault(f"a macro is {str(name)[:40]!r}")
        if self.modules is None and "\n" not in x.source and not _SOURCE.match(x.source):
            raise _fault(f"a kernel of {x.source[:40]!r}")
        self.kernels.add(key)


def _choice(choice: Choice) -> None:
    _a(choice, Choice, "a choice")
    _a(choice.config, KernelConfig, "a configuration")
    attrs = choice.config.attrs
    _words((choice.kernel, choice.reason, *(name for name, _ in attrs)), "a kernel chosen")
    numbers = [n for _, value in attrs for n in (value if type(value) is tuple else (value,))]
    known = choice.seconds is None or type(choice.seconds) is float
    if not known or not {*map(type, numbers)} <= {bool, int, float, str}:
        raise _fault(f"a choice is {str(choice)[:40]!r}")


def _argument(arg: object, ends: _Ends) -> None:
    if type(arg) is Ptr:
        _pointer(arg, ends)
    elif type(arg) is Num:
        bounds = _NUMBERS[arg.ctype]
        if bounds is not None:
            _whole(arg.value, *bounds, "an argument")
        elif type(arg.value) not in (int, float):
            raise _fault("an argument is no number")
    elif type(arg) is Table:
        _a(arg.words, tuple, "a table")
        for word in arg.words:
            if type(word) is Ptr:
                _pointer(word, ends)
            else:
                _whole(word, -(2**63), 2**64 - 1, "an argument")
    elif type(arg) is TensorMap:
        _map(arg, ends)
    else:
        raise _fault(f"an argument is a {type(arg).__name__}")


def _pointer(ptr: Ptr, ends: _Ends) -> None:
    """An operand that is not bound is a null pointer, which some kernels take for its absence."""
    if type(ptr.name) is not str or type(ptr.offset) is not int or ptr.offset < 0:
        raise _fault("a pointer")
    if ptr.offset > ends.get((ptr.name, False), 0):
        ends[ptr.name, False] = ptr.offset


def _collective(problem: Collective, args: tuple[Any, ...], ends: _Ends) -> None:
    """NCCL reads and writes as many elements as the problem says, in pairs of operands."""
    ranks, dtypes = problem.ranks, problem.dtypes
    _whole(ranks, 1, 2**20, "a number of ranks")
    _sizes(problem.sizes, 0, _LARGEST, "what ranks exchange")
    known = type(dtypes) is tuple and all(dtype in ITEMSIZE for dtype in dtypes)
    if not (known and len(args) == 2 * len(problem.sizes) == 2 * len(dtypes)):
        raise _fault("an exchange of ranks of unequal lengths")
    if any(type(ptr) is not Ptr for ptr in args):
        raise _fault("an exchange of ranks of what is no operand")
    for i, (size, dtype) in enumerate(zip(problem.sizes, dtypes, strict=True)):
        results = {"AllReduce": size, "ReduceScatter": size // ranks, "AllGather": size * ranks}
        if problem.kind not in results:
            raise _fault("an exchange of ranks of no kind")
        for ptr, elements in zip(args[2 * i :], (size, results[problem.kind]), strict=False):
            reach = ptr.offset + elements * ITEMSIZE[dtype]
            ends[ptr.name, False] = max(reach, ends.get((ptr.name, False), 0))


def _map(arg: TensorMap, ends: _Ends) -> None:
    _a(arg.ptr, Ptr, "a tensor map's operand")
    _pointer(arg.ptr, ends)
    if arg.dtype not in MAP_BYTES or arg.swizzle not in (0, 64, 128):
        raise _fault("a tensor map of an unknown kind")
    _whole(arg.swizzle, 0, 128, "a tensor map's swizzle")
    _sizes(arg.shape, 1, 2**32, "a tensor map's shape")
    _sizes(arg.strides, 0, 2**40, "a tensor map's strides")
    _sizes(arg.box, 1, 256, "a tensor map's box")
    _sizes(arg.window, -128, 127, "a tensor map's window")
    rank = len(arg.shape)
    images = (len(arg.box), len(arg.window)) == (2, 3 * (rank - 2)) and rank in (4, 5)
    boxed = images if arg.window else len(arg.box) == rank
    if not boxed or not rank == len(arg.strides) + 1 <= 5:
        raise _fault("a tensor map of unequal ranks")
    last = sum((d - 1) * s for d, s in zip(arg.shape[1:], arg.strides, strict=True))
    reach = arg.ptr.offset + last + arg.shape[0] * MAP_BYTES[arg.dtype]
    ends[arg.ptr.name, True] = max(reach, ends.get((arg.ptr.name, True), 0))
