"""The read_committed source on our broker and on Apache Kafka, with aborts, markers and offset gaps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.spark.topics import Collected, create_topic, read, read_stream
from support.spark.transactions import (
    committed_offsets,
    create_compacted,
    wait_for_stable_end,
    write_transactions,
)

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P1"), pytest.mark.timeout(300)]
COMMITTED = [*range(10), *range(22, 32)]
"""The offsets of the committed records in the transactions "cacaao" (c: committed, a: aborted, o: open).

Each transaction has ten records, and each ended one has a marker. The open one begins at offset 55.
"""


@pytest.fixture(params=["shared_broker", "apache_kafka"], ids=["ours", "apache"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).bootstrap_servers)


def test_an_open_transaction_is_the_end_until_it_ends(
    spark: Any, bootstrap: str, topic: str, checkpoint: str
) -> None:
    create_topic(bootstrap, topic)
    (unfinished,) = write_transactions(bootstrap, topic, "cacaao")
    wait_for_stable_end(bootstrap, topic, 55)

    rows = read(spark, bootstrap, subscribe=topic, maxRecordsPerPartition=7).collect()
    assert sorted(row.offset for row in rows) == COMMITTED
    uncommitted = {"kafka_isolation_level": "read_uncommitted"}
    assert read(spark, bootstrap, subscribe=topic, **uncommitted).count() == 60

    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 11}
    first = Collected()
    query = first.run(read_stream(spark, bootstrap, **options), checkpoint)
    assert first.offsets() == COMMITTED  # micro-batches with only aborted records and markers have no rows
    source = json.loads(query.recentProgress[-1].json)["sources"][0]
    assert source["endOffset"][topic] == source["latestOffset"][topic] == {"0": 55}

    unfinished.commit_transaction(60)
    wait_for_stable_end(bootstrap, topic, 66)
    second = Collected()
    second.run(read_stream(spark, bootstrap, **options), checkpoint)
    assert second.offsets() == list(range(55, 65))


def test_offset_gaps_left_by_compaction_are_no_loss(
    spark: Any, bootstrap: str, topic: str, checkpoint: str
) -> None:
    before = create_compacted(bootstrap, topic, "ccaccaccac")
    # Micro-batches and tasks are smaller than the offset gaps, and one starts inside a gap.
    options = {"subscribe": topic, "maxRecordsPerPartition": 4}
    whole = read(spark, bootstrap, **options).collect()
    inside = read(spark, bootstrap, **options, startingOffsets=f'{{"{topic}": {{"0": 3}}}}').count()
    stream = Collected()
    options |= {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 30}
    stream.run(read_stream(spark, bootstrap, **options), checkpoint)
    # The cleaner may still be running. So the stream must return at least the offsets that are left after it,
    # and at most those before it.
    after = committed_offsets(bootstrap, topic)
    assert set(after) <= {row.offset for row in whole} <= set(before)
    assert set(after) <= set(stream.offsets()) <= set(before)
    assert len(after) <= inside <= len(before) and len(stream.batches) == 4
    newest = {row.key: row.value for row in sorted(whole, key=lambda row: row.offset)}
    assert newest == {b"%d" % n: b"c9" for n in range(10)}
