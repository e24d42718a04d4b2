"""`oncelog audit --distinct provenance` counts and names repeated records, whatever their order is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.topics import new_topic, producer_of

from oncelog import Admin
from oncelog.audit.provenance_findings import PROVENANCE_KINDS, RepetitionRuns, repeated_run
from oncelog.audit.result import KeyTotals, ProvenanceTotals
from oncelog.cli.main import cli
from oncelog.errors import MisuseError
from oncelog.local_audit import audit_topic, key_counts, log_audit
from oncelog.rules.idempotence.provenance import OFFSET, PARTITION, TOPIC, Provenance
from oncelog.types import TopicPartition

pytestmark = pytest.mark.behaviour("P11")


def headers(source: int, offset: int) -> tuple[tuple[str, bytes | None], ...]:
    return ((TOPIC, b"s"), (PARTITION, b"%d" % source), (OFFSET, b"%d" % offset))


def write(servers: str, topic: str, partition: int, records: Sequence[tuple[int, int]]) -> None:
    """Write a record for each (source partition, source offset), with that pair in its provenance headers."""
    with producer_of(servers) as producer:
        for source, offset in records:
            producer.send(topic, b"v", partition=partition, headers=headers(source, offset))


def test_runs_of_repetitions_are_named_with_their_offsets(ours: str) -> None:
    topic = new_topic(ours, 2)
    write(ours, topic, 0, [(0, 5), (1, 5), (0, 6), (0, 5), (1, 6), (0, 6), (0, 7), (0, 6)])
    write(ours, topic, 1, [(0, 1), (0, 1)])
    result = audit_topic(ours, topic, distinct="provenance")
    assert result.provenance == ProvenanceTotals(10, 6, 4, 0, 0, 0, 0) and result.provenance.is_filter_exact
    assert (result.verdict, result.finding_count) == ("violated", 4)
    rows = [
        (f.kind, f.partition, f.base_offset, f.last_offset, f.key, f.explanation) for f in result.findings
    ]
    assert rows == [
        ("repeated_record", 0, 3, 5, "s-0:5", "2 records repeat offsets 5 to 6 of s-0, after its offset 6"),
        ("repeated_record", 0, 7, 7, "s-0:6", "1 records repeat offsets 6 to 6 of s-0, after its offset 7"),
        ("repeated_record", 1, 1, 1, "s-0:1", "1 records repeat offsets 1 to 1 of s-0, after its offset 1"),
    ]


def test_records_that_a_filter_would_lose_or_keep_twice_are_named(ours: str) -> None:
    topic = new_topic(ours, 2)
    write(ours, topic, 0, [(0, 1), (0, 3), (0, 2), (0, 2), (0, 4)])
    write(ours, topic, 1, [(0, 4)])
    result = audit_topic(ours, topic, distinct="provenance")
    assert (
        result.provenance == ProvenanceTotals(6, 4, 2, 1, 1, 0, 0) and not result.provenance.is_filter_exact
    )
    rows = [(f.kind, f.partition, f.base_offset, f.other_offset, f.explanation) for f in result.findings]
    # A record was written late, so a source offset below the highest one is not always a repetition. Each
    # finding therefore names its source record, instead of a run.
    assert rows == [
        ("repeated_record", 0, 3, 2, "s-0:2 is stored 2 times: first in partition 0 at offset 2, "
         "last in partition 0 at offset 3"),
        ("repeated_record", 1, 0, 4, "s-0:4 is stored 2 times: first in partition 0 at offset 4, "
         "last in partition 1 at offset 0"),
    ]  # fmt: skip
    (note,) = result.notes
    assert (note.kind, note.partition, note.base_offset, note.key) == ("late_record", 0, 2, "s-0:2")
    assert (result.verdict, result.finding_count) == ("violated", 2)


def test_a_copy_in_another_partition_is_a_repetition_that_a_filter_keeps(ours: str) -> None:
    topic = new_topic(ours, 2)
    for partition in range(2):
        write(ours, topic, partition, [(0, 1)])
    result = audit_topic(ours, topic, distinct="provenance")
    assert result.provenance == ProvenanceTotals(2, 1, 1, 0, 1, 0, 0)
    (finding,) = result.findings
    found = (finding.kind, finding.partition, finding.base_offset, finding.other_offset, finding.key)
    assert found == ("record_in_two_partitions", 1, 0, 0, "s-0:1")


def test_records_out_of_order_are_no_violation_if_each_is_there_once(ours: str) -> None:
    topic = new_topic(ours)
    write(ours, topic, 0, [(0, 1), (0, 3), (0, 2)])
    result = audit_topic(ours, topic, distinct="provenance")
    assert result.provenance == ProvenanceTotals(3, 3, 0, 1, 0, 0, 0)
    assert (result.verdict, result.findings, [note.kind for note in result.notes]) == (
        "clean", (), ["late_record"],
    )  # fmt: skip


def test_records_without_provenance_are_counted_and_malformed_ones_are_named(ours: str) -> None:
    topic = new_topic(ours)
    write(ours, topic, 0, [(0, 1)])
    with producer_of(ours) as producer:
        producer.send(topic, b"v")
    result = audit_topic(ours, topic, distinct="provenance")
    assert (result.verdict, result.finding_count) == ("unproven", 0)
    with producer_of(ours) as producer:
        producer.send(topic, b"v", headers=headers(0, 1)[:2])
    result = audit_topic(ours, topic, distinct="provenance")
    assert result.provenance == ProvenanceTotals(1, 1, 0, 0, 0, 1, 1)
    (note,) = result.notes
    assert (note.kind, note.base_offset) == ("malformed_provenance", 2)
    assert note.explanation == f"the header {OFFSET} is missing"
    assert (result.verdict, result.findings) == ("unproven", ())


def test_topics_have_repetitions_of_their_own(ours: str) -> None:
    topics = [new_topic(ours), new_topic(ours)]
    for topic in topics:
        write(ours, topic, 0, [(0, 1), (0, 2)])
    result = audit_topic(ours, topics, distinct="provenance")
    assert result.provenance == ProvenanceTotals(4, 4, 0, 0, 0, 0, 0) and result.verdict == "clean"


@pytest.mark.parametrize("failing", ["check_provenance", "check_keys", "compare_keys"])
def test_what_was_found_before_a_check_failed_stays_in_the_result(
    ours: str, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """R1293: retention removed records between two passes, and the verdict was `unproven`."""
    topic, other = new_topic(ours), new_topic(ours)
    write(ours, topic, 0, [(0, 1), (0, 2), (0, 1)])
    with producer_of(ours) as producer:
        for _ in range(2):
            producer.send(topic, b"v", key=b"k", headers=headers(0, 9))
    check = getattr(log_audit, failing)

    def after_a_removal(*arguments: Any) -> Any:
        with Admin({"bootstrap.servers": ours}) as admin:
            admin.delete_records({TopicPartition(topic, 0): 1})
        return check(*arguments)

    monkeypatch.setattr(log_audit, failing, after_a_removal)
    result = audit_topic(ours, topic, key_check=True, against=other, distinct="provenance")
    what, found, keys = {
        "check_provenance": ("keys and provenance were", None, None),
        "check_keys": ("keys were", ProvenanceTotals(5, 3, 2, 0, 0, 0, 0), None),
        "compare_keys": ("keys were", ProvenanceTotals(5, 3, 2, 0, 0, 0, 0), KeyTotals(2, 1, 1, 3)),
    }[failing]
    assert str(result.keys_problem).startswith(f"{what} not checked: the log start of {topic}-0 moved to 1")
    assert (result.provenance, result.keys) == (found, keys)
    assert result.verdict == ("violated" if found else "unproven")
    assert result.finding_count == (2 if found else 0) + (1 if keys else 0)


def test_another_way_to_tell_repetitions_is_refused(ours: str) -> None:
    with pytest.raises(MisuseError, match="distinct='key': expected None or 'provenance'"):
        audit_topic(ours, new_topic(ours), distinct="key")


def test_the_command_tells_totals_and_whether_a_filter_is_exact(ours: str) -> None:
    topic = new_topic(ours, 2)
    write(ours, topic, 0, [(0, 1), (0, 2), (0, 1), (0, 2)])
    arguments = ["audit", topic, "--local", "-b", ours, "--distinct", "provenance"]
    ended = CliRunner().invoke(cli, arguments)
    assert ended.exit_code == 3 and "repeated_record" in ended.stdout
    assert ended.stderr.splitlines()[-3:] == [
        "4 records of 2 source records: 2 repetitions",
        "a ProvenanceFilter drops exactly the repetitions",
        "verdict: violated (2 findings in 1 rows; a run is one row, and 1000 rows of a kind are shown)",
    ]
    write(ours, topic, 1, [(0, 2), (0, 9), (0, 8)])
    said = CliRunner().invoke(cli, arguments).stderr
    assert "a ProvenanceFilter is not exact here: 1 source records are stored only after later ones" in said
    assert "; 1 source records are in several partitions, and it would keep several copies\n" in said
    refused = CliRunner().invoke(cli, [*arguments, "--files"])
    assert refused.exit_code == 2 and "--distinct cannot be combined with --files" in refused.stderr


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=30), st.integers(0, 4))
def test_runs_hold_each_repetition_once(log: list[tuple[int, int]], limit: int) -> None:
    every, few = RepetitionRuns(len(log)), RepetitionRuns(limit)
    verdicts = []
    for at, (source, offset) in enumerate(log):
        provenance = Provenance("s", source, offset)
        verdicts.append(every.see(at, provenance).value)
        assert few.see(at, provenance).value == verdicts[-1]
    runs = every.finish()
    assert sum(run.records for run in runs) == verdicts.count("repeated")
    assert all(verdicts[run.first] == verdicts[run.last] == "repeated" for run in runs)
    assert few.finish() == runs[:limit]
    assert all(repeated_run(TopicPartition("t", 0), run).kind in PROVENANCE_KINDS for run in runs)


@pytest.mark.parametrize("rows_at_once", [1 << 20, 7])
def test_totals_do_not_depend_on_the_order(
    ours: str, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(key_counts, "ROWS_AT_ONCE", rows_at_once)
    topic = new_topic(ours, 3)
    logs = [[(n * 7 % 3, n * k % 11) for n in range(20)] for k in (3, 4, 5)]
    for partition, log in enumerate(logs):
        write(ours, topic, partition, log)
    new: Counter[tuple[int, int]] = Counter()
    for log in logs:
        highest: dict[int, int] = {}
        for source, offset in log:
            if offset > highest.get(source, -1):
                highest[source] = offset
                new[source, offset] += 1
    sources = {record for log in logs for record in log}
    doubled = sum(count > 1 for count in new.values())
    lost = len(sources - set(new))
    expected = ProvenanceTotals(60, len(sources), 60 - len(sources), lost, doubled, 0, 0)
    result = audit_topic(ours, topic, distinct="provenance")
    assert result.provenance == expected and lost and doubled
    times = Counter(record for log in logs for record in log)
    named = {f.key: int(f.explanation.split()[3]) for f in result.findings}
    assert named == {f"s-{s}:{n}": count for (s, n), count in times.items() if count > 1}
