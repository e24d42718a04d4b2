"""Provenance on Spark: headers by plain SQL, and an audit with the same findings as without Spark."""

from __future__ import annotations

from typing import Any

import pytest
from support.spark.topics import START_MS, create_topic, store

import oncelog
from oncelog.local_audit import audit_topic as audit_here
from oncelog.rules.idempotence.provenance import OFFSET, PARTITION, TOPIC, Provenance, read_provenance
from oncelog.spark import provenance_headers
from oncelog.spark.audit import audit_topic
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P11")]

Headers = tuple[tuple[str, bytes | None], ...]


def headers(offset: int, partition: int = 0) -> Headers:
    return ((TOPIC, b"s"), (PARTITION, b"%d" % partition), (OFFSET, b"%d" % offset))


def fill(bootstrap: str, topic: str, partition: int, rows: list[Headers]) -> None:
    records = [NewRecord(START_MS, None, b"v", row) for row in rows]
    store(bootstrap, topic, [build_batch(records)], partition)


ODD: list[Headers] = [
    (),
    (("trace", b"1"),),
    headers(1)[:2],
    (*headers(1), (TOPIC, b"s")),
    (*headers(1), ("trace", b"1")),
    *[
        ((TOPIC, topic), (PARTITION, partition), (OFFSET, offset))
        for topic, partition, offset in [
            (None, b"0", b"1"),
            (b"", b"0", b"1"),
            (b"\xff", b"0", b"1"),
            (b"a b", b"0", b"1"),
            (b"s\n", b"0", b"1"),
            (b"s" * 250, b"0", b"1"),
            (b"s", None, b"1"),
            (b"s", b"", b"1"),
            (b"s", b"-1", b"1"),
            (b"s", b"1\n", b"1"),
            (b"s", b" 1", b"1"),
            (b"s", b"2147483648", b"1"),
            (b"s", b"\xc2\xb2", b"1"),
            (b"s", b"0000000000000000003", b"1"),
            (b"s", b"0", b"+1"),
            (b"s", b"0", b"1.0"),
            (b"s", b"0", b"9223372036854775807"),
            (b"s", b"0", b"9223372036854775808"),
            (b"s", b"0", b"00000000000000000001"),
        ]
    ],
]


IN_ORDER = [(0, 5), (1, 5), (0, 6), (0, 5), (1, 6), (0, 6), (0, 7), (0, 6)]


@pytest.mark.parametrize("more", [[], [(0, 9), (0, 8), (0, 8)]], ids=["in-order", "late"])
def test_spark_and_one_process_find_the_same(
    spark: Any, shared_broker: oncelog.Broker, topic: str, more: list[tuple[int, int]]
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=3)
    fill(bootstrap, topic, 0, [headers(offset, partition) for partition, offset in IN_ORDER + more])
    fill(bootstrap, topic, 1, [headers(6), headers(20), headers(20)])
    fill(bootstrap, topic, 2, ODD)
    here = audit_here(bootstrap, topic, distinct="provenance")
    there = audit_topic(spark, bootstrap, topic, distinct="provenance")
    assert (there.provenance, there.findings, there.notes) == (here.provenance, here.findings, here.notes)
    assert here.provenance is not None and here.findings
    sound = [row for row in ODD if isinstance(read_provenance(row), Provenance)]
    assert (here.provenance.unmarked, here.provenance.malformed) == (2, len(ODD) - 2 - len(sound))
    assert (len(sound), here.provenance.filter_loses) == (3, len(more) // 2)
    assert here.provenance.filter_doubles == 1
    few = audit_here(bootstrap, topic, distinct="provenance", max_findings=1)
    assert audit_topic(spark, bootstrap, topic, distinct="provenance", max_findings=1) == few
    assert few.provenance == here.provenance


def test_compiled_queries_read_no_header_that_is_missing(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=2)
    fill(bootstrap, topic, 0, [headers(offset, partition) for partition, offset in IN_ORDER])
    fill(bootstrap, topic, 1, ODD)
    compiled = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
    interpreted = {name: spark.conf.get(name) for name in compiled}
    try:
        for name, value in compiled.items():
            spark.conf.set(name, value)
        there = audit_topic(spark, bootstrap, topic, distinct="provenance")
    finally:
        for name, value in interpreted.items():
            spark.conf.set(name, value)
    here = audit_here(bootstrap, topic, distinct="provenance")
    assert (there.provenance, there.findings, there.notes) == (here.provenance, here.findings, here.notes)


def test_headers_name_the_source_and_keep_others(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    from pyspark.sql.functions import lit

    bootstrap, copied = shared_broker.bootstrap_servers, f"{topic}-copied"
    for name in (topic, copied):
        create_topic(bootstrap, name, partitions=2)
    fill(bootstrap, topic, 1, [(), (("trace", b"1"), *headers(99, 7))])
    options = {"kafka.bootstrap.servers": bootstrap, "includeHeaders": "true"}
    rows = spark.read.format("oncelog").options(**options, subscribe=topic).load()
    found = rows.select(provenance_headers().alias("headers"))
    ours = [((TOPIC, topic), (PARTITION, "1"), (OFFSET, str(n))) for n in range(2)]
    assert [tuple((h.key, h.value.decode()) for h in row.headers) for row in found.collect()] == ours
    named = rows.withColumn("topic", lit("orders-2")).select(provenance_headers().alias("headers"))
    assert [row.headers[0].value.decode() for row in named.collect()] == ["orders-2", "orders-2"]
    kept = rows.select("key", "value", provenance_headers(keep="headers").alias("headers"))
    kept.write.format("oncelog").mode("append").options(**options, topic=copied).save()
    table = oncelog.read_table(copied, {"bootstrap.servers": bootstrap}, include_headers=True)
    stored = sorted(
        tuple((header["key"], header["value"].decode()) for header in row)
        for row in table.column("headers").to_pylist()
    )
    assert stored == sorted([ours[0], (("trace", "1"), *ours[1])])
    assert audit_here(bootstrap, copied, distinct="provenance").verdict == "clean"
