"""An in-memory disk that can be full, fail, be killed in the middle of a write, or lose power.

`after_kill` and `after_power_loss` return the disk that the next process finds. Synced data always survive.
Data that were written but not synced survive a kill completely, and a power loss at random:

- a file's bytes up to some position, or block by block; its length is the written or the synced one;
- the changes of a directory's names (creations, unlinks, renames) one by one, until the directory is synced;
- a new or renamed directory only if its parent's change survives, even if its files were synced.

After a failed sync, the affected bytes can still be read, but they are not on the disk, and the next sync
does not write them. Source: fsync(2) and rename(2) of Linux; ALICE (Pillai et al., OSDI 2014) for what file
systems reorder.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from random import Random
from typing import NamedTuple

from oncelog.log.disk import Buffer, SyncFailed

_split = lru_cache(4096)(posixpath.split)
_names = lru_cache(4096)(lambda path: tuple(path.split("/")) if path else ())
_ENTRY_BYTES = {".index": 8, ".timeindex": 12, ".txnindex": 34}
"""Size of an index entry by file extension.

A reader cannot detect that a file was cut between two entries.
"""
_BLOCK_BYTES = (16, 64, 512)


class SimulatedCrash(BaseException):
    """Raised to end the simulated process. A BaseException, so that no `except Exception` handles it."""


class _Inode:
    """A file's current bytes, and its bytes at the last sync.

    `lost`: ranges that can be read after a failed sync, but that later syncs do not write, as on Linux.
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
        """Record that the bytes from `start` to below `stop` were written again.

        The next sync then writes these bytes, even if an earlier sync of them failed.
        """
        parts = [part for a, b in self.lost for part in ((a, min(b, start)), (max(a, stop), b))]
        self.lost = [(a, b) for a, b in parts if a < b]

    def durable(self) -> bytes:
        """Return the bytes that are on the disk after the next successful sync."""
        data = bytearray(self.data)
        for start, stop in self.lost:
            stop = min(stop, len(data))
            if start < stop:
                data[start:stop] = self.synced[start:stop].ljust(stop - start, b"\0")
        return bytes(data)


class _Change(NamedTuple):
    """A change of a directory's names that is not synced yet. A rename is one change, as in a journal."""

    removed: str | None
    name: str | None
    node: _Inode | _Directory


class _Directory:
    """A directory: its current names, its names at the last sync, and the changes since then."""

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
        """Yield all files below this directory, at any depth."""
        for node in self.entries.values():
            if isinstance(node, _Inode):
                yield node
            else:
                yield from node.files()

    def copy(self, copied: dict[int, _Inode | _Directory]) -> _Directory:
        """Return a copy of the tree. `copied` maps the id() of each node copied so far to its copy."""

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
        """Return the directory as a power loss may leave it, chosen at random among the possible states.

        Files keep their modification times.
        """
        entries = dict(self.durable)
        for change in _surviving(self.changes, rng):
            _apply(entries, change)
        directory = _Directory()
        for name, node in sorted(entries.items()):
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
    """Return the changes that reached the disk: all, none, the first ones, or a random selection."""
    fate = rng.choice(("all", "none", "first", "each"))
    if fate == "first":
        return changes[: rng.randint(0, len(changes))]
    if fate == "each":
        return [change for change in changes if rng.random() < 0.5]
    return changes if fate == "all" else []


class MemoryFile:
    """A file of a MemoryDisk. Like a RealFile, it is opened by name at its first use, and again at the first
    use after `release_handle`.

    So it may then be another file, which took the name meanwhile. An open file stays the same, whatever
    happens to its name.
    """

    def __init__(self, disk: MemoryDisk, inode: _Inode | None, path: str) -> None:
        self._disk = disk
        self._inode = inode
        """The open file; None while no file is open."""
        self._path = path
        self._is_closed = False
        self._user_count = 0
        """Number of threads that sync or rewrite the file. Above 0, `release_handle` does nothing."""

    def size(self) -> int:
        self._check()
        return len((self._inode or self._disk.inode(self._path)).data)

    def pread(self, size: int, position: int) -> bytes:
        return bytes(self._used().data[position : position + size])

    def pwrite(self, data: Buffer, position: int) -> None:
        inode = self._used()
        inode.written(position, position + len(data))
        inode.modified_ms = self._disk.now_ms()
        self._disk.write_into(inode.data, bytes(data), position, self._path)

    def truncate(self, size: int) -> None:
        inode = self._used()
        self._disk.step("truncate", self._path)
        kept = inode.data[:size]
        inode.data[:] = kept + bytes(size - len(kept))

    def sync(self) -> None:
        with self._in_use(is_sync=True) as inode:
            if inode is None:
                # Another thread has closed the file during the sync, which is also possible on a real disk.
                return
            try:
                self._disk.step("sync", self._path)
            except SyncFailed:
                inode.fail_sync()
                raise
            inode.synced = inode.durable()

    def rewrite(self, start: int, stop: int) -> None:
        with self._in_use() as inode:
            if inode is not None:
                self._disk.step("write", self._path)
                inode.written(start, stop)

    def release_handle(self) -> None:
        if not self._user_count:
            self._inode = None

    def close(self) -> None:
        self._is_closed = True

    def _check(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the file is closed", self._path)

    def _open(self) -> None:
        """Open the file by name, unless it is open or closed for good. Raises FileNotFoundError."""
        if self._inode is None and not self._is_closed:
            self._disk.turn()
            if self._inode is None and not self._is_closed:
                self._inode = self._disk.inode(self._path)

    def _used(self) -> _Inode:
        """Return the open file, after other threads have had their turn.

        Raises OSError if one of them closed the file or released its handle. On a real disk, the number of
        the descriptor may belong to any other file by then.
        """
        self._open()
        inode = self._inode
        self._disk.turn()
        self._check()
        if inode is None or inode is not self._inode:
            raise OSError(errno.EBADF, "the handle was released while the file was used", self._path)
        return inode

    @contextmanager
    def _in_use(self, *, is_sync: bool = False) -> Iterator[_Inode | None]:
        """Yield the open file after other threads have had their turn; None if the file is closed. Until the
        end of the block, its handle is not released.
        """
        self._open()
        inode = self._inode
        self._user_count += 1
        try:
            self._disk.turn(is_sync=is_sync)
            yield None if self._is_closed else inode
        finally:
            self._user_count -= 1


class MemoryLock:
    """A lock of a MemoryDisk."""

    def __init__(self, held: set[str], path: str) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        self._held.discard(self._path)


class _Mutex:
    """A mutex between the threads of a simulated process. While it is held, no other thread runs."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk

    def __enter__(self) -> None:
        self._disk.turn()
        self._disk.held_count += 1

    def __exit__(self, *_: object) -> None:
        self._disk.held_count -= 1


class MemoryDisk:
    """An in-memory disk. One simulated process at a time uses it."""

    def __init__(self) -> None:
        self.capacity_bytes: int | None = None
        """Size of the disk; None for no limit."""
        self.errors: dict[tuple[str, str], int] = {}
        """Operations that fail: (operation, end of the path) -> errno.

        Operations: write, sync, truncate, create, rename, remove, replace, mkdir.
        """
        self.crash_after: int | None = None
        """SimulatedCrash is raised when `steps` reaches this value; None for never."""
        self.steps = 0
        """Number of completed steps. Each written byte is one step. Each of the other operations that
        `errors` can contain is also one step.
        """
        self.now_ms: Callable[[], int] = lambda: 1 << 60
        """The clock for modification times. The default is far in the future, so that no file is old."""
        self.on_crash: Callable[[], object] = lambda: None
        """Called once when `crash_after` is reached."""
        self.on_step: list[Callable[[str, str], object]] = []
        """Called before each step with the operation and the path. A write of any size is one call. May raise
        OSError, or set `crash_after`.
        """
        self.on_turn: Callable[[bool], object] | None = None
        """Called before each operation, with True before a sync. May run another thread of the process."""
        self.held_count = 0
        """Number of mutexes that are held. While this number is above 0, no other thread runs."""
        self._root = _Directory()
        self._locks: set[str] = set()
        self._is_dead = False

    def after_kill(self) -> MemoryDisk:
        """Return the disk after a kill: all written data are there.

        Data that were not synced can still be lost in a later power loss.
        """
        disk = MemoryDisk()
        disk.now_ms = self.now_ms
        disk._root = self._root.copy({})
        return disk

    def after_power_loss(self, rng: Random) -> MemoryDisk:
        """Return the disk after a power loss. Data that were not synced survive at random."""
        disk = MemoryDisk()
        disk.now_ms = self.now_ms
        disk._root = self._root.survivor(rng)
        return disk

    def die(self) -> None:
        """End the process: every further change and sync raises SimulatedCrash."""
        self._is_dead = True

    def release(self) -> None:
        """Allow operations again after the simulation, so that generators of a dead process can be closed."""
        self._is_dead, self.crash_after, self.on_turn = False, None, None
        self.errors.clear()
        self.on_step.clear()

    def turn(self, *, is_sync: bool = False) -> None:
        """Let other threads of the process run here, unless a mutex is held."""
        if self.on_turn is not None and not self.held_count:
            self.on_turn(is_sync)

    def step(self, operation: str, path: str, count: int = 1) -> int:
        """Count `count` steps of an operation. Return how many of these happen before the crash.

        Raises OSError if `errors` contains the operation, and SimulatedCrash if the process has ended or ends
        in this step. In a write, the caller raises SimulatedCrash itself, after it has stored the bytes
        before the crash.
        """
        self._refuse(operation, path)
        for call in self.on_step:
            call(operation, path)
        done = count if self.crash_after is None else min(count, max(self.crash_after - self.steps, 0))
        self.steps += done
        if done < count:
            self._is_dead = True
            # Hold a mutex, so that no other thread of the process runs while `on_crash` inspects the disk.
            self.held_count += 1
            self.on_crash()
            self.held_count -= 1
            if operation != "write":
                raise SimulatedCrash
        return done

    def _refuse(self, operation: str, path: str) -> None:
        """Raise the OSError that `errors` has for this operation.

        Raise SimulatedCrash if the process has ended.
        """
        if self._is_dead:
            raise SimulatedCrash
        for (failing, suffix), number in self.errors.items():
            if failing == operation and path.endswith(suffix):
                failed = SyncFailed if operation == "sync" else OSError
                raise failed(number, os.strerror(number), path)

    def write_into(self, target: bytearray, data: bytes, position: int, path: str) -> None:
        """Write the bytes that fit before the crash and into the capacity.

        If bytes are left, raises SimulatedCrash or OSError (ENOSPC).
        """
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
        """Return the total size of all files in bytes."""
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
        return MemoryFile(self, node if create else None, path)

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
        removed = self._directory(path)
        for name in list(removed.entries):
            self.remove(f"{path}/{name}")
        self.step("remove", path)
        directory, name = _split(path)
        self._directory(directory).apply(_Change(name, None, removed))

    def sync_directory(self, path: str = "") -> None:
        self.turn(is_sync=True)
        directory = self._directory(path)
        self.step("sync", path)
        directory.sync()

    def inode(self, path: str) -> _Inode:
        """Return the inode of a file. Raises FileNotFoundError."""
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
    """Return one of the contents that a power loss may leave in a file, chosen at random.

    A torn file often ends between two entries of `entry_bytes`, where a reader cannot detect the cut.
    """
    data, synced = inode.durable(), inode.synced
    fate = rng.choice(("synced", "written", "torn", "holed", "blocks"))
    if fate == "synced":
        return synced
    if fate == "written" or data == synced:
        return data
    # The first `durable` bytes were synced and not changed since. The bytes after them were appended later,
    # or written again after a truncation.
    durable = len(posixpath.commonprefix([data, synced]))
    if fate == "blocks":
        return _some_blocks(data, synced, durable, rng)
    length = rng.randint(durable, len(data))
    if rng.random() < 0.5:
        length = max(durable, length - length % entry_bytes)
    kept = data[:length]
    if fate == "holed" and len(kept) > durable:
        # Simulate that the length has reached the disk, but the last bytes have not.
        hole = rng.randint(durable, len(kept) - 1)
        kept = kept[:hole] + bytes(len(kept) - hole)
    return kept


def _some_blocks(data: bytes, synced: bytes, durable: int, rng: Random) -> bytes:
    """Return the first `durable` bytes, followed by blocks. Each block has its written or its synced content,
    chosen at random.

    The length of the result is that of the written or of the synced content.
    """
    length = rng.choice((len(data), len(synced)))
    size = rng.choice(_BLOCK_BYTES)
    kept = bytearray(data[:durable])
    for start in range(durable, length, size):
        block = rng.choice((data, synced))[start : min(start + size, length)]
        kept += block.ljust(min(size, length - start), b"\0")
    return bytes(kept[:length])
