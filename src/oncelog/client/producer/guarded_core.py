"""The one owner of a producer's state: its core, and the lock that every access to it holds.

Application threads append, the loop's thread drains and settles. Whoever takes `peek` without the lock may
only read single fields.

A signal handler of Python runs on the main thread, behind a call or as a function begins. It may raise there.
So the lock is taken by `with state.lock` only: a method of ours, or a Condition, could be left with it held.
What is waited for comes through a queue. `ProducerCore.put_right` repairs what `append` leaves half done.

A handler may also call the producer while the call that it interrupted holds the lock. It can neither wait
for that call, which goes on only behind it, nor use a state that is half changed. So it is refused. The lock
lets its own thread in again, for else nobody could tell.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref

from oncelog.client.producer.batch import Callback, Outcome, Row
from oncelog.client.producer.core import ProducerCore
from oncelog.errors import MisuseError


class ProducerState:
    """A ProducerCore behind its lock: `with state.lock: core = state.peek`."""

    def __init__(self, core: ProducerCore) -> None:
        self.peek = core
        """The core. Without the lock it is for reading one field that is replaced as a whole."""
        self.lock = threading.RLock()
        self.is_changing = False
        """A call that holds the lock changes the core; who finds this set is a signal handler within it."""
        self.told_count = 0
        """Outcomes whose callbacks have returned; see ProducerCore.settled_count."""
        self.room_waiters: list[queue.SimpleQueue[None]] = []
        """Of threads that wait for room in buffer.memory, each is told here that something was settled."""
        _states.add(self)

    @property
    def is_told(self) -> bool:
        """Return True once every record has its outcome and its callback has returned; under the lock."""
        return self.peek.is_idle and self.told_count >= self.peek.settled_count

    def check_not_held(self) -> None:
        """Raise MisuseError in a signal handler that has interrupted a call which holds the lock.

        Guard: test_a_signal_handler_that_calls_the_producer_never_waits_for_what_it_interrupted.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise _interrupted_call()

    def tell_room_waiters(self) -> None:
        """Let those who wait for room look again."""
        for news in list(self.room_waiters):
            news.put(None)

    def join(
        self, topic: str, partition: int | None, row: Row, size_bytes: int, callback: Callback | None
    ) -> tuple[Outcome, int] | None:
        """Take a record into an open batch, as happens with nearly every one; None: it must be appended.

        This is here, and not in the core, because one call less is a twentieth of what `send` costs.
        """
        with self.lock:
            if self.is_changing:
                raise _interrupted_call()
            self.is_changing = True
            try:
                core = self.peek
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
                # No signal handler can run between `len` and the end of `append`. A callback without its
                # record would be called for the next one. Guard:
                # test_an_interrupt_at_any_call_of_send_leaves_a_sound_producer.
                index = len(rows)
                batch.size_bytes, core.buffered_bytes = batch_bytes, buffered_bytes
                if callback is not None:
                    outcome.callbacks[index] = callback
                rows.append(row)
                return outcome, index
            finally:
                self.is_changing = False

    def reset_after_fork(self) -> None:
        """In a forked child no thread sends, and the lock may have been held by one that is not here."""
        self.lock = threading.RLock()
        self.is_changing = False
        self.room_waiters = []
        self.peek.detach(MisuseError("this producer was made before a fork; make one in the child process"))


def _interrupted_call() -> MisuseError:
    return MisuseError(
        "a signal handler cannot use this producer here: it has interrupted a call of the same producer, "
        "which goes on only when the handler has returned. Let the handler set a flag, or raise, and use the "
        "producer where that is caught"
    )


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
