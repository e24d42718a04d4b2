"""The disk as the log sees it: a port with two implementations (edge.disk.RealDisk, sim.disk.MemoryDisk).

Paths are relative to the data directory and use "/". Every call may raise OSError; a disk that is full
or broken does so with errno ENOSPC or EIO.
"""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class SyncFailed(OSError):
    """What was written before may be lost, though it can still be read: a later sync proves nothing."""


class PartitionClosed(OSError):
    """A partition's directory is not its own any more: deferred work that still comes to it has no effect."""


class File(Protocol):
    """An open file, read and written at positions. Reads and `sync` may come from another thread."""

    def size(self) -> int: ...

    def pread(self, size: int, position: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of `data`. On OSError an unknown part of it may be in the file."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """fdatasync: what was written before survives a power loss. Raises SyncFailed."""
        ...

    def rewrite(self, start: int, stop: int) -> None:
        """Write what is there once more, so that a sync covers it whatever became of earlier ones.

        Safe in another thread while what is behind `stop` is written, or the file closed.
        """
        ...

    def release_handle(self) -> None:
        """Give up what an open file costs until it is used again; not while another thread uses it."""
        ...

    def close(self) -> None:
        """Idempotent; other calls fail afterwards."""
        ...


class DiskLock(Protocol):
    """A held lock; it ends with the process at the latest."""

    def release(self) -> None: ...


class Disk(Protocol):
    """A data directory."""

    def describe(self, path: str) -> str:
        """The path as a human finds it, for error texts."""
        ...

    def list(self, directory: str = "") -> list[str]:
        """Names (not paths) in a directory, sorted; FileNotFoundError when there is none."""
        ...

    def exists(self, path: str) -> bool:
        """Return False only where nothing is there, or a symbolic link to nothing."""
        ...

    def is_directory(self, path: str) -> bool: ...

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; FileNotFoundError unless it exists or `create`."""
        ...

    def read(self, path: str) -> bytes:
        """A whole file."""
        ...

    def replace(self, path: str, data: bytes, *, sync: bool = True, is_private: bool = False) -> None:
        """Write a whole file so that a crash leaves the old or the new content, never a mixture.

        With `sync` False a power loss may leave neither; only for what can be rebuilt. `is_private`: nobody
        but the owner may read it. Raises SyncFailed when the new content has its name and a power loss may
        take it back; after any other OSError the old content stands.
        """
        ...

    def rename(self, old: str, new: str) -> None: ...

    def modified_ms(self, path: str) -> int:
        """When the file was written last, by the clock of the file system."""
        ...

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        """Give a file the time of another one whose content it takes over."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; FileNotFoundError when there is none."""
        ...

    def mkdir(self, path: str) -> None:
        """Make a directory, durable once its parent is synced; FileExistsError when there is one."""
        ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str = "") -> None:
        """Make creations, renames and removals in a directory survive a power loss. Raises SyncFailed."""
        ...

    def volume(self) -> tuple[int, int]:
        """(total bytes, bytes that may still be written) of what holds the directory."""
        ...

    def mutex(self) -> AbstractContextManager[object]:
        """Return a new lock between the threads that use this disk, to be held for moments."""
        ...

    def lock(self, path: str) -> DiskLock:
        """Take an exclusive lock on a file; BlockingIOError when another process holds it."""
        ...


_REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "raise the quota of the broker's user",
    errno.EROFS: "mount that disk read-write, or use another data directory",
    errno.EACCES: "give the broker's user the right to read and write there (chown, chmod)",
}


def explain(error: OSError) -> str:
    """What went wrong, with what to do about it where that is known."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error}: {remedy}" if remedy else str(error)


def remove_if_exists(disk: Disk, path: str) -> None:
    """Remove a file that may be gone already."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        pass


def write_synced(disk: Disk, path: str, data: bytes) -> None:
    """Write a whole file in place and sync it: for a file that then gets its name by `rename`."""
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        file.pwrite(data, 0)
        file.sync()
    finally:
        file.close()


def sync_file(disk: Disk, path: str, *, rewrites: bool = False) -> None:
    """Sync a file that may be missing; with `rewrites` write it once more first."""
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
