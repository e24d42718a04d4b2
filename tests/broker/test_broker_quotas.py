"""Quotas of a running broker: it throttles clients, mutes their connections meanwhile, or refuses their
requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.broker import RawClient, assert_unanswered, batch, produce_request
from support.wait import LIMIT_S, HeldTimers, pass_time, stop_clock, wait_until

from oncelog import Admin, Broker, NewTopic, Producer
from oncelog.broker import quota_manager
from oncelog.broker.quota_manager import FILE_NAME, QuotaManager
from oncelog.config import BROKER
from oncelog.errors import KafkaStorageError, StorageError, ThrottlingQuotaExceeded
from oncelog.rules.limits.quotas import DEFAULT, QuotaEntity, QuotaPrincipal
from oncelog.server import request_handler, throttle
from oncelog.server.disk import RealDisk
from oncelog.wire import messages as m
from oncelog.wire.frames import encode_request

ANONYMOUS = QuotaEntity(user="ANONYMOUS")
RAW = QuotaEntity(client_id="raw")
WINDOW = {"quota.window.num": 1}
"""A setting: the broker lets a client use one second of its quota at once, as a burst."""


@pytest.fixture
def limited() -> Iterator[Broker]:
    with Broker(config=WINDOW) as running:
        yield running


@pytest.fixture
def admin(limited: Broker) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": limited.bootstrap_servers}) as running:
        yield running


@pytest.fixture
def raw(limited: Broker) -> Iterator[RawClient]:
    with RawClient(limited.bootstrap_servers) as client:
        yield client


def produce(client: RawClient, topic: str, size_bytes: int, *, version: int = 9, acks: int = 1) -> int:
    """Produce a batch, and return the throttle time."""
    P = m.ProduceRequest
    data = P.PartitionProduceData(index=0, records=batch(b"v" * size_bytes))
    asked = P(acks=acks, timeout_ms=5000, topic_data=[P.TopicProduceData(name=topic, partition_data=[data])])
    if acks == 0:
        client.send(asked, version)
        return 0
    answer = client.ask(asked, version)
    assert answer.responses[0].partition_responses[0].error_code == 0
    return int(answer.throttle_time_ms)


def fetch(client: RawClient, topic: str, **fields: int) -> m.FetchResponse:
    F = m.FetchRequest
    asked = F.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    answer: m.FetchResponse = client.ask(
        F(max_bytes=1 << 20, topics=[F.FetchTopic(topic=topic, partitions=[asked])], **fields), 12
    )
    return answer


@pytest.mark.parametrize("version", [8, 9, 12])
def test_produce_is_with_throttle_time(limited: Broker, admin: Admin, raw: RawClient, version: int) -> None:
    stop_clock(limited)
    raw.create_topic("t")
    admin.alter_client_quotas({RAW: {"producer_byte_rate": 10_000}})
    assert produce(raw, "t", 5_000, version=version) == 0
    assert 80_000 < produce(raw, "t", 1_000_000, version=version) < 100_000
    assert limited.metrics()["throttled.producer_byte_rate"] == 1


def test_the_next_request_of_a_throttled_client_is_handled_after_the_pause(
    monkeypatch: pytest.MonkeyPatch, admin: Admin, raw: RawClient
) -> None:
    raw.create_topic("t")
    admin.alter_client_quotas({RAW: {"producer_byte_rate": 10_000}})
    timers = HeldTimers(monkeypatch, throttle)
    throttle_ms = produce(raw, "t", 20_000)
    assert throttle_ms > 0 and timers.delays_s == [throttle_ms / 1000]
    raw.send(m.ApiVersionsRequest(), 0)
    assert_unanswered(raw)
    timers.fire()
    assert raw.read_frame() is not None


def test_another_client_is_served_while_one_is_muted(limited: Broker, admin: Admin, raw: RawClient) -> None:
    raw.create_topic("t")
    admin.alter_client_quotas({RAW: {"producer_byte_rate": 1}})
    assert produce(raw, "t", 100_000) > 90_000
    raw.send(m.ApiVersionsRequest(), 0)
    with Producer({"bootstrap.servers": limited.bootstrap_servers, "client.id": "other"}) as producer:
        producer.send("t", b"v").result(timeout=60)
    assert_unanswered(raw)


def test_a_throttled_client_with_acks_0_is_muted_too(admin: Admin, raw: RawClient) -> None:
    raw.create_topic("t")
    admin.alter_client_quotas({RAW: {"producer_byte_rate": 1}})
    produce(raw, "t", 100_000, acks=0)
    raw.send(m.ApiVersionsRequest(), 0)
    assert_unanswered(raw)


def test_requests_of_a_throttled_client_are_handled_after_it_disconnects(
    limited: Broker, admin: Admin, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer with acks=0 may disconnect right after its last request. The broker must handle all its
    requests, although one round handles only 64.
    """
    stop_clock(limited)
    raw.create_topic("t")
    request = encode_request(produce_request("t", batch(b"v"), acks=0), 9, 1, "raw")
    admin.alter_client_quotas({RAW: {"producer_byte_rate": 500 * len(request)}})
    timers, is_sent = HeldTimers(monkeypatch, throttle), threading.Event()
    assert limited._thread is not None
    limited._thread.loop.call_soon_threadsafe(is_sent.wait, LIMIT_S)
    with RawClient(limited.bootstrap_servers) as gone:
        gone.socket.sendall(request * 1_000)
    is_sent.set()
    wait_until(lambda: bool(timers.delays_s))
    assert 500 < raw.offset("t") < 1_000
    admin.alter_client_quotas({RAW: {"producer_byte_rate": None}})
    timers.fire()
    wait_until(lambda: raw.offset("t") == 1_000)
    wait_until(lambda: limited.metrics()["connections"] <= 2)


def test_a_throttled_connection_whose_client_is_gone_ends() -> None:
    config = {**WINDOW, "connections.max.idle.ms": 600_000}
    with Broker(config=config) as broker, Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic("t", 1)])
        admin.alter_client_quotas({RAW: {"producer_byte_rate": 1}})
        for _ in range(5):
            with RawClient(broker.bootstrap_servers) as client:
                assert produce(client, "t", 100_000) > 60_000_000
        pass_time(broker, 601_000)
        wait_until(lambda: broker.metrics()["connections_ended.connections.max.idle.ms"] >= 5)
        wait_until(lambda: broker.metrics()["connections"] <= 1)


def test_a_client_over_its_fetch_quota_is_throttled_on_a_new_connection_too(
    limited: Broker, admin: Admin, raw: RawClient
) -> None:
    stop_clock(limited)
    raw.create_topic("t")
    produce(raw, "t", 50_000)
    admin.alter_client_quotas({RAW: {"consumer_byte_rate": 5_000}})
    first = fetch(raw, "t", session_epoch=-1)
    assert first.throttle_time_ms > 1_000 and first.responses[0].partitions[0].records
    with RawClient(limited.bootstrap_servers) as again:
        second = fetch(again, "t", session_epoch=-1)  # a new connection does not end the throttling
    assert 0 < second.throttle_time_ms <= first.throttle_time_ms and second.responses == []


def test_a_throttled_fetch_keeps_its_session(limited: Broker, admin: Admin, raw: RawClient) -> None:
    stop_clock(limited)
    raw.create_topic("t")
    produce(raw, "t", 50_000)
    session_id = fetch(raw, "t", session_epoch=0).session_id
    admin.alter_client_quotas({RAW: {"consumer_byte_rate": 5_000}})
    first = fetch(raw, "t", session_id=session_id, session_epoch=1)
    with RawClient(limited.bootstrap_servers) as again:
        second = fetch(again, "t", session_id=session_id, session_epoch=2)
    assert {(answer.error_code, answer.session_id) for answer in (first, second)} == {(0, session_id)}
    assert [bool(answer.responses) for answer in (first, second)] == [True, False]


def test_a_throttled_full_fetch_ends_its_session(limited: Broker, admin: Admin, raw: RawClient) -> None:
    """R1767: the session stayed until it expired. A consumer that closes sends such a fetch."""
    stop_clock(limited)
    assert limited._running is not None
    sessions = limited._running.node.sessions
    raw.create_topic("t")
    produce(raw, "t", 50_000)
    session_id = fetch(raw, "t", session_epoch=0).session_id
    admin.alter_client_quotas({RAW: {"consumer_byte_rate": 5_000}})
    assert fetch(raw, "t", session_id=session_id, session_epoch=1).responses
    assert len(sessions) == 1
    with RawClient(limited.bootstrap_servers) as again:
        last = fetch(again, "t", session_id=session_id, session_epoch=-1)
    assert (last.responses, last.session_id, len(sessions)) == ([], 0, 0)


def test_a_client_over_its_request_percentage_is_throttled(admin: Admin, raw: RawClient) -> None:
    admin.alter_client_quotas({RAW: {"request_percentage": 0.000001}})
    raw.ask(m.MetadataRequest(topics=[]), 9)
    assert raw.ask(m.ApiVersionsRequest(), 2).throttle_time_ms == 1_000


def test_only_clients_that_know_the_throttling_error_are_refused_topics(
    limited: Broker, admin: Admin, raw: RawClient
) -> None:
    stop_clock(limited)
    admin.alter_client_quotas({RAW: {"controller_mutation_rate": 2}})
    C, D = m.CreateTopicsRequest, m.DeleteTopicsRequest

    def create(client: RawClient, name: str, version: int) -> tuple[int, int]:
        topic = C.CreatableTopic(name=name, num_partitions=20, replication_factor=1)
        answer = client.ask(C(topics=[topic], timeout_ms=5000), version)
        return answer.topics[0].error_code, answer.throttle_time_ms

    error, throttle_ms = create(raw, "a", 7)
    assert error == 0 and throttle_ms > 5_000
    for version, expected in ((7, ThrottlingQuotaExceeded.code), (5, 0)):
        with RawClient(limited.bootstrap_servers) as other:
            error, throttle_ms = create(other, f"v{version}", version)
            assert error == expected and throttle_ms > 5_000
    with RawClient(limited.bootstrap_servers) as other:
        deletion = D(topics=[D.DeleteTopicState(name="a")], timeout_ms=5000)
        assert other.ask(deletion, 6).responses[0].error_code == ThrottlingQuotaExceeded.code
    G = m.CreatePartitionsRequest
    with RawClient(limited.bootstrap_servers) as other:
        growth = G(topics=[G.CreatePartitionsTopic(name="a", count=21, assignments=None)], timeout_ms=5000)
        assert other.ask(growth, 3).results[0].error_code == ThrottlingQuotaExceeded.code
    assert {topic.name for topic in admin.list_topics()} == {"a", "v5"}


def test_admin_waits_its_turn(admin: Admin, limited: Broker) -> None:
    admin.alter_client_quotas({ANONYMOUS: {"controller_mutation_rate": 5}})
    for name in "abc":
        admin.create_topics([NewTopic(name, 4)])
    assert {topic.name for topic in admin.list_topics()} == {"a", "b", "c"}
    assert limited.metrics()["throttled.controller_mutation_rate"] >= 1


def test_producers_above_the_rate_of_producer_ids_wait_for_their_ids(limited: Broker, admin: Admin) -> None:
    """Above the rate, a producer must get its id later, and no error."""
    admin.create_topics([NewTopic("t", 1)])
    admin.alter_client_quotas({QuotaEntity(DEFAULT): {"producer_ids_rate": 5}})
    with ExitStack() as stack:
        config = {"bootstrap.servers": limited.bootstrap_servers}
        producers = [stack.enter_context(Producer(config)) for _ in range(3)]
        for future in [producer.send("t", b"v") for producer in producers]:
            future.result(timeout=60)
    metrics = limited.metrics()
    assert metrics["producer_ids_given"] == metrics["producer_ids_active"] == 3


def test_no_producer_id_is_given_above_the_rate(limited: Broker, admin: Admin) -> None:
    stop_clock(limited)
    admin.alter_client_quotas({RAW: {"producer_ids_rate": 0.5}})
    asked = m.InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1000)

    def init() -> int:
        with RawClient(limited.bootstrap_servers) as client:
            return int(client.ask(asked, 4).error_code)

    assert [init() for _ in range(3)] == [0, 14, 14]
    for _ in range(2):
        pass_time(limited, 999)
        assert init() == 14
        pass_time(limited, 1_001)
        assert [init() for _ in range(2)] == [0, 14]
    assert limited.metrics()["producer_ids_given"] == 3


def test_a_transactional_id_that_has_its_producer_id_is_not_refused(admin: Admin, raw: RawClient) -> None:
    admin.alter_client_quotas({RAW: {"producer_ids_rate": 0.001}})

    def init(transactional_id: str) -> tuple[int, int]:
        asked = m.InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout_ms=1000, producer_id=-1, producer_epoch=-1
        )
        with RawClient("{}:{}".format(*raw.socket.getpeername())) as client:
            answer = client.ask(asked, 4)
        return answer.error_code, answer.producer_epoch

    assert init("one") == (0, 0)
    assert init("two") == (14, -1)
    assert init("one") == (0, 1)


def test_connections_above_the_rate_of_an_address_are_delayed_and_closed(
    limited: Broker, admin: Admin
) -> None:
    stop_clock(limited)
    admin.alter_client_quotas({QuotaEntity(ip="127.0.0.1"): {"connection_creation_rate": 1}})
    admitted = 0
    for _ in range(100):
        with RawClient(limited.bootstrap_servers) as client:
            client.send(m.ApiVersionsRequest(), 0)
            if client.read_frame() is None:
                break
            admitted += 1
    assert 0 < admitted < 100
    assert limited.metrics()["throttled.connection_creation_rate"] == 1


def test_memory_is_bounded_whatever_clients_call_themselves(tmp_path: Path) -> None:
    held = quota_manager.QuotaManager(RealDisk(tmp_path), BROKER.parse({}), {}, max_shares=100)
    held.alter(QuotaEntity(client_id=DEFAULT), [("producer_byte_rate", 10.0)], is_test=False)
    for number in range(1_000):
        held.charge("producer_byte_rate", QuotaPrincipal("u", f"client-{number}"), 10, number * 100)
    debtor = QuotaPrincipal("u", "debtor")
    held.charge("producer_byte_rate", debtor, 1_000_000, 100_000)
    for number in range(1_000):
        held.charge("producer_byte_rate", QuotaPrincipal("u", f"other-{number}"), 10, 200_000 + number * 100)
    assert len(held._buckets) <= 101 and len(held._shares) <= 100
    assert held.wait_ms("producer_byte_rate", debtor, 300_000) > 0


def test_a_quota_that_cannot_be_stored_is_refused(
    limited: Broker, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    admin.alter_client_quotas({RAW: {"producer_byte_rate": 1}})
    with monkeypatch.context() as patch:
        patch.setattr(RealDisk, "replace", full)
        with pytest.raises(KafkaStorageError, match="No space left"):
            admin.alter_client_quotas({RAW: {"producer_byte_rate": 2}})
    assert admin.describe_client_quotas() == {RAW: {"producer_byte_rate": 1.0}}


def test_quotas_outlive_a_restart(tmp_path: Path) -> None:
    values = {ANONYMOUS: {"producer_byte_rate": 7.0}, QuotaEntity("a", DEFAULT): {"request_percentage": 1.5}}
    with Broker(tmp_path) as broker, Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.alter_client_quotas(values)
    with Broker(tmp_path) as broker, Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        assert admin.describe_client_quotas() == values
        admin.alter_client_quotas({entity: dict.fromkeys(held) for entity, held in values.items()})
        assert admin.describe_client_quotas() == {}
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(StorageError, match=FILE_NAME):
        Broker(tmp_path).start()


class WorkClock:
    """A fake clock of processor time.

    It advances by 1 s when a request is read, by 10 s when it is handled, and by 100 s when its response is
    encoded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        self.charged: list[float] = []
        monkeypatch.setattr(throttle, "perf_counter", lambda: self.now)
        decode, handle = m.ListGroupsRequest.decode, request_handler.handle
        encode, encode_large = request_handler.encode_response, request_handler.encode_large_response

        def worked(
            quotas: QuotaManager, principal: QuotaPrincipal | None, seconds: float, now_ms: int
        ) -> None:
            if principal is not None and principal.client_id == "raw":
                self.charged.append(seconds)

        def taking(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
            def slow(*args: Any, **keywords: Any) -> Any:
                self.now += seconds
                return work(*args, **keywords)

            return slow

        monkeypatch.setattr(QuotaManager, "charge_request_time", worked)
        monkeypatch.setattr(m.ListGroupsRequest, "decode", taking(1, decode))
        monkeypatch.setattr(request_handler, "handle", taking(10, handle))
        monkeypatch.setattr(request_handler, "encode_response", taking(100, encode))
        monkeypatch.setattr(request_handler, "encode_large_response", taking(100, encode_large))

    def total(self) -> float:
        return sum(self.charged)


@pytest.mark.behaviour("I29")
def test_reading_carrying_out_and_writing_are_charged(
    monkeypatch: pytest.MonkeyPatch, admin: Admin, raw: RawClient
) -> None:
    admin.alter_client_quotas({RAW: {"request_percentage": 1_000_000}})
    clock = WorkClock(monkeypatch)
    raw.ask(m.ListGroupsRequest(), 4)
    wait_until(lambda: clock.total() == 111)


@pytest.mark.behaviour("I29")
def test_a_request_that_cannot_be_read_is_charged(
    monkeypatch: pytest.MonkeyPatch, admin: Admin, raw: RawClient
) -> None:
    admin.alter_client_quotas({RAW: {"request_percentage": 1_000_000}})
    clock = WorkClock(monkeypatch)
    frame = encode_request(m.ListGroupsRequest(), 4, 1, "raw")[4:-1]  # without the request's last byte
    raw.socket.sendall(len(frame).to_bytes(4, "big") + frame)
    assert raw.is_closed()
    assert clock.total() == 1


@pytest.mark.behaviour("I29")
def test_an_answer_that_comes_later_is_charged(
    monkeypatch: pytest.MonkeyPatch, limited: Broker, admin: Admin, raw: RawClient
) -> None:
    raw.create_topic("t")
    admin.alter_client_quotas({RAW: {"request_percentage": 1_000_000}})
    clock = WorkClock(monkeypatch)
    fetch(raw, "t", max_wait_ms=300, min_bytes=1)
    wait_until(lambda: clock.total() >= 110)
    assert clock.total() == 110
