"""The processes that tests kill: `python support/kill/programs.py copier|loop|reader|broker ARGUMENTS`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oncelog import Consumer, Producer, ProducerRecord, Record, TopicPartition, process
from oncelog.errors import OncelogError


def copier(servers: str, group: str, source: str, target: str) -> None:
    """Copy each record to both partitions of `target`, in transactions with the consumed offsets."""
    reading = {
        "bootstrap.servers": servers,
        "group.id": group,
        "group.instance.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "max.poll.records": 7,
    }
    writing = {"bootstrap.servers": servers, "transactional.id": group, "linger.ms": 0}
    with Consumer(reading) as consumer, Producer(writing) as producer:
        producer.init_transactions()
        consumer.subscribe([source])
        while True:
            records = consumer.poll()
            if not records:
                continue
            try:
                with producer.transaction():
                    for record in records:
                        producer.send(target, b"debit " + (record.value or b""), partition=0)
                        producer.send(target, b"credit " + (record.value or b""), partition=1)
                    ends = {TopicPartition(row.topic, row.partition): row.offset + 1 for row in records}
                    producer.send_offsets_to_transaction(ends, consumer.group_metadata())
            except OncelogError as error:
                print(f"aborted: {error!r}", file=sys.stderr, flush=True)
                if getattr(error, "reaction", None) == "fatal":
                    # End the process: later transactions would fail, too, so a new process must continue.
                    raise
                consumer.seek_to_committed()


def loop(servers: str, group: str, source: str, target: str, protocol: str) -> None:
    """Copy as `copier` does, with the library's loop `oncelog.process`."""

    def transform(record: Record) -> Iterator[ProducerRecord]:
        yield ProducerRecord(target, b"debit " + (record.value or b""), partition=0)
        yield ProducerRecord(target, b"credit " + (record.value or b""), partition=1)

    process(
        source,
        transform,
        group_id=group,
        transactional_id=group,
        bootstrap_servers=servers,
        max_records=7,
        linger_ms=0,
        group_protocol=protocol,
    )


def reader(servers: str, group: str, topic: str, seen: str) -> None:
    """Append `partition offset value` to the file `seen` for each record that a consumer gets."""
    settings = {
        "bootstrap.servers": servers,
        "group.id": group,
        "group.instance.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    file = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Consumer(settings) as consumer:
        consumer.subscribe([topic])
        while True:
            records = consumer.poll()
            if not records:
                continue
            lines = [
                b"%d %d %s\n" % (record.partition, record.offset, record.value or b"") for record in records
            ]
            os.write(file, b"".join(lines))
            try:
                consumer.commit()
            except OncelogError as error:
                print(f"not committed: {error!r}", file=sys.stderr, flush=True)


def broker(plan: str, *arguments: str) -> None:
    """Run `oncelog serve`, which kills itself at the step that the next word of the file `plan` names.

    With a number N, the broker dies when N markers of a transaction are written. With `complete`, it dies
    when all markers are written, but not the record that completes the transaction. A word is removed from
    the file before the kill.
    """
    from oncelog.broker.coordinators import transactions
    from oncelog.broker.coordinators.markers import MarkerWriter
    from oncelog.cli.main import main

    coordinator = transactions.TransactionCoordinator
    write_marker, write_markers, complete = (
        MarkerWriter.write,
        coordinator._write_markers,
        coordinator._complete,
    )
    written = 0

    def reach(step: str) -> None:
        words = Path(plan).read_text().split() if Path(plan).exists() else []
        if words and words[0] == step:
            Path(plan).write_text(" ".join(words[1:]))
            os.kill(os.getpid(), signal.SIGKILL)

    def new_markers(*args: Any) -> None:
        nonlocal written
        written = 0
        write_markers(*args)

    def new_marker(*args: Any) -> Any:
        nonlocal written
        reach(str(written))
        written += 1
        return write_marker(*args)

    def new_complete(*args: Any) -> None:
        reach("complete")
        complete(*args)

    MarkerWriter.write = new_marker  # type: ignore[method-assign]
    coordinator._write_markers, coordinator._complete = new_markers, new_complete  # type: ignore[method-assign]
    sys.argv = ["oncelog", *arguments]
    main()


if __name__ == "__main__":
    {"copier": copier, "loop": loop, "reader": reader, "broker": broker}[sys.argv[1]](*sys.argv[2:])
