"""Work that may end the process, done in a forked child."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from onnx_fuse import progress
from onnx_fuse.errors import ModelError, OnnxFuseError

T = TypeVar("T")


class Crash(Exception):
    """The child ended before it answered; the text says why."""


def in_child(work: Callable[[], T], name: str = "", *, silent: bool = False) -> T:
    """`work()` in a forked child, whose answer or exception is pickled.

    The child shares this process's memory, so the fork itself takes a few milliseconds. What the
    work reports of its progress reaches the watcher here. Errors begin with `name`. A `silent`
    child writes nothing to standard error, such as a failed assertion. Where nothing can be
    forked, the work is done here. Raises Crash where the child dies.
    """
    with in_background(work, name, silent=silent) as answer:
        return answer()


@contextlib.contextmanager
def in_background(
    work: Callable[[], T], name: str = "", *, silent: bool = False
) -> Iterator[Callable[[], T]]:
    """`in_child`, whose answer the block is given when it asks; with the block the child ends."""
    if not hasattr(os, "fork"):
        yield work
        return
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python warns of any fork beside threads; the child only does its work and leaves.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    except OSError:  # no memory to account for a second process of this size
        os.close(reader)
        os.close(writer)
        yield work
        return
    if child == 0:
        os.close(reader)
        if silent:
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _child(work, name, writer)
    os.close(writer)
    status: int | None = None

    def answer() -> T:
        nonlocal status
        message = _answer(pipe)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status) or message is None:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            raise Crash((number and signal.strsignal(number)) or "it left without an answer")
        ok, value = message
        if not ok:
            raise value
        return value

    with os.fdopen(reader, "rb") as pipe:
        try:
            yield answer
        finally:
            if status is None:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)


def _answer(pipe: IO[bytes]) -> tuple[bool, Any] | None:
    """What the child wrote at last, or None if it ended before; reports of progress go on.

    The other end of the pipe is a fork of this process alone, so it may be pickled.
    """
    while True:
        try:
            message = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):
            return None
        if len(message) == 2:
            ok, value = message
            return ok, value
        if (watch := progress.watcher()) is not None:  # the child has logged it
            watch(*message)


_M_MMAP_MAX = -4
"""Glibc's option for the number of blocks that are mapped by themselves."""


def _child(work: Callable[[], Any], name: str, writer: int) -> None:
    # A session inherited from the parent has no threads here: collecting it would wait for them.
    gc.disable()
    if (limit := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        # glibc gives large blocks back as soon as they are freed, and each that follows has to be
        # cleared page by page: half the time that onnxruntime takes to open a file of 440 MB.
        limit(_M_MMAP_MAX, 0)
    prefix = f"{name}: " if name else ""

    def send(text: str, done: int, total: int) -> None:
        os.write(writer, pickle.dumps((text, done, total), protocol=5))

    try:
        try:
            with progress.watched(send if progress.watcher() else None):
                answer = (True, work())
        except OnnxFuseError as error:
            text = str(error)
            answer = (False, type(error)(text if name in text else f"{prefix}{text}"))
        except MemoryError:
            answer = (False, ModelError(f"{prefix}out of memory"))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = (False, RuntimeError(f"{prefix}{type(error).__name__}: {error}"))
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe, protocol=5)
    finally:
        os._exit(0)
