"""Inferred sizes against those that onnxruntime makes: passes and programs believe the former."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import Builder, required
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.graphs import DualGraph
from onnx_fuse.validation.inputs import Feeds

_STRING = ir.DataType.STRING
_RUNS = 8
"""Inputs of other shapes that are run at most: each free axis at two sizes and at 1."""


def wrong_sizes(
    model: ir.Model,
    feeds: Sequence[Feeds],
    notes: list[str],
    threads: int = 0,
    file: str | os.PathLike[str] | None = None,
) -> list[str]:
    """A sentence for each node whose inferred sizes are not those of a run on onnxruntime.

    All results of the main graph are looked at, by a Shape node each: their numbers take no memory.
    What the file declares is left out, so that inference alone speaks. A symbol has to have one
    size in a run. `notes` takes why nothing could be compared. Weights of the model's `file` are
    read where they are.
    """
    plain = model.clone()
    for node in plain.graph:
        for value in node.outputs:
            value.shape = None
    infer_shapes(plain)
    values = [
        value
        for node in plain.graph
        for value in node.outputs
        if value.name and value.shape is not None and isinstance(value.type, ir.TensorType)
    ]
    packed = [v for v in values if v.dtype not in (None, _STRING) and v.dtype.bitwidth < 8]
    if packed:  # onnxruntime (1.32) has no Shape of these types
        notes.append(f"{len(packed)} inferred sizes of types of few bits are not compared")
        values = [v for v in values if v not in packed]
    op = Builder()
    shapes = [op.Shape(value) for value in values]
    for value, shape in zip(values, shapes, strict=True):
        shape.name, shape.dtype = f"{value.name} sizes", ir.DataType.INT64
    plain.graph.extend(op.nodes)
    plain.graph.outputs[:] = shapes
    sentences: dict[ir.Node, str] = {}
    try:
        graph = DualGraph.of_model(plain, file)
        opened = partial(ort.session, graph, as_written=True, threads=threads, spins="never")
        session = opened(prepacks=False) if values else None  # to pack takes as long as some runs
        for feed in _of_other_shapes(feeds) if values else ():
            answers = ort.run(session, feed)
            sizes = _symbols(plain, feed)
            actual = [[int(n) for n in answer] for answer in answers]
            makers = [required(value.producer()) for value in values]
            # what the steps of a Loop would give has sizes of 0 where it takes none
            loops = (y for y, maker in zip(actual, makers, strict=True) if maker.op_type == "Loop")
            idle = any(y[:1] == [0] for y in loops)
            for value, maker, y in zip(values, makers, actual, strict=True):
                contradiction = _contradiction(value, y, sizes)
                if contradiction and not (idle and 0 in y):
                    text = (
                        f"node '{maker.name or value.name}' ({maker.op_type}): '{value.name}' "
                        f"{contradiction}, which fusion relies on: please report this file"
                    )
                    sentences.setdefault(maker, text)
    except Exception as error:
        if not ort.is_fault(error):
            raise
        notes.append(f"inferred sizes are not compared with actual ones ({ort.plain(error)})")
    return list(sentences.values())


def _of_other_shapes(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
    """The first few feeds of which each has other shapes, and elements."""
    seen = set[tuple[tuple[str, tuple[int, ...]], ...]]()
    for feed in feeds:
        key = tuple((name, np.shape(array)) for name, array in sorted(feed.items()))
        holds = all(map(np.size, feed.values()))
        if holds and key not in seen and len(seen) < _RUNS:
            seen.add(key)
            yield feed


def _symbols(model: ir.Model, feed: Feeds) -> dict[str, int | None]:
    """The sizes that inputs give to symbols; None where they give several."""
    sizes: dict[str, int | None] = {}
    for value in model.graph.inputs:
        array = feed.get(value.name or "")
        if not isinstance(array, np.ndarray) or value.shape is None:
            continue
        for dim, size in zip(value.shape, array.shape, strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                same = sizes.setdefault(dim.value, size) == size
                sizes[dim.value] = size if same else None
    return sizes


def _contradiction(
    value: ir.Value, actual: Sequence[int], sizes: dict[str, int | None]
) -> str | None:
    inferred = value.shape
    assert inferred is not None
    if len(inferred) != len(actual):
        return f"has {len(actual)} axes on onnxruntime, inference says {len(inferred)}"
    for axis, (dim, size) in enumerate(zip(inferred, actual, strict=True)):
        bound = dim if isinstance(dim, int) else None
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            bound = sizes.setdefault(dim.value, size)
        if bound is not None and bound != size:
            name = "" if isinstance(dim, int) else f" ({dim.value})"
            return f"has size {size} along axis {axis} on onnxruntime, inference says {bound}{name}"
    return None
