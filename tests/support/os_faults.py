"""The real disk with operating system calls that can fail, and the files that a power loss leaves.

In the simulator, a call of the protocol `Disk` fails as a whole. Here, each system call inside such a call
can fail. A write may store a part of its data before it fails, and the call that removes this part may fail,
too.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from oncelog.server import disk as edge_disk

WRITES = {"pwrite", "ftruncate", "open", "rename", "replace", "mkdir", "write"}
READS = {"pread", "unlink", "listdir", "utime"}
SYNCS = {"fsync", "fdatasync"}
CALLS_THAT_FAIL = {
    errno.EIO: WRITES | READS,
    errno.ENOSPC: WRITES - {"ftruncate"},
    errno.EMFILE: {"open", "listdir"},
}


class FaultyOs:
    """Replaces the module `os` in `oncelog.server.disk`. It records what each sync would make durable.

    It does not really sync: `power_loss` restores the files from the records.
    """

    def __init__(self) -> None:
        self.call_count = 0
        self.failed: list[tuple[str, str]] = []
        """The name and path of each system call that failed. The message of a failed check contains them."""
        self._first = self._stop = 0
        self._error = errno.EIO
        self._names: set[str] = set()
        self._taken = 0.0
        self._contents: dict[int, bytes] = {}
        self._names_in: dict[int, dict[str, int]] = {}
        self._removed: dict[int, int] = {}
        """Open descriptors of removed files, so that their inode numbers are not used again. A power loss may
        restore the files' names.
        """

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            patch.object(edge_disk, "os", self),
            patch.object(edge_disk, "_fdatasync", self.fsync),
            patch.object(edge_disk, "open", self._open_file, create=True),
        ):
            try:
                yield
            finally:
                self._forget_removed()

    def arm(self, error: int, names: set[str], first: int, count: int, taken: float) -> None:
        """Let `count` system calls fail, beginning with call number `first` from now on.

        A write that fails stores a part of its data.
        """
        self._error, self._names, self._taken = error, names, taken
        self._first = self.call_count + first
        self._stop = self._first + count

    def disarm(self) -> None:
        self._stop = 0

    def _fails(self, name: str, path: str | int) -> bool:
        self.call_count += 1
        if not self._first <= self.call_count < self._stop or name not in self._names:
            return False
        self.failed.append((name, str(path) if isinstance(path, str) else _path_of(path)))
        return True

    def _check(self, name: str, path: str | int) -> None:
        if self._fails(name, path):
            raise OSError(self._error, os.strerror(self._error), str(path))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._check("open", path)
        is_new = not os.path.exists(path)
        fd = os.open(path, flags, mode)
        if is_new:
            self._contents.pop(os.fstat(fd).st_ino, None)
        return fd

    def _open_file(self, path: str, mode: str, **keywords: Any) -> Any:
        self._check("open", path)
        is_new = not os.path.exists(path)
        file = open(path, mode, **keywords)  # noqa: SIM115
        if is_new:
            self._contents.pop(os.fstat(file.fileno()).st_ino, None)
        if "w" in mode and self._fails("write", path):
            file.close()
            raise OSError(self._error, os.strerror(self._error), path)
        return file

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        if not self._fails("pwrite", fd):
            return os.pwrite(fd, data, position)
        part = int(len(data) * self._taken)
        if part:
            os.pwrite(fd, bytes(data)[:part], position)
        if self._error == errno.ENOSPC and 0 < part < len(data):
            return part  # a short write, as on a nearly full disk; the next call fails
        raise OSError(self._error, os.strerror(self._error))

    def pread(self, fd: int, size: int, position: int) -> bytes:
        self._check("pread", fd)
        return os.pread(fd, size, position)

    def ftruncate(self, fd: int, size: int) -> None:
        self._check("ftruncate", fd)
        os.ftruncate(fd, size)

    def listdir(self, path: str) -> list[str]:
        self._check("listdir", path)
        return os.listdir(path)

    def mkdir(self, path: str) -> None:
        self._check("mkdir", path)
        os.mkdir(path)
        self._names_in.pop(os.stat(path).st_ino, None)

    def utime(self, path: str, *, ns: tuple[int, int]) -> None:
        self._check("utime", path)
        os.utime(path, ns=ns)

    def unlink(self, path: str) -> None:
        self._check("unlink", path)
        self._note_removed(path)
        os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        self._check("rename", old)
        self._note_removed(new)
        os.rename(old, new)

    def replace(self, old: str, new: str) -> None:
        self._check("replace", old)
        self._note_removed(new)
        os.replace(old, new)

    def fsync(self, fd: int) -> None:
        self._check("fsync", fd)
        path, inode = _path_of(fd), os.fstat(fd).st_ino
        if os.path.isdir(path):
            self._names_in[inode] = _inodes(path)
        else:
            self._contents[inode] = _content(fd)

    def _note_removed(self, path: str) -> None:
        if os.path.isfile(path):
            fd = os.open(path, os.O_RDONLY)
            self._removed[os.fstat(fd).st_ino] = fd

    def _forget_removed(self) -> None:
        for fd in self._removed.values():
            os.close(fd)
        self._removed.clear()

    def power_loss(self, root: Path, rng: Random) -> None:
        """Leave the synced data in `root`. Of unsynced data, keep any part, as a power loss may."""
        paths = {each.stat().st_ino: each for each in root.rglob("*")}
        all_names_stay, loses_all = rng.choice([(False, True), (False, False), (False, False), (True, False)])

        def survives() -> bool:
            return not loses_all and (all_names_stay or rng.random() < 0.5)

        def build(source: Path | None, inode: int, target: Path) -> None:
            target.mkdir()
            synced = self._names_in.get(inode, {})
            now = {} if source is None else _inodes(str(source))
            for name in sorted(synced.keys() | now.keys()):
                chosen = now if synced.get(name) != now.get(name) and survives() else synced
                if name not in chosen:
                    continue
                path = paths.get(chosen[name])
                if chosen[name] in self._names_in or (path is not None and path.is_dir()):
                    build(path, chosen[name], target / name)
                    continue
                (target / name).write_bytes(self._surviving(chosen[name], path, rng, loses_all))
                if path is not None:
                    os.utime(target / name, ns=(path.stat().st_mtime_ns,) * 2)

        image = root.with_name(root.name + ".after")
        build(root, root.stat().st_ino, image)
        shutil.rmtree(root)
        image.rename(root)
        self._contents = {each.stat().st_ino: each.read_bytes() for each in root.rglob("*") if each.is_file()}
        directories = [root, *(each for each in root.rglob("*") if each.is_dir())]
        self._names_in = {directory.stat().st_ino: _inodes(str(directory)) for directory in directories}
        self._forget_removed()

    def _surviving(self, inode: int, path: Path | None, rng: Random, loses_all: bool) -> bytes:
        synced = self._contents.get(inode, b"")
        fd = self._removed.get(inode)
        last = path.read_bytes() if path is not None else synced if fd is None else _content(fd)
        fate = rng.random()
        if loses_all or fate < 0.4:
            return synced
        if fate < 0.7 or len(last) <= len(synced):
            return last
        cut = rng.randrange(len(synced), len(last) + 1)
        return synced + last[len(synced) : cut] + bytes(len(last) - cut if rng.random() < 0.3 else 0)


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _content(fd: int) -> bytes:
    """Read a file through /proc, because its descriptor may be write-only, and the file may have no name any
    more.
    """
    return Path(f"/proc/self/fd/{fd}").read_bytes()


def _inodes(directory: str) -> dict[str, int]:
    with os.scandir(directory) as entries:
        return {entry.name: entry.inode() for entry in entries}
