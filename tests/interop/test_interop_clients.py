"""Third-party clients write to our broker idempotently. All clients, ours included, read the same records."""

from __future__ import annotations

from typing import Any

import pytest
from support.foreign.functions import (
    READERS,
    TIMEOUT_S,
    WRITERS,
    Row,
    by_partition,
    make_topic,
    stored_batches,
)

PARTITIONS = 12
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def awkward_rows(writer: str) -> list[Row]:
    """Return, for every partition, records that clients may treat differently: nulls, empty values, odd
    headers, non-ASCII text, long values.
    """
    # aiokafka and kafka-python refuse a record without key and value before anything is sent.
    wholly_null = [Row(0, None, None)] if writer in ("confluent", "oncelog") else []
    # kafka-python refuses a header without a value.
    null_headers = () if writer == "kafka-python" else (("null", None),)
    rows = list(wholly_null)
    for partition in range(PARTITIONS):
        rows += [
            Row(partition, b"key", b"value"),
            Row(partition, None, b"no key"),
            Row(partition, b"tombstone", None),
            Row(partition, b"", b""),
            Row(partition, b"h", b"v", (("a", b"1"), ("a", b"2"), *null_headers, ("empty", b""))),
            Row(partition, "schlüssel".encode(), "wert ✈".encode(), (("überschrift", "ü".encode()),)),
        ]
        rows += [Row(partition, b"%d" % i, b"%d-" % partition * (i % 50)) for i in range(40)]
    # 1 MiB twice: one value compresses well, the other does not.
    rows.append(Row(3, b"long", b"oncelog " * (1_048_576 // 8)))
    rows.append(Row(7, b"noise", noise(1_048_576)))
    return rows


def noise(size: int) -> bytes:
    """Return the same incompressible bytes on every call."""
    import random

    return random.Random(13).randbytes(size)


@pytest.mark.behaviour("I21")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_client_reads_what_each_client_wrote(oncelog_broker: Any, writer: str, codec: str) -> None:
    bootstrap = oncelog_broker.bootstrap_servers
    make_topic(bootstrap, "mixed", PARTITIONS)
    rows = awkward_rows(writer)
    WRITERS[writer](bootstrap, "mixed", rows, codec, lambda: None)
    for name, read in READERS.items():
        seen = read(bootstrap, "mixed", PARTITIONS)
        assert by_partition(seen) == by_partition(rows), f"{name} reads something else"
        for partition in range(PARTITIONS):
            offsets = [row.offset for row in seen if row.partition == partition]
            assert offsets == list(range(len(offsets)))


@pytest.mark.behaviour("I5")
@pytest.mark.parametrize("writer", WRITERS)
def test_sequences_on_disk_are_unbroken(oncelog_broker: Any, writer: str) -> None:
    """Check that idempotence was on: each stored batch has a producer id, and sequences have no gaps."""
    bootstrap = oncelog_broker.bootstrap_servers
    make_topic(bootstrap, "sequenced", 3)
    rows = [Row(i % 3, b"%d" % i, b"x" * 100) for i in range(3000)]
    WRITERS[writer](bootstrap, "sequenced", rows, "none", lambda: None)
    partitions = stored_batches(bootstrap, "sequenced", 3)
    assert {header.producer_id is None for batches in partitions for header in batches} == {False}
    assert len({header.producer_id for batches in partitions for header in batches}) == 1
    for batches in partitions:
        expected = 0
        for header in batches:
            assert header.base_sequence == expected
            expected += header.records_count
        assert expected == 1000


@pytest.mark.parametrize("writer", WRITERS)
def test_keys_go_to_the_same_partitions(oncelog_broker: Any, writer: str) -> None:
    """All four clients partition by murmur2 of the key, as the Java client does by default."""
    from kafka.partitioner.default import murmur2

    bootstrap = oncelog_broker.bootstrap_servers
    make_topic(bootstrap, "keyed", PARTITIONS)
    keys = [b"%d" % i for i in range(200)] + [b"", b"a", "ü".encode(), bytes(range(256))]
    WRITERS[writer](bootstrap, "keyed", [Row(None, key, b"") for key in keys], "none", lambda: None)
    placed = {row.key: row.partition for row in READERS["oncelog"](bootstrap, "keyed", PARTITIONS)}
    assert placed == {key: (murmur2(key) & 0x7FFFFFFF) % PARTITIONS for key in keys}


@pytest.mark.behaviour("I21")
def test_librdkafka_lists_all_topics(oncelog_broker: Any) -> None:
    """librdkafka 2.0 to 2.16 sends three extra bytes after the body of a Metadata request for all topics."""
    from confluent_kafka.admin import AdminClient

    bootstrap = oncelog_broker.bootstrap_servers
    make_topic(bootstrap, "listed", 3)
    listed = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=TIMEOUT_S)
    assert len(listed.topics["listed"].partitions) == 3


@pytest.mark.behaviour("I21")
def test_librdkafka_subscribes_by_a_regex(oncelog_broker: Any) -> None:
    from confluent_kafka import Consumer

    bootstrap = oncelog_broker.bootstrap_servers
    make_topic(bootstrap, "by-regex-1", 1)
    write = WRITERS["oncelog"]
    write(bootstrap, "by-regex-1", [Row(0, None, b"value")], "none", lambda: None)
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "by-regex", "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe(["^by-regex-.*"])
        (message,) = consumer.consume(1, TIMEOUT_S)
        assert (message.topic(), message.value()) == ("by-regex-1", b"value")
    finally:
        consumer.close()


def test_librdkafka_sets_and_deletes_a_scram_user(oncelog_broker: Any) -> None:
    """librdkafka sends one extra byte after the body of an AlterUserScramCredentials request."""
    from confluent_kafka.admin import (
        AdminClient,
        ScramCredentialInfo,
        ScramMechanism,
        UserScramCredentialDeletion,
        UserScramCredentialUpsertion,
    )

    mechanism = ScramMechanism.SCRAM_SHA_256
    admin = AdminClient({"bootstrap.servers": oncelog_broker.bootstrap_servers})
    upsertion = UserScramCredentialUpsertion("carol", ScramCredentialInfo(mechanism, 4096), b"secret")
    admin.alter_user_scram_credentials([upsertion])["carol"].result(TIMEOUT_S)
    described = admin.describe_user_scram_credentials(["carol"])["carol"].result(TIMEOUT_S)
    assert [info.mechanism for info in described.scram_credential_infos] == [mechanism]
    deletion = UserScramCredentialDeletion("carol", mechanism)
    admin.alter_user_scram_credentials([deletion])["carol"].result(TIMEOUT_S)


@pytest.mark.behaviour("I21")
@pytest.mark.parametrize("codec", CODECS)
def test_our_clients_read_and_write_on_apache_kafka(apache_kafka: Any, codec: str) -> None:
    """On Apache Kafka, all clients read the records of our client, and our client reads those of each other
    client.
    """
    bootstrap = apache_kafka.bootstrap_servers
    for writer in WRITERS:
        topic = f"interop-{writer}-{codec}"
        make_topic(bootstrap, topic, PARTITIONS)
        rows = awkward_rows(writer)
        WRITERS[writer](bootstrap, topic, rows, codec, lambda: None)
        readers = READERS if writer == "oncelog" else {"oncelog": READERS["oncelog"]}
        for name, read in readers.items():
            seen = read(bootstrap, topic, PARTITIONS)
            assert by_partition(seen) == by_partition(rows), (
                f"{name} reads something else than {writer} wrote"
            )
