"""The pure parts of a trial: the matrix of cells, the moments of a kill, the count of rows, and the reading
of a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.append_notation import rows

from oncelog.errors import ConfigError
from oncelog.trial.judgement import Counts, Verdict, count, exit_code, foreign_text, judge, row_id
from oncelog.trial.masters import check_master, is_own_host, network_conf, standalone_hosts
from oncelog.trial.plan import (
    CELLS,
    LOCAL_CLUSTER,
    Evidence,
    Moment,
    TargetKind,
    choose_cells,
    has_come,
    master_of,
    spread,
    why_not,
)
from oncelog.trial.run import placeholders_filled
from oncelog.trial.spark_checkpoint import CheckpointState, newest_entry, positions_of, read_checkpoint
from oncelog.trial.targets import files_in_log

FAULTS = list(rows("trial_faults.txt"))
VERDICTS = list(rows("trial_verdicts.txt"))
WORDS = {
    "planned": {"is_planned": True},
    "consumed": {"is_consumed": True},
    "rows": {"has_rows": True},
    "struck": {"has_struck": True},
    "counted": {"has_counted": True},
    "writes": {"writes": 1, "new_writes": 1},
    "earlier": {"writes": 1},
    "reads": {"reads_lost": 1},
    "function": {"has_function": True},
    "line": {"is_before_write": True},
    "failed": {"has_failed_write": True},
    "sent": {"writes_lost": 1},
    "refused": {"refusals": 1},
    "unsent": {"commit_requests_lost": 1},
    "commits": {"commits_lost": 1},
    "cuts": {"cuts": 1},
    "norows": {"row_cuts": 0},
}


def evidence_of(words: str) -> Evidence:
    fields: dict[str, Any] = {}
    for word in words.split():
        fields |= WORDS[word]
    return Evidence(**fields)


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize(
    ("cell", "words", "now", "reason"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_a_fault_counts_only_if_it_has_happened(cell: str, words: str, now: str, reason: str) -> None:
    (chosen,) = choose_cells([cell], TargetKind.TOPIC)
    evidence = evidence_of(words)
    assert (why_not(chosen, evidence) or "-") == reason
    if chosen.kill_at is None:
        assert now == "-"
    else:
        assert has_come(chosen.kill_at, evidence) is (now == "yes")


def test_every_cell_is_in_the_table() -> None:
    assert {row[1] for row in FAULTS} == {cell.name for cell in CELLS}
    assert {cell.kill_at for cell in CELLS} == {None, *Moment}
    assert [cell.name for cell in CELLS if cell.is_calm] == ["calm"]


@pytest.mark.parametrize(
    ("cell", "master", "expected"),
    [
        ("calm", "local[2,4]", "local[2,4]"),
        ("calm", "local[*]", "local[*]"),
        ("driver-in-write", "local[2]", "local[2]"),
        ("worker-killed", "local[*]", "local[*,4]"),
        ("task-fails", "local[2]", "local[2,4]"),
        ("task-fails", "local", "local[1,4]"),
        ("task-fails", "local[2,1]", "local[2,1]"),
        ("task-fails", "local-cluster[2,1,512]", "local-cluster[2,1,512]"),
        ("executor-killed", "local[2,4]", LOCAL_CLUSTER),
        ("executor-killed", "local-cluster[3,1,512]", "local-cluster[3,1,512]"),
        ("executor-killed", "spark://127.0.0.1:7077", "spark://127.0.0.1:7077"),
    ],
)
def test_the_master_of_a_cell_has_what_its_fault_needs(cell: str, master: str, expected: str) -> None:
    """An executor is killed where it is a process. R1629: with `local[N]`, Spark repeated no task."""
    (chosen,) = choose_cells([cell], TargetKind.TOPIC)
    assert master_of(chosen, master) == expected


@pytest.mark.parametrize(
    ("master", "hosts"),
    [
        ("local[2]", []),
        ("yarn", []),
        ("spark://h:7077", ["h"]),
        ("spark://127.0.0.1:1,here:2", ["127.0.0.1", "here"]),
        ("spark://[::1]:7077", ["::1"]),
    ],
)
def test_the_hosts_of_a_standalone_cluster(master: str, hosts: list[str]) -> None:
    assert standalone_hosts(master) == hosts


def test_a_master_is_refused_if_its_executors_cannot_be_killed() -> None:
    for master in (
        "local",
        "local[2,4]",
        "local-cluster[2,1,1024]",
        "spark://here:1",
        "spark://here:1,here:2",
    ):
        assert check_master(master, lambda host: host == "here") is None
    for master in ("spark://there:1", "spark://here:1,there:1", "yarn", "k8s://here", "sc://here"):
        with pytest.raises(ConfigError, match=r"of a standalone cluster on this machine"):
            check_master(master, lambda host: host == "here")


def test_an_address_of_this_machine_is_one_that_it_can_bind() -> None:
    assert is_own_host("127.0.0.1") and is_own_host("localhost")
    # Addresses for documentation (RFC 5737), and a name that no resolver has (RFC 6761).
    assert not is_own_host("192.0.2.1") and not is_own_host("x.invalid") and not is_own_host("." * 70)


def test_executors_reach_the_driver_where_they_reach_the_master() -> None:
    loopback = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    for master, expected in (
        ("spark://127.0.0.1:7077", loopback),
        ("spark://localhost:7077", loopback),
        ("spark://192.0.2.1:7077", {}),
        ("spark://here:7077", {}),
        ("local[2]", {}),
    ):
        assert network_conf(master) == expected


def test_a_cell_that_cannot_happen_is_run_only_if_it_is_named() -> None:
    every, only_for_tables = {cell.name for cell in CELLS}, {"driver-at-write", "write-fails"}
    assert {cell.name for cell in choose_cells([], TargetKind.TOPIC)} == every - only_for_tables
    without = {cell.name for cell in choose_cells([], TargetKind.DELTA, has_proc=False)}
    only_for_topics = {"driver-write-lost", "driver-before-commit", "driver-in-commit"}
    only_for_topics |= {"requests-cut", "rows-refused"}
    assert without == every - only_for_topics - {"executor-killed", "spark-worker-killed"}
    (named,) = choose_cells(["executor-killed"], TargetKind.DELTA, has_proc=False)
    assert named.name == "executor-killed"


def test_a_spark_worker_is_killed_only_if_the_master_has_some() -> None:
    every = {cell.name for cell in CELLS}
    without = {cell.name for cell in choose_cells([], TargetKind.TOPIC, has_spark_workers=False)}
    assert without == every - {"spark-worker-killed", "driver-at-write", "write-fails"}
    with pytest.raises(ConfigError, match="needs the Spark workers of a standalone cluster"):
        choose_cells(["calm", "spark-worker-killed"], TargetKind.TOPIC, has_spark_workers=False)


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize(
    ("sent", "found", "happened", "error", "lost", "doubled", "foreign", "verdict"),
    [row[1:] for row in VERDICTS],
    ids=[row[0] for row in VERDICTS],
)
def test_rows_are_counted_by_their_ids(
    sent: str, found: str, happened: str, error: str, lost: str, doubled: str, foreign: str, verdict: str
) -> None:
    ids = [] if found == "-" else [None if word == "?" else word for word in found.split()]
    counts = count(range(int(sent)), ids)
    assert (counts.lost, counts.doubled, counts.foreign) == (int(lost), int(doubled), int(foreign))
    assert counts.found == len(ids)
    text = "it failed" if error == "yes" else None
    judged = judge(counts, has_happened=happened == "yes", error=text, is_possible=happened != "never")
    assert judged is Verdict[verdict]


def test_every_verdict_is_in_the_table() -> None:
    assert {row[-1] for row in VERDICTS} == {verdict.name for verdict in Verdict}


def test_a_target_that_was_not_read_is_a_failure() -> None:
    assert judge(None, has_happened=True, error=None) is Verdict.FAILED


def test_examples_of_ids_are_few() -> None:
    counts = count(range(100), ["7", "7"])
    assert counts == Counts(2, 99, 1, 0, ("0", "1", "2", "3", "4"), ("7",))


def test_rows_without_a_known_id_name_the_option() -> None:
    assert foreign_text(count(range(2), ["0", "1"]), "id") is None
    text = foreign_text(count(range(2), ["0", None, "x"]), "number")
    assert text is not None and text.startswith("2 of 3 rows") and "'number'" in text and "--id" in text


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict.CLEAN, Verdict.CLEAN], 0),
        ([Verdict.CLEAN, Verdict.NOT_REACHED], 1),
        ([Verdict.CLEAN, Verdict.IMPOSSIBLE], 0),
        ([Verdict.IMPOSSIBLE], 1),
        ([Verdict.FAILED], 1),
        ([Verdict.FAILED, Verdict.VIOLATED, Verdict.CLEAN], 3),
        ([], 1),
    ],
)
def test_the_exit_code_follows_from_the_worst_run(verdicts: list[Verdict], code: int) -> None:
    assert exit_code(verdicts) == code


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"id": 7, "value": b'{"id": "8"}', "key": b"9"}, "7"),
        ({"id": None, "value": b'{"id": "8"}', "key": b"9"}, "8"),
        ({"value": '{"id": 8}', "key": None}, "8"),
        ({"value": b'{"other": 8}', "key": b"9"}, "9"),
        ({"value": b"not JSON", "key": b"9"}, "9"),
        ({"value": b"[8]", "key": "9"}, "9"),
        ({"value": b"\xff", "key": b"9"}, "9"),
        ({"value": None, "key": None}, None),
        ({"number": 9}, None),
    ],
)
def test_the_id_of_a_row_is_a_column_a_field_or_the_key(row: dict[str, Any], found: str | None) -> None:
    assert row_id(row, "id") == found


def test_rows_are_spread_over_the_micro_batches() -> None:
    assert spread(10, 3) == [range(3), range(3, 6), range(6, 10)]
    assert [len(part) for part in spread(2, 4)] == [0, 1, 0, 1]


def test_without_names_the_cells_are_those_that_the_target_can_meet() -> None:
    without = [cell.name for cell in CELLS if cell not in choose_cells([], TargetKind.TOPIC)]
    assert without == ["driver-at-write", "write-fails"]
    without = [cell.name for cell in CELLS if cell not in choose_cells([], TargetKind.PARQUET)]
    commits = ["driver-before-commit", "driver-in-commit"]
    assert without == ["driver-write-lost", *commits, "requests-cut", "rows-refused"]
    named = choose_cells(["commit-lost", "calm"], TargetKind.TOPIC)
    assert [cell.name for cell in named] == ["calm", "commit-lost"]
    with pytest.raises(ConfigError, match="no cell is named 'reboot'; there are calm, task-fails"):
        choose_cells(["calm", "reboot"], TargetKind.TOPIC)


OURS = 'v1\n{"batchWatermarkMs":0}\n{"trial-in": {"0": 120, "1": 80}, "@ids": {"trial-in": "x"}}\n'
SPARKS = 'v1\n{"batchWatermarkMs":0}\n{"other":{"0":1}}\n{"trial-in":{"1":80,"0":120}}'


@pytest.mark.parametrize("entry", [OURS, SPARKS, json.dumps({"offsets": [OURS.splitlines()[2]]})])
def test_the_positions_of_a_topic_are_found_in_an_offset_log(entry: str) -> None:
    assert positions_of(entry, "trial-in") == {0: 120, 1: 80}


@pytest.mark.parametrize(
    "entry", ["", "v1\n{}\n{", 'v1\n{"trial": {"0": 1}}', '{"trial-in": {"0": "x"}}', "7"]
)
def test_an_offset_log_without_the_topic_has_no_positions(entry: str) -> None:
    assert positions_of(entry, "trial-in") is None


def test_hostile_nesting_in_an_offset_log_is_not_followed() -> None:
    assert positions_of('{"a":' * 40 + "{}" + "}" * 40, "trial-in") is None


def test_everything_is_consumed_when_committed_batches_cover_all_partitions() -> None:
    state = CheckpointState(planned=3, committed=3, positions={0: 10, 1: 8})
    assert state.covers({0: 10, 1: 8}) and state.covers({0: 9}) and state.covers({})
    assert not state.covers({0: 10, 1: 9}) and not state.covers({2: 1})
    assert not CheckpointState().covers({0: 1})
    assert not state.is_planned
    assert CheckpointState(planned=0).is_planned and CheckpointState(planned=4, committed=3).is_planned


def test_a_commit_entry_that_is_lost_without_rows_is_no_fault(tmp_path: Path) -> None:
    """A stateful query plans a micro-batch without rows after each one with rows. Losing the commit entry of
    such a micro-batch does not repeat any rows.
    """
    (cell,) = choose_cells(["commit-lost"], TargetKind.TOPIC)
    for log in ("offsets", "commits"):
        (tmp_path / log).mkdir()

    def lose(batch: int, end: int, log: str) -> str | None:
        text = f'v1\n{{"t": {{"0": {end}, "1": 4}}}}' if log == "offsets" else "v1"
        (tmp_path / log / str(batch)).write_text(text)
        state = read_checkpoint(tmp_path, "t")
        return why_not(cell, Evidence(state.is_planned, state.covers({0: 8}), state.has_rows))

    lose(0, 8, "offsets")
    assert lose(0, 8, "commits") is None
    assert lose(1, 8, "offsets") == "the next micro-batch was planned before the driver was dead"
    assert lose(1, 8, "commits") == "a micro-batch without rows was committed before the driver was dead"
    lose(2, 9, "offsets")
    assert lose(2, 9, "commits") is None


def test_temporary_files_are_no_entries_of_a_log() -> None:
    assert newest_entry(["2", "10", ".11.crc", ".11.abc.tmp", "metadata"]) == 10
    assert newest_entry([]) is None


def test_the_log_of_sparks_file_sink_names_the_committed_files() -> None:
    def entry(name: str, action: str = "add") -> str:
        return json.dumps({"path": f"file:///t/{name}", "size": 1, "action": action})

    texts = {
        "0": f"v1\n{entry('old')}",
        "9.compact": f"v1\n{entry('a')}\n{entry('b')}",
        "10": f"v1\n{entry('c')}\n{entry('d', 'delete')}",
        ".10.crc": "x",
    }
    assert files_in_log(texts) == {"a", "b", "c"}
    assert files_in_log({}) == set()


def test_placeholders_are_replaced_and_other_braces_stay() -> None:
    assert placeholders_filled('{"id": "{n}", "x": {}}', {"n": "7"}) == '{"id": "7", "x": {}}'
