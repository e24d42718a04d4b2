"""Write tests/golden/kafka-4.3.0*.tar.gz: data directories of Apache Kafka 4.3.0 after a clean stop.

`python tests/golden/kafka_directory.py` starts Apache Kafka, fills its directory, stops it and packs the
directory. Run it to test with a new version of Apache Kafka. `plain` has topics, transactions and groups;
`secured` is the same directory after ACLs, users, quotas and stored broker settings were added.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import time
from pathlib import Path

GOLDEN = Path(__file__).parent
sys.path.insert(0, str(GOLDEN.parent))

from oncelog_devtools.apache_kafka import VERSION, ApacheKafka  # noqa: E402
from support.broker import RawClient, batch  # noqa: E402
from support.topics import producer_of  # noqa: E402

import oncelog  # noqa: E402
from oncelog import Consumer, ConsumerGroupMetadata, NewTopic, OffsetAndMetadata, TopicPartition  # noqa: E402
from oncelog.client.admin.types import ConfigResource  # noqa: E402
from oncelog.wire.messages import InitProducerIdRequest  # noqa: E402

MONTH_MS = 30 * 86_400_000
SMALL = {
    "offsets.topic.num.partitions": 2,
    "transaction.state.log.num.partitions": 2,
    "log.index.size.max.bytes": 4096,
}
TOPICS = {
    "forever": {"retention.ms": "-1"},
    "table": {"cleanup.policy": "compact"},
    "short": {"retention.ms": "3600000"},
    "special": {"unclean.leader.election.enable": "true", "segment.jitter.ms": "5", "preallocate": "true"},
    "bank": {},
    "again": {},
    "gone": {"retention.ms": "-1"},
}


def fill(kafka: ApacheKafka) -> None:
    servers = kafka.bootstrap_servers
    old_ms = int(time.time() * 1000) - MONTH_MS
    with oncelog.Admin({"bootstrap.servers": servers}) as admin, RawClient(servers) as client:
        admin.create_topics(
            [NewTopic(name, num_partitions=1 + (name == "bank"), configs=own) for name, own in TOPICS.items()]
        )
        admin.alter_configs(
            {ConfigResource("topic", "bank"): {"max.message.bytes": "2000000", "retention.bytes": "5000"}}
        )
        admin.alter_configs({ConfigResource("topic", "bank"): {"retention.bytes": None}})
        time.sleep(1)
        admin.delete_topics(["gone", "again"])
        time.sleep(1)
        admin.create_topics([NewTopic("again", num_partitions=1, configs={"retention.ms": "-1"})])
        time.sleep(1)
        for number in range(5):
            for topic in ("forever", "table", "short", "special", "again"):
                made = batch(b"value-%d" % number, key=b"key-%d" % number, timestamp_ms=old_ms)
                assert client.produce(topic, made).error_code == 0
        producer_id = new_producer_id(client)
        for sequence in range(3):
            made = batch(b"numbered-%d" % sequence, pid=producer_id, sequence=sequence)
            assert client.produce("forever", made).error_code == 0
    transact(servers)
    commit(servers)


def new_producer_id(client: RawClient) -> int:
    """Return a new producer id. Retry, because Apache Kafka takes a moment to allocate a block of ids."""
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
    response = client.ask(request, 4)
    while response.error_code:
        time.sleep(0.1)
        response = client.ask(request, 4)
    return int(response.producer_id)


def transact(servers: str) -> None:
    """Write three transactions: a committed one with offsets, an aborted one, and one that stays open."""
    for name, end in (("done", "commit"), ("undone", "abort"), ("open", "")):
        producer = producer_of(servers, transactional_id=name, transaction_timeout_ms=900_000)
        producer.init_transactions()
        producer.begin_transaction()
        for partition in (0, 1):
            producer.send("bank", f"{name}-{partition}".encode(), partition=partition)
        offsets = {TopicPartition("bank", 0): OffsetAndMetadata(7)}
        producer.send_offsets_to_transaction(offsets, ConsumerGroupMetadata(f"of-{name}"))
        producer.flush()
        if end == "commit":
            producer.commit_transaction()
            producer.close()
        elif end == "abort":
            producer.abort_transaction()
            producer.close()
        else:
            HELD.append(producer)


HELD: list[object] = []
"""Producers with open transactions. They are kept here, because closing a producer aborts its transaction."""


def commit(servers: str) -> None:
    for protocol in ("classic", "consumer"):
        config = {"bootstrap.servers": servers, "group.id": f"{protocol}-readers", "group.protocol": protocol}
        with Consumer({**config, "auto.offset.reset": "earliest", "enable.auto.commit": False}) as consumer:
            consumer.subscribe(["forever"])
            count, deadline = 0, time.monotonic() + 60
            while count < 8 and time.monotonic() < deadline:
                count += len(consumer.poll(0.5))
            assert count == 8, count
            consumer.commit({TopicPartition("forever", 0): 4})


def secure(kafka: ApacheKafka) -> None:
    servers = kafka.bootstrap_servers
    acls = "org.apache.kafka.tools.AclCommand"
    kafka.run_tool(
        acls,
        *("--bootstrap-server", servers, "--add", "--allow-principal", "User:alice"),
        *("--operation", "Read", "--topic", "forever"),
    )
    kafka.run_tool(
        acls,
        *("--bootstrap-server", servers, "--add", "--deny-principal", "User:bob"),
        *("--operation", "All", "--topic", "ba", "--resource-pattern-type", "prefixed"),
    )
    configs = ("--bootstrap-server", servers, "--alter")
    settings = "SCRAM-SHA-256=[iterations=4096,password=alice-secret]"
    for entity, change in (
        (("--entity-type", "users", "--entity-name", "alice"), settings),
        (("--entity-type", "users", "--entity-name", "alice"), "producer_byte_rate=1048576"),
        (("--entity-type", "clients", "--entity-default"), "consumer_byte_rate=2097152"),
        (("--entity-type", "ips", "--entity-name", "127.0.0.9"), "connection_creation_rate=50"),
        (("--entity-type", "brokers", "--entity-default"), "log.retention.ms=-1"),
    ):
        kafka.run_tool("kafka.admin.ConfigCommand", *configs, *entity, "--add-config", change)


def pack(kafka: ApacheKafka, name: str) -> None:
    (node,) = kafka.nodes
    node.stop()
    assert (node.data_dir / ".kafka_cleanshutdown").exists()
    with tarfile.open(GOLDEN / f"kafka-{VERSION}-{name}.tar.gz", "w:gz") as tar:
        tar.add(node.data_dir, arcname="data")


def main() -> None:
    authorizer = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "allow.everyone.if.no.acl.found": "true",
    }
    directory = Path(tempfile.mkdtemp(prefix="oncelog-golden-"))
    with ApacheKafka(directory=directory, properties={**SMALL, **authorizer}) as kafka:
        fill(kafka)
        pack(kafka, "plain")
        kafka.start()
        secure(kafka)
        pack(kafka, "secured")


if __name__ == "__main__":
    main()
