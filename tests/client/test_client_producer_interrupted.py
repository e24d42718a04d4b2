"""Interrupts the blocking producer's calls at every place where a signal handler can run and raise."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from support.interrupts import Interrupt, each_place, interrupted_at, raise_interrupt
from support.topics import new_topic, producer_of, read
from support.wait import LIMIT_S, wait_until

from oncelog.errors import MisuseError, OncelogError
from oncelog.rules.transactions.client_session import State
from oncelog.types import RecordMetadata

pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class _OwnError(Interrupt, OncelogError):
    """An exception that is raised by a call of the producer inside the signal handler."""


@pytest.mark.behaviour("I1", "I2")
@pytest.mark.parametrize("linger_ms", [0, 60_000])
@pytest.mark.parametrize("buffer_memory", [600, 1_000_000])
@pytest.mark.parametrize("transactional_id", [None, "interrupted"])
@pytest.mark.parametrize("error", [Interrupt, _OwnError])
def test_an_interrupt_at_any_call_of_send_leaves_a_sound_producer(
    ours: str, linger_ms: int, buffer_memory: int, transactional_id: str | None, error: type[Interrupt]
) -> None:
    """Regression: the call left a lock held, forgot a batch, or ended the producer with an empty batch."""
    topic = new_topic(ours)
    reported: list[tuple[int, RecordMetadata | None]] = []
    with producer_of(
        ours,
        linger_ms=linger_ms,
        batch_size=300,
        buffer_memory=buffer_memory,
        transactional_id=transactional_id,
    ) as producer:
        if transactional_id is not None:
            producer.init_transactions()
            producer.begin_transaction()
        taken = []

        def send(number: int) -> None:
            """Send two records. The second joins the first one's batch or begins another."""
            for half in (2 * number, 2 * number + 1):
                taken.append(
                    producer.send(
                        topic,
                        b"%07d" % half + bytes(half % 200),
                        on_delivery=lambda metadata, _, half=half: reported.append((half, metadata)),
                    )
                )

        for _ in each_place(send, partial(raise_interrupt, error)):
            producer.flush(LIMIT_S)
        producer.flush(LIMIT_S)
        assert producer._driver.core.buffered_bytes == 0
        assert all(future.result(LIMIT_S) for future in taken)
        if transactional_id is not None:
            producer.commit_transaction()
    stored = {int(row.value[:7]): row.offset for row in read(ours, topic) if row.value}
    assert len(stored) == len(read(ours, topic)) >= len(taken)
    assert dict(reported) == {
        half: RecordMetadata(topic, 0, offset, metadata.timestamp_ms)
        for half, offset in stored.items()
        if (metadata := dict(reported).get(half)) is not None
    }
    assert len(reported) == len(stored)


@pytest.mark.parametrize("name", ["flush", "result", "exception", "metrics", "idempotence"])
def test_an_interrupt_at_any_call_of_a_waiting_method_blocks_nobody(ours: str, name: str) -> None:
    """Regression: the interrupted call kept a lock, and the producer's thread waited for it forever."""
    topic = new_topic(ours)
    with producer_of(ours, linger_ms=1) as producer:

        def wait(number: int) -> None:
            future = producer.send(topic, b"%d" % number)
            getattr(future if name in ("result", "exception") else producer, name)()

        for _ in each_place(wait):
            producer.flush(LIMIT_S)
        assert producer.send(topic, b"last").result(LIMIT_S).offset is not None


def test_an_interrupt_at_any_call_of_close_leaves_no_record_without_an_outcome(ours: str) -> None:
    topic = new_topic(ours)
    place, is_interrupted = 1, True
    while is_interrupted:
        producer = producer_of(ours, linger_ms=60_000)
        future = producer.send(topic, b"%d" % place)
        is_interrupted = interrupted_at(place, producer.close)
        producer.close(LIMIT_S)
        with suppress(OncelogError):
            future.result(LIMIT_S)
        with pytest.raises(MisuseError):
            producer.send(topic, b"late")
        wait_until(producer._thread.loop.is_closed)
        place += 1
    assert place > 10


def test_an_interrupt_at_any_call_of_a_transaction_leaves_it_as_it_was_or_ended(ours: str) -> None:
    topic, place, committed = new_topic(ours), 1, []
    with producer_of(ours, transactional_id="ended") as producer:
        producer.init_transactions()
        session = producer._transactions.session  # type: ignore[union-attr]

        def transact(number: int) -> None:
            producer.begin_transaction()
            producer.send(topic, b"%d" % number)
            producer.commit_transaction()

        while interrupted_at(place, partial(transact, place)):
            if session.state is State.COMMITTING:
                producer.commit_transaction()
                committed.append(place)
            elif session.state is not State.READY:
                producer.abort_transaction()
            place += 1
        committed.append(place)
    values = [int(row.value or b"") for row in read(ours, topic)]
    assert values == sorted(set(values))
    assert set(committed) <= set(values)


@pytest.mark.behaviour("I1", "I2")
@pytest.mark.parametrize("is_caught", [True, False])
@pytest.mark.parametrize("name", ["send", "flush", "metrics", "commit_transaction", "close"])
def test_a_signal_handler_that_calls_the_producer_never_waits_for_what_it_interrupted(
    ours: str, name: str, is_caught: bool
) -> None:
    """Regression: the handler waited forever for a lock that the interrupted call held.

    Now the handler's call raises MisuseError.
    """
    topic, place, is_interrupted = new_topic(ours), 1, True
    refused, taken = 0, 0
    settings: dict[str, Any] = {"batch_size": 150, "linger_ms": 60_000}
    if name == "commit_transaction":
        settings["transactional_id"] = "handled"

    def handle() -> None:
        nonlocal refused
        try:
            producer.send(topic, b"handled", b"key") if name == "send" else getattr(producer, name)()
        except MisuseError as error:
            refused += "signal handler" in str(error)
            if not is_caught:
                raise

    def send() -> None:
        nonlocal taken
        with suppress(MisuseError):  # raised by the handler, or because the producer is closed
            for _ in range(3):
                producer.send(topic, b"sent", b"key")
                taken += 1

    producer = producer_of(ours, **settings)
    try:
        if name == "commit_transaction":
            producer.init_transactions()
        while is_interrupted:
            if name == "commit_transaction":
                producer.begin_transaction()
            is_interrupted = interrupted_at(place, send, handle)
            place += 1
            if name == "close":
                producer.close(LIMIT_S)
                producer = producer_of(ours, **settings)
            session = producer._transactions and producer._transactions.session
            if session is not None and session.state is not State.READY:
                producer.commit_transaction()
            producer.flush(LIMIT_S)
            assert producer._driver.core.buffered_bytes == 0
    finally:
        producer.close(LIMIT_S)
    assert (refused > 10) == (name != "metrics")
    assert sum(row.value == b"sent" for row in read(ours, topic)) >= taken > 10
