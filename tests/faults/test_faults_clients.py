"""librdkafka and Java's client lose an acknowledgement in the proxy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import kafka
import pytest

from oncelog import Admin, Broker, Consumer, NewTopic, TopicPartition
from oncelog.testing.proxy import Direction, Fate, Proxy, Rule

RECORDS = [b"value %d" % number for number in range(12)]
TOPIC = "lost-ack"


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as running:
        with Admin({"bootstrap.servers": running.bootstrap_servers}) as admin:
            admin.create_topics([NewTopic(TOPIC, num_partitions=1)])
        yield running


def stored(broker: Broker) -> list[bytes]:
    tp = TopicPartition(TOPIC, 0)
    values: list[bytes] = []
    with Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
        end = consumer.end_offsets([tp])[tp]
        for batch in consumer.fetch_range(tp, 0, end):
            values += batch.column("value").to_pylist()
    return values


def send_with_confluent(address: str, idempotent: bool) -> list[int]:
    offsets: list[int] = []

    def delivered(error: object, message: confluent_kafka.Message) -> None:
        assert error is None
        offsets.append(message.offset())

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": idempotent,
            "linger.ms": 50,
            "reconnect.backoff.ms": 10,
            "retry.backoff.ms": 10,
        }
    )
    for value in RECORDS:
        producer.produce(TOPIC, value, partition=0, on_delivery=delivered)
    assert producer.flush(60) == 0
    return offsets


def send_with_kafka_python(address: str, idempotent: bool) -> list[int]:
    producer = kafka.KafkaProducer(
        bootstrap_servers=address,
        enable_idempotence=idempotent,
        acks="all",
        retries=20,
        linger_ms=50,
        reconnect_backoff_ms=10,
        retry_backoff_ms=10,
    )
    futures = [producer.send(TOPIC, value, partition=0) for value in RECORDS]
    producer.flush(timeout=60)
    offsets = [future.get(timeout=60).offset for future in futures]
    producer.close()
    return offsets


CLIENTS = [send_with_confluent, send_with_kafka_python]
LOST_ACK = Rule(action="cut", api="Produce", direction="response", nth=1)


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("send", CLIENTS)
def test_a_retry_is_stored_once_and_told_its_first_offset(
    broker: Broker, send: Callable[[str, bool], list[int]]
) -> None:
    with Proxy(broker.bootstrap_servers, rules=[LOST_ACK]) as proxy:
        assert send(proxy.bootstrap_servers, True) == list(range(len(RECORDS)))
        assert next(e.fate for e in proxy.events if e.outcomes) is Fate.CUT
        batches = [batch for event in proxy.events for batch in event.batches]
    assert batches[0].producer_id is not None
    assert batches[1] == batches[0]
    assert stored(broker) == RECORDS


@pytest.mark.behaviour("I1")
@pytest.mark.parametrize("send", CLIENTS)
def test_without_idempotence_the_retry_is_stored_twice(
    broker: Broker, send: Callable[[str, bool], list[int]]
) -> None:
    with Proxy(broker.bootstrap_servers, rules=[LOST_ACK]) as proxy:
        send(proxy.bootstrap_servers, False)
        first = next(event for event in proxy.events if event.batches).batches[0]
    assert first.producer_id is None
    values = stored(broker)
    assert len(values) == len(RECORDS) + first.records_count
    assert set(values) == set(RECORDS)


@pytest.mark.parametrize("send", CLIENTS)
def test_clients_never_bypass_the_proxy(broker: Broker, send: Callable[[str, bool], list[int]]) -> None:
    with Proxy(broker.bootstrap_servers) as proxy:
        send(proxy.bootstrap_servers, True)
        apis = {event.api for event in proxy.events if event.direction is Direction.REQUEST}
        assert {"ApiVersions", "Metadata", "InitProducerId", "Produce"} <= apis
        carried = sum(batch.records_count for event in proxy.events for batch in event.batches)
    assert carried == len(RECORDS)
    assert stored(broker) == RECORDS


@pytest.mark.behaviour("I1", "I9")
@pytest.mark.parametrize(
    "rule",
    [LOST_ACK, Rule(action="hold", api="Produce", nth=2, release_after=1)],
    ids=["lost-ack", "overtaken"],
)
def test_the_java_client_delivers_once_through_the_faults(
    broker: Broker, rule: Rule, kafka_class_path: str, tmp_path: Path
) -> None:
    # Kafka's VerifiableProducer sets retries=0. These properties override that.
    settings = tmp_path / "producer.properties"
    settings.write_text("enable.idempotence=true\nretries=2147483647\nacks=all\n")
    with Proxy(broker.bootstrap_servers, rules=[rule]) as proxy:
        command = ["java", "-Xmx128m", "-cp", kafka_class_path, "org.apache.kafka.tools.VerifiableProducer"]
        command += ["--bootstrap-server", proxy.bootstrap_servers, "--topic", TOPIC, "--max-messages", "3000"]
        command += ["--command-config", str(settings)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        assert any(event.fate in (Fate.CUT, Fate.HELD) for event in proxy.events)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    offsets = [line["offset"] for line in lines if line["name"] == "producer_send_success"]
    assert sorted(offsets) == list(range(3000))
    assert stored(broker) == [b"%d" % number for number in range(3000)]
