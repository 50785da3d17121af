"""`onnx-fuse compile`: a model as one file that runs without NVRTC and without ONNX libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import numpy as np
import onnx_ir as ir

from onnx_fuse import __version__, progress, rewrite, session
from onnx_fuse.adapters.columns import AdapterColumns, rows_for
from onnx_fuse.adapters.held import AdaptedFile
from onnx_fuse.adapters.inputs import RANKS, add_inputs, chosen
from onnx_fuse.container import GRAPH, digest_of, write
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.source import source_hash
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.feeds import argument
from onnx_fuse.files import written
from onnx_fuse.importer.save import is_large_weight, serialized_without_weights
from onnx_fuse.ir.build import defaults, required
from onnx_fuse.ir.constants import DEFAULT, Model
from onnx_fuse.kernels import cublaslt
from onnx_fuse.ops.update import expand_standard_updates
from onnx_fuse.program import template
from onnx_fuse.program.call import Call, NeedsValues, Program, dtype_of
from onnx_fuse.program.call import Shapes as TypedShapes
from onnx_fuse.program.formula import Formulas
from onnx_fuse.program.launch import Launch
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.packing import OFFSETS, TOKENS, Packing, row_count
from onnx_fuse.program.problem import CHIPS, PRECISIONS, TRAINING_PRECISIONS, Hardware
from onnx_fuse.program.size import Trace
from onnx_fuse.rewrite import padding
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime.encoding import FORMAT
from onnx_fuse.runtime.plan import PlannedProgram
from onnx_fuse.runtime.specialize import Specializer, Symbols
from onnx_fuse.runtime.states import COPIES, graph_digest

if TYPE_CHECKING:
    from onnx_fuse.training.trainer import Trainer

__all__ = ["CHIPS", "Compiled", "Hardware", "compile"]
__dir__ = __all__.copy

Shapes = Mapping[str, Sequence[int]]
Closed = dict[str, tuple[tuple[int, ...], str]]
"""(shape, dtype) of every input, by name."""
Free = dict[str, tuple[tuple[int, int], list[tuple[str, int]]]]
"""Symbol -> the smallest and the largest size, and the (input, axis) that have it."""
Sizes = tuple[Closed, Free, list[dict[str, int]]]
"""The largest shapes that programs serve, what varies in them, and all sizes of that."""
Module = tuple[str, tuple[tuple[str, str], ...]]
"""(source, defines) of a launch."""


@dataclass(frozen=True)
class Compiled:
    """A summary of the file that `compile` wrote."""

    shapes: list[dict[str, tuple[int, ...]]]
    """The shapes of all inputs by name, for each program of a target."""
    programs: dict[str, list[Program]]
    """The programs of each target."""
    modules: int
    """The number of kernels, each of which is compiled for every architecture."""
    weight_bytes: int
    """Bytes of weights and constants."""
    file_bytes: int
    """Bytes of the whole file."""


def compile(
    model: Model,
    path: str | os.PathLike[str],
    *,
    targets: Mapping[str, Hardware],
    shapes: Sequence[Shapes] = ({},),
    ranges: Mapping[str, tuple[int, int]] | None = None,
    precision: str = "fp32",
    level: int = 2,
    adapter_rank: int = 0,
    adapter_weights: Sequence[str] = ("*",),
    pack: bool | Literal["zero"] = False,
) -> Compiled:
    """Fuse and compile `model` for `targets` into one file that runs without a compiler.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model.
        path: The file to write, by custom named *.fused.
        targets: The GPUs that will run it, such as {"h200": CHIPS["H200"]}; none need be here.
            The keys are names for messages.
        shapes: The input shapes of each program, by name. An input whose shape the model fixes
            may be left out, and one that has a default takes the default's shape.
        ranges: The smallest and the largest size by the symbols of the inputs' shapes, such as
            {"sequence": (1, 512)}: the file has programs for all sizes between them, as few as
            serve them, and `shapes` may leave those sizes out.
        precision: As in InferenceSession.
        level: Level of the fusions, 0 to 3.
        adapter_rank: The most ranks that the low-rank adapters of a batch may have together,
            rounded up to a power of two of at least 16; 0 for a file without adapters
            (docs/howto/adapters.md). Runs with and without adapters have programs of their own.
        adapter_weights: Globs over the names of the weights, or of their PyTorch modules, that
            adapters may have.
        pack: Add programs over the tokens that the model's mask shows, for sessions with this
            `pack`; batches that cannot be packed run with their padding.

    Raises:
        UsageError: The shape of an input stays free, a glob matches no weight, or an option has
            none of its values.
        ModelError: The model is malformed, an operator has no kernel, sizes depend on data, or
            `pack` finds that its padding may be read.
        DeviceError: NVRTC is missing.
    """
    if adapter_rank < 0:
        raise UsageError(f"adapter_rank is {adapter_rank}: give a number of ranks, or 0 for none")
    if not adapter_weights or (not adapter_rank and tuple(adapter_weights) != ("*",)):
        raise UsageError("adapter_weights has at least one glob, and is for an adapter_rank")
    if pack not in (False, True, "zero"):
        raise UsageError(f"pack is True, 'zero' or False, not {pack!r}")
    graph = session.load(model)
    variants = []
    if adapter_rank:
        variants.append(_with_adapters(graph, adapter_rank, adapter_weights, precision))
    for each in (graph, *(variant.graph for variant in variants)):
        rewrite.optimize(each, level=level, own_kernels=True)
    if pack:
        variants.append(_with_tokens(graph, zero=pack == "zero"))
    graph, math = in_precision(graph, precision)
    for variant in variants:
        variant.graph, _ = in_precision(variant.graph, precision)
        _rename_others(variant.graph, graph, variant.key)
    return _compiled(graph, path, targets, shapes, ranges or {}, precision, math, variants=variants)


@dataclass
class _Variant:
    """A graph of the model with further inputs, which a session feeds: it has its own programs."""

    key: str
    """Where the manifest says what it is."""
    graph: ir.Model
    about: dict[str, Any]
    """What the manifest says."""
    shapes: Callable[[Shapes], Shapes]
    """The shapes of all inputs, from those of the model's own."""
    over: Callable[[Closed, Free], Sizes] | None = None
    """What its programs serve, from the shapes and the ranges of all inputs, where it is more."""

    def manifest(self, plain: ir.Model) -> dict[str, Any]:
        """What the file says of it: the inputs that it has beside the plain graph's, and more."""
        names = {v.name for v in plain.graph.inputs}
        inputs = [list(argument(v)) for v in self.graph.graph.inputs if v.name not in names]
        return {"inputs": inputs, **self.about}


def _with_adapters(graph: ir.Model, ranks: int, globs: Sequence[str], precision: str) -> _Variant:
    graph, rows = graph.clone(), rows_for(ranks)
    kind = PRECISIONS[precision][0]
    weights = chosen(graph, globs)
    layout = AdapterColumns.of(weights, None if kind == "float32" else dtype_of(kind))
    ends = add_inputs(graph, layout)

    def shapes(own: Shapes) -> Shapes:
        mask = {} if ends.refusal else {ends.mask: ([*own.get(ends.batch, ()), -1][0], rows)}
        return {**own, ends.matrices: (rows, layout.columns), **mask}

    def over(closed: Closed, free: Free) -> Sizes:
        places, least = [(ends.matrices, 0), (ends.mask, 1)][: 2 - bool(ends.refusal)], rows_for(1)
        halved = range((rows // least).bit_length())
        sizes = [{**each, RANKS: rows >> i} for i in halved for each in _sizes(free)]
        return closed, {**free, RANKS: ((least, rows), places)}, sizes

    about = AdaptedFile.manifest(ends, weights, rows, layout)
    return _Variant("adapters", graph, about, shapes, over)


def _with_tokens(graph: ir.Model, *, zero: bool) -> _Variant:
    packed = padding.pack(graph, zero=zero)
    packing = required(Packing.of(packed))
    picks = len(packing.picked)

    def shapes(own: Shapes) -> Shapes:
        batch, length = own.get(packing.mask, (-1, -1))
        more = {packing.rows: (1, 0), packing.offsets: (0,)}
        more |= {packing.places: (batch, length), packing.chosen: (batch, picks)}
        return {**own, **{name: shape for name, shape in more.items() if name}}

    about = {"zero": zero, "fields": asdict(packing)}
    return _Variant("packing", packed, about, shapes, partial(_over_tokens, packing))


def _rename_others(graph: ir.Model, other: ir.Model, why: str) -> None:
    """Give weights names of their own where the other graph has others of these names, in place."""
    for name, value in list(graph.graph.initializers.items()):
        theirs = other.graph.initializers.get(name)
        if theirs is None or theirs.const_value is None or value.const_value is None:
            continue
        one, two = value.const_value.numpy(), theirs.const_value.numpy()
        if (one.dtype, one.shape, one.tobytes()) != (two.dtype, two.shape, two.tobytes()):
            value.name = f"{name} of {why}"


def compile_training(
    trainer: Trainer,
    folder: str | os.PathLike[str],
    *,
    shapes: Sequence[Shapes] = ({},),
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Compiled]:
    """Compile the step and the evaluation of a run into a folder, which `Trainer(compiled=)` takes.

    Args:
        trainer: A Trainer made with the `hardware` that will run the steps.
        folder: The folder to write; it is made if need be. Each graph is a file in it.
        shapes: As in `compile`; the labels are inputs, too.
        ranges: As in `compile`.

    Returns:
        A summary of each file, by the name of what it runs: "update", "evaluate", "accumulate"
        where gradients are accumulated, "average" where there are running averages, and "copies"
        where steps read weights in 16 bits.

    Raises:
        UsageError: The shape of an input stays free, or the trainer has no `hardware`.
        ModelError: An operator has no kernel, or sizes depend on data.
        DeviceError: NVRTC is missing.
    """
    graphs, hw = trainer.graphs(), trainer.hardware
    assert hw is not None
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    compiled = {}
    precision = trainer.precision
    for mode, (graph, state) in graphs.items():
        more = {"graph": graph_digest(graph)}
        # an evaluation takes fewer inputs than the update
        names = {v.name for v in graph.graph.inputs}
        sets = [{k: v for k, v in s.items() if k in names or mode == "update"} for s in shapes]
        math, free = TRAINING_PRECISIONS[precision][1], {} if mode == COPIES else ranges or {}
        compiled[mode] = _compiled(
            graph, place / f"{mode}.fused", {hw.name: hw}, sets, free, precision, math, state, more
        )
    return compiled


def _compiled(
    graph: ir.Model,
    path: str | os.PathLike[str],
    targets: Mapping[str, Hardware],
    shapes: Sequence[Shapes],
    ranges: Mapping[str, tuple[int, int]],
    precision: str,
    math: str,
    state: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    variants: Sequence[_Variant] = (),
) -> Compiled:
    """Write the file of a graph in which everything is fused, with `more` in its manifest."""
    expand_standard_updates(graph)
    built: list[_Compiled] = []
    with cublaslt.left_out():
        for target, hw in targets.items():
            for each in (_Variant("", graph, {}, dict), *variants):
                programs = Specializer(each.graph, hw, math=math, state=state)  # as a session's
                built += _programs(each, programs, target, shapes, ranges)
    members: dict[str, bytes] = {}
    names, table = _modules(built, members)
    modules = list(dict.fromkeys(names.values()))
    tensors: dict[str, np.ndarray[Any, Any]] = {}

    def store(array: np.ndarray[Any, Any]) -> str:
        dense = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        name = f"constant {digest_of([repr((array.dtype.name, array.shape)).encode(), dense])}"
        tensors.setdefault(name, array)
        return name

    entries = []
    for i, one in enumerate(built):
        _weights(one.graph, one.program, tensors)
        inputs = {name: [list(shape), dtype] for name, (shape, dtype) in one.shapes.items()}
        member = f"programs/{i}.json"
        entry = {"target": one.target, "inputs": inputs, "member": member}
        program, trace = one.program, Trace()
        if one.served is not None:
            program, entry["open"] = _opened(one.served, trace)
        opened = SymbolicProgram(relabel(_without_weights(program), names), trace)
        guards = opened.guards if one.served is None else one.served.source.guards
        entry["guards"] = guards.data
        data = template.write(opened, store)
        members[member] = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
        entries.append(entry)
    arrays = defaults(graph)
    stored = [[name, store(a), [list(a.shape), a.dtype.name]] for name, a in arrays.items()]
    members[GRAPH] = serialized_without_weights(graph)
    for name, value in graph.graph.initializers.items():
        if name not in tensors and is_large_weight(value.const_value):
            assert value.const_value is not None
            tensors[name] = value.const_value.numpy()
    limits = ("arch", "sm_count", "smem_per_block")
    manifest = {
        "format": FORMAT,
        "version": __version__,
        "precision": precision,
        "compiler": f"NVRTC {nvrtc.check_compiler()}",
        "inputs": [list(argument(v)) for v in graph.graph.inputs],
        "outputs": [list(argument(v)) for v in graph.graph.outputs],
        "defaults": stored,
        "targets": {name: {k: getattr(hw, k) for k in limits} for name, hw in targets.items()},
        "modules": table,
        "programs": entries,
        **{each.key: each.manifest(graph) for each in variants},
        **(more or {}),
    }
    free = _free(graph, ranges)
    plain = _distinct([_closed(graph, each, free) for each in shapes])
    with written(path) as draft:
        write(draft, manifest, members, tensors)
        nbytes = draft.stat().st_size
    return Compiled(
        [{name: shape for name, (shape, _) in s.items()} for s in plain],
        {name: [one.program for one in built if one.target == name] for name in targets},
        len(modules),
        sum(a.nbytes for a in tensors.values()),
        nbytes,
    )


def _distinct(sets: list[Closed]) -> list[Closed]:
    return [each for i, each in enumerate(sets) if each not in sets[:i]]


def _programs(
    variant: _Variant,
    programs: Specializer,
    target: str,
    shapes: Sequence[Shapes],
    ranges: Mapping[str, tuple[int, int]],
) -> list[_Compiled]:
    """The programs of a graph for its sets of shapes, over all sizes of the ranges."""
    graph, built = variant.graph, list[_Compiled]()
    free = _free(graph, ranges)
    sets = _distinct([_closed(graph, variant.shapes(own), free) for own in shapes])
    for i, closed in enumerate(sets):
        progress.report(f"lowering for {target}", i, len(sets))
        if variant.over is not None:
            built += _over(programs, target, *variant.over(closed, free))
        elif free:
            built += _over(programs, target, closed, free, _sizes(free))
        else:
            program = _lowered(programs, closed).program
            built.append(_Compiled(target, programs.hw, closed, program, graph))
    return built


@dataclass(frozen=True)
class _Compiled:
    """A program for one target and one set of shapes."""

    target: str
    hw: Hardware
    shapes: Closed
    program: Program
    graph: ir.Model
    served: _SizeRange | None = None


@dataclass(frozen=True)
class _SizeRange:
    """What an open program serves: all of `sizes`, by symbol, and whatever else meets its guards.

    `ends` names the dimensions of each input, `ranges` has the names among them that vary, and
    `own` their symbols.
    """

    source: SymbolicProgram
    symbols: Symbols
    sizes: list[dict[str, int]]
    ends: dict[str, list[str]]
    ranges: Mapping[str, tuple[int, int]]
    own: Mapping[str, str]


def _free(graph: ir.Model, ranges: Mapping[str, tuple[int, int]]) -> Free:
    """The places of the symbols in `ranges`. Raises UsageError where there are none."""
    free: Free = {}
    for symbol, (low, high) in ranges.items():
        places = [
            (v.name or "", axis)
            for v in graph.graph.inputs
            for axis, dim in enumerate(v.shape or ())
            if not isinstance(dim, int) and dim.value == symbol
        ]
        if not places:
            raise UsageError(f"no input has a dimension called '{symbol}'")
        if not 1 <= low <= high:
            raise UsageError(
                f"'{symbol}' from {low} to {high}: expected sizes from 1 on, such as 1 to 512"
            )
        free[symbol] = (low, high), places
    if prod(high - low + 1 for (low, high), _ in free.values()) > MOST:
        raise UsageError(f"the ranges of {', '.join(free)} have over {MOST:,} shapes: give fewer")
    return free


MOST = 1 << 17
"""Shapes that ranges may have: each is held against the programs."""
_FIXED = "what the model does with them is no formula"


def _sizes(free: Free) -> list[dict[str, int]]:
    """All sizes of the ranges, from the largest down."""
    counts = [range(high, low - 1, -1) for (low, high), _ in free.values()]
    return [dict(zip(free, each, strict=True)) for each in product(*counts)]


def _over_tokens(packing: Packing, closed: Closed, free: Free) -> Sizes:
    """The shapes, ranges and sizes of a graph over tokens: all that batches may have."""
    label_of = {place: label for label, (_, places) in free.items() for place in places}
    ends = [label_of.get((packing.mask, axis), "") for axis in (0, 1)]
    sizes: list[dict[str, int]] = []
    for each in _sizes(free):
        own = zip(ends, closed[packing.mask][0], strict=True)
        batch, length = (each.get(label, size) for label, size in own)
        each[OFFSETS], counts, tokens = batch + 1, list[int](), batch
        while tokens <= batch * length and len(sizes) + len(counts) <= MOST:
            counts.append(row_count(tokens, length))
            tokens = counts[-1] + 1
        sizes += [{**each, TOKENS: count} for count in reversed(counts)]
        if len(sizes) > MOST:
            raise UsageError(
                f"batches have over {MOST:,} numbers of tokens: give narrower ranges, or no --pack"
            )
    if not sizes:
        raise UsageError("no batch has a token: give sizes from 1 on, or no --pack")
    free, closed = dict(free), dict(closed)
    for label, place in ((TOKENS, (packing.rows, 1)), (OFFSETS, (packing.offsets, 0))):
        found = [each[label] for each in sizes]
        free[label] = (min(found), max(found)), [place]
        shape, dtype = closed[place[0]]
        closed[place[0]] = (*shape[:-1], max(found)), dtype
    return closed, free, sizes


def _over(
    programs: Specializer,
    target: str,
    closed: Closed,
    free: Free,
    sizes: Iterable[Mapping[str, int]],
) -> list[_Compiled]:
    """Open programs, as few as serve all `sizes`."""
    symbols = programs.symbols(closed)
    of = {(name, axis): symbol for name, axis, symbol in symbols}
    symbol_of = {label: of[places[0]] for label, (_, places) in free.items()}
    whole = programs.numbers(closed)
    ends = {
        name: [
            next(
                (label for label, (_, places) in free.items() if (name, axis) in places), str(size)
            )
            for axis, size in enumerate(shape)
        ]
        for name, (shape, _) in closed.items()
    }
    ranges = {label: bounds for label, (bounds, _) in free.items()}
    compiled: list[_Compiled] = []
    for each in sizes:
        numbers = whole | {symbol_of[label]: size for label, size in each.items()}
        for one in reversed(compiled):
            assert one.served is not None
            if one.served.source.holds(numbers):
                one.served.sizes.append(numbers)
                break
        else:
            shapes = programs.changed(closed, numbers)
            planned = _lowered(programs, shapes)
            if planned.source is None:
                raise ModelError(f"{', '.join(free)} must be given size by size: {_FIXED}")
            served = _SizeRange(planned.source, symbols, [numbers], ends, ranges, symbol_of)
            made = planned.program, programs.model, served
            compiled.append(_Compiled(target, programs.hw, dict(shapes), *made))
    return compiled


def _opened(served: _SizeRange, trace: Trace) -> tuple[Program, dict[str, Any]]:
    """The program over open sizes, and what the manifest says of them."""
    opened = {symbol: trace.symbol(symbol, n) for symbol, n in served.sizes[0].items()}
    program: Program = served.source.traced(opened)
    checks = Formulas.of(trace.guards, tuple(opened))
    if not all(checks.hold(sizes) for sizes in served.sizes):
        raise ModelError(f"{', '.join(served.ranges)} must be given size by size: {_FIXED}")
    largest: dict[str, int] | None = {
        symbol: max(sizes[symbol] for sizes in served.sizes) for symbol in opened
    }
    if largest not in served.sizes:
        largest = None  # one layout for all of them would be of a program that there is not
    return program, {
        "symbols": [list(place) for place in served.symbols],
        "largest": largest,
        "names": served.ends,
        "ranges": [[label, *served.ranges[label], symbol] for label, symbol in served.own.items()],
    }


def _modules(
    compiled: Sequence[_Compiled], members: dict[str, bytes]
) -> tuple[dict[Module, Module], list[dict[str, Any]]]:
    """Compile all kernels into `members`: modules by what the file calls them, and their table."""
    wanted: dict[str, dict[Module, Launch]] = {}
    for one in compiled:
        calls = (*one.program.setup, *one.program.calls)
        launches = (x for c in calls for x in c.launches if not x.of_library)
        wanted.setdefault(one.hw.arch, {}).update(((x.source, x.defines), x) for x in launches)
    for arch, launches_of in wanted.items():
        nvrtc.compile_all(launches_of.values(), arch, workers=os.cpu_count() or 1)
    names: dict[Module, Module] = {}
    table = []
    for source, defines in dict.fromkeys(module for group in wanted.values() for module in group):
        cubins = {}
        for arch, group in wanted.items():
            if (source, defines) in group:
                cubin = nvrtc.compile(source, defines, arch)
                cubins[arch] = f"cubins/{digest_of([cubin])}.{arch}.cubin"
                members[cubins[arch]] = cubin
        names[source, defines] = (unique(source), defines)
        table.append({"source": unique(source), "defines": defines, "cubins": cubins})
    return names, table


def _closed(graph: ir.Model, shapes: Shapes, free: Free) -> Closed:
    """(shape, dtype) of every input, at the largest sizes of the ranges.

    Raises UsageError where one stays open.
    """
    largest = {place: high for (_, high), places in free.values() for place in places}
    inputs = {v.name or "": v for v in graph.graph.inputs}
    closed = {}
    for name in shapes:
        if name not in inputs:
            raise UsageError(f"the model has no input '{name}' (it has {list(inputs)})")
    for name, value in inputs.items():
        default = value.meta.get(DEFAULT)
        declared = value.shape if default is None else default.shape
        rank = list(declared) if declared is not None else None
        shape = list(shapes.get(name, rank or []))
        if rank is None and name not in shapes:
            raise UsageError(f"the shape of input '{name}' is dynamic: --input-shapes {name}:...")
        if rank is not None and len(shape) != len(rank):
            raise UsageError(f"input '{name}' has {len(rank)} dimensions, not {len(shape)}")
        shape = [largest.get((name, axis), size) for axis, size in enumerate(shape)]
        for axis, (dim, size) in enumerate(zip(rank or shape, shape, strict=True)):
            if not isinstance(size, int) or size < 0:
                symbol = getattr(dim, "value", None)
                raise UsageError(
                    f"input '{name}': the size of axis {axis} is dynamic: give it by --input-shapes"
                    + (f" or by --dim {symbol}=8" if symbol else "")
                )
            if isinstance(dim, int) and dim != size:
                raise UsageError(f"input '{name}': axis {axis} must be {dim}, not {size}")
        assert value.dtype is not None
        closed[name] = tuple(int(d) for d in shape), value.dtype.numpy().name
    return closed


def _lowered(programs: Specializer, shapes: TypedShapes) -> PlannedProgram:
    """The program for one set of shapes. Raises ModelError for what a file cannot hold."""
    try:
        planned = programs.of(shapes)
    except NeedsValues as needs:
        raise ModelError(
            f"the values of input {', '.join(needs.names)} decide about sizes, so no program "
            "serves all of them: make a constant of it"
        ) from needs
    program = planned.program
    if program.fallbacks:
        raise ModelError(
            f"{program.fallbacks[0]}, so it would run on onnxruntime, which a compiled file does "
            "without: run the .onnx file itself"
        )
    if program.stages:
        first = next(name for name, value in program.outputs if value is None)
        raise ModelError(
            f"the sizes of what computes '{first}' depend on data, so they cannot be compiled: run "
            "the .onnx file itself"
        )
    if any(b.kind == "random" for b in program.buffers):
        raise ModelError(
            "the model draws random numbers, whose state a compiled file does not keep: run the "
            ".onnx file itself"
        )
    return planned


def unique(source: str) -> str:
    """A module's name in the file: where its text came from, and what the text is."""
    path = "generated" if "\n" in source else source
    return f"{path}@{source_hash(source)}"


def relabel(program: Program, names: Mapping[Any, Any]) -> Program:
    """The program whose launches name modules as the file does."""

    def launch(x: Launch) -> Launch:
        if x.of_library:
            return x
        source, defines = names[x.source, x.defines]
        return replace(x, source=source, defines=defines)

    def renamed(calls: Sequence[Call]) -> tuple[Call, ...]:
        return tuple(replace(c, launches=tuple(map(launch, c.launches))) for c in calls)

    return replace(program, calls=renamed(program.calls), setup=renamed(program.setup))


def _without_weights(program: Program) -> Program:
    """The program whose folded and packed weights are weights as any other, by name."""
    weights = {b.id for b in program.buffers if b.kind == "weight"}
    constants = {k: v for k, v in program.constants.items() if k not in weights}
    return replace(program, constants=constants)


def _weights(graph: ir.Model, program: Program, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    for b in program.buffers:
        if b.kind != "weight" or b.name in tensors:
            continue
        if b.id in program.constants:
            tensors[b.name] = program.constants[b.id]
        else:
            value = graph.graph.initializers[b.name].const_value
            assert value is not None
            tensors[b.name] = value.numpy()
