"""Transactions while the broker or the producer is killed by SIGKILL: each is visible as a whole or not at
all.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from support.broker import wait_until
from support.topics import new_topic, read
from support.wait import pause

from oncelog import Producer
from oncelog.testing.broker_process import BrokerProcess

PARTITIONS = 3
KILLS = 12

_CHILD = """
import sys
from oncelog import Producer
producer = Producer({"bootstrap.servers": sys.argv[1], "transactional.id": "killed"}, linger_ms=0)
producer.init_transactions()
number = int(sys.argv[3])
while True:
    with producer.transaction():
        for partition in range(3):
            producer.send(sys.argv[2], b"%d" % number, partition=partition)
    print(number, flush=True)
    number += 1
"""


def whole(servers: str, topic: str) -> list[int]:
    """Return the numbers of the visible transactions in order.

    Check that each is in every partition exactly once.
    """
    seen = Counter((record.partition, int(record.value or b"")) for record in read(servers, topic))
    assert set(seen.values()) <= {1}, "a record twice"
    numbers = {number for _, number in seen}
    assert len(seen) == PARTITIONS * len(numbers), "a transaction in some partitions only"
    return [int(record.value or b"") for record in read(servers, topic) if record.partition == 0]


@pytest.mark.behaviour("T6")
def test_transactions_stay_whole_over_repeated_kills_of_the_broker(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        topic = new_topic(broker.bootstrap_servers, PARTITIONS)
        stopped, acknowledged = threading.Event(), []
        settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "steady"}
        with Producer(settings, linger_ms=0, retry_backoff_ms=10, retry_backoff_max_ms=50) as producer:
            producer.init_transactions()

            def work() -> None:
                number = 0
                while not stopped.is_set():
                    with producer.transaction():
                        for partition in range(PARTITIONS):
                            producer.send(topic, b"%d" % number, partition=partition)
                    acknowledged.append(number)
                    number += 1

            worker = threading.Thread(target=work)
            worker.start()
            chance = random.Random(7)
            for _ in range(KILLS):
                pause(chance.uniform(0.05, 0.3))
                broker.kill()
                broker.start()
            try:  # the limit is long because a machine may be slow
                wait_until(lambda: len(acknowledged) > KILLS, 200)
            finally:
                stopped.set()
                worker.join(120)
            assert not worker.is_alive()
        assert whole(broker.bootstrap_servers, topic) == acknowledged


@pytest.mark.behaviour("T3", "T6")
def test_transactions_stay_whole_over_repeated_kills_of_the_producer(tmp_path: Path) -> None:
    """Check that the successor aborts the open transaction, and that all acknowledged commits are visible."""
    with BrokerProcess(tmp_path / "data") as broker:
        topic = new_topic(broker.bootstrap_servers, PARTITIONS)
        told: list[int] = []
        chance = random.Random(11)
        for _ in range(5):
            first = (
                told[-1] + 2 if told else 0
            )  # the transaction after the last acknowledged one may be committed, too
            child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, broker.bootstrap_servers, topic, str(first)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            told.append(int(child.stdout.readline()))
            pause(chance.uniform(0.0, 0.1))
            child.kill()
            told += [int(line) for line in child.stdout.read().splitlines()]
            child.wait(10)
            child.stdout.close()
        with Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "killed"}) as last:
            last.init_transactions()
        seen = whole(broker.bootstrap_servers, topic)
        assert set(told) <= set(seen)
        assert seen == sorted(seen)
