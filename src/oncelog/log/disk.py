"""The interface between the log and a disk.

`oncelog.server.disk.RealDisk` and `oncelog.testing.memory_disk.MemoryDisk` implement it. Paths are relative
to the data directory and use "/". Every call may raise OSError; a full or broken disk raises ENOSPC or EIO.
"""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class SyncFailed(OSError):
    """Earlier writes may be lost although they can still be read; a later sync proves nothing."""


class PartitionClosed(OSError):
    """The partition was closed, so its directory may belong to another one: deferred work has no effect."""


class File(Protocol):
    """An open file, read and written at positions. Reads and `sync` may come from another thread."""

    def size(self) -> int: ...

    def pread(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        ...

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of `data`. On OSError an unknown part of it may be in the file."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Make earlier writes survive a power loss (fdatasync). Raises SyncFailed."""
        ...

    def rewrite(self, start: int, stop: int) -> None:
        """Write the stored bytes again, so that the next sync covers them even if an earlier one failed.

        Safe in another thread while bytes after `stop` are written, or the file is closed.
        """
        ...

    def release_handle(self) -> None:
        """Release the file descriptor until the file is used again; not while another thread uses it."""
        ...

    def close(self) -> None:
        """Close the file. Idempotent; other calls fail afterwards."""
        ...


class DiskLock(Protocol):
    """A held lock. It ends with the process at the latest."""

    def release(self) -> None: ...


class Disk(Protocol):
    """A data directory."""

    def describe(self, path: str) -> str:
        """Return the full path, for error messages."""
        ...

    def list(self, directory: str = "") -> list[str]:
        """Return the sorted names (not paths) in a directory. Raises FileNotFoundError without one."""
        ...

    def exists(self, path: str) -> bool:
        """Return False only if nothing is there, or a symbolic link to nothing."""
        ...

    def is_directory(self, path: str) -> bool: ...

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. Raises FileNotFoundError unless it exists or `create`."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        ...

    def replace(self, path: str, data: bytes, *, sync: bool = True, is_private: bool = False) -> None:
        """Write a whole file so that a crash leaves the old or the new content, never a mixture.

        Without `sync`, a power loss may leave neither; use that only for content that can be rebuilt.
        `is_private`: only the owner may read the file. Raises SyncFailed if the new content is in place but a
        power loss may undo it; after any other OSError the old content stays.
        """
        ...

    def rename(self, old: str, new: str) -> None: ...

    def modified_ms(self, path: str) -> int:
        """Return the time of the last write, by the clock of the file system."""
        ...

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        """Set the time of the last write, for a file that takes over the content of another one."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError without one."""
        ...

    def mkdir(self, path: str) -> None:
        """Create a directory, durable once its parent is synced. Raises FileExistsError if it exists."""
        ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str = "") -> None:
        """Make creations, renames and removals in a directory survive a power loss. Raises SyncFailed."""
        ...

    def volume(self) -> tuple[int, int]:
        """Return (total bytes, bytes that may still be written) of the volume that holds the directory."""
        ...

    def mutex(self) -> AbstractContextManager[object]:
        """Return a new lock between the threads that use this disk. Hold it only briefly."""
        ...

    def lock(self, path: str) -> DiskLock:
        """Take an exclusive lock on a file. Raises BlockingIOError if another process holds it."""
        ...


_REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "raise the quota of the broker's user",
    errno.EROFS: "mount that disk read-write, or use another data directory",
    errno.EACCES: "give the broker's user the right to read and write there (chown, chmod)",
}


def explain(error: OSError) -> str:
    """Return the text of an error, with a remedy where one is known."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error}: {remedy}" if remedy else str(error)


def remove_if_exists(disk: Disk, path: str) -> None:
    """Remove a file that may not exist."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        pass


def write_synced(disk: Disk, path: str, data: bytes) -> None:
    """Write a whole file in place and sync it; the caller then renames it."""
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        file.pwrite(data, 0)
        file.sync()
    finally:
        file.close()


def sync_file(disk: Disk, path: str, *, rewrites: bool = False) -> None:
    """Sync a file that may be missing; with `rewrites`, write its content again before."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return
    try:
        if rewrites:
            file.rewrite(0, file.size())
        file.sync()
    finally:
        file.close()
