"""A stand-in for the driver of a pipeline under trial: a thread that keeps a checkpoint as Spark does."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from oncelog import Consumer, Producer, TopicPartition
from oncelog.pipeline.restart_policy import ExitInfo
from oncelog.trial.plan import Strike, TargetKind
from oncelog.trial.run import PARTITIONS, Trial
from oncelog.trial.spark_checkpoint import read_checkpoint


def trial_of(kind: TargetKind, servers: str, directory: Path) -> Trial:
    """Return a trial of 30 rows in three micro-batches, whose driver a test replaces."""
    return Trial(
        file=directory / "mine.py",
        kind=kind,
        servers=servers,
        work_dir=directory,
        name=directory.name,
        rows=30,
        micro_batches=3,
        row='{"id": "{n}"}',
        id_name="id",
    )


class StandInDriver:
    """Copies SOURCE to TARGET in micro-batches. Subclasses decide how.

    If `remembers` is True, it does not write a micro-batch again that it has already written. If `ends_with`
    is an error, the driver raises it instead of copying.
    """

    remembers = True
    ends_with: ExitInfo | None = None

    def __init__(
        self,
        job: Mapping[str, Any],
        settings: Mapping[str, str],
        log_file: Path,
        control: Path,
        strike: Strike | None,
    ) -> None:
        self.settings = settings
        self._checkpoint, self._source = Path(settings["CHECKPOINT"]), settings["SOURCE"]
        self.exit_info: ExitInfo | None = None
        self.query_id: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.exit_info = self.ends_with
        if self.ends_with is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run)
            self._thread.start()

    def kill(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def _run(self) -> None:
        self.query_id = "q-1"
        for log in ("offsets", "commits"):
            (self._checkpoint / log).mkdir(parents=True, exist_ok=True)
        servers = {"bootstrap.servers": self.settings["BOOTSTRAP_SERVERS"]}
        with Consumer(servers) as consumer, Producer(servers) as producer:
            while not self._stop.wait(0.01):
                self._micro_batch(consumer, producer)

    def _micro_batch(self, consumer: Consumer, producer: Producer) -> None:
        state = read_checkpoint(self._checkpoint, self._source)
        begin = state.positions or {}
        number = 0 if state.committed is None else state.committed + 1
        offsets, commits = self._checkpoint / "offsets", self._checkpoint / "commits"
        if state.is_planned:
            line = json.loads((offsets / f"{number}").read_text().splitlines()[1])
            ends = {int(partition): end for partition, end in line[self._source].items()}
        else:
            tps = [TopicPartition(self._source, partition) for partition in range(PARTITIONS)]
            ends = {tp.partition: end for tp, end in consumer.end_offsets(tps).items()}
        if all(begin.get(partition, 0) == end for partition, end in ends.items()):
            return
        entry = json.dumps({self._source: {str(partition): end for partition, end in ends.items()}})
        (offsets / f"{number}").write_text(f"v1\n{entry}\n")
        written = self._checkpoint / f"written-{number}"
        if not (self.remembers and written.exists()):
            self._copy(consumer, producer, begin, ends)
            written.touch()
        (commits / f".{number}.crc").touch()
        (commits / f"{number}").write_text("v1\n{}")

    def _copy(
        self, consumer: Consumer, producer: Producer, begin: Mapping[int, int], ends: Mapping[int, int]
    ) -> None:
        for partition, end in ends.items():
            tp = TopicPartition(self._source, partition)
            for batch in consumer.fetch_range(tp, begin.get(partition, 0), end):
                for row in batch.select(["key", "value"]).to_pylist():
                    producer.send(self.settings["TARGET"], row["value"], row["key"])
        producer.flush()
