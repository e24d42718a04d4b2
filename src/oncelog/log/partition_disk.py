"""The disk as one partition uses it. Its paths lead to the partition's own files, or nowhere.

Deferred work (snapshots, compaction, a flush in another thread) addresses files by path. A deleted topic's
directory is renamed, and a new topic of that name has files of the same names. So every path is looked up
here, and nothing is found once the partition is closed. Files that are open already go with the directory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

from oncelog.log.background import BlockingCall
from oncelog.log.disk import Disk, DiskLock, File, PartitionClosed, SyncFailed, remove_if_exists

DROPPED_SUFFIX = ".deleted"
"""Kafka's: files that end so are removed at start."""
# Never given twice in a process, in no directory; what an earlier process left is removed at start.
_drops = itertools.count()


class PartitionDisk:
    """Passes calls on until `close`; from then on they raise PartitionClosed. Safe in threads.

    `close` waits for a call under way, so that no path is resolved before it and used after it.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._lock = disk.mutex()
        self._is_closed = False
        self.on_sync_failed: Callable[[SyncFailed], None] = lambda error: None
        """Called when a directory could not be synced, in the thread that met it."""

    def close(self) -> None:
        """Refuse further calls. Idempotent."""
        with self._lock:
            self._is_closed = True

    def drop(self, paths: Iterable[str]) -> BlockingCall:
        """Give files names that no other file ever has; return what removes them, at any time, in any thread.

        The first path must exist, others may be missing. Raises OSError when the first cannot be renamed;
        one of the others keeps its name then.
        """
        dropped: list[str] = []
        for path in paths:
            name = f"{path}.{next(_drops):016x}{DROPPED_SUFFIX}"
            try:
                self.rename(path, name)
            except OSError:
                if not dropped:
                    raise
            else:
                dropped.append(name)
        return partial(_remove_dropped, self._disk, dropped)

    def _check(self) -> None:
        if self._is_closed:
            raise PartitionClosed("the partition is closed")

    def describe(self, path: str) -> str:
        return self._disk.describe(path)

    def list(self, directory: str = "") -> list[str]:
        with self._lock:
            self._check()
            return self._disk.list(directory)

    def exists(self, path: str) -> bool:
        with self._lock:
            self._check()
            return self._disk.exists(path)

    def is_directory(self, path: str) -> bool:
        with self._lock:
            self._check()
            return self._disk.is_directory(path)

    def open(self, path: str, *, create: bool = False) -> File:
        with self._lock:
            self._check()
            return self._disk.open(path, create=create)

    def read(self, path: str) -> bytes:
        with self._lock:
            self._check()
            return self._disk.read(path)

    def replace(self, path: str, data: bytes, *, sync: bool = True, is_private: bool = False) -> None:
        with self._lock:
            self._check()
            self._disk.replace(path, data, sync=sync, is_private=is_private)

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._check()
            self._disk.rename(old, new)

    def modified_ms(self, path: str) -> int:
        with self._lock:
            self._check()
            return self._disk.modified_ms(path)

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        with self._lock:
            self._check()
            self._disk.set_modified_ms(path, modified_ms)

    def remove(self, path: str) -> None:
        with self._lock:
            self._check()
            self._disk.remove(path)

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._check()
            self._disk.mkdir(path)

    def remove_tree(self, path: str) -> None:
        with self._lock:
            self._check()
            self._disk.remove_tree(path)

    def sync_directory(self, path: str = "") -> None:
        # Without the lock, for it may take long: to sync the directory of another partition harms nothing.
        self._check()
        try:
            self._disk.sync_directory(path)
        except SyncFailed as error:
            self.on_sync_failed(error)
            raise

    def volume(self) -> tuple[int, int]:
        return self._disk.volume()

    def mutex(self) -> AbstractContextManager[object]:
        return self._disk.mutex()

    def lock(self, path: str) -> DiskLock:
        return self._disk.lock(path)


def _remove_dropped(disk: Disk, paths: Iterable[str]) -> None:
    for path in paths:
        # Gone if the directory was renamed meanwhile: it is removed as a whole.
        remove_if_exists(disk, path)
