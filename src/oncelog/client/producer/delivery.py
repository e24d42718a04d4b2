"""What `send` returns: small handles on the outcome that a whole batch shares."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from oncelog.client.producer.batch import OffsetRange, Outcome
from oncelog.errors import MisuseError, TimedOut
from oncelog.runtime.loop_thread import bounded
from oncelog.types import RecordMetadata

_LOG = logging.getLogger("oncelog.producer")


def _wait(outcome: Outcome, timeout: float | None) -> None:
    if outcome.is_done:
        return
    if sys.is_finalizing():
        raise MisuseError("the interpreter is ending: what has no outcome by now gets none")
    # Not an Event: an interrupt can leave its lock held, and then `set` never returns on the thread that
    # carries the records. See test_an_interrupt_at_any_call_of_what_waits_stops_nobody.
    done = threading.Lock()
    done.acquire()
    outcome.listen(done.release)
    if not done.acquire(timeout=-1 if timeout is None else max(bounded(timeout) or 0, 0)):
        raise TimedOut(f"no outcome within {timeout:g} s; the record is still under way")


_STATE = frozenset(vars(Future()))
"""What concurrent.futures keeps in every future, and this one only when it is asked for."""


def _is_condition(part: tuple[str, Any]) -> bool:
    return part[0] == "_condition"


class RecordFuture(Future[RecordMetadata]):
    """One record's outcome: a concurrent.futures.Future that cannot be cancelled and costs little.

    Its lock and lists are made when somebody (`wait`, `as_completed`) reaches for them.
    """

    __slots__ = ("_index", "_outcome")

    def __init__(self, outcome: Outcome, index: int) -> None:
        self._outcome = outcome
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if name not in _STATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Before the first part is there: a thread that is interrupted here leaves no future that never ends.
        self._outcome.listen(self._complete)
        self._make_state()
        return self.__dict__[name]

    def _make_state(self) -> None:
        """Make what concurrent.futures keeps, or what is missing of it; all threads get the same.

        Without a lock of its own: a fork, a signal or another thread may come at any moment.
        """
        mine = self.__dict__
        made = mine.setdefault("_made", vars(Future()))
        # The condition comes last: a thread that finds it finds the rest. Else its `wait` counts this record
        # as pending, completes it while it reaches for `_waiters`, and is never woken. See
        # test_a_future_whose_state_is_half_made_loses_no_waiter.
        for name, part in sorted(made.items(), key=_is_condition):
            mine.setdefault(name, part)

    def _complete(self) -> None:
        self._make_state()
        if super().done():
            return
        error = self._outcome.error_of(self._index)
        with suppress(InvalidStateError):  # two threads may come here at once
            if error is None:
                self.set_result(self._outcome.metadata(self._index))
            else:
                self.set_exception(error)

    def done(self) -> bool:
        """Whether it was delivered or failed."""
        return self._outcome.is_done

    def cancel(self) -> bool:
        """Never: a record that was taken is sent."""
        return False

    def cancelled(self) -> bool:
        """Never."""
        return False

    def running(self) -> bool:
        """Whether it is under way."""
        return not self._outcome.is_done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record stands. Raises why it failed, TimedOut after `timeout` seconds without either."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._outcome.metadata(self._index)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Why it failed; None when it was delivered. Raises TimedOut."""
        _wait(self._outcome, timeout)
        return self._outcome.error_of(self._index)

    def add_done_callback(self, fn: Callable[[Future[RecordMetadata]], object]) -> None:
        """Call `fn(self)` once there is an outcome, on the producer's thread or at once.

        What it raises is logged, as concurrent.futures does.
        """

        def call() -> None:
            try:
                fn(self)
            except Exception:  # `notify` logs what else is raised; at once, it is the caller's
                _LOG.exception("a done callback raised")

        self._outcome.listen(call)


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """What became of many records: stretches that stand in the log, and how many failed with what."""

    delivered: list[OffsetRange]
    failed: list[tuple[int, Exception]]

    @property
    def delivered_count(self) -> int:
        return sum(each.record_count for each in self.delivered)

    @property
    def failed_count(self) -> int:
        return sum(count for count, _ in self.failed)


class Delivery:
    """The outcome of many records sent at once. `parts`: (outcome, first index, count)."""

    def __init__(self, parts: list[tuple[Outcome, int, int]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(count for _, _, count in self._parts)

    def done(self) -> bool:
        """Whether every record has its outcome."""
        return all(outcome.is_done for outcome, _, _ in self._parts)

    def outcome(self, timeout: float | None = None) -> DeliveryResult:
        """All outcomes, failures included. `timeout` in seconds for each batch. Raises TimedOut."""
        delivered: list[OffsetRange] = []
        failed: list[tuple[int, Exception]] = []
        for outcome, first, count in self._parts:
            _wait(outcome, timeout)
            for each in outcome.ranges(first, count):
                if isinstance(each, OffsetRange):
                    delivered.append(each)
                else:
                    failed.append(each)
        return DeliveryResult(delivered, failed)

    def result(self, timeout: float | None = None) -> DeliveryResult:
        """All outcomes. Raises the first failure, TimedOut."""
        result = self.outcome(timeout)
        if result.failed:
            raise result.failed[0][1]
        return result
