"""The one owner of a producer's state: its core, and the lock that every access to it holds.

Application threads append, the loop's thread drains and settles. Nothing but this module has the core without
its lock, except `peek`, which is for reading single fields on the loop's thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

from oncelog.client.producer import ProducerCore
from oncelog.client.producer_batch import Callback, Outcome, Row
from oncelog.errors import MisuseError


class ProducerState:
    """A ProducerCore behind its lock: `with state as core: ...`.

    `changed` is a condition of the same lock: outcomes were settled, or callbacks have returned.
    """

    def __init__(self, core: ProducerCore) -> None:
        self._core = core
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.told_count = 0
        """Outcomes whose callbacks have returned; see ProducerCore.settled_count."""
        _states.add(self)

    def __enter__(self) -> ProducerCore:
        self._lock.acquire()
        return self._core

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @property
    def peek(self) -> ProducerCore:
        """The core without the lock, for reading one field that is replaced as a whole."""
        return self._core

    def join(
        self, topic: str, partition: int | None, row: Row, size_bytes: int, callback: Callback | None
    ) -> tuple[Outcome, int] | None:
        """Take a record into a batch that is open; see ProducerCore.join."""
        with self._lock:
            return self._core.join(topic, partition, row, size_bytes, callback)

    def reset_after_fork(self) -> None:
        """In a forked child no thread sends, and the lock may have been held by one that is not here."""
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self._core.detach(MisuseError("this producer was made before a fork; make one in the child process"))


class FlushMark:
    """What a flush waits for: the outcomes of all records taken before it, and then their callbacks."""

    def __init__(self, state: ProducerState) -> None:
        """Begin a flush; the state's lock must be held."""
        self._state = state
        self._serial = state.peek.flush()
        self._count: int | None = None

    def is_reached(self) -> bool:
        """Whether everything was told; the state's lock must be held."""
        core = self._state.peek
        if self._count is None and core.is_settled_to(self._serial):
            self._count = core.settled_count
        return self._count is not None and self._state.told_count >= self._count


_states: weakref.WeakSet[ProducerState] = weakref.WeakSet()


def _after_fork() -> None:
    for state in _states:
        state.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
