"""Runs of a decoder: its cache stands where the model runs, and a run answers with tokens."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from math import prod
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.container import is_container
from onnx_fuse.errors import DeviceError, ModelError, UsageError
from onnx_fuse.feeds import argument
from onnx_fuse.generation.decoder import CacheTensor, decoder_of
from onnx_fuse.generation.options import DecoderOptions
from onnx_fuse.generation.sampling import AFTER, LAST, TOKEN, append_sampler, sampler
from onnx_fuse.ir.build import Builder, required_inputs
from onnx_fuse.ir.constants import CANONICAL_OPSET, Model
from onnx_fuse.runtime import device, ort
from onnx_fuse.runtime.tensor import DeviceTensor
from onnx_fuse.session import InferenceSession, load

if TYPE_CHECKING:
    from onnx_fuse.cache import Entry
    from onnx_fuse.runtime.binding import Binding


class Engine:
    """A decoder and its sampler on a device, with the cache of a batch of sequences.

    A path or a model gets the sampler appended, and both are one program. A session runs as it is,
    and its logits go to a second one without leaving the device.
    """

    def __init__(
        self, model: Any, options: DecoderOptions, ragged: bool = False, rows: int = 1
    ) -> None:
        device, precision = options.device, options.precision
        is_path = isinstance(model, str | os.PathLike)
        self.name = os.fspath(model) if is_path else "the model"
        if is_path and is_container(model):
            model = InferenceSession(model, device=device, precision=precision)
        self.sampler: InferenceSession | None = None
        graph = model.model.graph if isinstance(model, InferenceSession) else None
        source = model
        if graph is None:
            model = load(model)
            graph = model.graph
            inputs, outputs = ([*map(argument, v)] for v in (required_inputs(model), graph.outputs))
        else:
            inputs, outputs = model.get_inputs(), model.get_outputs()
        try:
            self.decoder = decoder_of(inputs, outputs, graph)
        except ModelError as error:
            raise ModelError(f"{self.name}: {error}") from None
        whole = not self.decoder.caches
        self.gathers = whole and (ragged or self.decoder.width is not None)
        if self.decoder.flat and (self.gathers or rows > 1):
            raise ModelError(
                f"{self.name}: it has logits for the last position only: generate from one prompt "
                "at a time, without a draft"
            )
        at = next(i for i, v in enumerate(outputs) if v.name == self.decoder.logits)
        if isinstance(model, InferenceSession):
            self.session = model
            small = sampler(outputs[at], options, self.gathers, rows)
            self.sampler = InferenceSession(small, device=_place(model))
        else:
            append = partial(
                append_sampler, sampling=options, ragged=self.gathers, rows=rows,
                counted=self.decoder.counted,
            )  # fmt: skip
            if is_path:
                self.session = _Sampled(source, model, at, append, device, precision)
            else:
                append(graph, graph.outputs[at])
                self.session = InferenceSession(model, device=device, precision=precision)
        self._bindings: dict[Any, Any] = {}
        self._adapters: dict[str, Any] = {}
        self.on_gpu, self._gpu = self.session.device == "cuda", _gpu(self.session)
        self.in_place = self.decoder.in_slots or (self.decoder.fixed and self.on_gpu)
        self._slots: dict[str, Any] = {}
        self._grown: dict[str, Any] = {}
        self._counted: dict[str, Any] = {}  # inputs that a run makes for the next one
        self._rows, self._cached, self._room = rows, 0, 0
        self._cutter: InferenceSession | None = None
        self._read = defaultdict[int, deque[Answer]](deque)  # answers that are read, by batch

    def __del__(self) -> None:
        if getattr(self, "on_gpu", False) and not sys.is_finalizing():
            # a run whose tokens nobody has read may still write them to page-locked memory
            for binding in self._bindings.values():
                with contextlib.suppress(DeviceError):
                    binding.synchronize_outputs()

    def adapt(self, adapter: str | Sequence[str | None], batch: int) -> None:
        """Run with adapters that the session holds: one of them, or one for each sequence.

        Raises UsageError for unknown names, and without a session.
        """
        if self.sampler is None:
            raise UsageError(
                "adapter needs an InferenceSession that holds it: give generate the session in "
                "place of the model, after session.add_adapter"
            )
        self.session, self._adapters = self.session.adapted(adapter, batch)

    def allocate(self, batch: int, tokens: int) -> int:
        """Make the caches empty, with room for so many tokens; returns the bytes of the room."""
        self._slots, self._grown, self._bindings, self._counted, size = {}, {}, {}, {}, 0
        self._cached, self._room = 0, tokens
        for cache in self.decoder.caches:
            shape = cache.sized(batch, tokens if self.in_place else 0)
            if self.in_place:
                place = _zeros(prod(shape) * cache.dtype.itemsize, self.session)
                self._slots[cache.past] = (shape, *place)
                size += prod(shape) * cache.dtype.itemsize
            else:
                self._grown[cache.past] = np.zeros(shape, cache.dtype)
        return size

    def memory(self) -> int:
        """Bytes in use: on "cuda" of the GPU by all that run there, else the process's most."""
        if self.on_gpu:
            device.start(self._gpu)
            answer = device.bindings().cuMemGetInfo()
            device.check(answer, "the GPU's memory")
            return int(answer[2]) - int(answer[1])
        try:
            from resource import RUSAGE_SELF, getrusage
        except ImportError:  # not a Unix
            return 0
        return getrusage(RUSAGE_SELF).ru_maxrss * 1024

    def padded(self, rows: Sequence[Sequence[int]]) -> Array:
        """Tokens of sequences as a run takes them, each filled up with its first one.

        They are filled at the end, but where the cache is as long for each: at the beginning.
        """
        longest = max(map(len, rows))
        width = longest if self.decoder.caches else self.decoder.width or longest
        fills = [[row[0]] * (width - len(row)) for row in rows]
        pairs = zip(fills, rows, strict=True)
        return np.array([[*f, *r] if self.decoder.left else [*r, *f] for f, r in pairs], np.int64)

    def cut(self, tokens: int) -> None:
        """Let the cache have so many tokens, the first of those that it has."""
        caches = self.decoder.caches
        if not self.decoder.left or self.decoder.fixed or self._cached == tokens:
            return  # later runs write over the rest
        self._cached, chain = tokens, self._bindings.get(None)
        if chain is not None and self.on_gpu and chain.follows is not None:
            self._grown, chain.follows = chain.follows.presents(), None
        self._cutter = self._cutter or InferenceSession(
            _cutter(caches), device=_place(self.session)
        )
        binding = self._cutter.io_binding()
        binding.bind_cpu_input("tokens", np.array([tokens]))
        for cache in caches:
            binding.bind_ortvalue_input(cache.past, self._grown[cache.past])
            binding.bind_output(cache.present, "cuda" if self.on_gpu else "cpu")
        self._cutter.run_with_iobinding(binding)
        pasts = (cache.past for cache in caches)
        self._grown = dict(zip(pasts, binding.get_outputs(), strict=True))

    def run(
        self,
        ids: Array,
        counts: Array,
        draws: Mapping[str, Array] | None = None,
        rows: tuple[int, int] | None = None,
    ) -> Array:
        """The next tokens [B, R] of sequences whose latest tokens are `ids`, of `counts` in all.

        `draws` are the sampler's inputs. `rows` are the first of the slots and their number, where
        the run is not of all.
        """
        draws = dict(draws or {})
        if self.gathers:
            draws[LAST] = np.maximum(counts[:, None] - np.arange(self._rows, 0, -1), 0)
        with ort.faults(self.name):
            answer = self._run(ids, counts, draws, rows)
        return np.asarray(answer if isinstance(answer, np.ndarray) else answer.numpy())

    @property
    def runs_ahead(self) -> bool:
        """Whether a run may begin while the tokens of the one before are on the GPU alone."""
        is_int64 = self.decoder.roles["ids"].dtype == np.int64
        return self.on_gpu and bool(self.decoder.caches) and is_int64

    def begin(
        self,
        ids: object,
        counts: Array,
        draws: Mapping[str, Array],
        rows: tuple[int, int] | None = None,
    ) -> Answer:
        """Enqueue a run, and return at once: its tokens [B, 1] are on their way.

        `ids` may be the tokens of the run before, on the GPU. `rows` are as for `run`; without them
        each sequence has one token more than in the run before.
        """
        read = self._read[len(counts)]
        answer = read.popleft() if read else Answer(len(counts), self._gpu)
        with ort.faults(self.name):
            tokens = self._run(ids, counts, draws, rows, answer.tokens)
        answer.passed.record(tokens.ready)
        return answer

    def taken(self, answer: Answer) -> Array:
        """The tokens of a run that was begun, which must not be asked for again."""
        device.start(self._gpu)
        answer.passed.wait("the next token")
        self._read[len(answer.values)].append(answer)
        return answer.values.copy()

    def _run(
        self,
        ids: Any,
        counts: Array,
        draws: Mapping[str, Array],
        rows: tuple[int, int] | None,
        place: DeviceTensor | None = None,
    ) -> Any:
        """The tokens; at a `place`, where nobody has waited for them."""
        bind_tokens = methodcaller("bind_output", TOKEN)
        if place is not None:
            bind_tokens = methodcaller("rebind", TOKEN, "cuda", place, None)
        decoder, where = self.decoder, "cuda" if self.on_gpu else "cpu"
        total = int(counts.max()) if decoder.caches else ids.shape[1]
        if decoder.in_slots and decoder.elastic and 1 in ids.shape:
            total = self._room
        feeds = decoder.feeds(ids, counts, total, self._counted)
        binding = self._bindings.get(rows) or self._bound(rows)
        if place is not None and rows is None and not self.sampler and not self._counted:
            self._count(binding, feeds)
        for name, value in self._adapters.items():
            is_mask = value.dtype == np.bool_  # which has a row for each sequence
            feeds[name] = value if rows is None or not is_mask else value[rows[0] : sum(rows)]
        if not self.sampler:
            feeds |= draws
        if not (self.on_gpu and binding.follows is not None):  # whose caches are where it left them
            feeds |= self._grown
        for name, value in feeds.items():
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        if self.sampler:
            binding.bind_output(decoder.logits, where)
        else:
            bind_tokens(binding)
        for cache in decoder.caches if not self.in_place and not self.on_gpu else ():
            binding.bind_output(cache.present, where)  # onnxruntime has it where the last one is
        how = {} if place is None else {"synchronize": False}
        self.session.run_with_iobinding(binding, **how)
        self._cached = total
        answer, *presents = binding.get_outputs()
        presents = presents[: len(presents) - len(self._counted)]
        if presents and not self.in_place:
            self._grown = dict(zip(self._grown, presents, strict=True))
        if self.sampler is None:
            return answer
        binding = self._bindings.get(TOKEN) or self.sampler.io_binding()
        self._bindings[TOKEN] = binding
        binding.bind_ortvalue_input("logits", answer)
        for name, array in draws.items():
            binding.bind_cpu_input(name, array)
        bind_tokens(binding)
        self.sampler.run_with_iobinding(binding, **how)
        return binding.get_outputs()[0]

    def _count(self, binding: Binding, feeds: dict[str, Array]) -> None:
        """Let each run make what is one more in the next, from what `feeds` have now."""
        for name in self.decoder.counted:
            array = np.ascontiguousarray(feeds.pop(name))
            memory = self._counted[name] = device.Memory(array.nbytes, name)
            stream = device.Stream()
            stream.upload(memory.address, array.ctypes.data, array.nbytes)
            stream.wait(name)
            place = "cuda", self._gpu, array.dtype, array.shape, memory.address
            binding.bind_input(name, *place)
            binding.bind_output(AFTER + name, *place)

    def _bound(self, rows: tuple[int, int] | None) -> Any:
        """A binding to the cache's places, or to some of its slots."""
        binding = self._bindings[rows] = self.session.io_binding()
        if self.on_gpu:
            binding.expected, binding.chained = self._room, not self.in_place
        binding.bind_output(self.decoder.logits if self.sampler else TOKEN)  # the first one
        for cache in self.decoder.caches:
            if not self.in_place:
                binding.bind_output(cache.present, self.session.device)
                continue
            shape, address, _ = self._slots[cache.past]
            if rows is not None:
                axis = cache.batch
                address += rows[0] * prod(shape[axis + 1 :]) * cache.dtype.itemsize
                shape = (*shape[:axis], rows[1], *shape[axis + 1 :])
            device = self.session.device, self._gpu
            for bind, name in (
                (binding.bind_input, cache.past),
                (binding.bind_output, cache.present),
            ):
                bind(name, *device, cache.dtype, shape, address)
        return binding


class Answer:
    """Page-locked memory for the tokens of a run, which the next one reads: a copy would keep the
    stream waiting for as long as some launches.
    """

    def __init__(self, batch: int, gpu: int) -> None:
        device.start(gpu)
        self._memory, self.passed = device.Pinned(8 * batch), device.Event()
        self.values: Array = self._memory.array.view(np.int64).reshape(batch, 1)
        self.tokens = DeviceTensor(self._memory.address, (batch, 1), "int64", gpu, self._memory)


class _Sampled(InferenceSession):
    """A decoder's file with a sampler behind it, which the cache tells from the file by itself."""

    def __init__(
        self, source: Model, model: ir.Model, at: int, append: partial[None], device: str | None,
        precision: str,
    ) -> None:  # fmt: skip
        self._loaded, self._at, self._append = [model], at, append
        super().__init__(source, device=device, precision=precision)
        self._loaded.clear()  # what is in the cache was not needed

    def _read(self) -> ir.Model:
        model = self._loaded.pop() if self._loaded else super()._read()
        self._append(model.graph, model.graph.outputs[self._at])
        return model

    def _entry(self, **options: object) -> Entry | None:
        how = dict(self._append.keywords)
        sampling = how.pop("sampling")
        how |= {f.name: getattr(sampling, f.name) for f in fields(DecoderOptions)[3:]}
        return super()._entry(**options, sampler=sorted(how.items()))


def _cutter(caches: Sequence[CacheTensor]) -> ir.Model:
    """The first `tokens` of each past, as its present."""
    count = ir.Value(name="tokens", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    op, pasts, presents = Builder(), [], []
    for cache in caches:
        shape = [d if d >= 0 else None for d in cache.shape]
        kind = ir.TensorType(ir.DataType.from_numpy(cache.dtype))
        pasts.append(ir.Value(name=cache.past, shape=ir.Shape(shape), type=kind))
        present = op.Slice(pasts[-1], [0], count, [cache.axis])
        present.name, present.shape, present.type = cache.present, ir.Shape(shape), kind
        presents.append(present)
    opset = {"": CANONICAL_OPSET}
    graph = ir.Graph([count, *pasts], presents, nodes=op.nodes, opset_imports=opset, name="cutter")
    return ir.Model(graph, ir_version=10)


def _gpu(session: InferenceSession) -> int:
    return int(session.io_binding().device_id) if session.device == "cuda" else 0


def _place(session: InferenceSession) -> str:
    return f"cuda:{_gpu(session)}" if session.device == "cuda" else "cpu"


def _zeros(nbytes: int, session: InferenceSession) -> tuple[int, Any]:
    """The address of so many bytes of zeros on a session's device, and what holds them."""
    if session.device == "cpu":
        array = np.zeros(nbytes, np.uint8)
        return array.ctypes.data, array
    device.start(_gpu(session))
    memory, stream = device.Memory(nbytes, "the cache of a decoder"), device.Stream()
    stream.fill(memory.address, 0, nbytes)
    stream.wait("the cache of a decoder")
    return memory.address, memory
