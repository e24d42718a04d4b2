"""A broker is killed while a client produces, and is started again: each record is stored once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from support.foreign.functions import READERS, WRITERS, Row, make_topic, stored_batches

from oncelog.testing.broker_process import BrokerProcess

PARTITIONS = 12
RECORDS = 8_000
PATIENCE_S = 120


class KillOnce:
    """Counts acknowledgements. At number `at`, it lets the test kill the broker, and the client waits for the
    kill.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.reached, self.killed = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.reached.set()
            self.killed.wait(PATIENCE_S)


@pytest.mark.behaviour("I17", "I1")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("writer", WRITERS)
def test_no_acknowledged_record_is_lost_when_the_broker_is_killed_while_producing(
    tmp_path: Path, writer: str
) -> None:
    rows = [Row(i % PARTITIONS, b"%d" % i, b"v" * 300) for i in range(RECORDS)]
    with BrokerProcess(tmp_path / "data") as broker:
        make_topic(broker.bootstrap_servers, "killed", PARTITIONS)
        acknowledged = KillOnce(RECORDS // 4)
        failed: list[Exception] = []

        def produce() -> None:
            try:
                WRITERS[writer](broker.bootstrap_servers, "killed", rows, "lz4", acknowledged)
            except Exception as error:
                failed.append(error)
                acknowledged.reached.set()

        thread = threading.Thread(target=produce)
        thread.start()
        assert acknowledged.reached.wait(PATIENCE_S)
        before = acknowledged.count
        broker.kill()
        acknowledged.killed.set()
        broker.start()
        thread.join(PATIENCE_S)
        assert not failed
        assert before < RECORDS, "everything was acknowledged before the kill: the test shows nothing"
        seen = Counter(row.key for row in READERS["oncelog"](broker.bootstrap_servers, "killed", PARTITIONS))
        assert {key: n for key, n in seen.items() if n > 1} == {}, "doubled"
        assert len(seen) == RECORDS, "lost"
        for batches in stored_batches(broker.bootstrap_servers, "killed", PARTITIONS):
            assert [h.base_offset for h in batches] == sorted(h.base_offset for h in batches)
