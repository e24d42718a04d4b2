"""Closes of asyncio clients that continue after a cancellation, because nobody would call `close` again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

_CLOSING: set[asyncio.Future[None]] = set()
"""The closes that are running. The event loop itself has only weak references to its tasks."""


def close_in_background(close: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """Run a close in a task of its own, and return the task."""
    closing = asyncio.ensure_future(close)
    _CLOSING.add(closing)
    closing.add_done_callback(_CLOSING.discard)
    return closing


async def close_to_the_end(close: Coroutine[Any, Any, None]) -> None:
    """Run a close and wait for its end. A cancellation ends only the wait."""
    await asyncio.shield(close_in_background(close))


async def start_or_close(
    start: Callable[[], Coroutine[Any, Any, object]], close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Start a client for `__aenter__`, and close it if that fails or is cancelled.

    Without an `__aenter__` that succeeds, `async with` calls no `__aexit__`. Guard:
    test_a_cancelled_start_or_end_of_a_block_leaves_no_connection.
    """
    try:
        await start()
    except BaseException:
        await close_to_the_end(close())
        raise
