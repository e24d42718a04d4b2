"""Interrupts a call at every place where a signal handler can run and raise.

Python runs handlers on the main thread, after calls and at the start of functions. It calls a profile
function at the same places. Here the profile function raises at the first place, then at the second, until a
call completes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any


class Interrupt(BaseException):
    """The exception that the handler raises."""


def raise_interrupt(error: type[Interrupt] = Interrupt) -> None:
    """Raise the exception, as a signal handler."""
    raise error


def interrupted_at(place: int, call: Callable[[], Any], handler: Callable[[], Any] = raise_interrupt) -> bool:
    """Make the call, and run the handler at place number `place`. Return False if the call has fewer.

    An exception in a weak reference's callback is ignored by Python; the call then completes.
    """
    count = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_return"):
            count += 1
            if count == place:
                sys.setprofile(None)
                handler()

    sys.setprofile(interrupt)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return count >= place


def each_place(call: Callable[[int], Any], handler: Callable[[], Any] = raise_interrupt) -> Iterator[int]:
    """Make `call` repeatedly, and interrupt it at its first place, then at its second, until a call
    completes.

    Yield the number of each place.
    """
    place = 1
    while interrupted_at(place, partial(call, place), handler):
        yield place
        place += 1
    assert place > 10
