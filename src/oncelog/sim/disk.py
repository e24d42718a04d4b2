"""A disk in memory that can be full, broken, killed in the middle of a write, or lose power.

A crash is a value: `after_kill` and `after_power_loss` give the disk that the next process would find.
What was synced is there for sure; what was only written survives a kill wholly and a power loss by chance.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from random import Random

from oncelog.log.disk import Buffer, SyncFailed

_directory_of = lru_cache(4096)(posixpath.dirname)


class SimulatedCrash(BaseException):
    """The process ends here. Not an Exception, so that nothing on the way handles it."""


class _Inode:
    """A file's bytes now, and as of its last sync.

    `lost`: ranges that a failed sync left readable, but that later ones do not write, as on Linux.
    """

    __slots__ = ("data", "lost", "modified_ms", "synced")

    def __init__(self, data: bytes = b"", synced: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = synced
        self.lost: list[tuple[int, int]] = []
        self.modified_ms = 0

    def copy(self) -> _Inode:
        copied = _Inode(bytes(self.data), self.synced)
        copied.lost, copied.modified_ms = self.lost[:], self.modified_ms
        return copied

    def fail_sync(self) -> None:
        same = len(posixpath.commonprefix([bytes(self.data), self.synced]))
        if same < len(self.data):
            self.lost.append((same, len(self.data)))

    def written(self, start: int, stop: int) -> None:
        """These bytes are dirty again."""
        parts = [part for a, b in self.lost for part in ((a, min(b, start)), (max(a, stop), b))]
        self.lost = [(a, b) for a, b in parts if a < b]

    def durable(self) -> bytes:
        """What the disk has once all that is dirty is written."""
        data = bytearray(self.data)
        for start, stop in self.lost:
            stop = min(stop, len(data))
            if start < stop:
                data[start:stop] = self.synced[start:stop].ljust(stop - start, b"\0")
        return bytes(data)


class MemoryFile:
    """An open file of a MemoryDisk."""

    def __init__(self, disk: MemoryDisk, inode: _Inode, path: str) -> None:
        self._disk = disk
        self._inode = inode
        self._path = path
        self._is_open = True

    def size(self) -> int:
        self._check()
        return len(self._inode.data)

    def pread(self, size: int, position: int) -> bytes:
        self._check()
        return bytes(self._inode.data[position : position + size])

    def pwrite(self, data: Buffer, position: int) -> None:
        self._check()
        self._inode.written(position, position + len(data))
        self._inode.modified_ms = self._disk.now_ms()
        self._disk.write_into(self._inode.data, bytes(data), position, self._path)

    def truncate(self, size: int) -> None:
        self._check()
        self._disk.step("truncate", self._path)
        kept = self._inode.data[:size]
        self._inode.data[:] = kept + bytes(size - len(kept))

    def sync(self) -> None:
        self._check()
        try:
            self._disk.step("sync", self._path)
        except SyncFailed:
            self._inode.fail_sync()
            raise
        self._inode.synced = self._inode.durable()

    def rewrite(self, start: int, stop: int) -> None:
        self._check()
        self._disk.step("write", self._path)
        self._inode.written(start, stop)

    def rest(self) -> None:
        self._check()

    def close(self) -> None:
        self._is_open = False

    def _check(self) -> None:
        if not self._is_open:
            raise OSError(errno.EBADF, "the file is closed", self._path)


class MemoryLock:
    """A lock of a MemoryDisk."""

    def __init__(self, held: set[str], path: str) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        self._held.discard(self._path)


class MemoryDisk:
    """Set `capacity_bytes` for a disk that gets full (None: endless), `errors` to make calls fail:
    (operation, end of path) -> errno, with operation one of write, sync, truncate, create, rename,
    remove, replace, mkdir. `crash_after`: steps left until SimulatedCrash (None: never); every byte written
    is a step, and so is every other change. `steps` counts them.
    """

    def __init__(self) -> None:
        self.capacity_bytes: int | None = None
        self.errors: dict[tuple[str, str], int] = {}
        self.crash_after: int | None = None
        self.steps = 0
        self.now_ms: Callable[[], int] = lambda: 1 << 60
        """The clock that files get their times from; without one they stay young."""
        self.on_crash: Callable[[], object] = lambda: None
        """Told once, when it crashes by itself."""
        self._files: dict[str, _Inode] = {}
        self._directories: set[str] = {""}
        self._durable: dict[str, _Inode] = {}
        self._locks: set[str] = set()
        self._is_dead = False

    def after_kill(self) -> MemoryDisk:
        """The disk after the process was killed: everything written is there, and as durable as it was."""
        copies = {id(node): node.copy() for node in (*self._files.values(), *self._durable.values())}
        disk = MemoryDisk()
        disk.now_ms = self.now_ms
        disk._directories = set(self._directories)
        disk._files = {path: copies[id(node)] for path, node in self._files.items()}
        disk._durable = {path: copies[id(node)] for path, node in self._durable.items()}
        return disk

    def after_power_loss(self, rng: Random) -> MemoryDisk:
        """The disk after a power loss: what was not synced is there wholly, partly or not at all."""
        found: dict[str, bytes] = {}
        directories = sorted({_directory_of(path) for path in (*self._files, *self._durable)})
        for directory in directories:
            names = self._files if rng.random() < 0.5 else self._durable
            for path, inode in sorted(names.items()):
                if _directory_of(path) == directory:
                    found[path] = _survivor(inode, rng)
        disk = MemoryDisk()
        disk._directories = set(self._directories)
        disk.now_ms = self.now_ms
        disk._files = {path: _Inode(data, data) for path, data in found.items()}
        for inode in disk._files.values():
            inode.modified_ms = self.now_ms()
        disk._durable = dict(disk._files)
        return disk

    def die(self) -> None:
        """Its process is gone: whoever still uses it meets SimulatedCrash."""
        self._is_dead = True

    def release(self) -> None:
        """The world is over: what a dead process' generators do when they are closed harms nobody."""
        self._is_dead, self.crash_after = False, None
        self.errors.clear()

    def step(self, operation: str, path: str, count: int = 1) -> int:
        """Count steps; how many of `count` happen before the crash. Raises the OSError set for the call."""
        if self._is_dead:
            raise SimulatedCrash
        for (failing, suffix), number in self.errors.items():
            if failing == operation and path.endswith(suffix):
                failed = SyncFailed if operation == "sync" else OSError
                raise failed(number, os.strerror(number), path)
        done = count if self.crash_after is None else min(count, max(self.crash_after - self.steps, 0))
        self.steps += done
        if done < count:
            self._is_dead = True
            self.on_crash()
            if operation != "write":
                raise SimulatedCrash
        return done

    def write_into(self, target: bytearray, data: bytes, position: int, path: str) -> None:
        """Write as far as crash and capacity allow, then raise what stopped it."""
        room = len(data)
        if self.capacity_bytes is not None:
            growth_left = max(self.capacity_bytes - self.used_bytes(), 0)
            room = min(room, max(len(target) - position, 0) + growth_left)
        done = self.step("write", path, room)
        if position > len(target):
            target.extend(bytes(position - len(target)))
        target[position : position + done] = data[:done]
        if self._is_dead:
            raise SimulatedCrash
        if room < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def used_bytes(self) -> int:
        """Of all files together."""
        return sum(len(inode.data) for inode in self._files.values())

    def describe(self, path: str) -> str:
        return f"memory:/{path}"

    def list(self, directory: str = "") -> list[str]:
        if directory not in self._directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", directory)
        paths = (*self._files, *self._directories)
        return sorted(posixpath.basename(p) for p in paths if p and _directory_of(p) == directory)

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._directories

    def is_directory(self, path: str) -> bool:
        return path in self._directories

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        if path not in self._files:
            if not create or _directory_of(path) not in self._directories:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self.step("create", path)
            self._files[path] = _Inode()
        return MemoryFile(self, self._files[path], path)

    def read(self, path: str) -> bytes:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return bytes(self._files[path].data)

    def replace(self, path: str, data: bytes, *, sync: bool = True, is_private: bool = False) -> None:
        inode = _Inode()
        self.step("replace", path)
        self.write_into(inode.data, data, 0, path)
        self._files[path] = inode
        if sync:
            inode.synced = data
            self._durable[path] = inode

    def rename(self, old: str, new: str) -> None:
        self.step("rename", old)
        for path in [old] if old in self._files else [p for p in self._files if p.startswith(f"{old}/")]:
            self._files[new + path[len(old) :]] = self._files.pop(path)
            # Journals keep a rename whole: it is durable or it is not.
            if path in self._durable:
                self._durable[new + path[len(old) :]] = self._durable.pop(path)
        if old in self._directories:
            self._directories = {new + d[len(old) :] if d == old else d for d in self._directories}

    def modified_ms(self, path: str) -> int:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._files[path].modified_ms

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self._files[path].modified_ms = modified_ms

    def remove(self, path: str) -> None:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self.step("remove", path)
        del self._files[path]

    def mkdir(self, path: str) -> None:
        if path in self._directories:
            raise FileExistsError(errno.EEXIST, "the directory exists", path)
        self.step("mkdir", path)
        self._directories.add(path)

    def remove_tree(self, path: str) -> None:
        for name in [p for p in self._files if p.startswith(f"{path}/")]:
            self.remove(name)
        self.step("remove", path)
        self._directories.discard(path)

    def sync_directory(self, path: str = "") -> None:
        self.step("sync", path)
        for known in [p for p in self._durable if _directory_of(p) == path and p not in self._files]:
            del self._durable[known]
        self._durable |= {p: i for p, i in self._files.items() if _directory_of(p) == path}

    def volume(self) -> tuple[int, int]:
        total = self.capacity_bytes if self.capacity_bytes is not None else 1 << 40
        return total, max(total - self.used_bytes(), 0)

    def mutex(self) -> AbstractContextManager[object]:
        return nullcontext()

    def lock(self, path: str) -> MemoryLock:
        if path in self._locks:
            raise BlockingIOError(errno.EAGAIN, "locked by another holder", path)
        self._locks.add(path)
        return MemoryLock(self._locks, path)


def _survivor(inode: _Inode, rng: Random) -> bytes:
    """One of the contents a power loss may leave."""
    data, synced = inode.durable(), inode.synced
    fate = rng.choice(("synced", "written", "torn", "holed"))
    if fate == "synced":
        return synced
    if fate == "written" or data == synced:
        return data
    # What was synced and not touched since; a file that was cut and written on differs behind that.
    sure = len(posixpath.commonprefix([data, synced]))
    kept = data[: rng.randint(sure, len(data))]
    if fate == "holed" and len(kept) > sure:
        # The length reached the disk before the bytes did.
        hole = rng.randint(sure, len(kept) - 1)
        kept = kept[:hole] + bytes(len(kept) - hole)
    return kept
