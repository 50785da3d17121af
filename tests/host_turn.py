"""The way of CUDA tensors around torch's dispatcher, tried with tensors of the CPU."""

import ctypes
from math import prod
from typing import Any

import pytest
import torch

from onnx_fuse.torch import eager, gpu, library
from onnx_fuse.torch.graph import OnnxGraph


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on tensors of the CPU go as those on CUDA tensors do."""
    monkeypatch.setattr(eager, "on_gpu", lambda x: True)
    monkeypatch.setattr(library, "by_torch", lambda x: False)
    monkeypatch.setattr(gpu, "current_device", lambda: -1)
    monkeypatch.setattr(gpu, "state", lambda: (-1, 0, "highest"))
    monkeypatch.setattr(OnnxGraph, "turn", lambda graph, tensors: HostTurn(graph, tensors))


class HostTurn:
    """A graph as `gpu.Turn` launches it, on addresses of host memory."""

    def __init__(self, graph: OnnxGraph, tensors: list[Any]) -> None:
        self._graph, self._given = graph, [(tuple(t.shape), t.dtype) for t in tensors]
        found = [y.contiguous() for y in graph.run(tensors)]
        self.results = [(tuple(y.shape), y.stride(), y.dtype) for y in found]
        self._allocate = gpu.allocator(torch.device("cpu"))

    def new(self, shape: tuple[int, ...], strides: tuple[int, ...], kind: Any) -> Any:
        assert type(shape) is type(strides) is tuple  # as inductor's allocator for CUDA asks
        return self._allocate(shape, strides, kind)

    def enqueue(self, ends: list[int]) -> None:
        count = len(self._given)
        given = [at(a, *kind) for a, kind in zip(ends[:count], self._given, strict=True)]
        results = zip(ends[count:], self._graph.run(given), self.results, strict=True)
        for address, y, (shape, _, dtype) in results:
            at(address, shape, dtype).copy_(y)


def at(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """The tensor there."""
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
