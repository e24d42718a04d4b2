"""Edge cases of the blocking producer: partitions that disappear, a full buffer, interrupted calls,
closing.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pyarrow as pa
import pytest
from support.topics import new_topic, producer_of, values
from support.wait import JumpingClock

from oncelog import Admin, NewTopic, Producer
from oncelog.errors import (
    ConfigError,
    DisconnectedError,
    InvalidTimestamp,
    MessageTooLarge,
    MisuseError,
    OncelogError,
    OutcomeUnknown,
    PeerError,
    TimedOut,
)
from oncelog.types import RecordMetadata
from oncelog.wire.messages import InitProducerIdRequest

WAIT_S = 60


def test_a_topic_that_was_recreated_with_fewer_partitions_is_written_to(ours: str) -> None:
    topic = new_topic(ours, 8)
    with producer_of(ours) as producer, Admin({"bootstrap.servers": ours}) as admin:
        while producer.send(topic, b"x").result(WAIT_S).partition == 0:
            pass
        admin.delete_topics([topic])
        admin.create_topics([NewTopic(topic, 1)])
        producer._thread.run(producer._driver.cluster.refresh_metadata([topic]))
        for _ in range(5):
            assert producer.send(topic, b"y").result(WAIT_S).partition == 0
        with pytest.raises(MisuseError, match="no partition 3"):
            producer.send(topic, b"z", partition=3)


def test_nothing_lingers_while_a_sender_waits_for_memory(ours: str) -> None:
    """The buffer has some free memory, but not enough for the next record. So the open batch must be sent."""
    topic = new_topic(ours)
    patience = {"linger_ms": 600_000, "delivery_timeout_ms": 700_000, "max_block_ms": 30_000}
    sizes = {"buffer_memory": 1_000_000, "batch_size": 900_000}
    with producer_of(ours, **patience, **sizes) as producer:
        first = producer.send(topic, b"x" * 600_000)
        second = producer.send(topic, b"x" * 600_000)
        assert first.done() and not second.done()


def test_send_many_takes_nothing_of_a_list_with_a_record_that_is_too_large(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours, max_request_size=1000, batch_size=500) as producer:
        with pytest.raises(MessageTooLarge) as caught:
            producer.send_many(topic, [b"a"] * 100 + [b"b" * 2000])
        assert caught.value.delivery is None
        with pytest.raises(MisuseError, match="bytes"):
            producer.send_many(topic, [b"a", "text"])  # type: ignore[list-item]
    assert values(ours, topic) == []


def test_an_error_of_send_many_carries_the_delivery_of_what_it_took(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours, max_request_size=1000, batch_size=500) as producer:
        with pytest.raises(MessageTooLarge) as caught:
            producer.send_many(topic, (b"a" * (1 if number < 100 else 2000) for number in range(200)))
        assert caught.value.delivery.result(WAIT_S).delivered_count == 100
    assert len(values(ours, topic)) == 100


def test_an_error_of_send_table_carries_the_delivery_of_what_it_took(ours: str) -> None:
    topic = new_topic(ours)
    table = pa.table({"value": pa.array([b"x" * 10_000] * 100, pa.binary())})
    with producer_of(ours, buffer_memory=600_000, max_block_ms=300) as producer:
        producer.send(topic, b"first").result(WAIT_S)
        cluster = producer._driver.cluster
        submit = cluster.submit
        cluster.submit = _unreachable  # type: ignore[method-assign]
        with pytest.raises(TimedOut) as caught:
            producer.send_table(topic, table)
        cluster.submit = submit  # type: ignore[method-assign]
        taken = caught.value.delivery.result(WAIT_S).delivered_count
    assert 0 < taken < 100
    assert len(values(ours, topic)) == 1 + taken


def _unreachable(*_: object, **__: object) -> None:
    raise DisconnectedError("broker 9 is not in the cluster's metadata (known: none)")


def test_records_that_no_connection_took_are_known_not_to_be_stored(ours: str, clock: JumpingClock) -> None:
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        producer.send(topic, b"first").result(WAIT_S)
        producer._driver.cluster.submit = _unreachable  # type: ignore[method-assign]
        sent = producer.send(topic, b"x")
        clock.jump_until(sent.done, 50)
        error = sent.exception(WAIT_S)
    assert isinstance(error, TimedOut) and not isinstance(error, OutcomeUnknown)


def test_close_in_a_callback_is_refused_and_the_producer_can_still_be_closed(ours: str) -> None:
    topic = new_topic(ours)
    producer = producer_of(ours)
    raised: list[Exception] = []

    def close_here(_: RecordMetadata | None, __: Exception | None) -> None:
        try:
            producer.close()
        except MisuseError as error:
            raised.append(error)

    producer.send(topic, b"x", on_delivery=close_here)
    producer.flush(WAIT_S)
    assert len(raised) == 1 and "callback" in str(raised[0])
    producer.send(topic, b"y").result(WAIT_S)
    producer.close(WAIT_S)
    assert not producer._thread.is_running


def test_a_producer_that_cannot_be_made_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with pytest.raises(ConfigError, match="no such file"):
            Producer(bootstrap_servers="h:1", security_protocol="SSL", ssl_ca_location="/nonexistent")
    assert set(threading.enumerate()) <= before


def test_metrics_in_a_forked_child_do_not_wait_for_a_lock_that_nobody_holds_there(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        producer.send(topic, b"x").result(WAIT_S)
        with producer._driver.lock:
            child = os.fork()
            if not child:
                signal.alarm(WAIT_S)
                os._exit(0 if producer.metrics()["record-send-total"] == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "times",
    [pa.array([5, -1], pa.int64()), pa.array([-1], pa.timestamp("s")), pa.array(["soon"], pa.string())],
)
def test_a_table_with_times_before_1970_is_refused(ours: str, times: pa.Array) -> None:
    """Regression: a batch with two timestamps more than 64 bits apart ended the producer when it was
    split.
    """
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        with pytest.raises(MisuseError, match="timestamp"):
            producer.send_table(topic, pa.table({"value": [b"v"] * len(times), "timestamp": times}))
        latest = pa.array([0, 2**63 - 1], pa.int64())
        delivery = producer.send_table(topic, pa.table({"value": [b"v", b"w"], "timestamp": latest}))
        assert isinstance(delivery.outcome(WAIT_S).failed[0][1], InvalidTimestamp)


def test_a_failed_producer_raises_its_error_for_a_table_of_a_new_topic(ours: str) -> None:
    """Regression: send_table() raised KeyError instead of the producer's error."""
    with producer_of(ours) as producer:
        producer._driver.core.fail_all(MisuseError("as if it were fenced"))
        with pytest.raises(MisuseError, match="fenced"):
            producer.send_table(new_topic(ours), pa.table({"value": [b"v"]}))


def test_an_unexpected_exception_for_a_response_fails_the_records_at_once(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the records had no result until delivery.timeout.ms."""

    def fail(*_: object) -> None:
        raise ValueError("unexpected")

    with producer_of(ours, delivery_timeout_ms=2**31 - 1) as producer:
        monkeypatch.setattr(producer._driver.core, "on_response", fail)
        future = producer.send(new_topic(ours), b"v")
        with pytest.raises(OutcomeUnknown, match="unexpected"):
            future.result(WAIT_S)
        with pytest.raises(OncelogError, match="unexpected"):
            producer.send(new_topic(ours), b"w")


@pytest.mark.parametrize("error", [PeerError("malformed"), ValueError("unexpected")])
def test_a_producer_id_is_requested_with_pauses(
    ours: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Regression: a malformed response made the producer send thousands of requests in a second."""
    errors, attempts = [error] * 3, list[int]()
    with producer_of(ours) as producer:
        cluster = producer._driver.cluster
        real = cluster.request

        async def request(node_id: int | None, message: Any, **options: Any) -> Any:
            if isinstance(message, InitProducerIdRequest) and errors:
                raise errors.pop()
            return await real(node_id, message, **options)

        def pause_ms(attempt: int) -> float:
            attempts.append(attempt)
            return 0.0

        monkeypatch.setattr(cluster, "request", request)
        monkeypatch.setattr(cluster, "retry_pause_ms", pause_ms)
        future = producer.send(new_topic(ours), b"v")
        if isinstance(error, PeerError):
            assert future.result(WAIT_S).offset == 0 and attempts == [0, 1, 2]
        else:
            with pytest.raises(OncelogError, match="unexpected"):
                future.result(WAIT_S)
            assert len(errors) == 2
