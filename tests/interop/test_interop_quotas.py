"""Quotas: librdkafka and Java slow down, Kafka's tool sets quotas, and our clients obey Apache Kafka's."""

from __future__ import annotations

from collections.abc import Iterator

import confluent_kafka
import pytest
from oncelog_devtools.apache_kafka import ApacheKafka, run_tool
from support.broker import wait_until

from oncelog import Admin, Broker, Consumer, NewTopic, Producer, TopicPartition
from oncelog.errors import InvalidRequest
from oncelog.rules.limits.quotas import DEFAULT, QuotaEntity, QuotaFilter

EVERYBODY = QuotaEntity(DEFAULT)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(config={"quota.window.num": 1}) as running:
        yield running


@pytest.fixture
def admin(broker: Broker) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as running:
        running.create_topics([NewTopic("t", 1)])
        yield running


def test_librdkafka_waits_for_its_quota_with_one_producer_per_record(broker: Broker, admin: Admin) -> None:
    admin.alter_client_quotas({EVERYBODY: {"producer_ids_rate": 0.5}})
    errors: list[object] = []
    config = {"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True}
    producers = [confluent_kafka.Producer(config) for _ in range(3)]
    for producer in producers:
        producer.produce("t", b"v", on_delivery=lambda error, _: errors.append(error))
    assert [producer.flush(60) for producer in producers] == [0, 0, 0]
    assert errors == [None] * 3
    metrics = broker.metrics()
    assert metrics["throttled.producer_ids_rate"] >= 1 and metrics["records_stored"] == 3
    assert metrics["producer_ids_given"] == metrics["producer_ids_active"] == 3


@pytest.mark.soak
def test_librdkafka_gets_its_throttle_time(broker: Broker, admin: Admin) -> None:
    admin.alter_client_quotas({EVERYBODY: {"producer_byte_rate": 100_000, "consumer_byte_rate": 50_000}})
    throttled: list[confluent_kafka.ThrottleEvent] = []
    config = {"bootstrap.servers": broker.bootstrap_servers, "throttle_cb": throttled.append}
    producer = confluent_kafka.Producer({**config, "enable.idempotence": True, "batch.size": 50_000})
    for _ in range(20):
        producer.produce("t", b"v" * 10_000)
    assert producer.flush(60) == 0
    assert any(event.throttle_time > 0 for event in throttled)
    told = len(throttled)
    consumer = confluent_kafka.Consumer({**config, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    values: list[bytes | None] = []
    for _ in range(600):
        values += [message.value() for message in consumer.consume(100, 0.1) if message.error() is None]
        if len(values) >= 20 and len(throttled) > told:
            break
    consumer.close()
    assert len(values) == 20 and len(throttled) > told


@pytest.mark.soak
def test_our_throttled_clients_slow_down_and_stay_connected(broker: Broker, admin: Admin) -> None:
    """The broker may leave a throttled connection without a response for longer than request.timeout.ms.
    Clients must not close it.
    """
    admin.alter_client_quotas({QuotaEntity(client_id="slow"): {"producer_byte_rate": 10_000}})
    config = {"bootstrap.servers": broker.bootstrap_servers, "client.id": "slow"}
    opened = broker.metrics()["connections_opened"]
    with Producer(config, **{"request.timeout.ms": 1_500, "delivery.timeout.ms": 60_000}) as producer:
        for _ in range(3):
            producer.send("t", b"v" * 20_000).result(timeout=60)
        assert broker.metrics()["connections_opened"] - opened <= 2
    admin.alter_client_quotas({QuotaEntity(client_id="slow"): {"consumer_byte_rate": 30_000}})
    with Consumer(config, **{"auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([TopicPartition("t", 0)])
        count = 0
        while count < 3:
            count += len(consumer.poll(60))
    assert broker.metrics()["throttled.consumer_byte_rate"] >= 1


def test_our_clients_obey_apache_kafkas_quotas(apache_kafka: ApacheKafka) -> None:
    user, ip = QuotaEntity("quota-user"), QuotaEntity(ip="10.9.8.7")
    both = QuotaEntity("quota-user", DEFAULT)
    values = {
        user: {"producer_byte_rate": 1_000_000.0, "request_percentage": 12.5},
        both: {"consumer_byte_rate": 2_000_000.0},
        ip: {"connection_creation_rate": 100.0},
    }
    with Admin({"bootstrap.servers": apache_kafka.bootstrap_servers}) as admin:
        of_user, of_ip = QuotaFilter({"user": "quota-user"}), QuotaFilter({"ip": "10.9.8.7"}, is_strict=True)
        admin.alter_client_quotas(values, validate_only=True)
        assert admin.describe_client_quotas(of_user) == {}
        admin.alter_client_quotas(values)
        # A broker learns of the quota from the controller a moment after the response.
        wait_until(lambda: admin.describe_client_quotas(of_ip) == {ip: values[ip]})
        assert admin.describe_client_quotas(of_user) == {user: values[user], both: values[both]}
        strict = QuotaFilter({"user": None, "client-id": DEFAULT}, is_strict=True)
        assert admin.describe_client_quotas(strict)[both] == values[both]
        with pytest.raises(InvalidRequest, match="producer_ids_rate"):
            admin.alter_client_quotas({user: {"producer_ids_rate": 1.0}})
        admin.alter_client_quotas({entity: dict.fromkeys(held) for entity, held in values.items()})
        wait_until(lambda: admin.describe_client_quotas(of_ip) == {})


@pytest.mark.soak
def test_our_admin_obeys_apache_kafkas_controller_quota(apache_kafka: ApacheKafka) -> None:
    config = {"bootstrap.servers": apache_kafka.bootstrap_servers, "client.id": "quota-client"}
    of_client = QuotaEntity(client_id="quota-client")
    with Admin(config) as admin:
        admin.alter_client_quotas({of_client: {"controller_mutation_rate": 2.0}})
        wait_until(lambda: of_client in admin.describe_client_quotas())
        try:
            for number in range(3):  # the quota allows 22 partitions at once, then 2 a second
                admin.create_topics([NewTopic(f"quota-{number}", 13)])
        finally:
            admin.alter_client_quotas({of_client: {"controller_mutation_rate": None}})


@pytest.mark.soak
def test_a_java_producer_obeys_quotas_set_by_kafka_configs(
    broker: Broker, admin: Admin, kafka_class_path: str
) -> None:
    """kafka-configs sets the byte rate, and our admin client the rate of producer ids. A throttled Java
    producer waits for its producer id, and then sends all records.
    """
    server = ["--bootstrap-server", broker.bootstrap_servers]
    configs, default = "kafka.admin.ConfigCommand", ["--entity-type", "users", "--entity-default"]
    run_tool(configs, *server, *default, "--alter", "--add-config", "producer_byte_rate=10000")
    assert admin.describe_client_quotas() == {EVERYBODY: {"producer_byte_rate": 10_000.0}}
    described = run_tool(configs, *server, *default, "--describe")
    assert "producer_byte_rate=10000" in described
    admin.alter_client_quotas({EVERYBODY: {"producer_ids_rate": 0.1}})
    with Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        producer.send("t", b"v").result(timeout=60)
    sizes = ["--topic", "t", "--num-records", "100", "--record-size", "1000", "--throughput", "-1"]
    properties = ["--producer-props", f"bootstrap.servers={broker.bootstrap_servers}"]
    printed = run_tool("org.apache.kafka.tools.ProducerPerformance", *sizes, *properties)
    assert "100 records sent" in printed
    metrics = broker.metrics()
    assert metrics["records_stored"] == 101 and metrics["duplicates_acknowledged"] == 0
    assert metrics["throttled.producer_ids_rate"] >= 1 and metrics["throttled.producer_byte_rate"] >= 1
    run_tool(configs, *server, *default, "--alter", "--delete-config", "producer_byte_rate")
    assert admin.describe_client_quotas() == {EVERYBODY: {"producer_ids_rate": 0.1}}
