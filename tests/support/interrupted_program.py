"""A script in which real signals interrupt a consumer.

    python interrupted_program.py BOOTSTRAP TOPIC GROUP PARTITIONS COUNT poll|iterate|arrow PROTOCOL|assign

It prints the offsets that the application got, as JSON {partition: [offset, ...]}, the number of interrupts,
and the committed offsets at the end.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
import sys
from typing import Any

from oncelog import Consumer, TopicPartition


class Armed:
    """A handler of SIGINT and SIGALRM that raises KeyboardInterrupt while `is_on` is True."""

    def __init__(self, seed: int) -> None:
        self.is_on = False
        self.count = 0
        self.chance = random.Random(seed)
        signal.signal(signal.SIGALRM, self)
        signal.signal(signal.SIGINT, self)

    def __call__(self, *_: object) -> None:
        if self.is_on:
            self.count += 1
            raise KeyboardInterrupt

    def fire_soon(self) -> None:
        """Send signals that raise KeyboardInterrupt: the first within 1 ms, and then one every 0.1 s.

        Python ignores an exception that is raised in a weak reference's callback, so one signal may not be
        enough.
        """
        self.is_on = True
        signal.setitimer(signal.ITIMER_REAL, 10 ** self.chance.uniform(-5, -3), 0.1)


def read(consumer: Consumer, how: str, armed: Armed, given: list[tuple[int, int]]) -> None:
    """Read until an interrupt. Each record is stored in one step, so no interrupt can lose a record between
    two steps.
    """
    if how == "iterate":
        try:
            armed.fire_soon()
            for record in consumer:
                given.append(record[1:3])
        except KeyboardInterrupt:
            armed.is_on = False
        return
    rows: Any = None
    try:
        armed.fire_soon()
        if how == "poll":
            rows = consumer.poll(1, max_records=7)
        elif how == "arrow":
            rows = consumer.poll_arrow(1)
        armed.is_on = False
    except KeyboardInterrupt:
        armed.is_on = False
    if how == "arrow" and rows is not None:
        given += zip(rows.column("partition").to_pylist(), rows.column("offset").to_pylist(), strict=True)
    elif rows:
        given += [record[1:3] for record in rows]


def main(servers: str, topic: str, group: str, partitions: int, count: int, how: str, protocol: str) -> None:
    faulthandler.register(signal.SIGUSR1)
    armed = Armed(count)
    tps = [TopicPartition(topic, partition) for partition in range(partitions)]
    config: dict[str, object] = {
        "bootstrap.servers": servers, "auto.offset.reset": "earliest", "group.id": group,
        "max.poll.records": 20, "auto.commit.interval.ms": 5, "max.partition.fetch.bytes": 1000,
    }  # fmt: skip
    if protocol != "assign":
        config["group.protocol"] = protocol
    given: list[tuple[int, int]] = []
    with Consumer(config) as consumer:
        if protocol == "assign":
            consumer.assign(tps)
        else:
            consumer.subscribe([topic], on_assigned=lambda _: None)
        while len(given) < count:
            read(consumer, how, armed, given)
        armed.is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    by_partition = {tp.partition: [offset for p, offset in given if p == tp.partition] for tp in tps}
    with Consumer(config) as consumer:
        committed = [each.offset if each else None for each in consumer.committed(tps).values()]
    print(json.dumps({"given": by_partition, "interrupts": armed.count, "committed": committed}))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:8])
