"""The checkpoint topic: the records that its compaction leaves are enough to resume a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.broker import wait_until
from support.load import PARTITIONS, content, expected, write_csv
from support.topics import new_topic, read

from oncelog import Admin, Broker, Producer, TopicPartition
from oncelog.client.admin.blocking import NewTopic
from oncelog.errors import PeerError
from oncelog.load import on_spark
from oncelog.load.checkpoints import CHECKPOINT_TOPIC, checkpoint_partition, read_checkpoints
from oncelog.load.decisions import Layout
from oncelog.load.loader import Load, Report, run_load
from oncelog.load.parsing import Options

ROWS = 400
CSV = Layout("csv", None)
QUICK = {"internal.segment.bytes": 2_000, "min.cleanable.dirty.ratio": 0, "cleanup.policy": "compact"}


@pytest.mark.behaviour("P4")
def test_compaction_leaves_the_last_checkpoint_of_every_file(tmp_path: Path) -> None:
    files = [write_csv(tmp_path / f"{n}.csv", n * ROWS, ROWS) for n in range(2)]
    ids = [
        "first",
        next(f"x{n}" for n in range(999) if checkpoint_partition(f"x{n}") == checkpoint_partition("first")),
    ]
    with Broker(data_dir=tmp_path / "data", config={"log.cleaner.backoff.ms": 20}) as broker:
        servers = broker.bootstrap_servers
        with Admin({"bootstrap.servers": servers}) as admin:
            admin.create_topics([NewTopic(CHECKPOINT_TOPIC, 16, configs=QUICK)])
        topics = [new_topic(servers, PARTITIONS) for _ in ids]

        def run(number: int) -> Report:
            load = Load(files, topics[number], ids[number], Options(key="k"), max_records=20)
            return run_load(load, {"bootstrap.servers": servers})

        for number in (0, 1):
            assert run(number).transactions == 2 * ROWS // 20
        wait_until(lambda: len(read(servers, CHECKPOINT_TOPIC)) < 20)
        for number in (0, 1):
            report = run(number)
            assert (report.was_complete, report.records_before) == (True, 2 * ROWS)
            assert content(servers, topics[number]) == expected(2 * ROWS)


@pytest.mark.behaviour("P4")
def test_a_task_reads_the_checkpoints_only_if_its_file_was_tried_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new file, a task skips the checkpoints, because it would have to read those of all files.

    A repeated task must read them: the driver's checkpoint may be older than the first attempt.
    """
    pytest.importorskip("pyspark", reason="pip install 'oncelog[spark]'")
    files = [write_csv(tmp_path / f"{n}.csv", n * ROWS, ROWS) for n in range(3)]
    with Broker() as broker:
        config = {"bootstrap.servers": broker.bootstrap_servers}
        topic = new_topic(broker.bootstrap_servers, PARTITIONS)
        load = Load(files, topic, "tasks", Options(key="k"), max_records=150)
        spread, first_marks = on_spark._begin(None, load, [CSV] * 3, config, Report(0))  # type: ignore[arg-type]
        assert spread.files == (0, 1, 2)
        read_by: list[int] = []

        def count(*arguments: Any) -> Any:
            read_by.append(1)
            return read_checkpoints(*arguments)

        monkeypatch.setattr(on_spark, "read_checkpoints", count)
        outcomes = [on_spark._load_file(pair, load=load, config=config) for pair in first_marks.items()]
        assert ([outcome.transactions for outcome in outcomes], read_by) == ([3, 3, 3], [])
        # Repeat a task. The driver passes the same checkpoint as for the first attempt, which says that
        # nothing was read yet.
        again = on_spark._load_file((1, first_marks[1]), load=load, config=config)
        assert (again, read_by) == (on_spark.Outcome(1), [1])
        assert content(broker.bootstrap_servers, topic) == expected(3 * ROWS)


def _write(servers: str, tp: TopicPartition, *records: tuple[bytes, bytes | None]) -> None:
    with Producer({"bootstrap.servers": servers}) as producer:
        for key, value in records:
            producer.send(tp.topic, value, key=key, partition=tp.partition).result(timeout=30)


def test_foreign_records_beside_checkpoints_do_not_stop_a_load(tmp_path: Path) -> None:
    """R1062: a key that is not UTF-8 raised UnicodeDecodeError, which ended all loads whose checkpoints are
    in the same partition.
    """
    files = [write_csv(tmp_path / "0.csv", 0, ROWS)]
    with Broker() as broker:
        config = {"bootstrap.servers": (servers := broker.bootstrap_servers)}
        load = Load(files, new_topic(servers, PARTITIONS), "beside", Options(key="k"))
        run_load(load, config)
        tp = checkpoint_partition("beside")
        _write(servers, tp, (b"\xff", b"x"), (b"beside/x", b"x"), (b"other/0", None), (b"none", b"\xff"))
        assert run_load(load, config).was_complete
        for value in (b"[]", b"\xff", b'{"version":1}', b"[" * 100_000):
            _write(servers, tp, (b"beside/0", value))
            with pytest.raises(PeerError, match="was written by another version or program"):
                run_load(load, config)


def test_a_load_whose_checkpoints_were_deleted_begins_again(tmp_path: Path) -> None:
    """R1062: a tombstone ended the load with TypeError, until compaction removed the tombstone."""
    files = [write_csv(tmp_path / f"{n}.csv", n * ROWS, ROWS) for n in range(2)]
    with Broker() as broker:
        config = {"bootstrap.servers": (servers := broker.bootstrap_servers)}
        load = Load(files, new_topic(servers, PARTITIONS), "deleted", Options(key="k"))
        run_load(load, config)
        tp = checkpoint_partition("deleted")
        _write(servers, tp, (b"deleted/0", None))
        with pytest.raises(PeerError, match="file number 0 of load 'deleted' is missing"):
            run_load(load, config)
        _write(servers, tp, (b"deleted/1", None))
        report = run_load(load, config)
        assert (report.records, report.records_before) == (2 * ROWS, 0)
