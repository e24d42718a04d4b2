"""The producer against our broker over real sockets. It must stay idempotent behind a proxy that loses
messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from support.client import append
from support.topics import new_topic, producer_of, read, requests, sequences, values
from support.wait import JumpingClock, wait_until

from oncelog import Admin, Broker, Producer, TopicPartition
from oncelog.client.producer.batch import ProducerBatch
from oncelog.errors import (
    ConfigError,
    DeliveryUnknown,
    InvalidProducerEpoch,
    MessageTooLarge,
    OncelogError,
    OutcomeUnknown,
    TimedOut,
    UnknownTopicOrPartition,
)
from oncelog.testing.proxy import Proxy, Rule
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"auto.create.topics.enable": "false"}


@pytest.fixture
def servers(ours: str) -> str:
    return ours


def raw_batch(producer: Producer, count: int, base_sequence: int, epoch_ahead: int = 0) -> bytearray:
    """Return a forged batch under the producer's own id."""
    report = producer.idempotence()
    assert report.producer_id is not None and report.producer_epoch is not None
    return build_batch(
        [NewRecord(1_700_000_000_000, None, b"foreign")] * count,
        producer_id=report.producer_id,
        producer_epoch=report.producer_epoch + epoch_ahead,
        base_sequence=base_sequence,
    )


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize(("idempotent", "stored"), [(True, [b"x"]), (False, [b"x", b"x"])])
def test_only_idempotence_stores_a_record_once_when_its_acknowledgement_is_lost(
    servers: str, proxy: Proxy, idempotent: bool, stored: list[bytes]
) -> None:
    topic = new_topic(servers)
    proxy.add(Rule(action="cut", api="Produce", nth=1))
    with producer_of(proxy.bootstrap_servers, enable_idempotence=idempotent) as producer:
        metadata = producer.send(topic, b"x").result(60)
    assert values(servers, topic) == stored
    assert metadata.offset == len(stored) - 1
    assert len(requests(proxy)) == 2
    assert sequences(proxy) == ([0, 0] if idempotent else [None, None])


@pytest.mark.behaviour("I2", "I22")
def test_idempotence_is_on_by_default_and_reported(servers: str) -> None:
    topic = new_topic(servers)
    with producer_of(servers) as producer:
        producer.send(topic, b"x").result(60)
        report = producer.idempotence()
    assert report.enabled and report.acks == "all" and report.max_in_flight == 5 and report.retries > 0
    assert report.producer_id is not None and report.producer_epoch == 0
    with pytest.warns(UserWarning, match="acks=1"), producer_of(servers, acks="1") as plain:
        assert not plain.idempotence().enabled and "acks=1" in plain.idempotence().reason
    with pytest.raises(ConfigError, match="acks=1"):
        producer_of(servers, acks="1", enable_idempotence=True)


@pytest.mark.behaviour("I4")
def test_a_session_requests_its_producer_id_once(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers, 3)
    ids = []
    for session in (1, 2):
        with producer_of(proxy.bootstrap_servers) as producer:
            for number in range(9):
                producer.send(topic, b"x", partition=number % 3).result(60)
            ids.append(producer.idempotence().producer_id)
        assert len(requests(proxy, "InitProducerId")) == session
    assert None not in ids and len(set(ids)) == 2


@pytest.mark.behaviour("I4")
def test_ids_are_not_given_again_after_a_restart(tmp_path: Path) -> None:
    ids = []
    broker = Broker(tmp_path)
    for _ in range(2):
        with broker, producer_of(broker.bootstrap_servers) as producer:
            producer.send("t", b"x").result(60)
            ids.append(producer.idempotence().producer_id)
    assert len(set(ids)) == 2


@pytest.mark.behaviour("I10")
def test_at_most_five_batches_without_an_acknowledgement(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    with producer_of(proxy.bootstrap_servers, batch_size=1) as producer:
        producer.send(topic, b"0").result(60)
        proxy.add(Rule(action="hold", api="Produce", direction="response"))
        futures = [producer.send(topic, b"%d" % number) for number in range(1, 11)]
        assert proxy.wait_until(lambda events: len(requests(proxy)) >= 6)
        with pytest.raises(TimedOut):
            futures[-1].result(0.3)
        assert sequences(proxy) == [0, 1, 2, 3, 4, 5]
        proxy.clear()
        proxy.release()
        assert [future.result(60).offset for future in futures] == list(range(1, 11))
    assert values(servers, topic) == [b"%d" % number for number in range(11)]
    assert sequences(proxy) == list(range(11))  # an acknowledged batch is not sent again


@pytest.mark.behaviour("I10", "I11")
@pytest.mark.parametrize("direction", ["request", "response"])
def test_an_unanswered_request_is_repeated_with_its_sequence(
    servers: str, proxy: Proxy, direction: str
) -> None:
    topic = new_topic(servers)
    proxy.add(Rule(action="drop", api="Produce", direction=direction, nth=2))
    with producer_of(proxy.bootstrap_servers, request_timeout_ms=1_500, batch_size=1) as producer:
        producer.send(topic, b"0").result(60)
        futures = [producer.send(topic, b"%d" % number) for number in range(1, 8)]
        assert [future.result(60).offset for future in futures] == list(range(1, 8))
        assert producer.idempotence().producer_epoch == 0
    assert sequences(proxy).count(1) > 1
    assert values(servers, topic) == [b"%d" % number for number in range(8)]


@pytest.mark.behaviour("I11")
@pytest.mark.parametrize(("direction", "stored"), [("request", False), ("response", True)])
def test_after_the_delivery_timeout_nothing_is_missing_or_doubled(
    servers: str, proxy: Proxy, direction: str, stored: bool, clock: JumpingClock
) -> None:
    topic = new_topic(servers)
    settings = {"request_timeout_ms": 100_000, "delivery_timeout_ms": 200_000}
    with producer_of(proxy.bootstrap_servers, **settings) as producer:
        producer.send(topic, b"a").result(60)
        proxy.add(Rule(action="drop", api="Produce", direction=direction))
        errors: list[Exception | None] = []
        lost = producer.send(topic, b"b", on_delivery=lambda metadata, error: errors.append(error))
        wait_until(lambda: len(requests(proxy)) > 1)
        clock.jump_until(lost.done, 110)
        error = lost.exception(60)
        assert isinstance(error, DeliveryUnknown) and isinstance(error, TimedOut)
        assert error.reaction == "abortable"
        proxy.clear()
        proxy.cut()
        for value in (b"c", b"d", b"e"):
            producer.send(topic, value).result(60)
    assert errors == [error]
    assert values(servers, topic) == [b"a", *([b"b"] if stored else []), b"c", b"d", b"e"]


@pytest.mark.behaviour("I12")
def test_a_gap_raises_the_epoch_and_starts_again_from_zero(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    tp = TopicPartition(topic, 0)
    with producer_of(proxy.bootstrap_servers) as producer:
        producer.send(topic, b"a").result(60)
        append(servers, tp, raw_batch(producer, 3, base_sequence=1))
        old = raw_batch(producer, 1, base_sequence=4)
        assert producer.send(topic, b"b").result(60).offset == 4
        assert producer.send(topic, b"c").result(60).offset == 5
        assert producer.idempotence().producer_epoch == 1
        metrics = producer.metrics()
    assert (metrics["epoch-bump-total"], metrics["out-of-order-sequence-total"]) == (1, 1)
    sent = [
        (batch.producer_epoch, batch.base_sequence)
        for request in requests(proxy)
        for batch in request.batches
    ]
    assert sent == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(InvalidProducerEpoch):
        append(servers, tp, old)
    with Admin({"bootstrap.servers": servers}) as admin:
        (state,) = admin.describe_producers([tp])[tp].producers
    assert (state.producer_epoch, state.last_sequence) == (1, 1)
    assert values(servers, topic) == [b"a", *[b"foreign"] * 3, b"b", b"c"]


@pytest.mark.behaviour("I18")
def test_a_record_that_the_broker_refuses_fails_alone(servers: str) -> None:
    topic = new_topic(servers, max_message_bytes=1000)
    errors: list[Exception | None] = []
    with producer_of(servers) as producer:
        future = producer.send(topic, b"x" * 2000, on_delivery=lambda metadata, error: errors.append(error))
        error = future.exception(10)
        assert isinstance(error, MessageTooLarge)
        assert (error.code, error.kafka_name) == (10, "MESSAGE_TOO_LARGE")
        assert error.reaction == "abortable"
        assert producer.send(topic, b"small").result(60).offset == 0
        assert producer.metrics()["record-error-total"] == 1
    assert errors == [error]


@pytest.mark.behaviour("I18")
def test_a_batch_that_is_too_large_is_split_and_keeps_its_futures(servers: str) -> None:
    topic = new_topic(servers, max_message_bytes=1000)
    with producer_of(servers, linger_ms=200) as producer:
        futures = [producer.send(topic, b"%03d" % number * 100) for number in range(20)]
        assert [future.result(60).offset for future in futures] == list(range(20))
    assert values(servers, topic) == [b"%03d" % number * 100 for number in range(20)]


@pytest.mark.behaviour("I18")
def test_a_fenced_epoch_and_an_unknown_topic_raise_their_errors(
    servers: str, proxy: Proxy, clock: JumpingClock
) -> None:
    topic = new_topic(servers)
    errors: list[Exception | None] = []
    settings = {"max_block_ms": 60_000, "request_timeout_ms": 600_000, "delivery_timeout_ms": 700_000}
    with producer_of(proxy.bootstrap_servers, **settings) as producer, ThreadPoolExecutor(1) as thread:
        producer.send(topic, b"a").result(60)
        append(servers, TopicPartition(topic, 0), raw_batch(producer, 1, base_sequence=0, epoch_ahead=5))
        future = producer.send(topic, b"b", on_delivery=lambda metadata, error: errors.append(error))
        error = future.exception(10)
        assert isinstance(error, InvalidProducerEpoch) and error.reaction == "abortable"
        assert error.code == 47 and not error.retriable
        count = len(requests(proxy, "Metadata"))
        sending = thread.submit(producer.send, "nowhere", b"x")
        wait_until(lambda: len(requests(proxy, "Metadata")) > count + 1)
        clock.jump_until(sending.done, 61)
        with pytest.raises(UnknownTopicOrPartition, match="nowhere") as caught:
            sending.result(60)
    assert errors == [error]
    assert caught.value.code == 3 and caught.value.retriable
    assert values(servers, topic) == [b"a", b"foreign"]


@pytest.mark.behaviour("I18")
def test_retries_that_run_out_say_what_was_heard_last(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    proxy.add(Rule(action="fail", api="Produce", error="NOT_ENOUGH_REPLICAS"))
    with producer_of(proxy.bootstrap_servers, retries=2) as producer:
        error = producer.send(topic, b"x").exception(10)
        assert isinstance(error, OncelogError)
        assert (getattr(error, "code", None), getattr(error, "reaction", None)) == (19, "retriable")
        assert len(requests(proxy)) == 3
        proxy.clear()
        assert producer.send(topic, b"y").result(60).offset == 0
    assert values(servers, topic) == [b"y"]


@pytest.mark.behaviour("I21")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_come_back_through_every_codec(servers: str, proxy: Proxy, codec: str) -> None:
    topic = new_topic(servers)
    with producer_of(proxy.bootstrap_servers, compression_type=codec, linger_ms=100) as producer:
        futures = [producer.send(topic, b"v" * 100, b"k%d" % n, headers=[("h", b"x")]) for n in range(100)]
        assert [future.result(60).offset for future in futures] == list(range(100))
    records = read(servers, topic)
    assert [(record.key, record.value) for record in records] == [
        (b"k%d" % n, b"v" * 100) for n in range(100)
    ]
    sizes = [batch.size_bytes for event in requests(proxy) for batch in event.batches]
    assert (sum(sizes) < 5000) == (codec != "none")


@pytest.mark.behaviour("I21")
def test_a_batch_leaves_when_it_is_full_or_has_lingered(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    with producer_of(proxy.bootstrap_servers, linger_ms=60_000, batch_size=1000) as producer:
        first = producer.send(topic, b"x" * 100)
        with pytest.raises(TimedOut):
            first.result(0.2)  # the record is not sent yet, because its batch lingers
        for _ in range(15):
            producer.send(topic, b"x" * 100)
        assert first.result(60).offset == 0  # its batch was sent early because it is full
        assert not producer.send(topic, b"x").done()
        producer.flush(60)
        assert all(batch.size_bytes <= 1000 for event in requests(proxy) for batch in event.batches)
    assert len(values(servers, topic)) == 17
    assert len(requests(proxy)) == 3


@pytest.mark.behaviour("I21")
def test_a_full_buffer_holds_send_back_until_its_timeout(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    with producer_of(proxy.bootstrap_servers, buffer_memory=2000, max_block_ms=300) as producer:

        def is_warm() -> bool:
            with suppress(TimedOut):  # the first metadata request may take longer than max.block.ms
                producer.send(topic, b"warm").result(60)
                return True
            return False

        wait_until(is_warm)
        proxy.add(Rule(action="hold", api="Produce", direction="response"))
        futures = [producer.send(topic, b"x" * 900) for _ in range(2)]
        with pytest.raises(TimedOut, match=r"buffer\.memory=2000"):
            producer.send(topic, b"x" * 900)
        assert producer.metrics()["buffer-available-bytes"] < 900
        proxy.clear()
        proxy.release()
        assert [future.result(60).offset for future in futures] == [1, 2]
        producer.send(topic, b"y" * 900).result(60)
        assert producer.metrics()["buffer-available-bytes"] == 2000
    assert len(values(servers, topic)) == 4


@pytest.mark.behaviour("I22")
def test_metrics_have_kafkas_names_and_change(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers)
    proxy.add(Rule(action="cut", api="Produce", nth=1))
    with producer_of(proxy.bootstrap_servers) as producer:
        assert producer.metrics()["record-send-total"] == 0
        producer.send(topic, b"x").result(60)
        metrics = producer.metrics()
    assert (metrics["record-send-total"], metrics["record-retry-total"]) == (2, 1)
    assert (metrics["record-delivered-total"], metrics["record-error-total"]) == (1, 0)
    for name in ("record-send-rate", "byte-rate", "request-latency-avg", "batch-size-avg", "byte-total"):
        assert metrics[name] > 0, name
    assert metrics["records-per-request-avg"] == 1
    assert metrics["buffer-total-bytes"] == metrics["buffer-available-bytes"] == 33_554_432


@pytest.mark.parametrize("settings", [{}, {"enable_idempotence": False}, {"transactional_id": "too-large"}])
def test_a_batch_above_the_topics_limit_is_sent_in_few_requests(
    servers: str, proxy: Proxy, settings: dict[str, object]
) -> None:
    """Regression: if a batch was too large, each of its records was sent in a request of its own. One batch
    took thousands of round trips.
    """
    topic, reported = new_topic(servers, max_message_bytes=2_000), list[tuple[bytes, int]]()
    sent = [b"%04d" % number for number in range(500)]
    with producer_of(proxy.bootstrap_servers, linger_ms=60_000, **settings) as producer:
        if "transactional_id" in settings:
            producer.init_transactions()
            producer.begin_transaction()
        for value in sent:
            producer.send(
                topic,
                value,
                on_delivery=lambda metadata, error, value=value: reported.append((value, metadata.offset)),
            )
        producer.flush()
        if "transactional_id" in settings:
            producer.commit_transaction()
    assert values(servers, topic) == sent and reported == list(zip(sent, range(500), strict=True))
    assert len(requests(proxy)) <= 8


def test_a_topic_that_refuses_large_batches_gets_smaller_ones(servers: str, proxy: Proxy) -> None:
    topic = new_topic(servers, max_message_bytes=40_000)
    with producer_of(proxy.bootstrap_servers, linger_ms=60_000, batch_size=200_000) as producer:
        for _ in range(2):
            before = len(requests(proxy))
            for _ in range(190):
                producer.send(topic, bytes(1_000))
            producer.flush()
    sizes = [batch.size_bytes for event in requests(proxy)[before:] for batch in event.batches]
    assert sizes and max(sizes) <= 40_000, "the second round is sent without a batch that the topic refuses"
    assert len(values(servers, topic)) == 380


@pytest.mark.behaviour("I11")
@pytest.mark.parametrize("settings", [{}, {"enable_idempotence": False}])
@pytest.mark.parametrize("request_timeout_ms", [150_000, 40_000])
def test_records_that_wait_for_a_connection_are_reported_as_not_stored(
    clock: JumpingClock, settings: dict[str, object], request_timeout_ms: int
) -> None:
    """Regression: after an outage of delivery.timeout.ms, unsent records were reported as perhaps stored."""
    with Broker() as broker:
        topic = new_topic(broker.bootstrap_servers, 3)
        producer = producer_of(
            broker.bootstrap_servers,
            linger_ms=1_000,
            max_in_flight_requests_per_connection=1,
            reconnect_backoff_ms=1_000_000,
            reconnect_backoff_max_ms=1_000_000,
            request_timeout_ms=request_timeout_ms,
            delivery_timeout_ms=200_000,
            **settings,
        )
        stored = [producer.send(topic, b"stored", partition=partition) for partition in range(3)]
        producer.flush()
    assert [future.result(60).offset for future in stored] == [0, 0, 0]
    driver = producer._driver
    wait_until(lambda: not any(c.is_connected for c in driver.cluster._connections.values()))

    def in_request() -> list[ProducerBatch]:
        return [batch for call in list(driver._in_flight.values()) for batch in call.batches]

    futures = [producer.send(topic, b"in the way", partition=2)]
    clock.jump(2)
    wait_until(in_request)
    futures.append(producer.send(topic, b"first", partition=0))
    clock.jump(100)
    futures.append(producer.send(topic, b"second, in one request with the first", partition=1))
    for future in futures:
        clock.jump_until(future.done, 1)
        error = future.exception(60)
        assert isinstance(error, TimedOut) and not isinstance(error, OutcomeUnknown)
        # The request still contains the expired batch. Once a connection is made, that batch must not be sent
        # with the other one.
        wait_until(lambda: not any(batch.is_completed for batch in in_request()))
    producer.close()
