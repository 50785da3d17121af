"""Files that appear whole or not at all, and folders that one process at a time may write in.

Both rest on `flock`, which the kernel gives up with the process that holds it, however that ends.
Where a file system has no such locks, nothing is swept and no second writer is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from onnx_fuse import config
from onnx_fuse.errors import ModelError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_RANDOM = "[a-z0-9_]{8}"  # the part of a name that is drawn
_OPEN = {"/dev/stdout": "1", "/dev/stderr": "2"}
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


_REFUSED: set[Path] = set()


def private_folder(path: Path, *, make: bool = True) -> bool:
    """Make the cache's folder, for this user alone; whether nobody else may write to it.

    What stands in the cache runs with the user's rights, kernels included. So a folder of somebody
    else's, or one that a group or all may write to, is not used, and one warning says so.
    """
    root: Path = config.CACHE_DIR.value
    folders = [p for p in (path, *path.parents) if p == root or root in p.parents] or [path]
    for folder in reversed(folders):
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := _not_private(folder.stat()):
            if folder not in _REFUSED:
                _REFUSED.add(folder)
                warnings.warn(
                    f"the cache folder {folder} is not used, because it {reason}, and its contents "
                    f"are executed: remove their permission (chmod go-w), or set "
                    f"{config.CACHE_DIR.name} to another folder",
                    stacklevel=2,
                )
            return False
    return True


def _not_private(status: os.stat_result) -> str:
    """Why somebody else may write there, as the end of a sentence; "" where nobody may."""
    if sys.platform == "win32":  # whose folders have other rights
        return ""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and this process is of user {os.geteuid()}"
    return "may be written to by other users" if status.st_mode & 0o022 else ""


def opened_private(path: Path) -> BinaryIO:
    """The file of a cache, open to be read. Raises OSError for one that others may have written."""
    if not private_folder(path.parent, make=False):
        raise FileNotFoundError(errno.ENOENT, "in a folder of others", str(path))
    file = path.open("rb")
    if _not_private(os.fstat(file.fileno())):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "a file of others", str(path))
    return file


@contextlib.contextmanager
def written_private(path: Path) -> Iterator[Path]:
    """As `written`, for a file that only this user may read."""
    with written(path) as draft:
        yield draft
        draft.chmod(0o600)


def read_private(path: Path) -> bytes:
    """The bytes of a file of a cache; see `opened_private`."""
    with opened_private(path) as file:
        return file.read()


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a device, a pipe or a name of an open file such as /dev/stdout.

    Such a path is written to, never replaced.
    """
    parent = os.path.dirname(os.path.abspath(path))
    if parent in ("/dev", "/dev/fd") or parent.startswith("/proc/"):
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path of the same name in a new folder; at the end what is there takes the place of `path`.

    The folder stands beside the file, which is replaced by renaming: a reader sees the old or the
    new one, and a failure within the block leaves the old one. Files that the block puts beside
    the draft, such as a model's weights, go beside `path`, and go first. A link is followed, and a
    device or a pipe is written to. Folders that killed processes left for the same `path` are
    removed. Raises ModelError where the file cannot be written.
    """
    path = Path(path)
    try:
        if is_stream(path):
            with _streamed(path) as draft:
                yield draft
            return
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        sweep(target.parent, f".{target.name}.", ".draft")
        with locked_folder(target.parent, f".{target.name}.", ".draft") as folder:
            yield folder / path.name
            # The data file first: a model never stands without its weights.
            for draft_file in sorted(folder.iterdir(), key=lambda p: p.name == path.name):
                place = target if draft_file.name == path.name else target.parent / draft_file.name
                if place != target and place.exists() and not target.exists():
                    raise ModelError(
                        f"{place}: the file exists already, but not {path} is not: move it away, "
                        "or write to another path"
                    )
                os.replace(draft_file, place)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _streamed(path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="onnx-fuse-") as folder:
        yield Path(folder) / path.name
        files = list(Path(folder).iterdir())
        if any(p.name != path.name for p in files):
            raise ModelError(
                f"{path}: weights can only be stored beside a file: give the path of one"
            )
        sys.stdout.flush()  # what was printed before comes before
        for draft in files:
            with draft.open("rb") as source, _opened(path) as out:
                shutil.copyfileobj(source, out)


def _opened(path: Path) -> BinaryIO:
    """A device or a pipe; an open file where it stands, which opening it by name would truncate.

    A pipe that nobody reads is refused: waiting for a reader might never end.
    """
    name = os.path.abspath(path)
    number = _OPEN.get(name, name.removeprefix("/dev/fd/").removeprefix("/proc/self/fd/"))
    if number.isdigit():
        return os.fdopen(os.dup(int(number)), "wb")
    opened = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "set_blocking"):
        os.set_blocking(opened, True)
    return os.fdopen(opened, "wb")


@contextlib.contextmanager
def locked_folder(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """A new folder that `sweep` leaves alone, until it is removed at the end."""
    folder: Path | None = None
    lock: _Lock | None = None
    try:  # from before it is made, since a signal may end the run at any point
        while lock is None:
            folder = parent / f"{prefix}{secrets.token_hex(4)}{suffix}"
            try:
                folder.mkdir(0o700)
            except FileExistsError:
                folder = None  # another's
                continue
            try:
                lock = _Lock(folder)
            except FileNotFoundError:
                continue  # taken for a stale one and swept before it was locked
            if not (lock.acquire() and folder.exists()):
                lock.close()
                lock = None
        assert folder is not None
        yield folder
    finally:
        if folder is not None:
            try:
                shutil.rmtree(folder, ignore_errors=True)
            except BaseException:  # a signal came meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                raise
        if lock is not None:
            lock.close()


def sweep(parent: Path, prefix: str, suffix: str = "") -> None:
    """Remove the folders of this name in `parent` that no living process has locked."""
    if fcntl is None:
        return
    name = re.compile(re.escape(prefix) + _RANDOM + re.escape(suffix))
    for path in [p for p in parent.iterdir() if name.fullmatch(p.name)]:
        if path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):  # another's, or gone meanwhile
            lock = _Lock(path)
            if lock.acquire() and lock.acquired:
                shutil.rmtree(path, ignore_errors=True)
            lock.close()


class _Lock:
    """A lock on a folder that exists. Raises OSError where the folder cannot be opened."""

    def __init__(self, folder: Path) -> None:
        self._fd: int | None = None if fcntl is None else os.open(folder, os.O_RDONLY)
        self.acquired = False
        _locks.add(self)

    def acquire(self) -> bool:
        """False where another process has the lock; True where there are no locks at all."""
        if fcntl is None or self._fd is None:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.acquired = True
        except OSError as error:
            return error.errno not in _BUSY
        return True

    def close(self) -> None:
        _locks.discard(self)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_locks: set[_Lock] = set()
_owners: dict[tuple[int, int], int] = {}  # (device, inode) of a folder -> the thread that locked it


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[bool]:
    """Lock an existing folder for this thread; False where another thread or process has it.

    A thread may lock the same folder again within the block. Raises OSError where there is no such
    folder.
    """
    status = os.stat(folder)
    key, thread = (status.st_dev, status.st_ino), threading.get_ident()
    if key in _owners:
        yield _owners[key] == thread
        return
    lock = _Lock(Path(folder))
    try:
        if not lock.acquire():
            yield False
            return
        _owners[key] = thread
        try:
            yield True
        finally:
            del _owners[key]
    finally:
        lock.close()


def _forget() -> None:
    """A forked child shares its parent's locks, and would keep them after the parent's death."""
    for lock in list(_locks):
        lock.close()
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
