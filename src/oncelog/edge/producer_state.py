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
        """Take a record into an open batch, as happens with nearly every one; None: it must be appended.

        This is here, and not in the core, because one call less is a twentieth of what `send` costs.
        """
        with self._lock:
            core = self._core
            known = core.topics.get(topic)
            if known is None:
                return None
            if partition is not None:
                if type(partition) is not int:
                    return None
                queue = known.queues[partition] if 0 <= partition < known.count else None
            elif row[1] is None:
                queue = known.sticky
            elif row[1] and known.hashes_keys:
                queue = known.queues[known.partitioner.for_key(row[1], known.count)]
            else:
                return None
            if queue is None or (batch := queue.open) is None:
                return None
            batch_bytes, buffered_bytes = batch.size_bytes + size_bytes, core.buffered_bytes + size_bytes
            if batch_bytes > core.join_bytes or buffered_bytes > core.buffer_bytes:
                return None
            outcome, rows = batch.outcome, batch.rows
            index = len(rows)
            if callback is not None:
                outcome.callbacks.append((index, callback))
            rows.append(row)
            batch.size_bytes, core.buffered_bytes = batch_bytes, buffered_bytes
            return outcome, index

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
