"""A disk in memory that can be full, broken, killed in the middle of a write, or lose power.

A crash is a value: `after_kill` and `after_power_loss` return the disk that the next process finds.
What was synced is there for sure. What was only written survives a kill whole and a power loss by chance:

- a file's bytes block by block, with or without its length;
- the changes of a directory's names (creations, unlinks, renames) one by one, until the directory is synced;
- a directory that is new or was renamed only with its parent's change, though its files were synced.

A failed sync leaves pages that can be read, are not on the disk, and are not written by the next sync.
Source: fsync(2) and rename(2) of Linux; ALICE (Pillai et al., OSDI 2014) for what file systems reorder.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from random import Random
from typing import NamedTuple

from oncelog.log.disk import Buffer, SyncFailed

_split = lru_cache(4096)(posixpath.split)
_names = lru_cache(4096)(lambda path: tuple(path.split("/")) if path else ())
_ENTRY_BYTES = {".index": 8, ".timeindex": 12, ".txnindex": 34}
"""Sizes of index entries: a file that ends between two of them is not seen to be cut."""
_BLOCK_BYTES = (16, 64, 512)


class SimulatedCrash(BaseException):
    """The process ends here. Not an Exception, so that nothing on the way handles it."""


class _Inode:
    """A file's bytes now, and as of its last sync.

    `lost`: ranges that a failed sync left readable, but that later ones do not write, as on Linux.
    """

    __slots__ = ("data", "lost", "modified_ms", "synced")

    def __init__(self, data: bytes = b"", synced: bytes = b"", *, modified_ms: int = 0) -> None:
        self.data = bytearray(data)
        self.synced = synced
        self.lost: list[tuple[int, int]] = []
        self.modified_ms = modified_ms

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


class _Change(NamedTuple):
    """A change of a directory's names that is not durable yet. A rename does both at once, as journals do."""

    removed: str | None
    name: str | None
    node: _Inode | _Directory


class _Directory:
    """A directory's names now, as of its last sync, and the changes between."""

    __slots__ = ("changes", "durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, _Inode | _Directory] = {}
        self.durable: dict[str, _Inode | _Directory] = {}
        self.changes: list[_Change] = []

    def apply(self, change: _Change) -> None:
        _apply(self.entries, change)
        self.changes.append(change)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.changes.clear()

    def files(self) -> Iterator[_Inode]:
        """Return every file below this directory."""
        for node in self.entries.values():
            if isinstance(node, _Inode):
                yield node
            else:
                yield from node.files()

    def copy(self, copied: dict[int, _Inode | _Directory]) -> _Directory:
        """Return a copy of the tree. `copied` holds what was copied already, by the original's id."""

        def copy_of(node: _Inode | _Directory) -> _Inode | _Directory:
            if id(node) not in copied:
                copied[id(node)] = node.copy() if isinstance(node, _Inode) else node.copy(copied)
            return copied[id(node)]

        directory = _Directory()
        directory.entries = {name: copy_of(node) for name, node in self.entries.items()}
        directory.durable = {name: copy_of(node) for name, node in self.durable.items()}
        directory.changes = [change._replace(node=copy_of(change.node)) for change in self.changes]
        return directory

    def survivor(self, rng: Random) -> _Directory:
        """Return one of the directories that a power loss may leave. Files keep the times of their writes."""
        found = dict(self.durable)
        for change in _surviving(self.changes, rng):
            _apply(found, change)
        directory = _Directory()
        for name, node in sorted(found.items()):
            if isinstance(node, _Directory):
                directory.entries[name] = node.survivor(rng)
            else:
                data = _survivor(node, rng, _ENTRY_BYTES.get(posixpath.splitext(name)[1], 1))
                directory.entries[name] = _Inode(data, data, modified_ms=node.modified_ms)
        directory.sync()
        return directory


def _apply(entries: dict[str, _Inode | _Directory], change: _Change) -> None:
    if change.removed is not None and entries.get(change.removed) is change.node:
        del entries[change.removed]
    if change.name is not None:
        entries[change.name] = change.node


def _surviving(changes: list[_Change], rng: Random) -> list[_Change]:
    """Return the changes that reached the disk: all, none, the first ones, or each by chance."""
    fate = rng.choice(("all", "none", "first", "each"))
    if fate == "first":
        return changes[: rng.randint(0, len(changes))]
    if fate == "each":
        return [change for change in changes if rng.random() < 0.5]
    return changes if fate == "all" else []


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
        self._disk.turn()
        self._check()
        return bytes(self._inode.data[position : position + size])

    def pwrite(self, data: Buffer, position: int) -> None:
        self._disk.turn()
        self._check()
        self._inode.written(position, position + len(data))
        self._inode.modified_ms = self._disk.now_ms()
        self._disk.write_into(self._inode.data, bytes(data), position, self._path)

    def truncate(self, size: int) -> None:
        self._disk.turn()
        self._check()
        self._disk.step("truncate", self._path)
        kept = self._inode.data[:size]
        self._inode.data[:] = kept + bytes(size - len(kept))

    def sync(self) -> None:
        self._disk.turn(is_sync=True)
        if not self._is_open:
            return  # as on the real disk, where another thread may close a file meanwhile
        try:
            self._disk.step("sync", self._path)
        except SyncFailed:
            self._inode.fail_sync()
            raise
        self._inode.synced = self._inode.durable()

    def rewrite(self, start: int, stop: int) -> None:
        self._disk.turn()
        if not self._is_open:
            return
        self._disk.step("write", self._path)
        self._inode.written(start, stop)

    def release_handle(self) -> None:
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


class _Mutex:
    """A lock between the threads of a simulated process: no other one runs while it is held."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk

    def __enter__(self) -> None:
        self._disk.turn()
        self._disk.held_count += 1

    def __exit__(self, *_: object) -> None:
        self._disk.held_count -= 1


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
        """Called once, when it crashes by itself."""
        self.on_turn: Callable[[bool], object] | None = None
        """Called before each operation, with True before a sync: here another thread may run."""
        self.held_count = 0
        """Mutexes that are held: meanwhile no other thread runs."""
        self._root = _Directory()
        self._locks: set[str] = set()
        self._is_dead = False

    def after_kill(self) -> MemoryDisk:
        """The disk after the process was killed: everything written is there, and as durable as it was."""
        disk = MemoryDisk()
        disk.now_ms = self.now_ms
        disk._root = self._root.copy({})
        return disk

    def after_power_loss(self, rng: Random) -> MemoryDisk:
        """The disk after a power loss: what was not synced is there wholly, partly or not at all."""
        disk = MemoryDisk()
        disk.now_ms = self.now_ms
        disk._root = self._root.survivor(rng)
        return disk

    def die(self) -> None:
        """Its process is gone: whoever still uses it meets SimulatedCrash."""
        self._is_dead = True

    def release(self) -> None:
        """The world is over: what a dead process' generators do when they are closed harms nobody."""
        self._is_dead, self.crash_after, self.on_turn = False, None, None
        self.errors.clear()

    def turn(self, *, is_sync: bool = False) -> None:
        """Let other threads of the process run here, unless a mutex is held."""
        if self.on_turn is not None and not self.held_count:
            self.on_turn(is_sync)

    def step(self, operation: str, path: str, count: int = 1) -> int:
        """Count steps; how many of `count` happen before the crash. Raises the OSError set for the call."""
        self._refuse(operation, path)
        done = count if self.crash_after is None else min(count, max(self.crash_after - self.steps, 0))
        self.steps += done
        if done < count:
            self._is_dead = True
            self.held_count += 1  # what looks at the last moment is no thread of the process
            self.on_crash()
            self.held_count -= 1
            if operation != "write":
                raise SimulatedCrash
        return done

    def _refuse(self, operation: str, path: str) -> None:
        """Raise the OSError set for the call, and SimulatedCrash when the process is gone."""
        if self._is_dead:
            raise SimulatedCrash
        for (failing, suffix), number in self.errors.items():
            if failing == operation and path.endswith(suffix):
                failed = SyncFailed if operation == "sync" else OSError
                raise failed(number, os.strerror(number), path)

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
        return sum(len(inode.data) for inode in self._root.files())

    def describe(self, path: str) -> str:
        return f"memory:/{path}"

    def list(self, directory: str = "") -> list[str]:
        self.turn()
        return sorted(self._directory(directory).entries)

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def is_directory(self, path: str) -> bool:
        return isinstance(self._find(path), _Directory)

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        self.turn()
        node = self._find(path)
        if node is None:
            directory, name = _split(path)
            if not create or not isinstance(self._find(directory), _Directory):
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self.step("create", path)
            node = _Inode(modified_ms=self.now_ms())
            self._directory(directory).apply(_Change(None, name, node))
        if isinstance(node, _Directory):
            raise IsADirectoryError(errno.EISDIR, "a directory", path)
        return MemoryFile(self, node, path)

    def read(self, path: str) -> bytes:
        self.turn()
        return bytes(self.inode(path).data)

    def replace(self, path: str, data: bytes, *, sync: bool = True, is_private: bool = False) -> None:
        self.turn()
        self.step("replace", path)
        parent, name = _split(path)
        directory, inode, temporary = (
            self._directory(parent),
            _Inode(modified_ms=self.now_ms()),
            f"{name}.tmp",
        )
        directory.apply(_Change(None, temporary, inode))
        try:
            self.write_into(inode.data, data, 0, path)
            if sync:
                self._sync_temporary(path)
                inode.synced = data
        except OSError:
            directory.apply(_Change(temporary, None, inode))
            raise
        directory.apply(_Change(temporary, name, inode))
        if sync:
            self._refuse("sync", parent)
            directory.sync()

    def _sync_temporary(self, path: str) -> None:
        try:
            self._refuse("sync", path)
        except SyncFailed as error:
            raise OSError(error.errno, error.strerror, path) from error

    def rename(self, old: str, new: str) -> None:
        self.turn()
        self.step("rename", old)
        (old_directory, old_name), (new_directory, new_name) = _split(old), _split(new)
        node = self._find(old)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", old)
        if old_directory == new_directory:
            self._directory(old_directory).apply(_Change(old_name, new_name, node))
        else:
            self._directory(new_directory).apply(_Change(None, new_name, node))
            self._directory(old_directory).apply(_Change(old_name, None, node))

    def modified_ms(self, path: str) -> int:
        return self.inode(path).modified_ms

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        self.inode(path).modified_ms = modified_ms

    def remove(self, path: str) -> None:
        self.turn()
        inode = self.inode(path)
        self.step("remove", path)
        directory, name = _split(path)
        self._directory(directory).apply(_Change(name, None, inode))

    def mkdir(self, path: str) -> None:
        self.turn()
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "the directory exists", path)
        self.step("mkdir", path)
        directory, name = _split(path)
        self._directory(directory).apply(_Change(None, name, _Directory()))

    def remove_tree(self, path: str) -> None:
        self.turn()
        found = self._directory(path)
        for name in list(found.entries):
            self.remove(f"{path}/{name}")
        self.step("remove", path)
        directory, name = _split(path)
        self._directory(directory).apply(_Change(name, None, found))

    def sync_directory(self, path: str = "") -> None:
        self.turn(is_sync=True)
        directory = self._directory(path)
        self.step("sync", path)
        directory.sync()

    def inode(self, path: str) -> _Inode:
        """Return a file's bytes. Raises FileNotFoundError."""
        node = self._find(path)
        if not isinstance(node, _Inode):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return node

    def _find(self, path: str) -> _Inode | _Directory | None:
        node: _Inode | _Directory | None = self._root
        for name in _names(path):
            node = node.entries.get(name) if isinstance(node, _Directory) else None
        return node

    def _directory(self, path: str) -> _Directory:
        node = self._find(path)
        if not isinstance(node, _Directory):
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return node

    def volume(self) -> tuple[int, int]:
        total = self.capacity_bytes if self.capacity_bytes is not None else 1 << 40
        return total, max(total - self.used_bytes(), 0)

    def mutex(self) -> AbstractContextManager[object]:
        return _Mutex(self)

    def lock(self, path: str) -> MemoryLock:
        if path in self._locks:
            raise BlockingIOError(errno.EAGAIN, "locked by another holder", path)
        self._locks.add(path)
        return MemoryLock(self._locks, path)


def _survivor(inode: _Inode, rng: Random, entry_bytes: int) -> bytes:
    """Return one of the contents that a power loss may leave.

    `entry_bytes`: a cut often is between two entries of this size, where nothing shows it.
    """
    data, synced = inode.durable(), inode.synced
    fate = rng.choice(("synced", "written", "torn", "holed", "blocks"))
    if fate == "synced":
        return synced
    if fate == "written" or data == synced:
        return data
    # What was synced and not touched since; a file that was cut and written on differs behind that.
    sure = len(posixpath.commonprefix([data, synced]))
    if fate == "blocks":
        return _some_blocks(data, synced, sure, rng)
    length = rng.randint(sure, len(data))
    if rng.random() < 0.5:
        length = max(sure, length - length % entry_bytes)
    kept = data[:length]
    if fate == "holed" and len(kept) > sure:
        # The length reached the disk before the bytes did.
        hole = rng.randint(sure, len(kept) - 1)
        kept = kept[:hole] + bytes(len(kept) - hole)
    return kept


def _some_blocks(data: bytes, synced: bytes, sure: int, rng: Random) -> bytes:
    """Return either length and, behind `sure`, either content of each block: none waits for another."""
    length = rng.choice((len(data), len(synced)))
    size = rng.choice(_BLOCK_BYTES)
    kept = bytearray(data[:sure])
    for start in range(sure, length, size):
        block = rng.choice((data, synced))[start : min(start + size, length)]
        kept += block.ljust(min(size, length - start), b"\0")
    return bytes(kept[:length])
