"""The real disk, with POSIX files: positioned reads and writes, fdatasync, atomic replacement, flock."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from oncelog.log.disk import Buffer, SyncFailed, explain
from oncelog.runtime import system
from oncelog.runtime.event_log import log_event

_FILE_MODE = 0o644
_REWRITE_BYTES = 1 << 20
LOG_EVERY_SECONDS = 60.0
"""Minimum time between two log messages about the same kind of disk error."""


class RealFile:
    """A file that is opened at its first use. Ten thousand idle files therefore need no descriptors.

    `sync` and `rewrite` may run for seconds in a thread. `close` is called on the event loop's thread, so it
    does not wait for such calls. The last of these calls then closes the descriptor when it returns. See
    test_closing_a_file_does_not_wait_for_its_sync.
    """

    __slots__ = ("_fd", "_fd_to_close", "_lock", "_path", "_user_count")

    def __init__(self, path: str, fd: int | None = None) -> None:
        self._path = path
        self._fd = fd
        # The lock protects the descriptor and the user count. It is never held during a sync.
        self._lock = threading.Lock()
        self._user_count = 0
        self._fd_to_close: int | None = None

    def _opened(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = _open(self._path, os.O_RDWR)
            return self._fd

    def size(self) -> int:
        return os.stat(self._path).st_size if self._fd is None else os.fstat(self._fd).st_size

    def pread(self, size: int, position: int) -> bytes:
        fd = self._fd if self._fd is not None else self._opened()
        data = os.pread(fd, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]
        missing = size - len(data)
        while missing and data:
            data = os.pread(fd, missing, position + size - missing)
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def pwrite(self, data: Buffer, position: int) -> None:
        fd = self._fd if self._fd is not None else self._opened()
        try:
            written = os.pwrite(fd, data, position)
            if written == len(data):
                return
            view = memoryview(data)
            while written < len(view):
                # Write the remaining bytes: on a nearly full disk, one call writes a part, and the next call
                # fails.
                step = os.pwrite(fd, view[written:], position + written)
                if step == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += step
        except OSError as error:
            _log_refusal(error, self._path)
            raise

    def truncate(self, size: int) -> None:
        os.ftruncate(self._opened(), size)

    def sync(self) -> None:
        with self._in_use() as fd:
            if fd >= 0:
                _sync(_fdatasync, fd, self._path)

    def rewrite(self, start: int, stop: int) -> None:
        with self._in_use() as fd:
            while start < stop and self._fd is not None and self._fd >= 0:
                data = os.pread(fd, min(_REWRITE_BYTES, stop - start), start)
                if not data:
                    return
                start += os.pwrite(fd, data, start)

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        """Yield the descriptor, which stays valid during the block; -1 if the file is closed."""
        with self._lock:
            if self._fd is None:
                self._fd = _open(self._path, os.O_RDWR)
            fd = self._fd
            self._user_count += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._user_count -= 1
                fd_to_close = None
                if not self._user_count:
                    fd_to_close, self._fd_to_close = self._fd_to_close, None
            if fd_to_close is not None:
                os.close(fd_to_close)

    def release_handle(self) -> None:
        with self._lock:
            if self._fd is not None and self._fd >= 0 and not self._user_count:
                # If the close fails, the descriptor is closed nevertheless, and its number may soon belong to
                # another file. See test_a_handle_whose_close_fails_is_not_used_again.
                fd, self._fd = self._fd, None
                os.close(fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if self._user_count and fd is not None and fd >= 0:
                self._fd_to_close = fd
                return
        if fd is not None and fd >= 0:
            os.close(fd)


def _open(path: str, flags: int) -> int:
    """Open a file and return its descriptor.

    Raises OSError. If too many files are open, the error's text has advice.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        _advise(error, path)
        raise


def _advise(error: OSError, path: str) -> None:
    """If `error` means that too many files are open, raise an OSError with advice. Otherwise do nothing."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        advice = f"{error.strerror}: the limit is {limit}; raise it (ulimit -n, LimitNOFILE=)"
        advised = OSError(error.errno, advice, path)
        _log_refusal(advised, path)
        raise advised from error


_logged_at: dict[int | None, float] = {}


def _log_refusal(error: OSError, path: str) -> None:
    """Log a disk error.

    Retries repeat the same error, so each error number is logged once per LOG_EVERY_SECONDS.
    """
    now = system.current().monotonic_ns() / 1e9
    if now - _logged_at.get(error.errno, -LOG_EVERY_SECONDS) >= LOG_EVERY_SECONDS:
        _logged_at[error.errno] = now
        log_event("error", "disk refuses", path=path, error=explain(error))


# macOS has no fdatasync.
_fdatasync = getattr(os, "fdatasync", os.fsync)


def _sync(sync: Callable[[int], None], fd: int, path: str) -> None:
    try:
        sync(fd)
    except OSError as error:
        raise SyncFailed(error.errno, error.strerror, path) from error


class RealLock:
    """An exclusive file lock (flock). The operating system releases it when the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class RealDisk:
    """The files below the directory `root`. The constructor creates the directory if it does not exist."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._prefix = f"{self.root}/"

    def describe(self, path: str) -> str:
        return self._prefix + path

    def list(self, directory: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._prefix + directory))
        except OSError as error:
            _advise(error, self._prefix + directory)
            raise

    def exists(self, path: str) -> bool:
        # os.path.exists would return False for every error, for example for a missing permission. See
        # test_a_directory_that_cannot_be_looked_at_for_a_moment_keeps_its_records.
        try:
            os.stat(self._prefix + path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(self._prefix + path)

    def open(self, path: str, *, create: bool = False) -> RealFile:
        full = self._prefix + path
        if create:
            return RealFile(full, _open(full, os.O_RDWR | os.O_CREAT))
        # Raise FileNotFoundError here, if the file does not exist, and not at its first use.
        os.stat(full)
        return RealFile(full)

    def read(self, path: str) -> bytes:
        with open(self._prefix + path, "rb") as file:
            return file.read()

    def replace(self, path: str, data: bytes, *, sync: bool = True, is_private: bool = False) -> None:
        full = self._prefix + path
        temporary = full + ".tmp"
        # The directory is opened before the rename. After the rename, only the sync can fail.
        parent = _open(os.path.dirname(full), os.O_RDONLY) if sync else None
        try:
            with open(temporary, "wb", opener=_open_private if is_private else None) as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, full)
            if parent is not None:
                _sync(os.fsync, parent, full)
        except SyncFailed:
            raise
        except OSError:
            _remove_quietly(temporary)
            raise
        finally:
            if parent is not None:
                os.close(parent)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._prefix + old, self._prefix + new)

    def modified_ms(self, path: str) -> int:
        return os.stat(self._prefix + path).st_mtime_ns // 1_000_000

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        os.utime(self._prefix + path, ns=(modified_ms * 1_000_000, modified_ms * 1_000_000))

    def remove(self, path: str) -> None:
        os.unlink(self._prefix + path)

    def mkdir(self, path: str) -> None:
        os.mkdir(self._prefix + path)

    def remove_tree(self, path: str) -> None:
        full = self._prefix + path
        if not os.path.islink(full):
            shutil.rmtree(full)
            return
        # The path is a link: an administrator has moved the partition to another volume. Delete the content
        # and the link, but keep the linked directory: it may be a mount point.
        if os.path.isdir(full):
            for entry in os.scandir(full):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        os.unlink(full)

    def sync_directory(self, path: str = "") -> None:
        _sync_directory(self._prefix + path)

    def volume(self) -> tuple[int, int]:
        stats = os.statvfs(self.root)
        return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize

    def mutex(self) -> AbstractContextManager[object]:
        return threading.Lock()

    def lock(self, path: str) -> RealLock:
        fd = os.open(self._prefix + path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return RealLock(fd)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_directory(path: str) -> None:
    fd = _open(path, os.O_RDONLY)
    try:
        _sync(os.fsync, fd, path)
    finally:
        os.close(fd)


def _remove_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
