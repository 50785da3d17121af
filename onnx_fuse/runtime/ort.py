"""The portable backend: stock onnxruntime on the CPU, and the guard against its faults."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy
from onnx_fuse.arrays import Array

# isort: split
import numpy as np
import onnx_ir
from onnx_ir import DataType

from onnx_fuse import guard
from onnx_fuse.container import is_container
from onnx_fuse.errors import ModelError, OnnxFuseError
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import fits_protobuf, inline, save, to_proto
from onnx_fuse.runtime.graphs import DualGraph
from onnx_fuse.runtime.recurrences import survivable
from onnx_fuse.runtime.tensor import Argument

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding, NodeArg, SessionOptions

T = TypeVar("T")
Source: TypeAlias = "str | os.PathLike[str] | bytes | onnx_ir.Model | DualGraph"
CPU_ONLY = ("CPUExecutionProvider",)
FATAL = 4  # onnxruntime's log severity: what it logs, it also raises


def session(
    model: Source,
    options: SessionOptions | None = None,
    *,
    as_written: bool = False,
    fallback: bool = True,
    providers: Sequence[Any] = CPU_ONLY,
    **quiet_settings: Any,
) -> Any:
    """An onnxruntime.InferenceSession of a path, bytes or ir.Model (fused ops carry their bodies),
    or of a graph whose weights it shares.

    `as_written` switches onnxruntime's own graph rewrites off: the oracle runs the nodes as they
    stand in the file. With `fallback` they are off, after a warning, where they break the graph.
    `providers` are onnxruntime's, which takes the first that it has for a node. Without `options`,
    those of `quiet_options(**quiet_settings)` count.
    A bfloat16 graph, which onnxruntime's CPU has hardly a kernel for, becomes a `Widened` session.
    Raises what onnxruntime raises.
    """
    import onnxruntime as ort

    if isinstance(model, str | os.PathLike) and (is_container(model) or _is_no_text(model)):
        model = read(model)
    quiet = options is None
    quietly = partial(quiet_options, as_written=as_written, **quiet_settings)
    options = options or quietly()
    chosen, off = options.graph_optimization_level, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if as_written and chosen != off:
        options.graph_optimization_level = off
        try:
            return session(model, options, providers=providers)
        finally:
            options.graph_optimization_level = chosen  # the caller's, who may use them again
    fallback = fallback and chosen != off
    try:
        if quiet and isinstance(model, DualGraph) and tuple(providers) == CPU_ONLY:
            opened = _over_weights(model, quietly())
        else:
            opened = _session(model, options, providers)
    except Exception as error:
        if not is_fault(error):
            raise
        graph = _graph(model)
        if written := _written_out(graph):
            return session(
                written, options, as_written=as_written, fallback=fallback, providers=providers
            )
        if any(v.dtype == DataType.BFLOAT16 for v in _values(graph)):
            return Widened(graph, options, providers)
        if _INT8_CLASH in str(error) and chosen != off:
            return _session(model, options, providers, disabled_optimizers=[_INT8_REWRITE])
        if not fallback:
            raise
        try:
            opened = session(model, options, as_written=True, providers=providers)
        except Exception as again:
            if not is_fault(again):
                raise
            raise error from None
        _warn_of_optimizations(error)
        return opened
    # Its Python API has no arrays of this type.
    ends = [*opened.get_inputs(), *opened.get_outputs()]
    if any(e.type == _BFLOAT16 for e in ends):
        return Widened(_graph(model), options, providers)
    reopen = partial(session, model, options, as_written=True, providers=providers)
    return WithFallback(opened, reopen) if fallback else opened


def _written_out(graph: onnx_ir.Model) -> onnx_ir.Model | None:
    """The graph with the bodies of contrib nodes that onnxruntime's CPU has no kernel for.

    None where there is none. Raises ModelError where one has no body.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    from onnx_fuse.importer import contrib

    kernels = {(k.domain, k.op_name) for k in get_all_opkernel_def() if k.provider in CPU_ONLY}

    def lacks_kernel(node: onnx_ir.Node) -> bool:
        return node.domain == contrib.MICROSOFT and (node.domain, node.op_type) not in kernels

    if not any(map(lacks_kernel, onnx_ir.traversal.RecursiveGraphIterator(graph.graph))):
        return None
    written = graph.clone()
    for name, reason in contrib.expand(written, lacks_kernel).items():
        left = next(filter(lacks_kernel, onnx_ir.traversal.RecursiveGraphIterator(written.graph)))
        raise ModelError(
            f"{name}: onnxruntime's CPU has no kernel for {left.op_type}, and this one cannot be "
            f"written in standard ONNX: {reason}"
        )
    return written


def _warn_of_optimizations(error: BaseException) -> None:
    warnings.warn(
        "onnxruntime's own optimizations break this graph, which runs without them: "
        f"{plain(error)}",
        stacklevel=5,
    )


def _is_no_text(path: str | os.PathLike[str]) -> bool:
    """Whether a path holds bytes that are no UTF-8, by which onnxruntime opens no file."""
    return re.search("[\ud800-\udfff]", os.fspath(path)) is not None


# What `onnx.save.loadable` describes, and the rewrite that makes int8 uint8.
_INT8_CLASH = "output_dtype INT8 does not match y_zero_point type UINT8"
_INT8_REWRITE = "QDQS8ToU8Transformer"


def quiet_options(
    *,
    as_written: bool = False,
    threads: int = 0,
    spins: Literal["always", "in runs", "never"] = "always",
    prepacks: bool = True,
) -> Any:
    """SessionOptions that log nothing.

    An operator has `threads`, 0 for one on each core, which spin where they wait: that costs CPU
    time and saves time. Without `prepacks` a session opens sooner and runs slower.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads
    if spins == "in runs":
        options.add_session_config_entry("session.force_spinning_stop", "1")
    elif spins == "never":
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not prepacks:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if as_written:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _over_weights(graph: DualGraph, options: SessionOptions) -> Any:
    """A session over the arrays of a graph's weights: none of them is parsed.

    The options name these, and would pass them on to the next model: they are for this one.
    """
    import onnxruntime as ort

    of_numpy = ort.OrtValue.ortvalue_from_numpy_with_onnx_type
    values = [of_numpy(array, kind) for array, kind in graph.weights.values()]
    options.add_external_initializers(list(graph.weights), values)
    if graph.folder is not None:
        options.add_session_config_entry(_FOLDER, str(graph.folder))
    opened = _session(graph.data, options, CPU_ONLY)
    opened.onnx_fuse_weights = graph  # as long as somebody has the session
    return opened


_FOLDER = "session.model_external_initializers_file_folder_path"
"""The option for the folder of the files that a protobuf in memory names."""


def _session(model: Source, options: SessionOptions, providers: Sequence[Any], **more: Any) -> Any:
    import onnxruntime as ort

    if isinstance(model, DualGraph):
        model = model.model
    if isinstance(model, onnx_ir.Model):
        if tuple(providers) != CPU_ONLY:
            model = inline(model)  # OpenVINO refuses what is not in the standard
        if not options.enable_profiling:  # which names the nodes of the model
            model = survivable(model)
        if fits_protobuf(model):
            proto = to_proto(model, shapes=False)
            return ort.InferenceSession(proto.SerializeToString(), options, providers, **more)
        with tempfile.TemporaryDirectory(prefix="onnx-fuse-") as folder:
            path = Path(folder) / "model.onnx"
            save(model, path, external=True, shapes=False)
            return ort.InferenceSession(str(path), options, providers, **more)
    source = model if isinstance(model, bytes) else os.fspath(model)
    return ort.InferenceSession(source, options, providers, **more)


def _graph(model: Source) -> onnx_ir.Model:
    if isinstance(model, DualGraph):
        return model.model
    return model if isinstance(model, onnx_ir.Model) else read(model)


def _values(model: onnx_ir.Model) -> Iterator[onnx_ir.Value]:
    """Inputs, weights and results of nodes."""
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        yield from node.outputs


_BFLOAT16 = "tensor(bfloat16)"


class _Around:
    """A session around onnxruntime's, which answers what is not defined here."""

    _inner: InferenceSession

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


_NODE_FAILED = "Non-zero status code returned while running"


class WithFallback(_Around):
    """A session that runs its graph as written once onnxruntime's optimizations broke it."""

    def __init__(self, inner: object, as_written: Callable[[], Any]) -> None:
        self._inner, self._open_as_written = inner, as_written
        self._optimized, self._as_written = inner, None  # what bindings were made for stays

    def run(
        self, names: Sequence[str] | None, feeds: Mapping[str, Array], options: object = None
    ) -> list[Any]:
        """Run the session; what fails in a node is run as written, if that does not fail too."""
        return list(self._tried(lambda inner: inner.run(names, feeds, options)))

    def run_with_iobinding(self, iobinding: IOBinding, run_options: object = None) -> None:
        """Run on what is bound, as `run` does."""
        # onnxruntime's Python asks that the binding be the session's own; its C++ does not
        self._tried(lambda inner: inner._sess.run_with_iobinding(iobinding._iobinding, run_options))

    def _tried(self, runs: Callable[[Any], T]) -> T:
        try:
            return runs(self._inner)
        except Exception as error:
            if _NODE_FAILED not in str(error) or self._inner is self._as_written:
                raise
            try:
                if self._as_written is None:
                    self._as_written = self._open_as_written()
                result = runs(self._as_written)
            except Exception as again:
                if not is_fault(again):
                    raise
                raise error from None
            _warn_of_optimizations(error)
        self._inner = self._as_written
        return result


class Widened(_Around):
    """A session of a bfloat16 graph that computes in float32 between ends of their own types.

    Results are rounded to bfloat16 once, at the outputs. All else is the session's.
    """

    note = "onnxruntime's CPU has no bfloat16 kernels: computed in float32"

    def __init__(self, model: onnx_ir.Model, options: object, providers: Sequence[Any]) -> None:
        from onnx_fuse.rewrite.precision import widened  # no other session needs its passes

        wide = widened(model, (DataType.BFLOAT16,), DataType.FLOAT)
        self._inner = _session(wide, options, providers)
        narrow = {v.name for v in model.graph.inputs if v.dtype == DataType.BFLOAT16}
        narrow |= {v.name for v in model.graph.outputs if v.dtype == DataType.BFLOAT16}
        self._narrow = narrow

    def get_inputs(self) -> list[Argument]:
        """The inputs as the model has them."""
        return [self._argument(a) for a in self._inner.get_inputs()]

    def get_outputs(self) -> list[Argument]:
        """The outputs as the model has them."""
        return [self._argument(a) for a in self._inner.get_outputs()]

    def _argument(self, end: NodeArg) -> Argument:
        kind = _BFLOAT16 if end.name in self._narrow else end.type
        return Argument(end.name, kind, end.shape)

    def run(
        self, names: Sequence[str] | None, feeds: Mapping[str, Array], options: object = None
    ) -> list[Any]:
        """Run the inner session; arrays of bfloat16 have the type of ml_dtypes."""
        wide = {k: a.astype(np.float32) if k in self._narrow else a for k, a in feeds.items()}
        names = list(names or [end.name for end in self._inner.get_outputs()])
        results = self._inner.run(names, wide, options)
        kind = DataType.BFLOAT16.numpy()
        with np.errstate(over="ignore"):
            return [
                y.astype(kind) if n in self._narrow else y
                for n, y in zip(names, results, strict=True)
            ]


def run(session: Any, feeds: Mapping[str, Array], names: Sequence[str] | None = None) -> list[Any]:
    """`session.run` without onnxruntime's log lines; outputs in the order of `names`."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = FATAL
    return list(session.run(None if names is None else list(names), dict(feeds), options))


@contextlib.contextmanager
def faults(name: str) -> Iterator[None]:
    """What onnxruntime raises within the block, as a ModelError of one line that names `name`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OnnxFuseError) or not is_fault(error):
            raise
        raise ModelError(f"{name}: onnxruntime: {plain(error)}") from error


def plain(error: BaseException) -> str:
    """An error's text on one line, without onnxruntime's numbers and C++ signatures."""
    if isinstance(error, UnicodeDecodeError):
        return "an output holds text that is not UTF-8"
    if unserved := _NO_KERNEL.search(str(error)):
        return "no kernel takes the types of {} '{}'".format(*unserved.groups())
    return _NOISE.sub("", " ".join(str(error).split()))[:400]


def refuse_types(error: BaseException) -> None:
    """Raise ModelError where onnxruntime has no kernel for the types of a node."""
    if _NO_KERNEL.search(str(error)):
        raise ModelError(
            f"onnxruntime's CPU cannot run this model: {plain(error)}; "
            'device="cuda" has kernels of its own'
        ) from error


_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*)'")
"""What onnxruntime says of a node's operator and name."""


# Its own error numbers, and the C++ function an error was raised in.
_NOISE = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed: ?|"
    r"/onnxruntime(?:_src)?/\S+:\d+ .*?\)(?: const)? (?:\[with .*?\] (?=\[))?"
)


def is_fault(error: BaseException) -> bool:
    """Whether onnxruntime raised this exception."""
    # what a run of bindings raises in C++ is a plain RuntimeError
    if type(error).__module__.startswith("onnxruntime") or _NODE_FAILED in str(error):
        return True
    trace = error.__traceback__
    while trace is not None:
        if "onnxruntime" in trace.tb_frame.f_globals.get("__name__", ""):
            return True
        trace = trace.tb_next
    return False


def guarded(work: Callable[[], T], name: str) -> T:
    """`work()` in a forked child: a crash inside onnxruntime becomes a ModelError about `name`.

    onnxruntime can die on a graph that the checker accepts (a bad attribute, a size it trusts).
    """
    with in_background(work, name) as answer:
        return answer()


@contextlib.contextmanager
def in_background(work: Callable[[], T], name: str) -> Iterator[Callable[[], T]]:
    """`guarded`, of which the block is given the answer when it asks."""
    import onnxruntime  # noqa: F401 - once, and not in each child

    def faults_named() -> T:
        with faults(name):
            return work()

    with guard.in_background(faults_named, name) as answer:

        def crash_named() -> T:
            try:
                return answer()
            except guard.Crash as error:
                raise ModelError(f"{name}: onnxruntime crashed on this graph ({error})") from error

        yield crash_named
