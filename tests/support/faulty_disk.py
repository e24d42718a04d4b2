"""A disk on which any call can fail or end the process, even a call that only reads."""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from oncelog.log.disk import SyncFailed
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash


class Fault(Enum):
    """The fault of one call. With `LATE_EIO`, a call takes effect but is not synced, and then reports EIO."""

    KILL_BEFORE = "killed before"
    KILL_AFTER = "killed after"
    ENOSPC = "no room"
    EIO = "fails"
    LATE_EIO = "not synced"
    EMFILE = "no descriptor"


DISK_CALLS = {
    "list", "open", "read", "replace", "rename", "remove", "mkdir", "remove_tree", "sync_directory",
}  # fmt: skip
FILE_CALLS = {"pwrite", "truncate", "sync"}
_WRITES = {"open", "replace", "mkdir", "pwrite"}
_NEEDS_DESCRIPTOR = {"list", "open", "read", "replace", "remove_tree", "sync_directory"}
_SYNCS = {"sync", "sync_directory"}


class FaultyDisk:
    """A disk that passes calls on to a MemoryDisk, until one of them meets a fault.

    Since `arm`, calls are counted from 0, and call number `fail_in` meets `fault`. With `is_lasting`, all
    later calls meet it, too. `calls` counts the calls that can fail. After a kill, the disk rejects every
    call.
    """

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk
        self.calls = 0
        self.fail_in: int | None = None
        self.fault = Fault.EIO
        self.is_lasting = self.is_met = self._is_dead = False

    def arm(self, fail_in: int, fault: Fault, is_lasting: bool = False) -> None:
        self.calls, self.fail_in, self.fault, self.is_met = 0, fail_in, fault, False
        self.is_lasting = is_lasting

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.disk, name)
        return partial(self._call, name, method) if name in DISK_CALLS else method

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        result = self._with_fault(name, lambda: method(*args, **keywords))
        return _FaultyFile(self, result) if name == "open" else result

    def _with_fault(self, name: str, call: Callable[[], Any]) -> Any:
        if self._is_dead:
            raise SimulatedCrash
        self.calls += 1
        if self.fail_in is None or not self._is_due(self.calls - 1 - self.fail_in):
            return call()
        was_met, self.is_met = self.is_met, True
        match self.fault:
            case Fault.KILL_BEFORE:
                self._is_dead = True
                raise SimulatedCrash
            case Fault.KILL_AFTER:
                call()
                self._is_dead = True
                raise SimulatedCrash
            case Fault.ENOSPC if name in _WRITES:
                raise OSError(errno.ENOSPC, "no room")
            case Fault.EMFILE if name in _NEEDS_DESCRIPTOR:
                raise OSError(errno.EMFILE, "too many open files")
            case Fault.LATE_EIO if name == "replace":
                call()
                raise SyncFailed(errno.EIO, "not synced")
            case Fault.EIO:
                raise (SyncFailed if name in _SYNCS else OSError)(errno.EIO, "fails")
        self.is_met = was_met
        return call()

    def _is_due(self, calls_since: int) -> bool:
        return calls_since >= 0 if self.is_lasting else calls_since == 0


class _FaultyFile:
    def __init__(self, disk: FaultyDisk, file: Any) -> None:
        self._disk, self._file = disk, file

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._file, name)
        if name not in FILE_CALLS:
            return method
        return lambda *args: self._disk._with_fault(name, lambda: method(*args))
