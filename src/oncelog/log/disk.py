"""The interface through which the log uses a disk.

`oncelog.server.disk.RealDisk` and `oncelog.testing.memory_disk.MemoryDisk` implement it. Paths are relative
to the data directory and use "/". Every method may raise OSError, for example ENOSPC if the disk is full, or
EIO if it is broken.
"""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class SyncFailed(OSError):
    """A sync failed. Earlier writes may be lost although they can still be read, and a later sync proves
    nothing.
    """


class PartitionClosed(OSError):
    """The partition was closed, so its paths may belong to another partition. Deferred work must stop."""


class File(Protocol):
    """An open file with reads and writes at positions. Other threads may call `pread` and `sync`."""

    def size(self) -> int: ...

    def pread(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        ...

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of `data`. After an OSError, any part of it may be in the file."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Sync the file (fdatasync), so that earlier writes survive a power loss. Raises SyncFailed."""
        ...

    def rewrite(self, start: int, stop: int) -> None:
        """Write the stored bytes from `start` to below `stop` again, so that the next sync includes them.

        Used after a restart, because an earlier process's sync may have failed. May run in another thread
        while bytes after `stop` are written or the file is closed.
        """
        ...

    def release_handle(self) -> None:
        """Close the file descriptor; the next use opens the file again. No other thread may be using the
        file.
        """
        ...

    def close(self) -> None:
        """Close the file. Idempotent; all other methods fail afterwards."""
        ...


class DiskLock(Protocol):
    """A lock on a file, held by this process. It is released by `release`, or at the latest when the process
    ends.
    """

    def release(self) -> None: ...


class Disk(Protocol):
    """The file operations on a data directory. All paths are relative to it."""

    def describe(self, path: str) -> str:
        """Return the full path, for error messages."""
        ...

    def list(self, directory: str = "") -> list[str]:
        """Return the sorted names, not paths, in a directory.

        Raises FileNotFoundError if the directory does not exist.
        """
        ...

    def exists(self, path: str) -> bool:
        """Return True if a file or directory exists. Return False for a dangling symbolic link."""
        ...

    def is_directory(self, path: str) -> bool: ...

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing.

        Raises FileNotFoundError if the file does not exist and `create` is false.
        """
        ...

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        ...

    def replace(self, path: str, data: bytes, *, sync: bool = True, is_private: bool = False) -> None:
        """Write a whole file atomically: a crash leaves the old or the new content.

        With `sync` false, a power loss may leave neither, so the caller must be able to rebuild the content.
        With `is_private`, only the owner may read the file. Raises SyncFailed if the new content is in place
        but a power loss may undo it. After any other OSError, the old content stays.
        """
        ...

    def rename(self, old: str, new: str) -> None: ...

    def modified_ms(self, path: str) -> int:
        """Return the time of the last write in ms, by the clock of the file system."""
        ...

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        """Set the time of the last write, in ms. Compaction copies it from an old file to its successor."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError if it does not exist."""
        ...

    def mkdir(self, path: str) -> None:
        """Create a directory, durable once its parent is synced. Raises FileExistsError if it exists."""
        ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str = "") -> None:
        """Sync a directory, so that creations, renames and removals in it survive a power loss. Raises
        SyncFailed.
        """
        ...

    def volume(self) -> tuple[int, int]:
        """Return (total bytes, free bytes that the broker may use) of the volume of the data directory."""
        ...

    def mutex(self) -> AbstractContextManager[object]:
        """Return a new lock. All threads that use this disk wait for its holder, so hold it only briefly."""
        ...

    def lock(self, path: str) -> DiskLock:
        """Take an exclusive lock on a file. Raises BlockingIOError if another process holds it."""
        ...


_REMEDIES = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "raise the quota of the broker's user",
    errno.EROFS: "mount the disk read-write, or use another data directory",
    errno.EACCES: "give the broker's user the right to read and write the directory (chown, chmod)",
}


def explain(error: OSError) -> str:
    """Return the text of an error, with a remedy if `_REMEDIES` has one."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error}: {remedy}" if remedy else str(error)


def remove_if_exists(disk: Disk, path: str) -> None:
    """Remove a file if it exists."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        pass


def write_synced(disk: Disk, path: str, data: bytes) -> None:
    """Write and sync a whole file, not atomically. The caller renames the file afterwards."""
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        file.pwrite(data, 0)
        file.sync()
    finally:
        file.close()


def sync_file(disk: Disk, path: str, *, rewrites: bool = False) -> None:
    """Sync a file if it exists. With `rewrites`, first write the content again, because an earlier sync may
    have failed.
    """
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
