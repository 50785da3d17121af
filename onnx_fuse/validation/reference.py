"""What runs in float64 where onnxruntime has no kernels: ONNX's own evaluator, and Scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import sliding_window_view
from onnx import NodeProto
from onnx_ir import DataType

from onnx_fuse import progress
from onnx_fuse.arrays import Array
from onnx_fuse.autodiff.emit import Emitter, expand
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.actual_sizes import same_pads
from onnx_fuse.ir.build import remove_unused_nodes
from onnx_fuse.ir.constants import one_line
from onnx_fuse.lower.pool import taps
from onnx_fuse.ops.recurrent import GATES
from onnx_fuse.rewrite.precision import widened
from onnx_fuse.runtime import ort
from onnx_fuse.validation.inputs import Feeds
from onnx_fuse.validation.values import by_name


def reference_evaluator(model: ir.Model) -> Any:
    """ONNX's own evaluator, with operators corrected in which it departs from the standard (1.23).

    Its Erf rounds to float32, its GatherElements takes no negative axis, its Pad no negative pads,
    its Scan no directions and no axes but 0; its Loop makes no step without a condition and stacks
    along no axis of its own; its DynamicQuantizeLinear takes the scale for a float32; its STFT has
    no signals of two axes; its Resize multiplies in float64; its LRN sums over as many channels as
    there are images; its convolutions of groups raise, and all are slow.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops import op_loop, op_scan

    erf = np.vectorize(math.erf, otypes=[np.float64])

    class Erf(OpRun):
        def _run(self, x: Array) -> tuple[Array]:
            return (erf(x) if x.size else x,)

    class Gelu(OpRun):
        def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
            if approximate == "tanh":
                return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
            return (0.5 * x * (1 + erf(x / math.sqrt(2))) if x.size else x,)

    class GatherElements(OpRun):
        def _run(self, x: Array, indices: Array, axis: int = 0) -> tuple[Array]:
            ahead = (slice(None) if k == axis % x.ndim else slice(n)
                     for k, n in enumerate(indices.shape))  # fmt: skip
            return (np.take_along_axis(x[tuple(ahead)], indices, axis),)

    class Pad(OpRun):
        def _run(
            self, x: Array, pads: Array, value: Array | None = None, axes: Array | None = None,
            mode: str = "constant",
        ) -> tuple[Array]:  # fmt: skip
            along = range(x.ndim) if axes is None else (int(a) % x.ndim for a in axes)
            each = dict(zip(along, pads.reshape(2, -1).T, strict=True))
            more = [tuple(int(max(p, 0)) for p in each.get(a, (0, 0))) for a in range(x.ndim)]
            less = [tuple(int(max(-p, 0)) for p in each.get(a, (0, 0))) for a in range(x.ndim)]
            fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
            y = np.pad(x, more, mode=mode, **fill)  # type: ignore[call-overload]
            return (y[tuple(slice(a, n - b) for (a, b), n in zip(less, y.shape, strict=True))],)

    class DynamicQuantizeLinear(OpRun):
        def _run(self, x: Array) -> tuple[Array, Array, Array]:
            high, low = max(x.max(initial=0), 0), min(x.min(initial=0), 0)
            scale = np.asarray((high - low) / 255 or 1, x.dtype)
            zero = np.clip(np.rint(-low / scale), 0, 255)
            return (
                np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8),
                scale,
                np.asarray(zero, np.uint8),
            )

    class STFT(OpRun):
        def _run(
            self, x: Array, step: Array, window: Array | None = None, length: Array | None = None,
            onesided: int = 1,
        ) -> tuple[Array]:  # fmt: skip
            size = int(length) if length is not None else len(window if window is not None else ())
            parts = np.moveaxis(x.reshape(*x.shape[:2], -1), -1, 0)
            signal = parts[0] if len(parts) == 1 else parts[0] + 1j * parts[1]
            frames = sliding_window_view(signal, size, 1)[:, :: int(step)]
            y = np.fft.fft(frames if window is None else frames * window)
            y = y[..., : size // 2 + 1 if onesided else size]
            return (np.stack([y.real, y.imag], -1).astype(x.dtype),)

    class LRN(OpRun):
        def _run(
            self, x: Array, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0,
            size: int = 1,
        ) -> tuple[Array]:  # fmt: skip
            ends = [(0, 0), ((size - 1) // 2, size // 2), *[(0, 0)] * (x.ndim - 2)]
            squares = sliding_window_view(np.pad(x * x, ends), size, 1).sum(-1)
            return (x / (bias + alpha / size * squares) ** beta,)

    class Conv(OpRun):
        def _run(
            self, x: Array, w: Array, b: Array | None = None, auto_pad: str = "NOTSET",
            dilations: Sequence[int] | None = None, group: int = 1,
            kernel_shape: Sequence[int] | None = None, pads: Sequence[int] | None = None,
            strides: Sequence[int] | None = None,
        ) -> tuple[Array]:  # fmt: skip
            return (_conv(x, w, b, auto_pad, dilations, group or 1, pads, strides),)

    class ConvTranspose(OpRun):
        def _run(
            self, x: Array, w: Array, b: Array | None = None, auto_pad: str = "NOTSET",
            dilations: Sequence[int] | None = None, group: int = 1,
            kernel_shape: Sequence[int] | None = None, output_padding: Sequence[int] | None = None,
            output_shape: Sequence[int] | None = None, pads: Sequence[int] | None = None,
            strides: Sequence[int] | None = None,
        ) -> tuple[Array]:  # fmt: skip
            n = x.ndim - 2
            steps, every = strides or [1] * n, dilations or [1] * n
            more, spans = output_padding or [0] * n, zip(w.shape[2:], every, strict=True)
            full = [(length - 1) * s + (k - 1) * d + 1 + p for length, s, (k, d), p in
                     zip(x.shape[2:], steps, spans, more, strict=True)]  # fmt: skip
            sizes = list(output_shape or ())[-n:]
            if not sizes and auto_pad.startswith("SAME"):
                sizes = [length * s for length, s in zip(x.shape[2:], steps, strict=True)]
            if sizes:
                cut = [max(a - b, 0) for a, b in zip(full, sizes, strict=True)]
                less, rest = [c // 2 for c in cut], [c - c // 2 for c in cut]
                pads = less + rest if auto_pad == "SAME_UPPER" else rest + less
            if output_shape:  # which may be longer than what the kernel reaches
                more = [p + max(b - a, 0) for p, a, b in zip(more, full, sizes, strict=True)]
            return (_turned_conv(x, w, b, dilations, group or 1, pads, strides, more),)

    class Resize(OpRun):
        def _run(
            self, x: Array, roi: Array | None = None, scales: Array | None = None,
            sizes: Array | None = None, antialias: int = 0, axes: Sequence[int] | None = None,
            coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
            exclude_outside: int = 0, extrapolation_value: float = 0.0,
            keep_aspect_ratio_policy: str = "stretch", mode: str = "nearest",
            nearest_mode: str = "round_prefer_floor",
        ) -> tuple[Array]:  # fmt: skip
            along = [a % x.ndim for a in axes or range(x.ndim)]
            lengths = np.array([x.shape[a] for a in along], np.float32)
            if scales is not None and scales.size:
                factors: Array = scales.astype(np.float32)
                wanted: Array = np.trunc(lengths * factors)
            else:
                wanted = np.asarray(sizes)
                factors = wanted.astype(np.float32) / np.maximum(lengths, 1)
                if keep_aspect_ratio_policy != "stretch":
                    pick = np.min if keep_aspect_ratio_policy == "not_larger" else np.max
                    factors = np.full_like(factors, pick(factors))
                    wanted = np.floor((lengths * factors).astype(float) + 0.5)
            if (wanted == lengths).all():
                return (x,)
            ends = np.array([0, 1]).repeat(len(along)) if roi is None or not roi.size else roi
            y = x
            for i, (a, size, factor) in enumerate(zip(along, wanted, factors, strict=True)):
                if factor == 1 or (antialias and size == x.shape[a]):
                    continue
                index, weight = taps(
                    x.shape[a], int(size), float(factor), mode=mode, nearest=nearest_mode,
                    transform=coordinate_transformation_mode, cubic=cubic_coeff_a,
                    exclude_outside=bool(exclude_outside), antialias=bool(antialias),
                    roi=(float(ends[i]), float(ends[i + len(along)])),
                )  # fmt: skip
                read = np.moveaxis(y, a, -1)[..., np.maximum(index, 0)]
                read = np.where(index < 0, extrapolation_value, read)
                y = np.moveaxis((read * weight).sum(-1), -1, a)
            return (y.astype(x.dtype),)

    forward: Any = op_scan.Scan

    class Scan(forward):  # type: ignore[misc]
        def __init__(self, node: NodeProto, run_params: Any) -> None:
            plain = NodeProto.FromString(node.SerializeToString())
            held = {a.name: list(a.ints) for a in node.attribute if a.name.startswith("scan_")}
            for attribute in [a for a in plain.attribute if a.name in held]:
                plain.attribute.remove(attribute)
            super().__init__(plain, run_params)
            self._held = held

        def _run(self, *args: Any, **more: Any) -> tuple[Any, ...]:
            states = len(args) - self.num_scan_inputs
            inputs = [*args[:states], *self._turned(args[states:], "input")]
            outputs = super()._run(*inputs, **more)
            return (*outputs[:states], *self._turned(outputs[states:], "output", back=True))

        def _turned(self, arrays: Sequence[Array], side: str, back: bool = False) -> list[Array]:
            axes = self._held.get(f"scan_{side}_axes", [0] * len(arrays))
            ways = self._held.get(f"scan_{side}_directions", [0] * len(arrays))
            ends = [(0, a) if back else (a, 0) for a in axes]
            turned = [np.flip(x, 0 if back else a) if w else x
                     for x, a, w in zip(arrays, axes, ways, strict=True)]  # fmt: skip
            return [np.moveaxis(x, *end) for x, end in zip(turned, ends, strict=True)]

    again: Any = op_loop.Loop

    class Loop(again):  # type: ignore[misc]
        K: Any
        _run_body: Any

        def __init__(self, node: NodeProto, run_params: Any) -> None:
            super().__init__(node, run_params)
            mine: Any = self
            self._stacked, mine.K = mine.K, 0
            self._steps: list[Sequence[Array]] = []
            self._step, mine._run_body = mine._run_body, self._kept

        def _run(self, trips: Any, condition: Any, *states: Any, **more: Any) -> tuple[Any, ...]:
            self._steps = []
            start = np.array(True) if condition is None else condition
            outputs = super()._run(trips, start, *states, **more)[: self.N]
            rows = ([step[1 + self.N + k] for step in self._steps] for k in range(self._stacked))
            return (*outputs, *(np.stack(each) if each else np.empty(0) for each in rows))

        def _kept(self, *args: Any, **more: Any) -> Sequence[Array]:
            self._steps.append(self._step(*args, **more))
            return self._steps[-1]

    mended: list[Any] = [Erf, Gelu, GatherElements, Pad, DynamicQuantizeLinear, Conv, ConvTranspose]
    mended += [LRN, STFT, Resize, Scan, Loop]
    evaluator = ReferenceEvaluator(to_proto(model), new_ops=mended)
    evaluator.rt_nodes_ = _Watched(evaluator.rt_nodes_)
    return evaluator


def write_recurrences(model: ir.Model) -> None:
    """Turn LSTM, GRU and RNN into Scans of their steps, in place.

    onnxruntime has these operators in float32 alone (1.32), and ONNX's evaluator ignores
    `sequence_lens` and knows one direction of an LSTM or a GRU.
    """
    nodes = [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if node.op_type in GATES and not node.domain
    ]
    if nodes:
        infer_shapes(model)
        op = Emitter(model)
        for node in nodes:
            assert isinstance(node.graph, ir.Graph)
            expand(node.graph, op, node)


class _Watched(list[Any]):
    """The nodes of an evaluator, which is slow enough for each of them to be a step."""

    def __iter__(self) -> Iterator[Any]:
        for i, node in enumerate(super().__iter__()):
            progress.report("running ONNX's own evaluator in float64", i, len(self))
            yield node


def _conv(
    x: Array,
    w: Array,
    b: Array | None,
    auto_pad: str,
    dilations: Sequence[int] | None,
    group: int,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> Array:
    """ONNX's Conv of any rank, as a product over windows."""
    rank = x.ndim - 2
    kernel, steps, every = w.shape[2:], strides or [1] * rank, dilations or [1] * rank
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, every, strict=True)]
    ends = list(pads or [0] * (2 * rank))
    if auto_pad.startswith("SAME"):
        sizes = zip(x.shape[2:], kernel, steps, strict=True)
        around = [same_pads(n, k, s, auto_pad, conv=True) for n, k, s in sizes]
        ends = [before for before, _ in around] + [max(after, 0) for _, after in around]
        cut = (slice(None),) * 2, (slice(max(-before, 0), None) for before in ends[:rank])
        x, ends = x[(*cut[0], *cut[1])], [max(p, 0) for p in ends]
    wide = np.pad(x, [(0, 0), (0, 0), *zip(ends[:rank], ends[rank:], strict=True)])
    windows: Any = sliding_window_view(wide, spans, tuple(range(2, 2 + rank)))
    windows = windows[(..., *(slice(None, None, d) for d in every))]
    windows = windows[(slice(None), slice(None), *(slice(None, None, s) for s in steps))]
    outer = windows.shape[2 : 2 + rank]
    perm = [0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank)]
    inner = w[0].size
    columns = windows.transpose(perm).reshape(x.shape[0], math.prod(outer), group, inner)
    filters = w.reshape(group, w.shape[0] // group, inner)
    y: Array = np.moveaxis(columns, 2, 1) @ filters.transpose(0, 2, 1)
    y = np.swapaxes(y, 2, 3).reshape(x.shape[0], w.shape[0], *outer)
    return y if b is None else y + b.reshape(-1, *[1] * rank)


def _turned_conv(
    x: Array,
    w: Array,
    b: Array | None,
    dilations: Sequence[int] | None,
    group: int,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    output_padding: Sequence[int] | None,
) -> Array:
    """ONNX's ConvTranspose of any rank: each place of the kernel adds a grid of products."""
    rank = x.ndim - 2
    kernel, steps, every = w.shape[2:], strides or [1] * rank, dilations or [1] * rank
    ends, more = list(pads or [0] * (2 * rank)), output_padding or [0] * rank
    each, filters = x.shape[2:], w.shape[1]
    rows = x.reshape(x.shape[0], group, x.shape[1] // group, -1)
    taps: Any = w.reshape(group, x.shape[1] // group, filters, *kernel)
    full = [(n - 1) * s + (k - 1) * d + 1 + p
             for n, s, k, d, p in zip(each, steps, kernel, every, more, strict=True)]  # fmt: skip
    y: Any = np.zeros((x.shape[0], group * filters, *full), x.dtype)
    for at in product(*map(range, kernel)):
        tap = taps[(..., *at)].transpose(0, 2, 1)
        part = (tap @ rows).reshape(x.shape[0], group * filters, *each)
        grid = zip(at, every, steps, each, strict=True)
        y[(..., *(slice(i * d, i * d + (n - 1) * s + 1, s) for i, d, s, n in grid))] += part
    inside = zip(ends[:rank], ends[rank:], full, strict=True)
    y = y[(..., *(slice(a, n - e) for a, e, n in inside))]
    return y if b is None else y + b.reshape(-1, *[1] * rank)


def evaluator_in_double(
    model: ir.Model, names: Sequence[str]
) -> Callable[[Feeds], dict[str, Array]]:
    """The model in float64: onnxruntime where it has the kernels, else the ONNX reference."""
    model = to_double(model)
    write_recurrences(model)
    model.graph.outputs[:] = list(by_name(model, names).values())
    remove_unused_nodes(model)  # ONNX's evaluator would run them, too
    inputs = [v.name or "" for v in model.graph.inputs]
    try:
        session = ort.session(model)
        return lambda feeds: dict(
            zip(names, ort.run(session, {k: feeds[k] for k in inputs}, names), strict=True)
        )
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        missing = ort.plain(error)
    reference = reference_evaluator(model)

    def evaluate(feeds: Feeds) -> dict[str, Array]:
        try:
            with np.errstate(all="ignore"):  # a guard selects what is no number afterwards
                outputs = reference.run(None, {k: feeds[k] for k in inputs})
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"nothing here runs the graph in float64, which checks its gradients: onnxruntime "
                f"says '{missing}', ONNX's own evaluator says '{one_line(error)}'"
            ) from error
        return dict(zip(names, outputs, strict=True))

    return evaluate


def in_double(feeds: Mapping[str, Array]) -> Feeds:
    """Floats of any width as float64, the rest as it is."""
    return {
        name: a.astype(np.float64) if DataType.from_numpy(a.dtype).is_floating_point() else a
        for name, a in feeds.items()
    }


_NARROW = (DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16)


def to_double(model: ir.Model) -> ir.Model:
    """A copy that computes in float64."""
    return widened(model, _NARROW, DataType.DOUBLE)
