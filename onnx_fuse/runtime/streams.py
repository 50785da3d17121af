"""An Executable's own stream and those of its callers: one run after another in any of them."""

from __future__ import annotations

from onnx_fuse.errors import UsageError
from onnx_fuse.runtime import device


class StreamOrder:
    """Runs in callers' streams among those in `home`: each comes after the one before.

    Nothing is recorded or waited for between two runs of one stream.
    """

    def __init__(self, home: device.Stream) -> None:
        self._own, self._end = home, device.Event()
        self._streams: dict[int, device.Stream] = {}
        self._last: device.Stream | None = None

    def stream(self, handle: object) -> device.Stream:
        """The stream that a caller names: a handle, or an object with `__cuda_stream__`."""
        if hasattr(handle, "__cuda_stream__"):
            handle = handle.__cuda_stream__()[1]
        if not isinstance(handle, int):
            raise UsageError(
                f"stream {handle!r} is neither a handle (an int) nor an object with __cuda_stream__"
            )
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = device.Stream(handle)
        return stream

    def enter(self, stream: device.Stream) -> None:
        """Let what `stream` gets next come after all runs before."""
        home = self._own
        if stream is home:
            home.catch_up()
        elif home.behind is not self._end or self._last is not stream:
            home.catch_up()
            home.before(stream)
        self._last = stream

    def leave(self, stream: device.Stream) -> None:
        """Let what other streams get from now on come after this run."""
        if stream is not self._own:
            self._end.record(stream)
            self._own.behind = self._end
