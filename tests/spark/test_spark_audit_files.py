"""The audit of segment files: planted faults are found with offsets, and sound logs have no findings."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from oncelog_devtools.apache_kafka import ApacheKafka
from pyarrow import fs
from support.cli import oncelog as oncelog_command
from support.spark.topics import START_MS, create_topic, records
from support.spark.transactions import RECORDS, create_compacted, wait_for_stable_end, write_transactions

import oncelog
from oncelog.audit.partition import FindingKind
from oncelog.cli.audit import EXIT_VIOLATIONS
from oncelog.errors import ConfigError, MisuseError
from oncelog.local_audit import audit_files as audit_files_here
from oncelog.local_audit.segment_files import find_segments
from oncelog.log.checkpoint import CLEANED_OFFSETS, LOG_STARTS, RECOVERY_POINTS, encode_offsets
from oncelog.spark.audit import audit as spark_audit
from oncelog.spark.audit.audit import AuditResult, Difference, KeyTotals, audit_topic
from oncelog.types import TopicPartition
from oncelog.wire.batch import HEADER_BYTES, build_batch, read_header, stamp
from oncelog.wire.control import ControlType, decode_control, encode_end_marker
from oncelog.wire.records import NewRecord

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P5"), pytest.mark.timeout(600)]

Batches = list[bytearray]
LAST = 2**31 - 1
SIZE = len(build_batch(records(0, 1))) - HEADER_BYTES
"""The size in bytes of the encoded record in a batch of one record, without the batch header."""


def audit_files(spark: Any, paths: str | Sequence[str], **options: Any) -> AuditResult:
    """Run the audit on Spark, and check that the audit without Spark has the same result."""
    result = spark_audit.audit_files(spark, paths, **options)
    if not options.keys() & {"key_check", "against"}:
        assert audit_files_here(paths, **options) == result
    return result


def data(
    producer_id: int, epoch: int, sequence: int, count: int, *, is_transactional: bool = True
) -> bytearray:
    return build_batch(
        records(sequence % 1000, count),
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=is_transactional,
    )


def plain(producer_id: int, epoch: int, sequence: int, count: int) -> bytearray:
    return data(producer_id, epoch, sequence, count, is_transactional=False)


def end(producer_id: int, epoch: int, word: str, coordinator_epoch: int = 0) -> bytearray:
    return encode_end_marker(producer_id, epoch, word == "COMMIT", coordinator_epoch, START_MS)


def damaged(batch: bytearray) -> bytearray:
    batch[HEADER_BYTES + 4] ^= 0xFF
    return batch


def cut(batch: bytearray, by: int = 20) -> bytearray:
    del batch[-by:]
    return batch


def holder(sequence: int) -> bytearray:
    """Return a batch whose only record has a complete batch of offset 500 in its value."""
    value = build_batch(records(0, 3))
    stamp(value, 0, 500, partition_leader_epoch=0)
    record = NewRecord(START_MS, b"k", b"z" * 40 + value + b"z" * 40)
    return build_batch([record], producer_id=7, producer_epoch=0, base_sequence=sequence)


def counts(batch: bytearray, records_count: int) -> bytearray:
    """Return the batch with this record count in its header."""
    batch[57:61] = records_count.to_bytes(4, "big")
    return seal(batch)


def no_epoch(batch: bytearray) -> bytearray:
    batch[51:53] = b"\xff\xff"
    return seal(batch)


def inside(batch: bytearray, payload: bytes) -> bytearray:
    """Return the batch with `payload` as its encoded records, and with a length that fits."""
    batch[HEADER_BYTES:] = payload
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    return seal(batch)


def seal(batch: bytearray) -> bytearray:
    """Return the batch with a correct checksum."""
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    return batch


def claims_more(batch: bytearray) -> bytearray:
    """Return the batch with one flipped bit, after which its length points behind the end of the file."""
    batch[9] ^= 1
    return batch


def no_magic(batch: bytearray) -> bytearray:
    batch[16] = 9
    return batch


SOUND: dict[str, tuple[int, list[Batches]]] = {
    "idempotent": (0, [[plain(7, 0, 0, 3), plain(8, 0, 0, 2), plain(7, 0, 3, 1), plain(7, 1, 0, 2)]]),
    "transactions": (
        0,
        [
            [data(7, 0, 0, 3), data(8, 4, 0, 2), end(7, 0, "COMMIT"), data(7, 0, 3, 2), end(7, 0, "ABORT")],
            [end(8, 4, "ABORT"), data(7, 0, 5, 1), end(7, 0, "COMMIT"), end(9, 3, "ABORT")],
        ],
    ),
    "raised-epochs": (
        0,
        [
            [
                data(17, 0, 0, 3),
                end(17, 1, "COMMIT"),
                end(17, 1, "COMMIT", 1),
                data(17, 1, 0, 2),
                end(17, 2, "ABORT", 1),
            ]
        ],
    ),
    "fenced": (0, [[data(27, 0, 0, 3), end(27, 1, "ABORT"), data(27, 2, 0, 1), end(27, 2, "COMMIT")]]),
    "wrapped": (
        500,
        [[plain(7, 0, LAST - 1, 2)], [plain(7, 0, 0, 5), plain(8, 0, LAST, 3), plain(8, 0, 2, 1)]],
    ),
    "retention": (90, [[end(7, 3, "ABORT"), data(7, 3, 40, 2), end(7, 3, "COMMIT"), end(9, 1, "COMMIT")]]),
    "empty": (0, [[]]),
}
"""For each sound log, its first offset, and the batches of each segment.

A log with rising epochs has a producer id of its own, because the audit compares outcomes across all
partitions.
"""

PLANTED: dict[str, tuple[Batches, tuple[Any, ...]]] = {
    "repeated": ([plain(7, 0, 0, 3), plain(7, 0, 3, 2), plain(7, 0, 0, 3)], ("duplicate_batch", 5, 7, 0)),
    "missing": ([plain(7, 0, 0, 3), plain(7, 0, 5, 2)], ("sequence_gap", 3, 3, None)),
    "swapped": ([plain(7, 0, 0, 3), plain(7, 0, 5, 2), plain(7, 0, 3, 2)], ("out_of_order", 5, 6, 3)),
    "old-epoch": ([plain(7, 2, 0, 3), plain(7, 1, 3, 2)], ("epoch_went_back", 3, 4, None)),
    "never-ended": (
        [data(7, 0, 0, 3), data(7, 1, 0, 2), end(7, 1, "COMMIT")],
        ("transaction_without_outcome", 0, 2, 3),
    ),
    "two-outcomes": (
        [data(37, 0, 0, 3), end(37, 1, "COMMIT"), end(37, 1, "ABORT")],
        ("two_outcomes", 4, 4, 3),
    ),
    "marker-alone": ([plain(7, 0, 0, 3), end(7, 0, "COMMIT")], ("marker_without_transaction", 3, 3, 0)),
    "after-marker": (
        [data(47, 0, 0, 3), end(47, 1, "ABORT"), data(47, 0, 3, 2)],
        ("epoch_went_back", 4, 5, None),
    ),
    "outside": ([data(7, 0, 0, 3), plain(7, 0, 3, 1), end(7, 0, "ABORT")], ("outside_transaction", 3, 3, 0)),
    "coordinator": (
        [data(7, 0, 0, 3), end(7, 0, "ABORT", 5), data(7, 0, 3, 1), end(7, 0, "COMMIT", 4)],
        ("epoch_went_back", 5, 5, None),
    ),
    "damaged": (
        [plain(7, 0, 0, 3), damaged(plain(7, 0, 3, 2)), plain(7, 0, 5, 1)],
        ("crc_damage", 3, 4, None),
    ),
    "few-records": ([plain(7, 0, 0, 3), counts(plain(7, 0, 3, 5), 4)], ("record_count", 3, 7, None)),
    "many-records": ([plain(7, 0, 0, 3), counts(plain(7, 0, 3, 5), 6)], ("record_count", 3, 7, None)),
    "half": ([plain(7, 0, 0, 3), no_epoch(plain(7, 0, 3, 5))], ("half_numbered", 3, 7, None)),
    "last-batch": ([plain(7, 0, 0, 3), no_magic(plain(7, 0, 3, 2))], ("unreadable", 3, 3, None)),
    "shown": ([data(7, 0, 0, 3), data(7, 0, 3, 2), end(7, 0, "ABORT")], ("visible_though_aborted", 0, 4, 5)),
    "hidden": ([data(7, 0, 0, 3), end(7, 0, "COMMIT")], ("hidden_though_committed", 0, 2, 3)),
}
"""For each planted fault: the batches of the only segment, and the finding (kind, first and last offset,
offset of the other batch).
"""


def write_partition(
    directory: Path, segments: Sequence[Sequence[bytearray]], first_offset: int = 0, *, has_index: bool = True
) -> None:
    """Write segments as a broker does: consecutive offsets, and aborted transactions in `.txnindex`."""
    directory.mkdir(parents=True)
    offset, opened = first_offset, {}
    for batches in segments:
        base, stored, aborted = offset, bytearray(), bytearray()
        for batch in map(bytearray, batches):
            if any(batch):
                stamp(batch, 0, offset, partition_leader_epoch=0)
            header = read_header(batch) if batch[16] == 2 else None
            if header is not None and header.is_control:
                first = opened.pop(header.producer_id, None)
                control = decode_control(batch)
                if first is not None and control is not None and control.type is ControlType.ABORT:
                    aborted += struct.pack(">hqqqq", 0, header.producer_id, first, offset, offset + 1)
            elif header is not None and header.is_transactional:
                opened.setdefault(header.producer_id, offset)
            stored += batch
            offset += int.from_bytes(batch[23:27], "big") + 1  # the field lastOffsetDelta
        (directory / f"{base:020}.log").write_bytes(stored)
        if aborted and has_index:
            (directory / f"{base:020}.txnindex").write_bytes(aborted)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data directory with a topic per sound log and per planted fault, flushed to its end."""
    root = tmp_path_factory.mktemp("files")
    for name, (first_offset, segments) in SOUND.items():
        write_partition(root / f"{name}-0", segments, first_offset)
    for name, (batches, _) in PLANTED.items():
        write_partition(root / f"{name}-0", [batches], has_index=name != "shown")
    (root / "hidden-0" / f"{0:020}.txnindex").write_bytes(struct.pack(">hqqqq", 0, 7, 0, 3, 4))

    # Logs for which the audit reports a note, and faults that only a comparison of partitions shows.
    write_partition(root / "torn-0", [[plain(7, 0, 0, 3)], [plain(7, 0, 3, 2), cut(plain(7, 0, 5, 4))]])
    write_partition(root / "zeros-0", [[plain(7, 0, 0, 3), bytearray(4096)]])
    write_partition(root / "open-0", [[data(7, 0, 0, 3), end(7, 0, "COMMIT"), data(7, 0, 3, 2)]])
    write_partition(root / "middle-0", [[plain(7, 0, 0, 3), cut(plain(7, 0, 3, 2))], [plain(7, 0, 5, 1)]])
    write_partition(root / "torn-holder-0", [[plain(7, 0, 0, 3), cut(holder(3))]])
    held = [plain(7, 0, 0, 3), claims_more(holder(3)), plain(7, 0, 4, 1), plain(7, 0, 5, 2)]
    write_partition(root / "holder-0", [held])
    bad = {"claims": claims_more, "no-magic": no_magic}
    for name, change in bad.items():
        changed = [plain(7, 0, 0, 3), change(plain(7, 0, 3, 2)), plain(7, 0, 5, 1), plain(7, 0, 6, 2)]
        write_partition(root / f"{name}-0", [changed])
    write_partition(root / "synced-0", [[plain(7, 0, 0, 3), cut(plain(7, 0, 3, 4))]])
    write_partition(root / "cleaned-0", [[plain(7, 0, 0, 3), counts(plain(7, 0, 5, 5), 2)]])
    write_partition(root / "overfull-0", [[counts(plain(7, 0, 0, 3), 4)]])
    (root / "oncelog-topics.json").write_text(
        json.dumps(
            {
                "topics": [
                    {"name": name, "settings": {"cleanup.policy": "delete,compact"}}
                    for name in ("cleaned", "overfull")
                ]
            }
        )
    )
    write_partition(root / "halves-0", [[data(57, 0, 0, 3), end(57, 1, "COMMIT")]])
    write_partition(root / "halves-1", [[data(57, 0, 0, 4), end(57, 1, "ABORT")]])
    write_partition(root / "bad-index-0", [[data(7, 0, 0, 3)], [end(7, 0, "ABORT"), plain(8, 0, 0, 1)]])
    (root / "bad-index-0" / f"{3:020}.txnindex").write_bytes(struct.pack(">hqqqq", 0, 7, 4, 3, 4))
    write_partition(root / "compacted-0", [[plain(7, 0, 4, 3), plain(7, 0, 9, 1)]])
    write_partition(root / "__consumer_offsets-0", [[plain(7, 0, 4, 3)]])
    (root / "deleted-0.5b3e-delete").mkdir()
    names = [path.name.rsplit("-", 1) for path in root.glob("*-[0-9]")]
    flushed = {TopicPartition(topic, int(number)): 10**6 for topic, number in names}
    # The recovery points of these logs are before their torn tails, because a crash cannot tear a tail that
    # was synced.
    flushed |= {
        TopicPartition("torn", 0): 5,
        TopicPartition("torn-holder", 0): 3,
        TopicPartition("zeros", 0): 3,
        TopicPartition("synced", 0): 4,
    }
    (root / RECOVERY_POINTS).write_bytes(encode_offsets(flushed))
    (root / CLEANED_OFFSETS).write_bytes(encode_offsets({TopicPartition("compacted", 0): 7}))
    return root


@pytest.fixture(scope="module")
def audited(spark: Any, data_dir: Path) -> AuditResult:
    return audit_files(spark, str(data_dir))


def found_in(result: AuditResult, topic: str) -> list[tuple[Any, ...]]:
    some = [*result.findings, *result.notes]
    return [(f.kind, f.base_offset, f.last_offset, f.other_offset) for f in some if f.topic == topic]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(audited: AuditResult, name: str) -> None:
    assert found_in(audited, name) == [PLANTED[name][1]]


@pytest.mark.parametrize("name", [*SOUND, "compacted", "cleaned"])
def test_a_sound_log_is_clean(audited: AuditResult, name: str) -> None:
    assert found_in(audited, name) == []
    totals = audited.partitions[TopicPartition(name, 0)]
    if name in SOUND:
        assert totals.batches == sum(map(len, SOUND[name][1]))


def test_a_torn_tail_and_an_open_transaction_are_no_violations(audited: AuditResult) -> None:
    assert found_in(audited, "torn") == [("torn_tail", 5, 5, None)]
    assert found_in(audited, "zeros") == [("torn_tail", 3, 3, None)]
    assert found_in(audited, "open") == [("open_transaction", 4, 5, None)]
    assert {note.kind for note in audited.notes} == {"torn_tail", "open_transaction", "unreadable_index"}
    (torn,) = [note for note in audited.notes if note.topic == "torn"]
    assert "00000000000000000003.log at position" in torn.explanation
    # In the middle of the log, a torn batch is a violation. The audit continues with the later segments.
    kinds = [kind for kind, *_ in found_in(audited, "middle")]
    assert kinds == ["unreadable", "sequence_gap"]


def test_a_damaged_index_of_aborted_transactions_does_not_end_the_audit(audited: AuditResult) -> None:
    """A damaged index is not a violation, because a broker rebuilds it. The log is audited as usual."""
    assert found_in(audited, "bad-index") == [("unreadable_index", 3, 3, None)]
    (note,) = [note for note in audited.notes if note.topic == "bad-index"]
    assert f"{3:020}.txnindex: entry 0 is" in note.explanation
    totals = audited.partitions[TopicPartition("bad-index", 0)]
    assert (totals.batches, totals.aborted, totals.findings) == (3, 1, 0)


@pytest.mark.parametrize("name", ["claims", "no-magic"])
def test_batches_behind_a_damage_in_the_last_segment_are_audited(audited: AuditResult, name: str) -> None:
    """With one flipped bit in its length, a batch may seem to end behind the file.

    That is not a torn tail.
    """
    assert found_in(audited, name) == [("unreadable", 3, 4, None), ("sequence_gap", 5, 5, None)]
    assert audited.partitions[TopicPartition(name, 0)].batches == 3


def test_a_batch_that_is_the_value_of_a_record_is_not_taken_for_one_of_the_log(audited: AuditResult) -> None:
    """The audit must not take a batch in a record's value for a batch of the log, even if the outer batch is
    incomplete or has a wrong length.
    """
    assert found_in(audited, "torn-holder") == [("torn_tail", 3, 3, None)]
    assert found_in(audited, "holder") == [("unreadable", 3, 3, None), ("sequence_gap", 4, 4, None)]
    seen = [audited.partitions[TopicPartition(name, 0)].batches for name in ("torn-holder", "holder")]
    assert seen == [1, 3]


def test_a_tail_that_was_synced_is_damaged_and_not_torn(audited: AuditResult) -> None:
    assert found_in(audited, "synced") == [("unreadable", 3, 3, None)]
    (found,) = [finding for finding in audited.findings if finding.topic == "synced"]
    assert "a broker had synced the log up to offset 4" in found.explanation


def test_a_compacted_batch_has_fewer_records_than_offsets_and_never_more(audited: AuditResult) -> None:
    """The audit finds compacted topics in the broker's list of topics, even before the cleaner's first
    round.
    """
    assert found_in(audited, "overfull") == [("record_count", 0, 2, None)]


def test_records_inside_batches_are_checked_where_keys_are(spark: Any, tmp_path: Path) -> None:
    """These batches have faults only in their records: the checksums are correct, and so are the headers."""
    one, two, three = (bytes(plain(7, 0, 0, 3)[HEADER_BYTES:][at : at + SIZE]) for at in (0, SIZE, 2 * SIZE))
    faults = {
        "sound": one + two + three,
        "twice": one + two + two,
        "swapped": two + one + three,
        "fewer": one + two,
        "beyond": one + two + three[:3] + b"\x08" + three[4:],
        "more": one + two + three + three,
        "short": one + two + three[:-1],
        "garbage": b"\xff" * 40,
    }
    for name, payload in faults.items():
        write_partition(tmp_path / f"{name}-0", [[inside(plain(7, 0, 0, 3), payload), plain(7, 0, 3, 2)]])
    write_partition(tmp_path / "codec-0", [[seal(plain(7, 0, 0, 3)[:22] + b"\x06" + plain(7, 0, 0, 3)[23:])]])
    result = audit_files(spark, str(tmp_path), key_check="concat(topic, partition, offset)")
    found = {f.topic: (f.kind, f.base_offset, f.last_offset) for f in result.findings if f.key is None}
    assert found == {name: ("bad_records", 0, 2) for name in (*faults, "codec") if name != "sound"}
    texts = {f.topic: f.explanation for f in result.findings if f.key is None}
    assert "record 2 has the offset 1, like the record before it" in texts["twice"]
    assert "record 2 has the offset 4, after offset 1, in a batch that ends at 2" in texts["beyond"]
    assert audit_files(spark, str(tmp_path)).verdict == "clean"


def test_a_transaction_committed_here_and_aborted_there_has_two_outcomes(audited: AuditResult) -> None:
    assert found_in(audited, "halves") == [("two_outcomes", 0, 4, 3)]
    (finding,) = [f for f in audited.findings if f.topic == "halves"]
    assert finding.partition == 1
    assert "COMMIT of the same transaction in halves-0 at offset 3" in finding.explanation
    assert audited.partitions[finding.tp].findings == 1


def test_totals_count_transactions_and_leave_out_internal_topics(audited: AuditResult) -> None:
    assert audited.verdict == "violated"
    assert audited.finding_count == len(audited.findings)
    topics = {tp.topic for tp in audited.partitions}
    assert topics >= {*SOUND, *PLANTED} and not any(name.startswith("__") for name in topics)
    totals = audited.partitions[TopicPartition("transactions", 0)]
    assert (totals.committed, totals.aborted, totals.empty_markers) == (2, 2, 1)
    kinds = {f.kind for f in (*audited.findings, *audited.notes)}
    untold = {
        "overlap",
        "offset_gap",
        "offset_overlap",
        "visible_though_open",
        "bad_records",
        "unknown_marker",
    }
    untold |= {"log_start_moved"}  # the files cannot show this finding
    assert kinds == {kind.value for kind in FindingKind} - untold


def test_a_path_may_be_one_partition_or_a_uri(spark: Any, data_dir: Path, tmp_path: Path) -> None:
    # A copy of a single partition has no checkpoint beside it, so the audit does not trust the newest
    # segment's index.
    copied = shutil.copytree(data_dir / "shown-0", tmp_path / "shown-0")
    compacted = shutil.copytree(data_dir / "compacted-0", tmp_path / "cleaned-0")
    result = audit_files(spark, [copied.as_uri(), str(compacted)], compacted_topics=["cleaned"])
    assert result.verdict == "clean"
    assert sorted(map(str, result.partitions)) == ["cleaned-0", "shown-0"]


def test_only_keys_of_committed_records_are_checked(spark: Any, tmp_path: Path) -> None:
    """Keys k0 to k4 are committed. k0 and k1 are also in a transaction that a later segment aborts. k5 is in
    an open one.
    """
    segments = [
        [plain(7, 0, 0, 3), data(8, 0, 0, 2), damaged(plain(9, 0, 0, 1))],
        [end(8, 0, "ABORT"), data(17, 0, 3, 2), end(17, 0, "COMMIT"), data(17, 0, 5, 1)],
    ]
    write_partition(tmp_path / "found-0", segments, has_index=False)
    write_partition(tmp_path / "wanted-0", [[plain(7, 0, 0, 6)]])
    write_partition(tmp_path / "again-1", [[plain(7, 0, 0, 3), plain(8, 0, 0, 1)]])
    found, wanted, again = (str(tmp_path / name) for name in ("found-0", "wanted-0", "again-1"))
    checked = audit_files(spark, [found, again], key_check=True)
    assert checked.keys == KeyTotals(9, 8, 1)
    shown = [(f.topic, f.key, f.other_offset, f.base_offset) for f in checked.findings if f.key]
    assert shown == [("again", "k0", 0, 3)]
    compared = audit_files(spark, found, key_check="upper(CAST(value AS STRING))", against=wanted)
    assert [(f.kind, f.key) for f in compared.findings if f.key] == [("lost_key", "V5")]
    assert compared.difference == Difference(6, 5, 1, 0, 0, 0)
    with pytest.raises(MisuseError, match="again-1 would be compared with itself"):
        audit_files(spark, again, against=[wanted, again])


@pytest.mark.soak
def test_files_in_object_storage_are_audited(spark: Any, data_dir: Path) -> None:
    """moto simulates S3.

    The address contains all settings, because Spark's workers may have been started before this test.
    """
    server = pytest.importorskip(
        "moto.server", reason="S3 on this machine needs moto: pip install 'moto[s3]'"
    )
    storage = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    storage.start()
    where = "?region=us-east-1&scheme=http&endpoint_override={}:{}".format(*storage.get_host_and_port())
    try:
        s3, _ = fs.FileSystem.from_uri(f"s3://key:secret@copies{where}&allow_bucket_creation=true")
        s3.create_dir("copies")
        for name in ("transactions-0", "shown-0", RECOVERY_POINTS):
            fs.copy_files(str(data_dir / name), f"copies/data/{name}", destination_filesystem=s3)
        told = oncelog_command(
            "audit", "--files", f"s3a://key:secret@copies/data{where}", "--keys", "-o", "json"
        )
    finally:
        storage.stop()
    assert told.code == EXIT_VIOLATIONS, told.err
    found = [(f["kind"], f["base_offset"], f["last_offset"], f["other_offset"]) for f in json.loads(told.out)]
    assert found == [PLANTED["shown"][1]]
    assert "2 partitions" in told.err and "4 different keys, 0 of them more than once" in told.err


def test_paths_without_segments_are_refused(spark: Any, data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no segment files; use a partition directory"):
        audit_files(spark, str(tmp_path))
    with pytest.raises(ConfigError, match=r"torn-0 is in .* audit one replica at a time"):
        audit_files(spark, [str(data_dir), str(data_dir / "torn-0")])
    with pytest.raises(ConfigError, match="cannot list the directory"):
        audit_files(spark, str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="cannot open a file system"):
        audit_files(spark, "ftp://host/data")
    shutil.copytree(data_dir / "torn-0", tmp_path / "copy")
    with pytest.raises(ConfigError, match="must end with the partition, as in topic-0"):
        audit_files(spark, str(tmp_path / "copy"))


@pytest.mark.parametrize("name", [CLEANED_OFFSETS, LOG_STARTS, RECOVERY_POINTS])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"0\n1\n", b"0\n1\nfound 0 x\n"])
def test_an_unreadable_checkpoint_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """If the checkpoint counted as empty, the audit would report gaps in a compacted topic."""
    write_partition(tmp_path / "found-0", [[plain(7, 0, 0, 3), plain(7, 0, 8, 1)]])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"{name}: the checkpoint .* To audit without this file, move the file away"
    ):
        find_segments([str(tmp_path)])


def test_an_empty_checkpoint_names_no_partition(tmp_path: Path) -> None:
    """Apache Kafka creates checkpoint files before they have entries."""
    write_partition(tmp_path / "found-0", [[plain(7, 0, 0, 3)]])
    for name in (CLEANED_OFFSETS, LOG_STARTS, RECOVERY_POINTS):
        (tmp_path / name).write_bytes(b"")
    (partition,) = find_segments([str(tmp_path)])
    assert (partition.is_compacted, partition.log_start_offset, partition.recovery_point) == (False, 0, 0)


def test_directories_named_like_segments_are_not_read(tmp_path: Path) -> None:
    write_partition(tmp_path / "found-0", [[plain(7, 0, 0, 3)]])
    (tmp_path / "found-0" / f"{3:020}.log").mkdir()
    (found,) = find_segments([str(tmp_path)])
    assert [segment.base_offset for segment in found.segments] == [0]


def test_names_that_no_broker_creates_are_passed_over(tmp_path: Path) -> None:
    """R1070: a file with such a name ended the audit of the whole directory with a traceback."""
    write_partition(tmp_path / "found-0", [[plain(7, 0, 0, 3)]])
    log = (tmp_path / "found-0" / f"{0:020}.log").read_bytes()
    (tmp_path / "found-0" / f"{10**20 - 1}.log").write_bytes(b"")
    for name in (os.fsdecode(b"\xff-0"), f"found-{2**31}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{0:020}.log").write_bytes(log)
    (tmp_path / "found-0" / os.fsdecode(b"\xff")).touch()
    (found,) = find_segments([str(tmp_path)])
    assert (found.tp, [segment.base_offset for segment in found.segments]) == (
        TopicPartition("found", 0),
        [0],
    )
    with pytest.raises(ConfigError, match="the path is not UTF-8"):
        find_segments([str(tmp_path / os.fsdecode(b"\xff-0"))])


@pytest.mark.parametrize("suffix", [".log", ".txnindex"])
def test_an_interrupted_compaction_is_refused(tmp_path: Path, suffix: str) -> None:
    """R1067: records that are only in the `.swap` file counted as lost, or the audit did not notice that they
    are missing.
    """
    partition = tmp_path / "c-0"
    partition.mkdir()
    (partition / f"{7:020}.log").write_bytes(build_batch(records(0, 1)))
    swap = partition / f"{0:020}{suffix}.swap"
    swap.touch()
    for root in (tmp_path, partition):
        with pytest.raises(ConfigError, match="a compaction was interrupted here"):
            find_segments([str(root)])
    (partition / f"{0:020}.log.cleaned").touch()
    assert [files.tp for files in find_segments([str(tmp_path)])] == [TopicPartition("c", 0)]


def test_records_below_the_log_start_are_not_judged(spark: Any, tmp_path: Path) -> None:
    """DeleteRecords leaves records in the segment that contains the log start. No reader gets them."""
    removed = [damaged(plain(7, 0, 0, 2)), plain(7, 0, 2, 2), plain(9, 0, 0, 3)]
    write_partition(tmp_path / "found-0", [[*removed, plain(8, 0, 0, 4), plain(8, 0, 4, 1)]])
    write_partition(tmp_path / "wanted-0", [[plain(7, 0, 2, 3)]], first_offset=5)
    (tmp_path / LOG_STARTS).write_bytes(encode_offsets({TopicPartition("found", 0): 9}))
    found, wanted = str(tmp_path / "found-0"), str(tmp_path / "wanted-0")
    result = audit_files(spark, found, key_check=True)
    assert (result.verdict, result.findings) == ("clean", ())
    assert (result.totals.records, result.totals.removed_records) == (5, 7)
    assert result.keys == KeyTotals(3, 3, 0)  # the keys k2, k3 and k4 are above the log start
    assert audit_files(spark, found, against=wanted).verdict == "clean"
    assert audit_files(spark, wanted, against=found).verdict == "clean"


def test_damage_from_below_the_log_start_up_to_the_end_is_found(spark: Any, tmp_path: Path) -> None:
    log = [plain(7, 0, 0, 3), no_magic(plain(7, 0, 3, 2)), no_magic(plain(7, 0, 5, 4))]
    write_partition(tmp_path / "found-0", [log])
    starts, synced = {TopicPartition("found", 0): 6}, {TopicPartition("found", 0): 9}
    (tmp_path / LOG_STARTS).write_bytes(encode_offsets(starts))
    (tmp_path / RECOVERY_POINTS).write_bytes(encode_offsets(synced))
    assert found_in(audit_files(spark, str(tmp_path)), "found") == [("unreadable", 3, 6, None)]


def test_files_written_by_our_broker_are_clean(spark: Any, tmp_path: Path) -> None:
    with oncelog.Broker(tmp_path, config={"log.cleaner.backoff.ms": 20}) as broker:
        create_topic(broker.bootstrap_servers, "ours")
        producers = write_transactions(broker.bootstrap_servers, "ours", "cacao")
        create_compacted(broker.bootstrap_servers, "cleaned", "cacc")
        assert len(producers) == 1
    del producers  # a producer that stays open would continue to look for the stopped broker
    result = audit_files(spark, str(tmp_path))
    assert result.findings == ()
    assert [(note.kind, note.topic) for note in result.notes] == [("open_transaction", "ours")]
    totals = result.partitions[TopicPartition("ours", 0)]
    assert (totals.committed, totals.aborted) == (2, 2)
    cleaned = result.partitions[TopicPartition("cleaned", 0)]
    assert cleaned.control_batches == 4 and cleaned.empty_markers > 0
    for index in (tmp_path / "ours-0").glob("*.txnindex"):
        index.unlink()
    seen = audit_files(spark, str(tmp_path / "ours-0"))
    assert [f.kind for f in seen.findings] == ["visible_though_aborted"] * 2


def test_the_offsets_topic_is_clean_after_transactional_commits(spark: Any, tmp_path: Path) -> None:
    with oncelog.Broker(tmp_path) as broker:
        create_topic(broker.bootstrap_servers, "in")
        settings = {"bootstrap.servers": broker.bootstrap_servers}
        with (
            oncelog.Producer({**settings, "transactional.id": "t"}) as producer,
            oncelog.Consumer({**settings, "group.id": "g", "enable.auto.commit": False}) as consumer,
        ):
            producer.init_transactions()
            for _ in range(2):
                producer.begin_transaction()
                producer.send_offsets_to_transaction({TopicPartition("in", 0): 0}, consumer.group_metadata())
                producer.commit_transaction()
    (log,) = [path for path in tmp_path.glob("__consumer_offsets-*/*.log") if path.stat().st_size]
    result = audit_files(spark, str(log.parent))
    assert (result.verdict, result.findings, result.notes) == ("clean", (), ())
    assert result.totals.committed == 2


def test_topics_and_files_of_apache_kafka_are_clean(
    spark: Any, apache_kafka: ApacheKafka, topic: str
) -> None:
    bootstrap = apache_kafka.bootstrap_servers
    create_topic(bootstrap, topic)
    write_transactions(bootstrap, topic, "caca")
    wait_for_stable_end(bootstrap, topic, 4 * (RECORDS + 1))
    asked = audit_topic(spark, bootstrap, topic)
    read = audit_files(spark, str(apache_kafka.nodes[0].data_dir / f"{topic}-0"))
    for result in (asked, read):
        assert (result.verdict, result.findings, result.notes) == ("clean", (), ())
        assert (result.totals.committed, result.totals.aborted) == (2, 2)
    assert asked.totals == read.totals
