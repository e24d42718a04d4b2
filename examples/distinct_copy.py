"""Copy a topic, and leave out the records that an at-least-once job wrote to it more than once.

    python examples/distinct_copy.py HOST:PORT SOURCE TARGET

The job's records need the headers of `oncelog.spark.provenance_headers()`. Each transaction holds the copied
records, the positions and the state of the filter. So this program may be killed and started again at any
time: the target has each record once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from oncelog import Consumer, Producer, ProvenanceFilter, TopicPartition


def copy(servers: str, source: str, target: str, keep_on: Callable[[], bool] = lambda: True) -> None:
    name = f"distinct-{source}-{target}"
    reading = {
        "bootstrap.servers": servers,
        "group.id": name,
        "group.instance.id": name,  # a successor gets the partitions at once
        "auto.offset.reset": "earliest",  # without a committed state, the whole topic must be read
        "enable.auto.commit": False,
    }
    writing = {"bootstrap.servers": servers, "transactional.id": name}
    distinct = ProvenanceFilter()
    with Consumer(reading) as consumer, Producer(writing) as producer:

        def restore(partitions: list[TopicPartition]) -> None:
            for tp, committed in consumer.committed(partitions).items():
                distinct.start(tp, committed)

        producer.init_transactions()
        consumer.subscribe([source], on_assigned=restore)
        while keep_on():
            if not (records := consumer.poll()):
                continue
            # After any error the program ends. Its successor begins at the committed positions and states.
            with producer.transaction():
                for record in filter(distinct.accept, records):
                    producer.send(target, record.value, key=record.key, headers=record.headers)
                read = {TopicPartition(record.topic, record.partition) for record in records}
                ends = {tp: distinct.committable(tp) for tp in read}
                producer.send_offsets_to_transaction(ends, consumer.group_metadata())


if __name__ == "__main__":
    copy(*sys.argv[1:4])
