"""Spark, the audit and the loader over TLS, with SCRAM or certificates and only the documented ACLs."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.broker import wait_until
from support.security.brokers import (
    AUTHORIZER,
    PASSWORD,
    Certificates,
    add_acls,
    apache_properties,
    documented_acls,
    make_certificates,
)

import oncelog
from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.errors import OncelogError
from oncelog.load.checkpoints import CHECKPOINT_TOPIC, PARTITIONS
from oncelog.load.loader import Load, run_load
from oncelog.rules.security.authorization import AclFilter, Operation
from oncelog.rules.transactions.hanging import Hanging
from oncelog.server.embedded import Broker
from oncelog.spark import write_atomic
from oncelog.spark.audit.audit import audit_topic
from oncelog.spark.sink.kept_clients import KeptClients
from oncelog.spark.sink.sink_options import parse_sink_options
from oncelog.spark.sink.task import Sink, finish, write_task
from oncelog.spark.source.offset_resolver import OffsetResolver
from oncelog.spark.source.reader import read_range
from oncelog.spark.source.source import plan_batch
from oncelog.spark.source.source_options import parse_options

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

USERS = {"Spark source": "reader", "Spark sink": "writer", "audit": "auditor", "load": "loader"}
"""The users named in docs/security.md, each with the user in these tests that has its ACLs."""
WRONG = "a wr0ng password"


@dataclass(frozen=True)
class Locked:
    """A secured cluster: its listeners, protocols and certificate authority.

    On the listener `plain`, ANONYMOUS may do everything.
    """

    plain: str
    scram: str
    certified: str
    certificates: Certificates

    def config(self, user: str, password: str = PASSWORD) -> dict[str, str]:
        """Return settings for SCRAM under the names of Kafka's Java clients."""
        module = "org.apache.kafka.common.security.scram.ScramLoginModule"
        return {
            "bootstrap.servers": self.scram,
            "security.protocol": "SASL_SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificates.authority),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{module} required username="{user}" password="{password}";',
        }

    def certified_config(self) -> dict[str, str]:
        """Return settings for TLS with alice's certificate, under the names of librdkafka's clients."""
        return {
            "bootstrap.servers": self.certified,
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.certificates.authority),
            "ssl.certificate.location": str(self.certificates.client),
            "ssl.key.location": str(self.certificates.client),
        }


@pytest.fixture(scope="module", params=["ours", pytest.param("apache", marks=pytest.mark.soak)])
def locked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    if request.param == "ours":
        config = {
            "listeners": ",".join(f"{name}://127.0.0.1:0" for name in ("PLAINTEXT", "SASL_SSL", "SSL")),
            "ssl.keystore.location": str(certificates.broker),
            "ssl.truststore.location": str(certificates.authority),
            "listener.name.ssl.ssl.client.auth": "required",
            "listener.name.ssl.ssl.principal.mapping.rules": "RULE:^.*CN=([a-z]+).*$/$1/",
            "authorizer.class.name": AUTHORIZER,
            "super.users": "User:ANONYMOUS;User:admin",
        }
        with Broker(tmp_path_factory.mktemp("data"), config=config) as broker:
            yield _prepared(*broker.listeners.values(), certificates)
    else:
        request.getfixturevalue("kafka_class_path")
        with ApacheKafka(
            properties=apache_properties(certificates), also_listen=["SASL_SSL", "SSL"]
        ) as kafka:
            ports = kafka.nodes[0].ports
            addresses = [f"127.0.0.1:{ports[name]}" for name in ("PLAINTEXT", "SASL_SSL", "SSL")]
            yield _prepared(*addresses, certificates)


def _prepared(plain: str, scram: str, certified: str, certificates: Certificates) -> Locked:
    with Admin({"bootstrap.servers": plain}) as admin:
        admin.create_topics([NewTopic(name, num_partitions=2) for name in ("flights", "enriched")])
        for who, user in USERS.items():
            admin.set_user(user, PASSWORD)
            add_acls(admin, documented_acls(who, user))
        add_acls(admin, documented_acls("Spark source", "alice") + documented_acls("Spark sink", "alice"))
    return Locked(plain, scram, certified, certificates)


def options(config: dict[str, str]) -> dict[str, str]:
    return {f"kafka.{key}": value for key, value in config.items()}


def load(locked: Locked, tmp_path: Path, load_id: str, rows: int = 40) -> int:
    file = tmp_path / "flights.txt"
    file.write_text("".join(f"flight {n}\n" for n in range(rows)))
    return run_load(Load([file], "flights", load_id), locked.config("loader")).records


def stream(
    spark: Any, locked: Locked, checkpoint: Path, reader: dict[str, str], writer: dict[str, str]
) -> Any:
    """Stream all of `flights` into `enriched`."""
    frame = spark.readStream.format("oncelog").options(**options(reader), subscribe="flights")
    frame = frame.option("startingOffsets", "earliest").load().selectExpr("value AS key", "value")
    query = frame.writeStream.format("oncelog").options(**options(writer), topic="enriched")
    query = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def count(spark: Any, config: dict[str, str], topic: str) -> int:
    found: int = spark.read.format("oncelog").options(**options(config), subscribe=topic).load().count()
    return found


def test_loading_and_streaming_need_only_the_documented_acls(
    spark: Any, locked: Locked, tmp_path: Path
) -> None:
    """The test loads with SCRAM, reads with a certificate, and writes with SCRAM."""
    load(locked, tmp_path, "first")
    stream(spark, locked, tmp_path / "checkpoint", locked.certified_config(), locked.config("writer"))
    assert count(spark, locked.config("writer"), "enriched") >= 40


@pytest.mark.soak
def test_the_audit_needs_only_the_documented_acls(spark: Any, locked: Locked, tmp_path: Path) -> None:
    config = locked.config("auditor")
    _write_lane(locked, 99)
    audited = audit_topic(spark, config.pop("bootstrap.servers"), ["enriched"], client_config=config)
    assert (audited.verdict, audited.notes) == ("clean", ())


@pytest.mark.soak
def test_batch_and_transactional_writes_need_only_the_documented_acls(
    spark: Any, locked: Locked, tmp_path: Path
) -> None:
    load(locked, tmp_path, "second")
    flights = spark.read.format("oncelog").options(**options(locked.config("reader")), subscribe="flights")
    rows = flights.load().selectExpr("value AS key", "value").limit(10)
    before = count(spark, locked.config("writer"), "enriched")
    for number, config in enumerate((locked.config("writer"), locked.certified_config())):
        batch = rows.write.format("oncelog").mode("append").options(**options(config), topic="enriched")
        batch.option("writeId", f"once-{number}").save()
        batch.option("writeId", f"once-{number}").save()
        write_atomic(rows, 0, {**options(config), "topic": "enriched"}, name=f"atomic-{number}")
    assert count(spark, locked.certified_config(), "enriched") - before == 40


def test_a_wrong_password_is_an_error_on_the_driver(spark: Any, locked: Locked, tmp_path: Path) -> None:
    load(locked, tmp_path, "third", rows=5)
    reader, wrong = locked.config("reader"), locked.config("writer", WRONG)
    frame = spark.read.format("oncelog").options(**options(reader), subscribe="flights").load()
    assert PASSWORD not in frame._jdf.queryExecution().toString()
    for act in (
        lambda: count(spark, wrong, "enriched"),
        lambda: stream(spark, locked, tmp_path / "checkpoint", reader, wrong),
    ):
        text = refused(act)
        assert "SCRAM-SHA-512" in text and locked.scram in text
        # The first text is that of our broker, the second one that of Apache Kafka.
        assert "wrong user or password" in text or "invalid credentials" in text
        assert WRONG not in text


@pytest.mark.soak
def test_secrets_appear_in_no_log_plan_or_checkpoint(
    spark: Any, locked: Locked, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="oncelog")
    load(locked, tmp_path, "fourth", rows=5)
    reader, writer, wrong = locked.config("reader"), locked.config("writer"), locked.config("writer", WRONG)
    query = stream(spark, locked, tmp_path / "good", reader, writer)
    frame = spark.read.format("oncelog").options(**options(reader), subscribe="flights").load()
    plan = frame._jdf.queryExecution()
    told = [str(query.recentProgress), repr(frame), plan.toString(), plan.stringWithStats()]
    values, to = frame.selectExpr("value"), {**options(wrong), "topic": "enriched"}
    for act in (
        lambda: stream(spark, locked, tmp_path / "read", wrong, writer),
        lambda: stream(spark, locked, tmp_path / "write", reader, wrong),
        lambda: values.write.format("oncelog").mode("append").options(**to).save(),
        lambda: write_atomic(values, 1, to, name="refused"),
        lambda: audit_topic(spark, locked.scram, ["enriched"], client_config=wrong),
        lambda: run_load(Load([tmp_path / "flights.txt"], "flights", "refused"), wrong),
    ):
        told.append(refused(act))
    told.append(caplog.text)
    told += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert [text for text in told if PASSWORD in text or WRONG in text] == []


def refused(act: Callable[[], object]) -> str:
    """Open a connection that must fail to authenticate, and return the text of the exception."""
    with pytest.raises(Exception, match="SASL_AUTHENTICATION_FAILED") as caught:
        act()
    return str(caught.value)


def _read_flights(locked: Locked, number: int) -> None:
    with oncelog.Producer({"bootstrap.servers": locked.plain}) as producer:
        producer.send("flights", b"one")
    source = parse_options({**options(locked.config("reader")), "subscribe": "flights"}, "batch")
    with OffsetResolver(source) as lookup:
        (wanted, *_) = plan_batch(source, lookup, None)
    for _ in read_range(
        source.client, wanted.value, topic_id=wanted.topic_id, include_headers=False, fail_on_data_loss=True
    ):
        pass


def _write_lane(locked: Locked, number: int) -> None:
    sink = Sink(
        f"task-{number}",
        parse_sink_options({**options(locked.config("writer")), "topic": "enriched"}, "stream"),
    )
    rows = pa.RecordBatch.from_pydict({"value": [b"1", b"2"]})
    kept = KeptClients()
    try:
        finish(sink, 0, [write_task(sink, 0, 0, [rows], kept)], kept)
    finally:
        kept.close()


def _look_at_open_transaction(locked: Locked, number: int) -> None:
    """Send the requests that the audit sends for an open transaction, in addition to Fetch."""
    config = locked.config("auditor")
    with oncelog.Consumer({**config, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([oncelog.TopicPartition("enriched", 0)])
        consumer.poll(timeout=60)
    source = parse_options({**options(config), "subscribe": "enriched"})
    with OffsetResolver(source) as lookup:
        lookup.available()
        lookup.is_compacted(["enriched"])
    plain = {"bootstrap.servers": locked.plain, "transactional.id": f"open-{number}"}
    with oncelog.Producer(plain) as producer, Admin(config) as admin:
        producer.init_transactions()
        with producer.transaction():
            producer.send("enriched", b"open", partition=0)
            producer.flush()
            found = [held for held in admin.find_hanging(["enriched"]) if held.hanging is not Hanging.NO]
        if found:
            raise OncelogError(found[0].reason)


def _load(locked: Locked, number: int) -> None:
    with Admin({"bootstrap.servers": locked.plain}) as admin, tempfile.TemporaryDirectory() as directory:
        mine = admin.describe_acls(AclFilter(principal=f"User:{USERS['load']}"))
        # the checkpoint topic does not exist, as before a first load
        if Operation.CREATE not in {acl.operation for acl in mine}:
            admin.delete_topics([CHECKPOINT_TOPIC])
        try:
            load(locked, Path(directory), f"load-{number}", rows=1)
            # the second load reads the existing checkpoints
            load(locked, Path(directory), f"load-{number}", rows=1)
        finally:
            marks = NewTopic(CHECKPOINT_TOPIC, PARTITIONS, configs={"cleanup.policy": "compact"})
            admin.create_topics([marks], raise_errors=False)


USES = {"Spark source": _read_flights, "Spark sink": _write_lane}
USES |= {"audit": _look_at_open_transaction, "load": _load}


@pytest.mark.parametrize("who", USES)
def test_every_documented_acl_is_needed(locked: Locked, who: str) -> None:
    """Remove the ACLs of the table one by one. Without each of them, the operation that needs it must fail
    with a named error.
    """
    numbers = itertools.count()
    USES[who](locked, next(numbers))
    with Admin({"bootstrap.servers": locked.plain}) as admin:
        for acl in documented_acls(who, USERS[who]):
            taken = AclFilter(
                acl.resource_type, acl.name, acl.pattern_type, acl.principal, None, acl.operation
            )
            assert len(admin.delete_acls([taken])) == 1
            wait_until(lambda gone=acl: gone not in admin.describe_acls())  # type: ignore[misc]
            try:
                with pytest.raises(OncelogError, match=r"AUTHORIZATION|may DESCRIBE"):
                    USES[who](locked, next(numbers))
            finally:
                add_acls(admin, [acl])
