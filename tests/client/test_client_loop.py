"""The event-loop thread of the blocking clients."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from support.wait import hang

from oncelog.errors import MisuseError, TimedOut
from oncelog.runtime.loop_thread import LoopThread


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_run_returns_the_result_or_raises_the_exception() -> None:
    thread = LoopThread()

    async def fail() -> None:
        raise ValueError("told")

    assert thread.run(give(3)) == 3
    with pytest.raises(ValueError, match="told"):
        thread.run(fail())
    thread.stop()


def test_calls_keep_their_order() -> None:
    thread = LoopThread()
    seen: list[int] = []
    for number in range(50):
        thread.call_soon(seen.append, number)
    thread.run(give(0))
    assert seen == list(range(50))
    thread.stop()


def test_a_time_limit_cancels_the_coroutine() -> None:
    thread = LoopThread()
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await hang()
        finally:
            cancelled.set()

    with pytest.raises(TimedOut, match=r"0\.05 s"):
        thread.run(wait(), timeout=0.05)
    assert cancelled.wait(60)
    thread.stop()


def test_a_timeout_of_the_coroutine_itself_passes_through() -> None:
    thread = LoopThread()

    async def fail() -> None:
        raise TimedOut("its own")

    with pytest.raises(TimedOut, match="its own"):
        thread.run(fail(), timeout=5)
    thread.stop()


def test_waiting_on_its_own_thread_is_misuse() -> None:
    thread = LoopThread()

    async def inside() -> None:
        thread.run(give(1))

    with pytest.raises(MisuseError, match="callback"):
        thread.run(inside())
    thread.stop()


def test_after_stop_calls_are_misuse_and_tasks_are_cancelled() -> None:
    thread = LoopThread()
    ended = threading.Event()

    async def wait() -> None:
        try:
            await hang()
        finally:
            ended.set()

    thread.submit(wait())
    thread.run(give(0))
    thread.stop()
    thread.stop()
    assert ended.is_set()
    assert not thread.is_running
    with pytest.raises(MisuseError, match="closed"):
        thread.run(give(1))


def test_use_after_a_fork_is_misuse() -> None:
    thread = LoopThread()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            thread.run(give(1))
        except MisuseError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.run(give(4)) == 4
    thread.stop()
