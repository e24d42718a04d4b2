"""The audit on Spark: a clean topic is proven clean, and every planted fault is found with its offset."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.spark.topics import START_MS, create_topic, fill, records, store
from support.spark.transactions import create_compacted, write_transactions

import oncelog
from oncelog.audit.result import AuditResult
from oncelog.client.admin.blocking import Admin, ConfigResource
from oncelog.errors import MisuseError
from oncelog.local_audit import log_audit as local_audit
from oncelog.log.manager import CLEAN_SHUTDOWN
from oncelog.spark.audit import audit as audit_audit
from oncelog.spark.audit import keys as audit_keys
from oncelog.spark.audit.audit import audit_topic
from oncelog.spark.audit.keys import check_keys
from oncelog.spark.audit.topic_batches import whole_and_split
from oncelog.spark.source.offset_ranges import Available, DataLossError
from oncelog.testing.proxy import Proxy, Rule
from oncelog.types import TopicPartition
from oncelog.wire.batch import HEADER_BYTES, build_batch, iter_batches, stamp
from oncelog.wire.control import encode_end_marker
from oncelog.wire.records import NewRecord

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P5")]

COUNTS = [3, 1, 4, 1, 5, 9, 2, 6]


def audit_both(spark: Any, bootstrap: str, topics: str | list[str], **options: Any) -> AuditResult:
    """Run the audit on Spark, and check that the audit without Spark has the same result."""
    result = audit_topic(spark, bootstrap, topics, **options)
    options.pop("offsets_per_task", None)
    assert local_audit.audit_topic(bootstrap, topics, **options) == result
    return result


def numbered(producer_id: int, counts: list[int] = COUNTS, epoch: int = 0) -> list[bytearray]:
    """Return batches of one producer in order, beginning at sequence 0. The key of each record is its
    sequence.
    """
    batches, sequence = [], 0
    for count in counts:
        batches.append(
            build_batch(
                records(sequence, count),
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=sequence,
            )
        )
        sequence += count
    return batches


def test_a_clean_topic_is_proven_clean_however_it_is_split(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=2)
    for partition in range(2):
        mixed = [batch for pair in zip(numbered(7), numbered(8), strict=True) for batch in pair]
        store(bootstrap, topic, [*mixed, *numbered(7, [2, 2], epoch=1)], partition)
    result = audit_both(spark, bootstrap, topic)
    assert result.findings == () and result.verdict == "clean"
    totals = result.totals
    assert (totals.records, totals.batches, totals.producers) == (2 * (2 * 31 + 4), 2 * 18, 4)
    # Ranges of seven offsets cut batches in two: none may be lost or counted twice.
    assert audit_both(spark, bootstrap, [topic], offsets_per_task=7) == result


def test_transactions_of_a_broker_are_clean(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    producers = write_transactions(bootstrap, topic, "caaco")
    # Tasks of seven offsets begin and end inside transactions.
    result = audit_both(spark, bootstrap, topic, offsets_per_task=7)
    assert (result.verdict, result.findings) == ("clean", ())
    assert (result.totals.committed, result.totals.aborted, result.totals.control_batches) == (2, 2, 4)
    (note,) = result.notes
    assert (note.kind, note.base_offset, note.last_offset) == ("open_transaction", 44, 53)
    assert note.explanation == f"open at the end of the log: '{topic}-4' is Ongoing"
    producers[0].abort_transaction(60)


def test_an_empty_topic_is_clean(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    create_topic(shared_broker.bootstrap_servers, topic, partitions=3)
    result = audit_both(spark, shared_broker.bootstrap_servers, topic, key_check=True)
    assert (result.verdict, result.totals.batches, len(result.partitions)) == ("clean", 0, 3)


def test_a_log_without_its_first_segments_is_audited_from_its_log_start(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    store(bootstrap, topic, numbered(7))
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        # the log start is inside the batch of offsets 9 to 13
        admin.delete_records({TopicPartition(topic, 0): 11})
    result = audit_both(spark, bootstrap, topic)
    assert result.verdict == "clean"
    assert (result.totals.batches, result.totals.unknown_starts) == (4, 1)


def test_without_producer_ids_nothing_is_proven(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    create_topic(shared_broker.bootstrap_servers, topic)
    fill(shared_broker.bootstrap_servers, topic, 0, 20)
    result = audit_both(spark, shared_broker.bootstrap_servers, topic)
    assert (result.verdict, result.totals.unnumbered_records) == ("unproven", 20)
    assert audit_both(spark, shared_broker.bootstrap_servers, topic, key_check=True).verdict == "clean"
    store(shared_broker.bootstrap_servers, topic, [build_batch([NewRecord(START_MS, None, b"no key")] * 2)])
    result = audit_both(spark, shared_broker.bootstrap_servers, topic, key_check=True)
    assert (result.verdict, result.keys) == ("unproven", (20, 20, 0, 2))


# Faults planted in the segment files of a stopped broker.


def repeat(batches: list[bytearray]) -> list[bytearray]:
    return [*batches[:5], batches[2], *batches[5:]]


def drop(batches: list[bytearray]) -> list[bytearray]:
    return [*batches[:4], *batches[5:]]


def swap(batches: list[bytearray]) -> list[bytearray]:
    return [*batches[:3], batches[4], batches[3], *batches[5:]]


def overlap(batches: list[bytearray]) -> list[bytearray]:
    longer = build_batch(records(8, 6), producer_id=7, producer_epoch=0, base_sequence=8)
    return [*batches[:4], longer, *batches[5:]]


def old_epoch(batches: list[bytearray]) -> list[bytearray]:
    return [*batches, *numbered(7, [2], epoch=2), *numbered(7, [3], epoch=1)]


def damage(batches: list[bytearray]) -> list[bytearray]:
    bad = bytearray(batches[6])
    bad[HEADER_BYTES + 4] ^= 0xFF
    return [*batches[:6], bad, *batches[7:]]


def in_transaction(*ends: bytearray) -> Callable[[list[bytearray]], list[bytearray]]:
    """Return a change that replaces all batches by a transaction of three records, followed by `ends`."""
    batch = build_batch(
        records(0, 3), producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True
    )
    return lambda _: [batch, *ends]


def marker(is_commit: bool) -> bytearray:
    return encode_end_marker(7, 0, is_commit, 0, START_MS)


PLANTED: dict[str, tuple[Callable[[list[bytearray]], list[bytearray]], tuple[Any, ...]]] = {
    "repeat": (repeat, ("duplicate_batch", 14, 17, 4, 7, 4)),
    "drop": (drop, ("sequence_gap", 9, 9, 9, 13, None)),
    "swap": (swap, ("out_of_order", 13, 13, 8, 8, 8)),
    "overlap": (overlap, ("overlap", 9, 14, 8, 13, 8)),
    "old-epoch": (old_epoch, ("epoch_went_back", 33, 35, 0, 2, None)),
    "damage": (damage, ("crc_damage", 23, 24, 23, 24, None)),
    "hangs": (in_transaction(), ("transaction_without_outcome", 0, 2, None, None, None)),
    "shown": (in_transaction(marker(True)), ("visible_though_aborted", 0, 2, None, None, 3)),
    "hidden": (in_transaction(marker(False)), ("hidden_though_committed", 0, 2, None, None, 3)),
}
"""For each fault: the change that plants it, and the finding (kind, first and last offset, first and last
sequence, offset of the other batch).
"""


def rewrite(directory: Path, change: Callable[[list[bytearray]], list[bytearray]]) -> None:
    """Change the batches of a partition's only segment, and give them consecutive offsets again."""
    (segment,) = directory.glob("*.log")
    data = segment.read_bytes()
    batches = [bytearray(data[at : at + h.size_bytes]) for at, h in iter_batches(data)]
    offset, changed = 0, [bytearray(batch) for batch in change(batches)]
    for batch in changed:
        stamp(batch, 0, offset, partition_leader_epoch=0)
        offset += int.from_bytes(batch[23:27], "big") + 1  # the field lastOffsetDelta
    segment.write_bytes(b"".join(changed))
    # As after a stop of Apache Kafka, the next start does not compare the sizes with those of the last stop.
    (directory.parent / CLEAN_SHUTDOWN).write_text('{"version":0,"brokerEpoch":-1}')
    # If the sizes are unchanged, the indexes still fit. So a start does not read the damaged batch and
    # truncate the log there.
    if [len(batch) for batch in changed] == [len(batch) for batch in batches]:
        return
    for derived in [*directory.glob("*index"), *directory.glob("*.snapshot*")]:
        derived.unlink()


@pytest.fixture(scope="module")
def faulty_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[oncelog.Broker]:
    """Run our broker on changed files: it has one topic for each planted fault, and a sound one."""
    data_dir = tmp_path_factory.mktemp("faulty")
    broker = oncelog.Broker(data_dir)
    with broker:
        for name in [*PLANTED, "sound"]:
            create_topic(broker.bootstrap_servers, name)
            store(broker.bootstrap_servers, name, numbered(7))
    for name, (change, _) in PLANTED.items():
        rewrite(data_dir / f"{name}-0", change)
    with oncelog.Broker(data_dir):
        pass  # this start creates indexes that fit the files
    for name, is_commit in (("shown", False), ("hidden", True)):
        flipped = marker(is_commit)
        rewrite(data_dir / f"{name}-0", lambda batches, now=flipped: [*batches[:-1], now])  # type: ignore[misc]
    with oncelog.Broker(data_dir) as broker:
        yield broker


def test_every_planted_fault_is_found_and_nothing_else(spark: Any, faulty_broker: oncelog.Broker) -> None:
    result = audit_both(spark, faulty_broker.bootstrap_servers, [*PLANTED, "sound"])
    # Tasks of seven offsets: several of them read a partition, and another one judges it.
    bootstrap = faulty_broker.bootstrap_servers
    assert audit_topic(spark, bootstrap, [*PLANTED, "sound"], offsets_per_task=7) == result
    found = {
        f.topic: (f.kind, f.base_offset, f.last_offset, f.first_sequence, f.last_sequence, f.other_offset)
        for f in result.findings
    }
    assert found == {name: finding for name, (_, finding) in PLANTED.items()}
    assert result.verdict == "violated" and result.finding_count == len(result.findings) == len(PLANTED)
    assert {f.producer_id for f in result.findings} == {7}
    (hung,) = [f for f in result.findings if f.topic == "hangs"]
    assert (
        hung.explanation
        == "the transaction hangs: no coordinator knows producer id 7 among the transactional ids that you "
        "may DESCRIBE"
    )


def test_small_and_large_partitions_are_audited_together(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    """One task reads and judges a small partition. Several tasks read a large one, and another judges it."""
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=3)
    store(bootstrap, topic, numbered(7)[:2])
    store(bootstrap, topic, numbered(8), 1)
    result = audit_both(spark, bootstrap, topic, offsets_per_task=9)
    assert result.verdict == "clean"
    assert [totals.batches for totals in result.partitions.values()] == [2, 8, 0]


def test_a_partition_is_read_whole_if_one_task_may_read_its_offsets() -> None:
    small, empty, large, is_open = (TopicPartition("t", number) for number in range(4))
    earliest = {small: 10, empty: 5, large: 0, is_open: 0}
    latest = {small: 19, empty: 5, large: 10, is_open: 3}
    written = {small: 19, empty: 5, large: 10, is_open: 12}
    whole, larger = whole_and_split(Available(earliest, latest, written), 9)
    assert whole == [is_open, small]
    assert larger.earliest == {large: 0} and larger.latest == larger.written == {large: 10}


def test_bytes_that_are_no_batch_are_found_at_their_first_offset(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    create_topic(shared_broker.bootstrap_servers, topic)
    store(shared_broker.bootstrap_servers, topic, numbered(7))
    # Damage the file while the broker runs. A starting broker would cut the log at the damage.
    (segment,) = (shared_broker.data_dir / f"{topic}-0").glob("*.log")
    data = bytearray(segment.read_bytes())
    bad = [at for at, _ in iter_batches(data)][6]
    data[bad + 16] = 9  # an unknown version in the magic byte
    with segment.open("r+b") as file:
        file.write(data)
    (finding,) = audit_both(spark, shared_broker.bootstrap_servers, topic).findings
    assert (finding.kind, finding.base_offset, finding.last_offset) == ("unreadable", 23, 30)
    # The check of keys stops at the damage. The finding of the check of batches is still reported.
    result = audit_both(spark, shared_broker.bootstrap_servers, topic, key_check=True)
    assert (result.findings, result.keys) == ((finding,), None)
    assert result.keys_problem == f"keys were not checked: {topic}-0 cannot be read at offset 23"


@pytest.mark.parametrize("offsets_per_task", [1, 4, 5_000_000])
def test_batches_in_the_wrong_order_are_found(spark: Any, tmp_path: Path, offsets_per_task: int) -> None:
    """Sorted by offset, these batches would look sound. So the audit must read them in the order of the
    file.

    A batch belongs to the task that reads its place in the file, even if another task reads the batch before
    it.
    """
    # The large batch gets the last entry of the index, and a start only reads what follows. It would take
    # the moved batches for damaged.
    counts = [*COUNTS, 300, 1]
    with oncelog.Broker(tmp_path) as broker:
        create_topic(broker.bootstrap_servers, "moved")
        store(broker.bootstrap_servers, "moved", numbered(7, counts))
    (segment,) = (tmp_path / "moved-0").glob("*.log")
    data = segment.read_bytes()
    batches = [data[at : at + h.size_bytes] for at, h in iter_batches(data)]
    assert len(batches[1]) == len(batches[3]), "the indexes would not fit"
    batches[1], batches[3] = batches[3], batches[1]
    segment.write_bytes(b"".join(batches))
    with oncelog.Broker(tmp_path) as broker:
        result = audit_both(spark, broker.bootstrap_servers, "moved", offsets_per_task=offsets_per_task)
    found = result.findings
    assert result.totals.records == sum(counts)
    assert {(each.kind, each.base_offset) for each in found} == {
        ("offset_gap", 8),
        ("offset_overlap", 4),
        ("out_of_order", 4),
        ("offset_overlap", 3),
        ("out_of_order", 3),
    }


def test_a_topic_that_was_once_compacted_is_audited_as_compacted(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_compacted(bootstrap, topic, "ccc")
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.alter_configs({ConfigResource("topic", topic): {"cleanup.policy": "delete"}})
    result = audit_both(spark, bootstrap, topic, compacted_topics=[topic])
    assert (result.verdict, result.findings, result.notes) == ("clean", (), ())


def test_findings_can_be_read_as_rows_and_as_a_frame(spark: Any, faulty_broker: oncelog.Broker) -> None:
    result = audit_both(spark, faulty_broker.bootstrap_servers, ["swap", "damage"])
    frame = result.to_frame(spark)
    assert [row.kind for row in frame.orderBy("topic").collect()] == ["crc_damage", "out_of_order"]
    assert (
        json.loads(json.dumps(result.to_rows()))[1]["explanation"]
        == "stored after the later batch at offset 8"
    )


# Keys


def write_through_lost_acknowledgements(bootstrap: str, topic: str, idempotence: bool) -> None:
    """Produce thirty records in thirty requests.

    Two responses are lost, so the client sends these records again.
    """
    from confluent_kafka import Producer

    with Proxy(bootstrap, rules=[Rule(action="cut", api="Produce", nth=4, count=2)]) as proxy:
        producer = Producer(
            {
                "bootstrap.servers": proxy.bootstrap_servers,
                "enable.idempotence": idempotence,
                "acks": "all",
                "max.in.flight.requests.per.connection": 1,
                "batch.num.messages": 1,
                "linger.ms": 0,
                "retry.backoff.ms": 20,
                "reconnect.backoff.ms": 20,
            }
        )
        for n in range(30):
            producer.produce(topic, key=f"order-{n}", value=json.dumps({"id": n}))
        assert producer.flush(60) == 0


def test_keys_doubled_by_retries_without_idempotence_are_named_with_their_offsets(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    for name, idempotence in [(f"{topic}.on", True), (f"{topic}.off", False)]:
        create_topic(bootstrap, name)
        write_through_lost_acknowledgements(bootstrap, name, idempotence)
    on = audit_both(spark, bootstrap, f"{topic}.on", key_check=True)
    assert on.verdict == "clean" and on.keys == (30, 30, 0, 0)

    off = audit_topic(spark, bootstrap, f"{topic}.off", key_check="get_json_object(string(value), '$.id')")
    assert off.verdict == "violated"
    assert off.keys is not None and off.keys.keys == 30 and off.keys.repeated >= 1
    for finding in off.findings:
        assert finding.kind == "repeated_key" and finding.other_offset is not None
        assert finding.base_offset > finding.other_offset
        assert f"0:{finding.other_offset}, 0:{finding.base_offset}" in finding.explanation
    assert off.keys.records - 30 >= len(off.findings)


def test_a_key_of_many_records_is_shown_with_a_few_places(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a few of a key's offsets are listed. Regression: a key with a few million records made the audit
    fail.
    """
    from pyspark.sql import functions

    def places_in_a_row(*_: object) -> None:
        raise AssertionError("all places of a key are gathered in one row")

    monkeypatch.setattr(functions, "collect_list", places_in_a_row)
    records = spark.range(0, 40, 1, 4).selectExpr(
        "'t' AS topic",
        "array(IF(id % 2 = 0, -1, id)) AS key",
        "CAST(id % 3 AS INT) AS partition",
        "id AS offset",
    )
    (finding,), totals = check_keys(records, True, 10)
    assert totals == (40, 21, 1, 0)
    assert (finding.partition, finding.base_offset, finding.other_offset) == (0, 6, 0)
    assert "20 times, at partition:offset 0:0, 0:6, 0:12, 0:18, 0:24, 0:30, 0:36, 1:4, 1:10, 1:16, ..." in (
        finding.explanation
    )
    # as if records were removed between the count of the keys and the search for their places
    monkeypatch.setattr(audit_keys, "_places", lambda *_: defaultdict(list))
    (finding,), _ = check_keys(records, True, 10)
    assert "20 times, at partition:offset 0:0, 2:38, ..." in finding.explanation


def test_a_comparison_names_lost_and_doubled_records(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    source, sink = f"{topic}.source", f"{topic}.sink"
    for name in (source, sink):
        create_topic(bootstrap, name)
    fill(bootstrap, source, 0, 8)  # k0 to k7
    fill(bootstrap, source, 0, 2)  # k0 and k1 again, as in the target
    # In the target, k6 and k7 are missing, k4 is doubled, and k9 has no source.
    for first, count in ((0, 2), (0, 6), (4, 1), (9, 1)):
        fill(bootstrap, sink, first, count)
    store(bootstrap, sink, [build_batch([NewRecord(START_MS, None, b"no key")])])
    result = audit_both(spark, bootstrap, sink, against=source)
    assert (result.verdict, result.finding_count, result.difference) == ("violated", 4, (10, 10, 2, 1, 1, 1))
    found = {f.key: (f.kind, f.topic, f.base_offset, f.other_offset) for f in result.findings}
    assert found == {
        "k6": ("lost_key", source, 6, None),
        "k7": ("lost_key", source, 7, None),
        "k4": ("doubled_key", sink, 8, 6),
        "k9": ("unexpected_key", sink, 9, None),
    }
    (doubled,) = [f for f in result.findings if f.key == "k4"]
    assert doubled.explanation == (
        "2 times in the audited topics, 1 times expected; "
        f"expected at {source}-0:4; first found at {sink}-0:6"
    )
    same = audit_topic(spark, bootstrap, sink, against=source, key_check="substring(key, 1, 1)")
    # The record without a key is not compared, and it has no producer id either.
    assert same.verdict == "unproven" and same.difference == (10, 10, 0, 0, 0, 1)


def test_keys_are_those_of_committed_records_whatever_the_settings_say(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    """R1812: with isolation.level=read_uncommitted, an aborted record stood for the record that was lost."""
    bootstrap, source = shared_broker.bootstrap_servers, f"{topic}-source"
    for name in (topic, source):
        create_topic(bootstrap, name)
    fill(bootstrap, source, 0, 1)  # k0
    with oncelog.Producer({"bootstrap.servers": bootstrap, "transactional.id": topic}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"", key=b"k0").result(timeout=60)
        producer.abort_transaction()
    settings = {"isolation.level": "read_uncommitted"}
    result = audit_both(spark, bootstrap, topic, against=source, client_config=settings)
    assert (result.verdict, result.difference) == ("violated", (1, 0, 1, 0, 0, 0))


def test_a_topic_is_not_compared_with_itself(spark: Any) -> None:
    with pytest.raises(MisuseError, match="'a' would be compared with itself"):
        audit_topic(spark, "127.0.0.1:1", ["a", "b"], against="a")


def test_only_the_planned_offsets_are_read(
    spark: Any, shared_broker: oncelog.Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look-up of offsets and the read, a broker may remove or add records. That is not a
    violation.
    """
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    store(bootstrap, topic, numbered(7))
    look_up = audit_audit.look_up

    def change_after(change: Callable[[Admin], object]) -> None:
        def look_up_and_change(*args: Any) -> Any:
            found = look_up(*args)
            with Admin({"bootstrap.servers": bootstrap}) as admin:
                change(admin)
            return found

        monkeypatch.setattr(audit_audit, "look_up", look_up_and_change)

    change_after(lambda admin: (admin.create_partitions({topic: 2}), store(bootstrap, topic, numbered(8), 1)))
    result = audit_topic(spark, bootstrap, topic)
    assert result.verdict == "clean" and list(result.partitions) == [TopicPartition(topic, 0)]


def change_before(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[], object]) -> None:
    """Replace a function of the audit, so that `change` is called just before it."""
    call = getattr(audit_audit, name)

    def change_and_call(*args: Any) -> Any:
        change()
        return call(*args)

    monkeypatch.setattr(audit_audit, name, change_and_call)


@pytest.mark.parametrize("step", ["judge", "_with_keys"])
def test_records_removed_during_the_audit_are_reported(
    spark: Any, shared_broker: oncelog.Broker, topic: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    bootstrap, tp = shared_broker.bootstrap_servers, TopicPartition(topic, 0)
    create_topic(bootstrap, topic)
    store(bootstrap, topic, numbered(7))
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        change_before(monkeypatch, step, lambda: admin.delete_records({tp: 8}))
        result = audit_topic(spark, bootstrap, topic, offsets_per_task=5)
    assert (result.verdict, result.findings) == ("clean", ())
    (note,) = result.notes
    assert (note.kind, note.tp, note.base_offset, note.last_offset) == ("log_start_moved", tp, 0, 7)
    # At the step "judge", the records are removed before the audit reads them; at the other step, they are
    # removed afterwards.
    assert result.totals.records == (31 - 8 if step == "judge" else 31)


def test_a_comparison_with_a_topic_that_loses_records_meanwhile_is_withdrawn(
    spark: Any, shared_broker: oncelog.Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap, source = shared_broker.bootstrap_servers, f"{topic}-source"
    for name in (topic, source):
        create_topic(bootstrap, name)
        store(bootstrap, name, numbered(7))
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        cut = {TopicPartition(topic, 0): 8}
        change_before(monkeypatch, "compare_keys", lambda: admin.delete_records(cut))
        result = audit_topic(spark, bootstrap, topic, against=source)
    assert (result.verdict, result.findings, result.difference) == ("unproven", (), None)
    text = f"the log start of {topic}-0 moved to 8 during the audit (retention or DeleteRecords)"
    assert result.keys_problem == f"keys were not compared: {text}"


@pytest.mark.parametrize(
    ("step", "is_created_again"), [("judge", False), ("judge", True), ("_with_keys", True)]
)
def test_a_topic_deleted_during_the_audit_gets_no_verdict(
    spark: Any,
    shared_broker: oncelog.Broker,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    is_created_again: bool,
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    store(bootstrap, topic, numbered(7))

    def replace() -> None:
        with Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.delete_topics([topic])
        if is_created_again:
            create_topic(bootstrap, topic)
            store(bootstrap, topic, numbered(8, [*COUNTS, 5]))

    change_before(monkeypatch, step, replace)
    with pytest.raises(DataLossError, match=r"deleted.* during the audit, so the audit proves nothing"):
        # The default of half a minute would pass while Spark's planner looks for the deleted topic.
        audit_topic(spark, bootstrap, topic, key_check=True, client_config={"request.timeout.ms": 5000})
