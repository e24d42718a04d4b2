"""The raw load generators: both brokers store everything they send, and they report every error."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from oncelog_bench import raw_fetch, raw_produce, raw_transactions
from oncelog_bench.process import cpu_seconds, rss_mb, settle
from oncelog_bench.raw_fetch import FetchSpec
from oncelog_bench.raw_produce import ProduceSpec, Sender, Template
from oncelog_bench.raw_transactions import TransactionSpec
from oncelog_bench.raw_wire import receive_frame
from oncelog_devtools.apache_kafka import ApacheKafka

from oncelog import Admin, Broker, Consumer, NewTopic, TopicPartition
from oncelog.errors import OncelogError
from oncelog.wire.batch import iter_batches, verify_crc
from oncelog.wire.frames import decode_request, encode_response
from oncelog.wire.messages import ProduceResponse

OPENING_BATCHES = 3
Address = tuple[str, int]


@pytest.fixture(params=["oncelog", "apache-kafka"])
def address(request: pytest.FixtureRequest) -> Iterator[Address]:
    """Yield the bootstrap servers and the process id of a broker: ours for one run of the test, Apache
    Kafka's for another.
    """
    if request.param == "apache-kafka":
        kafka: ApacheKafka = request.getfixturevalue("apache_kafka")
        yield kafka.bootstrap_servers, kafka.pid
    else:
        with Broker() as broker:
            yield broker.bootstrap_servers, os.getpid()


def topic(bootstrap_servers: str, name: str, partitions: int) -> str:
    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.create_topics([NewTopic(name, partitions, 1)])
    return name


def ends(bootstrap_servers: str, name: str, partitions: int) -> list[int]:
    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        listed = admin.list_offsets({TopicPartition(name, index): "latest" for index in range(partitions)})
        return [each.offset or 0 for each in listed.values()]


@pytest.mark.parametrize("idempotence", [True, False], ids=["numbered", "verbatim"])
@pytest.mark.parametrize(("batches", "connections"), [(3, 1), (1, 4)], ids=["wide", "single"])
def test_every_batch_that_is_reported_is_stored(
    address: Address, batches: int, connections: int, idempotence: bool
) -> None:
    servers, pid = address
    name = topic(servers, f"raw-{batches}-{connections}-{idempotence}", 3)
    sizes = {"batches": batches, "connections": connections, "idempotence": idempotence}
    spec = ProduceSpec(servers, pid, name, 3, batch_records=4, record_bytes=300, requests=24, **sizes)
    report = raw_produce.run(spec)
    assert report.requests == 24 and report.batches == 24 * batches and report.records == 96 * batches
    opened = OPENING_BATCHES * 3 * connections * 4
    twice = sum(ends(servers, name, 3)) - report.records - opened
    # Without idempotence, a whole opening request is retried if one of its partitions has no leader yet. Then
    # the records for its other partitions are stored twice.
    assert twice == 0 if idempotence else twice in range(0, 3 * opened, 4)
    assert set(report.quantiles) == {"p50_ms", "p99_ms", "p999_ms"} and report.broker_cpu_seconds > 0


def test_paced_sends_are_one_at_a_time_and_all_stored(address: Address) -> None:
    servers, pid = address
    name = topic(servers, "raw-paced", 1)
    report = raw_produce.run(ProduceSpec(servers, pid, name, seconds=0.1, rate_per_s=200.0))
    assert report.requests == 20 and ends(servers, name, 1) == [20 + OPENING_BATCHES]


@pytest.mark.parametrize("ends", [{"commit_records": 40}, {"commit_ms": 20.0}], ids=["records", "time"])
def test_every_transaction_that_is_reported_is_visible(address: Address, ends: dict[str, Any]) -> None:
    servers, pid = address
    name = topic(servers, f"raw-txn-{''.join(ends)}", 3)
    produce = ProduceSpec(servers, pid, name, 3, batch_records=4, record_bytes=300, batches=3, seconds=0.2)
    report = raw_transactions.run(TransactionSpec(produce, **ends))
    assert report.transactions >= 1 and report.records == report.batches * 4
    settings = {"bootstrap.servers": servers, "auto.offset.reset": "earliest"}
    with Consumer(settings, isolation_level="read_committed") as consumer:
        parts = [TopicPartition(name, index) for index in range(3)]
        consumer.assign(parts)
        wanted = report.records + OPENING_BATCHES * 3 * 4
        seen = 0
        while seen < wanted and (records := consumer.poll(10.0)):
            seen += len(records)
        assert seen == wanted and not consumer.poll(0.2)
    if "commit_records" in ends:
        assert report.records <= report.transactions * 48  # each request has 12 records


def test_consumers_get_every_batch_at_the_end_and_in_catching_up(address: Address) -> None:
    servers, pid = address
    name = topic(servers, "raw-read", 1)
    produce = ProduceSpec(servers, pid, name, batch_records=5, rate_per_s=200.0, record_bytes=1_000)
    size = Template(produce, [0], None).batch_bytes
    tail = raw_fetch.run(FetchSpec(servers, pid, name, 1, 3, size, 0, seconds=0.1, produce=produce))
    assert tail.batches == 3 * 20 and tail.bytes == 60 * size
    assert min(tail.quantiles.values()) > 0
    end = (20 + OPENING_BATCHES) * 5
    catch_up = raw_fetch.run(FetchSpec(servers, pid, name, 1, 2, size, end, seconds=0.05))
    assert catch_up.fetches >= 2 and catch_up.batches >= 2 * (20 + OPENING_BATCHES)


def test_records_are_readable_by_a_consumer() -> None:
    with Broker() as broker:
        name = topic(broker.bootstrap_servers, "raw-records", 1)
        raw_produce.run(
            ProduceSpec(broker.bootstrap_servers, os.getpid(), name, record_bytes=700, requests=2)
        )
        settings = {"bootstrap.servers": broker.bootstrap_servers, "auto.offset.reset": "earliest"}
        with Consumer(settings) as consumer:
            consumer.assign([TopicPartition(name, 0)])
            records = consumer.poll(10.0)
    assert [len(record.value or b"") for record in records] == [700] * (2 + OPENING_BATCHES)


def test_a_template_sets_sequences_and_checksums_of_its_batches() -> None:
    spec = ProduceSpec("", 0, "t", 2, batch_records=3, batches=2)
    template = Template(spec, [0, 1], (77, 5))
    for expected in (0, 3, 6):
        _, request = decode_request(bytes(template.next()[4:]))
        for part in request.topic_data[0].partition_data:  # type: ignore[attr-defined]
            ((position, header),) = iter_batches(part.records)
            assert (header.producer_id, header.producer_epoch, header.base_sequence) == (77, 5, expected)
            assert verify_crc(part.records, position, header.size_bytes)


def test_a_refused_batch_among_acknowledged_ones_is_seen() -> None:
    """The test's own server acknowledges the first of two batches and rejects the second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = threading.Thread(target=_refuse_second, args=(listener,), daemon=True)
        peer.start()
        port = listener.getsockname()[1]
        sender = Sender(ProduceSpec(f"127.0.0.1:{port}", 0, "t", 2, batches=2, idempotence=False), 0)
        sender.open()
        sender.send()
        with pytest.raises(OncelogError, match="rejected a batch"):
            sender.receive([])
        sender.close()
        peer.join(10)


def _refuse_second(listener: socket.socket) -> None:
    with listener.accept()[0] as peer:
        for code in (0,) * OPENING_BATCHES + (45,):
            receive_frame(peer)
            parts = [
                ProduceResponse.PartitionProduceResponse(index=index, error_code=index * code, base_offset=7)
                for index in (0, 1)
            ]
            topics = [ProduceResponse.TopicProduceResponse(name="t", partition_responses=parts)]
            peer.sendall(encode_response(ProduceResponse(responses=topics), raw_produce.VERSION, 0))


def test_cpu_time_and_memory_of_a_process_are_read() -> None:
    before = cpu_seconds(os.getpid())
    sum(range(300_000))
    assert cpu_seconds(os.getpid()) > before and rss_mb(os.getpid()) > 1
    settle(os.getpid())
