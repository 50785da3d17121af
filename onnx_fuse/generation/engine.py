"""Runs of a decoder: its cache stands where the model runs, and a run answers with tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from onnx_fuse.container import is_container
from onnx_fuse.errors import ModelError
from onnx_fuse.generation.decoder import Array, decoder_of
from onnx_fuse.generation.sampling import TOKEN, Sampling, append_sampler, sampler
from onnx_fuse.ir.build import required
from onnx_fuse.runtime import ort
from onnx_fuse.session import InferenceSession, argument, load


class Engine:
    """A decoder and its sampler on a device, with the cache of a batch of sequences.

    A path or a model gets the sampler appended, and both are one program. A session runs as it is,
    and its logits go to a second one without leaving the device.
    """

    def __init__(
        self, model: Any, sampling: Sampling, ragged: bool, device: str | None, precision: str
    ) -> None:
        is_path = isinstance(model, str | os.PathLike)
        self.name = os.fspath(model) if is_path else "the model"
        if is_path and is_container(model):
            model = InferenceSession(model, device=device, precision=precision)
        self.sampler: InferenceSession | None = None
        graph = model.model.graph if isinstance(model, InferenceSession) else None
        if graph is None:
            model = load(model)
            graph = model.graph
            inputs, outputs = map(argument, required(model)), list(map(argument, graph.outputs))
        else:
            inputs, outputs = model.get_inputs(), model.get_outputs()
        try:
            self.decoder = decoder_of(inputs, outputs, graph)
        except ModelError as error:
            raise ModelError(f"{self.name}: {error}") from None
        whole = not self.decoder.caches
        self.gathers = whole and (ragged or self.decoder.width is not None)
        if self.gathers and self.decoder.flat:
            raise ModelError(
                f"{self.name}: its logits are of the last position alone, which a prompt that is "
                "padded does not fill: generate from one prompt at a time"
            )
        at = next(i for i, v in enumerate(outputs) if v.name == self.decoder.logits)
        if isinstance(model, InferenceSession):
            self.session = model
            small = sampler(outputs[at], sampling, self.gathers)
            self.sampler = InferenceSession(small, device=_place(model))
        else:
            append_sampler(graph, graph.outputs[at], sampling, self.gathers)
            self.session = InferenceSession(model, device=device, precision=precision)
        self.on_gpu = self.session.device == "cuda"
        self.in_place = self.decoder.in_slots or (self.decoder.fixed and self.on_gpu)
        self._slots: dict[str, Any] = {}
        self._grown: dict[str, Any] = {}
        self._bindings: dict[Any, Any] = {}

    def allocate(self, batch: int, tokens: int) -> int:
        """Make the caches empty, with room for so many tokens; returns the bytes of the room."""
        self._slots, self._grown, self._bindings, size = {}, {}, {}, 0
        fixed = self.decoder.capacity if self.decoder.fixed else None
        for cache in self.decoder.caches:
            roomy = self.in_place or self.decoder.fixed
            shape = cache.sized(batch, (fixed or tokens) if roomy else 0)
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
            from onnx_fuse.runtime import device

            device.start(_gpu(self.session))
            answer = device.bindings().cuMemGetInfo()
            device.check(answer, "the GPU's memory")
            return int(answer[2]) - int(answer[1])
        try:
            from resource import RUSAGE_SELF, getrusage
        except ImportError:  # not a Unix
            return 0
        return getrusage(RUSAGE_SELF).ru_maxrss * 1024

    def run(
        self, ids: Array, counts: Array, draws: Mapping[str, Array], row: int | None = None
    ) -> Array:
        """The next token [B] of sequences whose latest tokens are `ids`, of `counts` in all.

        `draws` are the sampler's inputs. With `row`, the run is of that sequence alone.
        """
        with ort.faults(self.name):
            return self._run(ids, counts, draws, row)

    def _run(self, ids: Array, counts: Array, draws: Mapping[str, Array], row: int | None) -> Array:
        decoder, where = self.decoder, "cuda" if self.on_gpu else "cpu"
        total = int(counts.max()) if decoder.caches else ids.shape[1]
        feeds = decoder.feeds(ids, counts, total)
        binding = self._bindings.get(row) or self._bound(row)
        for name, array in (feeds | ({} if self.sampler else dict(draws))).items():
            binding.bind_cpu_input(name, array)
        for past, value in self._grown.items():
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(past, value)
            else:
                binding.bind_ortvalue_input(past, value)
        names = [decoder.logits if self.sampler else TOKEN]
        binding.bind_output(names[0], where if self.sampler else "cpu")
        for cache in decoder.caches:
            names.append(cache.present)
            if not self.in_place:
                binding.bind_output(cache.present, where)
        self.session.run_with_iobinding(binding)
        results = dict(zip(names, binding.get_outputs(), strict=True))
        for cache in decoder.caches if not self.in_place else ():
            self._grown[cache.past] = results[cache.present]
        answer = results[names[0]]
        if self.sampler:
            answer = self._sampled(answer, draws)
        return np.asarray(answer if isinstance(answer, np.ndarray) else answer.numpy())[:, 0]

    def _sampled(self, logits: Any, draws: Mapping[str, Array]) -> Any:
        assert self.sampler is not None
        binding = self.sampler.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        for name, array in draws.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(TOKEN)
        self.sampler.run_with_iobinding(binding)
        return binding.get_outputs()[0]

    def _bound(self, row: int | None) -> Any:
        """A binding to the cache's places, or to those of one sequence."""
        binding = self._bindings[row] = self.session.io_binding()
        binding.bind_output(self.decoder.logits if self.sampler else TOKEN)  # the first one
        for cache in self.decoder.caches if self.in_place else ():
            shape, address, _ = self._slots[cache.past]
            if row is not None:
                axis = cache.batch
                address += row * prod(shape[axis + 1 :]) * cache.dtype.itemsize
                shape = (*shape[:axis], 1, *shape[axis + 1 :])
            device = self.session.device, _gpu(self.session)
            for bind, name in (
                (binding.bind_input, cache.past),
                (binding.bind_output, cache.present),
            ):
                bind(name, *device, cache.dtype, shape, address)
        return binding


def _gpu(session: InferenceSession) -> int:
    return int(session.io_binding().device_id) if session.device == "cuda" else 0


def _place(session: InferenceSession) -> str:
    return f"cuda:{_gpu(session)}" if session.device == "cuda" else "cpu"


def _zeros(nbytes: int, session: InferenceSession) -> tuple[int, Any]:
    """The address of so many bytes of zeros on a session's device, and what holds them."""
    if session.device == "cpu":
        array = np.zeros(nbytes, np.uint8)
        return array.ctypes.data, array
    from onnx_fuse.runtime import device

    device.start(_gpu(session))
    memory, stream = device.Memory(nbytes, "the cache of a decoder"), device.Stream()
    stream.fill(memory.address, 0, nbytes)
    stream.wait("the cache of a decoder")
    return memory.address, memory
