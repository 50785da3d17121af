"""Frames over the connections of a run: a kind, a length, and bytes."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.distributed.environment import Place
from onnx_fuse.errors import DeviceError

MAGIC = b"onnx-fuse ranks 1"
_HEAD = struct.Struct("<cQ")
LARGEST = 1 << 40
"""Bytes of a frame: what claims more comes from no rank."""
CHANNELS = ("data", "control")
"""The connections of each rank to rank 0: one for what ranks exchange, one for their faults."""


def send(link: socket.socket, kind: bytes, *parts: bytes | memoryview) -> None:
    """Send one frame of the parts in a row."""
    link.sendall(_HEAD.pack(kind, sum(len(part) for part in parts)))
    for part in parts:
        link.sendall(part)


def receive(link: socket.socket) -> tuple[bytes, bytearray]:
    """The kind and the bytes of the next frame. Raises ConnectionError at the end of the link."""
    kind, size = _HEAD.unpack(_exactly(link, _HEAD.size))
    if size > LARGEST:
        raise ConnectionError("the received data is not a frame")
    return kind, _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = link.recv_into(view[at:])
        if not count:
            raise ConnectionError("the other end is closed")
        at += count
    return data


def packed(arrays: Mapping[str, Array]) -> list[bytes | memoryview]:
    """Arrays as parts of a frame: their names, dtypes and shapes as JSON, then their bytes."""
    heads = [[name, a.dtype.name, list(a.shape)] for name, a in arrays.items()]
    text = json.dumps(heads).encode()
    bodies = [
        memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data) for a in arrays.values()
    ]
    return [struct.pack("<Q", len(text)), text, *bodies]


def unpacked(data: bytearray) -> dict[str, Array]:
    """The arrays of a frame, in its memory."""
    import ml_dtypes  # noqa: F401  its types are known by name from now on

    (length,) = struct.unpack_from("<Q", data)
    at, arrays = 8 + length, {}
    for name, dtype, shape in json.loads(bytes(data[8:at])):
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, kind, count, at).reshape(shape)
        at += count * kind.itemsize
    return arrays


# ---- how the ranks find each other -------------------------------------------------------------


def _tuned(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def gather(place: Place, patience: float) -> dict[str, list[socket.socket]]:
    """The links of rank 0 to all others, by channel, in the order of the ranks from 1 on.

    Raises DeviceError where ranks are missing after `patience` seconds, or the port is taken.
    """
    links: dict[tuple[str, int], socket.socket] = {}
    expected = {(name, rank) for name in CHANNELS for rank in range(1, place.size)}
    end = time.monotonic() + patience
    try:
        server = socket.create_server((place.host, place.port), backlog=4 * place.size)
    except OSError as error:
        raise DeviceError(
            f"rank 0 cannot listen on {place.host}:{place.port} ({error.strerror or error}): set "
            "MASTER_PORT to a free port"
        ) from error
    with server:
        while expected - links.keys():
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                link, _ = server.accept()
            except TimeoutError:
                missing = sorted({rank for _, rank in expected - links.keys()})
                raise DeviceError(
                    f"after {patience:.0f} s no word from rank {', '.join(map(str, missing))}"
                ) from None
            hello = _hello(link)
            if hello is None or hello not in expected:
                link.close()
                continue
            links[hello] = _tuned(link)
    for name, rank in sorted(expected):
        send(links[name, rank], b"W")
    return {name: [links[name, rank] for rank in range(1, place.size)] for name in CHANNELS}


def _hello(link: socket.socket) -> tuple[str, int] | None:
    """The channel and rank that a new link says it is; None for one of somebody else's."""
    link.settimeout(5)
    try:
        kind, data = receive(link)
        if kind != b"H" or not data.startswith(MAGIC):
            return None
        name, rank = json.loads(bytes(data[len(MAGIC) :]))
        return str(name), int(rank)
    except (OSError, ValueError, TypeError):
        return None


def join(place: Place, patience: float) -> dict[str, socket.socket]:
    """The links of a rank to rank 0, by channel.

    Raises DeviceError where rank 0 does not answer within `patience` seconds.
    """
    end, fault = time.monotonic() + patience, "no answer"
    while time.monotonic() < end:
        links: dict[str, socket.socket] = {}
        try:
            for name in CHANNELS:
                link = links[name] = socket.create_connection((place.host, place.port), timeout=5)
                send(link, b"H", MAGIC, json.dumps([name, place.rank]).encode())
            for link in links.values():  # which are answered once all ranks are there
                link.settimeout(max(end - time.monotonic(), 1))
                receive(link)
            return {name: _tuned(link) for name, link in links.items()}
        except OSError as error:
            fault = error.strerror or str(error)
        for link in links.values():
            link.close()
        time.sleep(0.05)
    raise DeviceError(f"rank {place.rank}: no rank 0 at {place.host}:{place.port}: {fault}")
