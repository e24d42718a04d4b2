"""Fetch sessions: their owners and their limits; abandoned fetches leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from itertools import count
from unittest.mock import Mock

import pytest
from support.broker import fetch_request

from oncelog.broker.fetch_sessions import FetchSessions
from oncelog.broker.purgatory import DelayedFetch, FetchPurgatory, PendingResponse
from oncelog.broker.topics.topic_names import MAX_LENGTH
from oncelog.errors import FetchSessionIdNotFound
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.types import TopicPartition
from oncelog.wire.messages import FetchRequest

EVICTION_MS, EXPIRY_MS = DEFAULT_LIMITS.session_eviction_ms, DEFAULT_LIMITS.session_expiry_ms


def _sessions(slots: int = 1000, **limits: int) -> FetchSessions:
    return FetchSessions(slots, new_id=lambda: next(_IDS), limits=Limits(**limits))


_IDS = count(1)


def _request(session_id: int, epoch: int, partitions: int = 0) -> FetchRequest:
    positions = [("t", partition, 0) for partition in range(partitions)]
    return fetch_request(positions, session_id=session_id, session_epoch=epoch)


def test_a_fetch_session_is_unknown_to_anybody_but_its_owner() -> None:
    sessions = _sessions()
    alices = sessions.open(_request(0, 0, 2), 12, 0, "User:alice").session_id
    with pytest.raises(FetchSessionIdNotFound):
        sessions.open(_request(alices, 1), 12, 0, "User:mallory")
    sessions.open(_request(alices, -1), 12, 0, "User:mallory")  # another user cannot end the session either
    sessions.open(_request(alices, 0, 1), 12, 0, "User:mallory")
    context = sessions.open(_request(alices, 1), 12, 0, "User:alice")
    assert len(context.targets) == 2


def test_a_session_id_is_drawn_again_while_it_is_taken() -> None:
    drawn = iter([5, 5, 0, 9])
    sessions = FetchSessions(10, new_id=lambda: next(drawn))
    ids = [sessions.open(_request(0, 0, 1), 12, 0, "").session_id for _ in range(2)]
    assert ids == [5, 9]


def test_fetch_sessions_remember_a_bounded_number_of_partitions() -> None:
    sessions = _sessions(max_session_partitions=10)
    first = sessions.open(_request(0, 0, 6), 12, 0, "").session_id
    assert first and sessions.partition_count == 6
    assert sessions.open(_request(0, 0, 5), 12, 0, "").session_id == 0
    second = sessions.open(_request(0, 0, 4), 12, 0, "").session_id
    assert second and sessions.partition_count == 10
    # A session that outgrows the limit ends, and its client sends full fetches from then on.
    with pytest.raises(FetchSessionIdNotFound):
        sessions.open(_request(second, 1, 5), 12, 0, "")
    assert (sessions.partition_count, len(sessions)) == (6, 1)
    assert sessions.open(_request(0, 0, 5), 12, EVICTION_MS, "").session_id
    assert (sessions.partition_count, len(sessions)) == (5, 1)


def test_a_fetch_session_does_not_contain_names_that_are_too_long_for_topics() -> None:
    """R1678: the names of unknown topics had no limit of memory, and may have 30,000 characters."""
    sessions = _sessions()
    long, longest = "n" * (MAX_LENGTH + 1), "n" * MAX_LENGTH

    def request(session_id: int, epoch: int, name: str) -> FetchRequest:
        return fetch_request([(name, 0, 0)], session_id=session_id, session_epoch=epoch)

    context = sessions.open(request(0, 0, long), 12, 0, "")
    assert (context.session_id, len(context.targets), len(sessions)) == (0, 1, 0)
    session_id = sessions.open(request(0, 0, longest), 12, 0, "").session_id
    assert session_id
    assert len(sessions.open(request(session_id, 1, "t"), 12, 0, "").targets) == 2
    with pytest.raises(FetchSessionIdNotFound):
        sessions.open(request(session_id, 2, long), 12, 0, "")
    assert (len(sessions), sessions.partition_count) == (0, 0)


def test_an_idle_fetch_session_is_forgotten() -> None:
    sessions = _sessions()
    old, used = (sessions.open(_request(0, 0, 1), 12, 0, "").session_id for _ in range(2))
    sessions.open(_request(used, 1), 12, 1, "")
    sessions.expire(EXPIRY_MS)
    with pytest.raises(FetchSessionIdNotFound):
        sessions.open(_request(old, 1), 12, EXPIRY_MS, "")
    assert sessions.open(_request(used, 2), 12, EXPIRY_MS, "").session_id == used


def test_the_response_of_a_delayed_fetch_is_freed_at_once() -> None:
    """R1643: responses stayed in memory until the deadline of their fetch, and of all earlier ones."""

    class Response:
        pass

    waits, tp = FetchPurgatory(), TopicPartition("t", 0)
    waits.watch(DelayedFetch(PendingResponse(blocks_pipeline=True), [TopicPartition("t", 1)], 1, 9, Mock()))
    seen: list[weakref.ref[Response]] = []
    gc.disable()
    try:
        for number in range(100):
            deferred = PendingResponse(blocks_pipeline=True)
            deferred.add_done_callback(lambda response: seen.append(weakref.ref(response)))
            waits.watch(DelayedFetch(deferred, [tp], 1, 1 << 40, lambda is_due: Response()))
            waits.check_and_complete(tp, 1) if number % 2 else waits.complete_all(tp)
            assert len(seen) == number + 1 and seen[-1]() is None
    finally:
        gc.enable()
    assert len(waits) == 1 and len(waits._deadlines) <= 4


def test_a_fetch_whose_connection_is_gone_leaves_nothing_behind() -> None:
    waits, partitions = FetchPurgatory(), [TopicPartition("t", index) for index in range(100)]
    stays = PendingResponse(blocks_pipeline=True)
    waits.watch(DelayedFetch(stays, partitions[:1], 1, 1 << 40, lambda is_due: "answer"))
    for _ in range(1000):
        deferred = PendingResponse(blocks_pipeline=True)
        waits.watch(DelayedFetch(deferred, partitions, 1, 1 << 40, lambda is_due: "answer"))
        deferred.cancel()
    assert (len(waits), len(waits._deadlines)) == (1, 1)
    assert [waits.is_watched(partition) for partition in partitions] == [True] + [False] * 99
    waits.check_and_complete(partitions[0], 1)
    assert stays.is_done and waits.next_deadline_ms is None
