"""A partition's view of the disk. It rejects calls once the partition is closed.

Deferred work, such as snapshots, compaction or a flush in another thread, addresses files by path. After a
topic is deleted, its directory is renamed, and a new topic of the same name may have files with the same
paths. So the old partition must not resolve any path after it is closed. Its open files stay valid, because
they moved with the directory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

from oncelog.log.background import BlockingCall
from oncelog.log.disk import Disk, DiskLock, File, PartitionClosed, SyncFailed, remove_if_exists

DROPPED_SUFFIX = ".deleted"
"""Kafka's ending of deleted files. Recovery removes such files."""
# A counter that makes the names of deleted files unique within the process. Names of earlier processes cannot
# clash, because recovery removes their files.
_drops = itertools.count()


class PartitionDisk:
    """A disk that raises PartitionClosed after `close`. Thread-safe.

    Until then, it forwards all calls to another disk. `close` waits for a call in progress, so that no call
    resolves a path before `close` and uses it afterwards.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._lock = disk.mutex()
        self._is_closed = False
        self.on_sync_failed: Callable[[SyncFailed], None] = ignore_failure
        """A callback for a failed sync of a directory. It is called in the thread of the sync."""

    def close(self) -> None:
        """Reject all further calls. Idempotent."""
        with self._lock:
            self._is_closed = True

    def drop(self, paths: Iterable[str]) -> BlockingCall:
        """Rename files to unique names, and return a function that removes them later, in any thread.

        The first file must exist; the others may be missing. Raises OSError if the first file cannot be
        renamed. Another file that cannot be renamed keeps its name.
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
        # Do not hold the lock, because a sync may take long. If the partition is closed after the check, the
        # path may belong to another partition, but syncing that directory does no harm.
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


def ignore_failure(error: SyncFailed) -> None:
    """Do nothing after a failed sync of a directory. This is the callback of a PartitionDisk that no log
    uses.
    """


def _remove_dropped(disk: Disk, paths: Iterable[str]) -> None:
    for path in paths:
        # The file no longer has this path if the directory of a deleted partition was renamed. That directory
        # is removed separately.
        remove_if_exists(disk, path)
