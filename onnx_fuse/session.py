"""InferenceSession: what a user of onnxruntime expects, over the fused graph."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from onnx_fuse import config
from onnx_fuse.container import digest_of_file, in_threads, is_container, stamp
from onnx_fuse.errors import DeviceError, UsageError, did_you_mean, listed
from onnx_fuse.feeds import (
    InputSpec,
    Interface,
    SharedSizes,
    checked_feeds,
    invalid,
    rows_of,
    shared_sizes,
    warn_of_different,
)
from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.packing import Packing
from onnx_fuse.program.problem import PRECISIONS
from onnx_fuse.runtime.deployed import Deployed

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_fuse import cache
    from onnx_fuse.adapters.held import HeldAdapters, Rows
    from onnx_fuse.ir.constants import Model
    from onnx_fuse.runtime.executable import Executable
    from onnx_fuse.runtime.graphs import DualGraph
    from onnx_fuse.runtime.program_cache import Origin

__all__ = ["InferenceSession"]
__dir__ = __all__.copy

DEVICES = ("cpu", "cuda")


class InferenceSession:
    """A model made ready to run, with the interface of onnxruntime.InferenceSession.

    Any number of threads may run one session. What is not defined here (run_async, end_profiling,
    ...) is onnxruntime's own, on the same graph.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model, or the path of a file that
            `onnx-fuse compile` has written. Such a file runs on "cuda" in the shapes and the
            precision it was compiled for, without NVRTC and without any ONNX library.
        sess_options: onnxruntime.SessionOptions of the CPU session; ignored on "cuda".
        providers: Execution providers, as onnxruntime has them, instead of `device`:
            ["CUDAExecutionProvider"] means "cuda", and
            [("CUDAExecutionProvider", {"device_id": 1})] the second GPU. The first one that this
            machine has is used, with a warning for each before it. One that is not this package's,
            such as "OpenVINOExecutionProvider", goes to onnxruntime with those after it.
        device: "cpu" (the default) runs the fused graph on onnxruntime, "cuda" runs it on this
            package's own kernels, and "cuda:1" on the second GPU.
        optimize: False runs the graph as it is.
        level: Level of the fusions, 0 to 3, as in `optimize`.
        precision: What "cuda" computes in. "fp32" multiplies matrices as IEEE says, "tf32" rounds
            the operands to 11 bits, "bf16x3" and "bf16x6" compute a float32 multiplication as three
            or six in bfloat16 (relative errors of 4e-6, and of float32 itself), and "bf16" and
            "fp16" compute in 16 bits. Inputs and outputs keep their types.
        recompile: Compile the graph that is in a compiled file here, as any other model's.
        pack: Compute on "cuda" only the tokens that the model's attention mask shows, not the
            padding (docs/padding.md). "zero" does so where an output has a row for each token, too:
            it is zero at the padding. A batch that cannot be packed runs with its padding, with
            one warning.
        batch_invariant: On "cuda", give a row the same bits whatever else is in its batch (True: in
            batches of up to 32), or of up to a number, or whatever the sizes of some dynamic
            dimensions are, by name, up to a number each (docs/howto/invariant.md).

    Raises:
        ModelError: The model is malformed or unsupported, or `pack` finds that its padding may be
            read.
        DeviceError: `device` is "cuda" and there is no usable GPU.
        UsageError: There is no such device, precision or provider, or none of the providers.
    """

    def __init__(
        self,
        model: Model,
        sess_options: object = None,
        providers: Sequence[Any] | None = None,
        *,
        device: str | None = None,
        optimize: bool = True,
        level: int = 2,
        precision: str = "fp32",
        recompile: bool = False,
        pack: bool | Literal["zero"] = False,
        batch_invariant: bool | int | Mapping[str, int] = False,
    ) -> None:
        self.device, gpu, self._providers = _device(device, providers)
        if pack not in (False, True, "zero"):
            raise UsageError(f"there is no pack={pack!r}: it is False, True or 'zero'")
        if pack and (self.device != "cuda" or not optimize):
            raise UsageError("pack is for device 'cuda', for a model that is optimized")
        if pack and batch_invariant is not False:
            raise UsageError("pack puts a batch's tokens together: leave it or batch_invariant out")
        self._pack, self._warned = pack, False
        self._packing: Packing | None = None
        if precision not in (PRECISIONS if self.device == "cuda" else ("fp32",)):
            raise UsageError(
                f"there is no precision '{precision}' on device '{self.device}': "
                f"device 'cuda' has {', '.join(PRECISIONS)}, device 'cpu' fp32"
            )
        if self.device == "cuda":
            from onnx_fuse.runtime.device import begin

            begin(gpu)
        kind = PRECISIONS[precision][0]
        self._computes_in = None if kind == "float32" else dtype_of(kind)
        self._source, self._options = model, sess_options
        self._alike = partial(
            InferenceSession, sess_options=sess_options, optimize=optimize, level=level,
            precision=precision, device=f"cuda:{gpu}" if self.device == "cuda" else None,
            batch_invariant=batch_invariant,
            providers=self._providers if self.device == "cpu" else None,
        )  # fmt: skip
        self._level: int | None = None
        self._cached: DualGraph | None = None
        self._executable: Executable | None = None
        self._invariant = batch_invariant
        if batch_invariant is not False and (
            self.device == "cpu" or (not recompile and _is_compiled(model))
        ):
            raise UsageError(
                "batch_invariant needs device 'cuda' and an ONNX file: sums of onnxruntime depend "
                "on the batch (ReduceMean does), and a compiled file has its programs already"
            )
        if self.device == "cuda" and not recompile and _is_compiled(model):
            from onnx_fuse.runtime import executable

            compiled = model if isinstance(model, Deployed) else Deployed(model)  # type: ignore[arg-type]
            compiled.check_precision(precision)
            self._interface = Interface.of_compiled(compiled)
            if pack:
                compiled, self._packing = compiled.packed(pack)
            self._executable = executable.Executable(compiled, device_id=gpu)
            self._executable.check()
            return
        _require_graphs()
        self._level = level if optimize else None
        if self.device == "cpu":
            self._session  # noqa: B018 - what onnxruntime refuses, it refuses now
        else:
            made = self._executable = self._on_gpu(precision, gpu)
            shared = shared_sizes(self.get_inputs()) if optimize else {}
            if self._invariant is not False:
                made.on_shape = partial(_check_sizes, made.model, shared)
            elif shared:
                made.on_shape = partial(warn_of_different, shared)

    def _on_gpu(self, precision: str, gpu: int) -> Executable:
        """The graph's Executable; what optimizing and `precision` make of it may be kept."""
        from onnx_fuse.runtime.invariance import note

        more: dict[str, object] = {"pack": self._pack} if self._pack else {}
        if self._invariant is not False:
            more["batch_invariant"] = repr(self._invariant)
        entry = self._entry(precision=precision, **more)
        cached = entry.load() if entry else None
        if entry and cached is None:  # the kernels of a new file are likely to be new as well
            from onnx_fuse.cuda import nvrtc

            nvrtc.begin_loading()
        graph = self.model if cached is None else cached[0]
        note(graph, self._invariant)
        self._packing = Packing.of(graph) if self._pack else None
        self._interface = Interface.of_graph(graph, self._packing.added if self._packing else ())
        if cached is None:
            executable = _executable(self.model, precision, gpu)
            if entry:
                executable.on_lowered = entry.store
            return executable
        graph, origin = cached
        if PRECISIONS[precision][0] == "float32":
            self.model = graph
        else:
            precision = "fp32"  # its weights are of the precision already
        executable = _executable(graph, precision, gpu)
        ready: Future[Origin | None] = Future()
        ready.set_result(origin)
        executable.keep(ready)
        return executable

    def _entry(self, **options: object) -> cache.Entry | None:
        """The place of the optimized graph in the cache, None where it is not kept."""
        digest = _digest(self._source) if self._level is not None else None
        from onnx_fuse import cache  # while the file is read

        if digest is None or (identity := digest.result()) is None:
            return None
        options["level"] = self._level
        return cache.Entry(Path(self._source), *identity, options)  # type: ignore[arg-type]

    def _read(self) -> ir.Model:
        """The model as it is before it is optimized."""
        return load(self._source)

    @cached_property
    def model(self) -> ir.Model:
        """The graph that runs; of a compiled file, the one that its programs were made of."""
        if self._cached is not None:
            return self._cached.model
        graph = self._read()
        if self._level is not None:
            from onnx_fuse import rewrite

            rewrite.optimize(graph, level=self._level, own_kernels=self.device == "cuda")
        if self._pack:
            from onnx_fuse.rewrite.padding import pack

            graph = pack(graph, zero=self._pack == "zero")
        return graph

    @cached_property
    def _session(self) -> Any:
        """The onnxruntime session of the same graph; on "cuda" it is made at its first use."""
        import onnxruntime

        from onnx_fuse.runtime import ort

        entry = self._entry(onnxruntime=onnxruntime.__version__) if self.device == "cpu" else None
        self._cached = entry.portable() if entry else None
        opened = partial(ort.session, options=self._options, providers=self._providers)
        try:
            session = opened(self._cached or self.model)
        except Exception as error:
            if self._level is None or not ort.is_fault(error):
                raise
            # its inference contradicts what is folded, as of pools with SAME and dilations; where
            # it refuses the file too, that error names a node of the file
            try:
                session, entry = opened(self._read()), None
            except Exception as again:
                ort.refuse_types(again)
                raise
            text = "onnxruntime refuses the fused graph, and the file runs as it is"
            warnings.warn(f"{text}: {ort.plain(error)}", stacklevel=3)
        if entry and self._cached is None:
            entry.store(self.model, portable=True)
        if isinstance(session, ort.Widened):
            warnings.warn(session.note, stacklevel=3)
        return session

    def get_inputs(self) -> list[Any]:
        """The inputs that a run needs, as objects with `name`, `type` and `shape`.

        `type` is onnxruntime's name of it, such as "tensor(float)". A size in `shape` is an int, or
        a str or None where it is free.
        """
        if self._executable is None:
            return list(self._session.get_inputs())
        return list(self._interface.inputs)

    def get_overridable_initializers(self) -> list[Any]:
        """The inputs that a run may leave out, since the model has a default for them."""
        if self._executable is None:
            return list(self._session.get_overridable_initializers())
        return list(self._interface.overridable)

    def get_outputs(self) -> list[Any]:
        """The model's outputs, as objects with `name`, `type` and `shape` (see `get_inputs`)."""
        if self._executable is None:
            return list(self._session.get_outputs())
        return list(self._interface.outputs)

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: object = None,
        *,
        adapter: Rows | None = None,
    ) -> list[Any]:
        """Run the model once and wait for the result.

        Args:
            output_names: The outputs wanted; None or an empty list asks for all.
            input_feed: Arrays by input name: NumPy arrays, or tensors of any library with DLPack or
                the CUDA array interface. Types and shapes must be the model's.
            run_options: onnxruntime.RunOptions of the CPU session; ignored on "cuda".
            adapter: The name of an adapter (`add_adapter`), or one for each row of the batch, None
                for rows that run without.

        Returns:
            The outputs as NumPy arrays, in the order of `output_names`.

        Raises:
            ValueError: An input is missing.
            onnxruntime's InvalidArgument: A name, type or shape is wrong (UsageError where
                onnxruntime is not installed).
            DeviceError: A kernel failed.
            UsageError: There is no such adapter, or not one for each row.
        """
        if not isinstance(input_feed, Mapping):
            raise UsageError(
                f"the inputs are of type {type(input_feed).__name__}: give arrays by input name"
            )
        output_names = listed("output_names", output_names or ())
        if adapter is not None:
            session, more = self._adapters.feeds(adapter, partial(rows_of, input_feed))
            if session is not None:
                return list(session.run(output_names, {**input_feed, **more}, run_options))
        if self._executable is None:
            feeds = {name: _host(value) for name, value in input_feed.items()}
            return list(self._session.run(output_names or None, feeds, run_options))
        names = self._output_names
        if output_names:
            names = output_names
            for name in names:
                if name not in self._output_names:
                    raise invalid(f"Invalid output name:{name}")
        executable, prepared = self._prepared(input_feed)
        return list(executable.run(names, prepared))

    @cached_property
    def _adapters(self) -> HeldAdapters:
        from onnx_fuse.adapters.held import AdaptedFile, HeldAdapters

        compiled = self._executable and self._executable.model
        if isinstance(compiled, Deployed):
            return HeldAdapters(AdaptedFile(compiled, self._alike), batch_invariant=False)
        from onnx_fuse.adapters.inputs import AdaptedModel

        model = AdaptedModel(self._read, self._alike, self._computes_in)
        return HeldAdapters(model, batch_invariant=self._invariant is not False)

    def adapted(self, adapter: Rows, batch: int) -> tuple[InferenceSession, dict[str, Any]]:
        """The session that runs a batch with its adapters, and what that is fed besides.

        Raises UsageError as `run` does.
        """
        session, more = self._adapters.feeds(adapter, lambda _: batch)
        return (self if session is None else session), more

    def add_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Hold a low-rank adapter (LoRA), by whose name `run` has it beside the weights.

        The weights stay as they are, and another adapter of the same weights and of a similar rank
        needs no other program (docs/howto/adapters.md).

        Args:
            name: The name, in whose place another adapter may stand.
            path: A folder that PEFT wrote, a file of onnxruntime's `AdapterFormat` (.onnx_adapter),
                or one of `Trainer.save_adapters` (.safetensors).

        Raises:
            DataError: The file is no adapter of this model.
            UsageError: The session has `pack`, or a file that was compiled without --adapter-rank.
        """
        if self._pack:
            raise UsageError("a session with pack takes no adapters: leave pack out")
        self._adapters.add(name, path)

    def remove_adapter(self, name: str) -> None:
        """Let go of an adapter. Raises UsageError where there is none of that name."""
        self._adapters.remove(name)

    def get_adapters(self) -> list[str]:
        """The names of the adapters that `add_adapter` has been given."""
        return self._adapters.names

    def io_binding(self) -> Any:
        """An object that says where inputs come from and where outputs go, as onnxruntime has it.

        On "cuda" both may be GPU memory, which is read and written in place (docs/binding.md). With
        `pack` each run waits for the mask, which it reads on the host.
        """
        return (self._executable or self._session).io_binding()

    def run_with_iobinding(
        self,
        iobinding: Any,
        run_options: object = None,
        *,
        stream: object = None,
        synchronize: bool = True,
    ) -> None:
        """Run on what is bound; `iobinding.get_outputs()` has the results.

        Args:
            iobinding: The result of `io_binding`, with inputs and outputs bound.
            run_options: onnxruntime.RunOptions of the CPU session; ignored on "cuda".
            stream: The CUDA stream that the run is enqueued in, in order with everything else
                there: a handle (an int) or an object with `__cuda_stream__`. The default is the
                session's own stream.
            synchronize: False returns before the run is done;
                `iobinding.synchronize_outputs()` waits for it.

        Raises:
            UsageError: Something is not bound, or the device has no streams.
            DeviceError: A kernel failed.
        """
        if self._executable is None:
            if stream is not None:
                raise UsageError("device 'cpu' has no CUDA streams: leave `stream` out")
            self._session.run_with_iobinding(iobinding, run_options)
            return
        executable, fed = self._executable, None
        if self._packing is not None:
            if stream is not None:  # in which the mask may still be made
                executable.shared.order.stream(stream).before(executable.stream)
            fed = iobinding.recall(partial(executable.beside, self._packing))
            if fed is None:
                executable, fed = self._prepared(iobinding.feeds)
            if executable is not self._executable:  # its stream and the usual one have no order
                iobinding.synchronize_outputs()
                synchronize = True
        checked = lambda given: fed or self._feeds(given)  # noqa: E731
        executable.run_with_iobinding(iobinding, checked, stream=stream, synchronize=synchronize)
        iobinding.keep(fed)

    def explain(self, input_feed: Mapping[str, Any]) -> str:
        """A listing of what runs for these feeds: kernel calls, why each was chosen, memory.

        With `batch_invariant` also what that costs. Raises UsageError unless the device is "cuda".
        """
        executable, feeds = self._prepared(input_feed)
        listing = str(executable.instance(feeds))
        if self._invariant is not False:
            here, usual = (f"{1e6 * seconds:,.1f} us" for seconds in self.predicted(input_feed))
            return f"{listing}\nbatch-invariant: predicted {here}, else {usual}"
        if self._packing is None or self._packing.rows not in feeds:
            return listing
        mask = feeds[self._packing.mask].shape
        rows = feeds[self._packing.rows].shape[1]
        return f"padding is packed: {rows} rows for {mask[0]} x {mask[1]}\n{listing}"

    def predicted(self, input_feed: Mapping[str, Any]) -> tuple[float, float]:
        """The predicted seconds of the kernels for these feeds, and without `batch_invariant`.

        Raises UsageError unless the device is "cuda".
        """
        from onnx_fuse.kernels import chosen_seconds
        from onnx_fuse.runtime.invariance import note
        from onnx_fuse.runtime.specialize import Specializer

        executable, feeds = self._prepared(input_feed)
        graph, hw = executable.model.clone(), executable.hw
        note(graph, False)
        shapes = {name: (value.shape, value.dtype.name) for name, value in feeds.items()}
        usual = Specializer(graph, hw, math=executable.math).of(shapes).program
        plans = executable.instance(feeds).program.calls, usual.calls
        one, other = (sum(chosen_seconds(c, hw) for c in calls if c.launches) for calls in plans)
        return one, other

    def program(self, input_feed: Mapping[str, Any]) -> tuple[Any, Any]:
        """The program.call.Program that these feeds run, and its program.problem.Hardware.

        Raises UsageError unless the device is "cuda".
        """
        executable, feeds = self._prepared(input_feed)
        return executable.instance(feeds).program, executable.hw

    def profile(self, input_feed: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
        """Number of calls and microseconds in all by kernel, the longest first.

        Each call is timed by itself. Raises UsageError unless the device is "cuda".
        """
        times: dict[str, tuple[int, float]] = {}
        executable, feeds = self._prepared(input_feed)
        for call, seconds in executable.instance(feeds).profile():
            calls, us = times.get(call.kernel, (0, 0.0))
            times[call.kernel] = (calls + 1, us + 1e6 * seconds)
        return dict(sorted(times.items(), key=lambda item: -item[1][1]))

    def release_memory(self) -> int:
        """Free the GPU memory that runs hold, except weights; return the number of bytes freed.

        The next run allocates it again. Raises UsageError unless the device is "cuda".
        """
        return int(self._on_cuda().release_memory())

    def _on_cuda(self) -> Any:
        if self._executable is None:
            raise UsageError(
                'this session runs on device "cpu": only device="cuda" has GPU programs and memory'
            )
        return self._executable

    @cached_property
    def _output_names(self) -> list[str]:
        return [end.name for end in self._interface.outputs]

    @cached_property
    def _input_specs(self) -> list[InputSpec]:
        return [InputSpec(v) for v in (*self.get_inputs(), *self.get_overridable_initializers())]

    def _feeds(self, input_feed: Mapping[str, Any]) -> Mapping[str, Any]:
        """The feeds checked, with the defaults of those left out."""
        if len(input_feed) == len(self._input_specs):
            for end in self._input_specs:
                if not end.accepts(input_feed.get(end.name)):
                    break
            else:
                return input_feed
        feeds = {
            name: self._on_cuda().adopt(value) if _on_gpu(value) else _host(value)
            for name, value in input_feed.items()
        }
        return checked_feeds(self._input_specs, {**self._interface.defaults, **feeds})

    def _prepared(self, input_feed: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """What runs these feeds, and all that it is fed."""
        executable, feeds = self._on_cuda(), self._feeds(input_feed)
        if self._packing is None:
            return executable, feeds
        more = executable.beside(self._packing, feeds)
        if not isinstance(more, str):
            return executable, {**feeds, **more}
        if not self._warned:
            self._warned = True
            warnings.warn(f"a batch runs with its padding (said once): {more}", stacklevel=3)
        return self._padded._prepared(input_feed)

    @cached_property
    def _padded(self) -> InferenceSession:
        """The session of the same model for batches that cannot be packed."""
        return self._alike(self._source)

    def __repr__(self) -> str:
        source = self._source if isinstance(self._source, str | os.PathLike) else ""
        ends = (self.get_inputs(), self.get_outputs())
        inputs, outputs = (", ".join(f"{v.name} {v.shape}" for v in values) for values in ends)
        name = f"'{os.fspath(source)}', " if source else ""
        return f"InferenceSession({name}device='{self.device}', {inputs} -> {outputs})"

    def _repr_html_(self) -> str:
        """The inputs and outputs as a table, in a notebook."""
        from onnx_fuse.textwrap import html_table

        ends = (("input", self.get_inputs()), ("output", self.get_outputs()))
        rows = [[kind, v.name, v.type, v.shape] for kind, values in ends for v in values]
        return html_table(repr(self), ["", "name", "type", "shape"], rows)

    def get_providers(self) -> list[str]:
        """The names of the execution providers in use, as onnxruntime has them."""
        if self.device == "cuda":
            return [_CUDA, _CPU]
        return list(self._session.get_providers())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._session, name)


def _check_sizes(model: Any, shared: SharedSizes, feeds: Mapping[str, Any]) -> None:
    """Refuse sizes beyond what `batch_invariant` holds for, and warn of different ones."""
    from onnx_fuse.runtime.invariance import check

    check(model, feeds)
    warn_of_different(shared, feeds)


def _require_graphs() -> None:
    """Raise UsageError in an installation of onnx-fuse-runtime, which lacks what reads ONNX."""
    if find_spec("onnx_fuse.importer") is None:
        raise UsageError(
            "onnx-fuse-runtime only runs files of onnx-fuse compile, on device 'cuda' and as they "
            "were compiled: pip install onnx-fuse for ONNX models, device 'cpu' or recompile=True"
        )


def _is_compiled(model: object) -> bool:
    path = isinstance(model, str | os.PathLike)
    return isinstance(model, Deployed) or (path and is_container(model))  # type: ignore[arg-type]


_KEPT = 1 << 16
"""Bytes of a file from which its optimized graph is kept: a smaller one is optimized as fast."""


def _digest(model: object) -> Future[tuple[str, tuple[int, int]] | None] | None:
    """Compute the digest of the file at a path in a thread, and note the file's stamp before.

    The result is None for a model that the cache does not keep.
    """
    if not isinstance(model, str | os.PathLike) or config.CACHE_MB.value <= 0:
        return None
    path = Path(model)

    def work() -> tuple[str, tuple[int, int]] | None:
        try:
            before = stamp(path)
            return None if before[0] < _KEPT else (digest_of_file(path), before)
        except OSError:
            return None  # reading the model reports what is wrong with the file

    return in_threads(work, [()])[0]


_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def _device(device: str | None, providers: Sequence[Any] | None) -> tuple[str, int, Sequence[Any]]:
    """The kind of device, the number of the GPU (1 for "cuda:1"), and onnxruntime's providers."""
    if device is None and providers:
        return of_providers(providers)
    kind, colon, number = str(device or "cpu").partition(":")
    if kind not in DEVICES or (colon and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"unknown device '{device}': choose one of {', '.join(DEVICES)}, cuda:1")
    if colon:
        return kind, int(number), (_CPU,)
    options = provider(providers[0])[1] if providers else {}
    return kind, int(options.get("device_id", 0)), (_CPU,)


def provider(entry: object) -> tuple[str, Mapping[str, Any]]:
    """The name and options of an entry in a list of providers."""
    name, options = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, {})
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise UsageError(
            f"{entry!r} is no execution provider: give a name, or a tuple of a name and options"
        )
    return name, options


def of_providers(providers: Sequence[Any]) -> tuple[str, int, Sequence[Any]]:
    """As `_device`, by the first of `providers` that is there; warns of each one before it."""
    providers = listed("providers", providers)
    entries = [provider(entry) for entry in providers]
    missing = {name: why_missing(name) for name, _ in entries if name not in (_CPU, _CUDA)}
    for place, (name, options) in enumerate(entries):
        rest = providers[place:]
        if name == _CUDA:
            gpu = int(options.get("device_id", 0))
            if not (reason := _without_gpu(gpu) if len(rest) > 1 else ""):
                return "cuda", gpu, (_CPU,)
        elif not (reason := missing.get(name, "")):
            return "cpu", 0, rest
        if len(rest) == 1:
            raise UsageError(f"{name} cannot be used: {reason}; add '{_CPU}' to run without it")
        warnings.warn(f"{name} is not used: {reason}", stacklevel=4)
    raise AssertionError("the last one is used or refused")


def why_missing(name: str) -> str:
    """Why onnxruntime has not this provider, "" where it has. Raises UsageError for no provider."""
    import onnxruntime

    there = onnxruntime.get_available_providers()
    every = {*onnxruntime.get_all_providers(), *there}
    if name not in every:
        raise UsageError(
            f"onnxruntime knows no execution provider '{name}'{did_you_mean(name, every)}"
        )
    return "" if name in there else f"the installed onnxruntime has {', '.join(there)}"


def _without_gpu(gpu: int) -> str:
    """Why this GPU cannot be used, "" where it can."""
    from onnx_fuse.runtime import device

    try:
        device.probe(gpu)
    except DeviceError as error:
        return str(error)
    return ""


def _executable(model: ir.Model, precision: str, gpu: int) -> Executable:
    from onnx_fuse.rewrite.precision import in_precision
    from onnx_fuse.runtime.executable import Executable

    graph, math = in_precision(model, precision)
    return Executable(graph, math=math, device_id=gpu)


def _host(value: object) -> Any:
    """An array for what carries DLPack (and is no array yet); anything else as it is."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return value
    return np.from_dlpack(value)


def _on_gpu(value: object) -> bool:
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return hasattr(value, "__cuda_array_interface__")
    return int(value.__dlpack_device__()[0]) == 2  # kDLCUDA


def load(model: Model) -> ir.Model:
    """Read, check and bring to the canonical opset a model: `onnx.load.load`, imported late."""
    from onnx_fuse.autodiff.load import load as load_model

    return load_model(model)
