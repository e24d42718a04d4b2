"""A process that copies a topic in transactions of a fixed size, until its group has consumed the topic to
the end.

Its argument is a JSON object: servers, source, target, partitions (of each topic), group, and name (the
transactional id). `size` is records per transaction, and `pause` is seconds before a commit. `share` is the
list of its partitions, or null to consume as a member of the group. It prints the record count of each
transaction that it committed. SIGTERM ends it cleanly, even within a transaction.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from oncelog import Consumer, Producer, Record, TopicPartition
from oncelog.errors import OncelogError

QUICK = {"retry_backoff_ms": 10, "retry_backoff_max_ms": 100}


class Stopped(BaseException):
    """Raised when SIGTERM arrives."""


def stop(*_: object) -> None:
    raise Stopped


class Gathered:
    """Records that were polled for one transaction. A rebalance discards them.

    The transaction would be sent with the group metadata of the new generation. In that generation, another
    member may own the partitions of these records.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []

    def drop(self, _: list[TopicPartition]) -> None:
        self.records.clear()

    def take(self, consumer: Consumer, size: int) -> list[Record]:
        """Return `size` records, or fewer if there are no more."""
        self.records.clear()
        while len(self.records) < size:
            more = consumer.poll(0.2, max_records=size - len(self.records))
            if not more:
                break
            self.records += more
        return self.records


def copy(told: Any, consumer: Consumer, producer: Producer, records: list[Record]) -> None:
    """Copy records in one transaction. One transaction in six fails halfway on purpose."""
    fails_at = random.randrange(6 * len(records))
    with producer.transaction():
        for number, record in enumerate(records):
            if number == fails_at:
                raise InterruptedError
            producer.send(
                told.target, record.value, partition=int(record.value or b"") // 7 % told.partitions
            )
        ends = {TopicPartition(each.topic, each.partition): each.offset + 1 for each in records}
        group = told.group if told.share else consumer.group_metadata()
        producer.send_offsets_to_transaction(ends, group)
        time.sleep(told.pause)


def is_all_copied(told: Any, consumer: Consumer) -> bool:
    partitions = [TopicPartition(told.source, each) for each in range(told.partitions)]
    found, ends = consumer.committed(partitions), consumer.end_offsets(partitions)
    return all((at := found[each]) is not None and at.offset >= end for each, end in ends.items())


def go_back(consumer: Consumer) -> None:
    while True:
        try:
            consumer.seek_to_committed()
        except OncelogError:
            continue
        return


def work(told: Any, consumer: Consumer, producer: Producer) -> None:
    """Copy until everything is copied. A fatal error of the producer ends the process, and the test starts
    another.
    """
    gathered = Gathered()
    producer.init_transactions()
    if told.share:
        consumer.assign([TopicPartition(told.source, each) for each in told.share])
        go_back(consumer)
    else:
        consumer.subscribe([told.source], on_revoked=gathered.drop)
    while True:
        records = gathered.take(consumer, told.size)
        if not records:
            if is_all_copied(told, consumer):
                return
            continue
        try:
            copy(told, consumer, producer, records)
        except (InterruptedError, OncelogError) as error:
            if getattr(error, "reaction", None) == "fatal":
                raise
            go_back(consumer)
        else:
            print(len(records), flush=True)


def main() -> None:
    told = SimpleNamespace(**json.loads(sys.argv[1]))
    shared = {"bootstrap.servers": told.servers}
    reading = {"group.id": told.group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    signal.signal(signal.SIGTERM, stop)
    try:
        with (
            Consumer(
                shared | reading, session_timeout_ms=1000, heartbeat_interval_ms=100, **QUICK
            ) as consumer,
            Producer(shared, transactional_id=told.name, **QUICK) as producer,
        ):
            work(told, consumer, producer)
    except Stopped:
        pass


main()
