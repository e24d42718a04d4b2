"""Handlers of Ctrl-C for commands that process a stream of items, and of SIGTERM and SIGHUP for commands that
clean up.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Interrupt:
    """A handler of Ctrl-C.

    The first Ctrl-C ends the input of `until`, but does not interrupt the processing of an item. The second
    Ctrl-C raises KeyboardInterrupt immediately.
    """

    def __init__(self) -> None:
        self.is_set = self._is_reading = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: object) -> None:
        was_set, self.is_set = self.is_set, True
        if was_set or self._is_reading:
            self._is_reading = False
            raise KeyboardInterrupt

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items until they end or Ctrl-C is pressed."""
        iterator = iter(items)
        while True:
            try:
                self._is_reading = True
                if self.is_set:
                    return
                item = next(iterator)
                self._is_reading = False
            except (StopIteration, KeyboardInterrupt):
                return
            finally:
                self._is_reading = False
            yield item


@contextmanager
def clean_up_on_termination() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that they do not skip `finally` blocks. Ignore further
    ones, which would interrupt these blocks.
    """

    def end(number: int, frame: object) -> None:
        for changed_number in changed:
            signal.signal(changed_number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # Leave ignored signals alone: nohup ignores SIGHUP.
    before = {number: signal.getsignal(number) for number in numbers}
    changed = [number for number in numbers if before[number] is not signal.SIG_IGN]
    try:
        for number in changed:
            signal.signal(number, end)
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
