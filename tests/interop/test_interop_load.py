"""Loads into Apache Kafka that are killed, continued, repeated or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.cli import oncelog
from support.load import PARTITIONS, Loader, content, expected, write_csv
from support.topics import new_topic

ROWS = 2_000


@pytest.mark.behaviour("P4")
def test_a_killed_load_continues_without_loss_or_duplicate(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    servers = apache_kafka.bootstrap_servers
    topic = new_topic(servers, PARTITIONS)
    file = write_csv(tmp_path / "rows.csv", 0, ROWS)
    for _ in range(2):
        loader = Loader(servers, topic, topic, [file])
        loader.wait_for_transaction()
        loader.kill()
    command = ("load", str(file), "--topic", topic, "--id", topic, "--key", "k")
    done = oncelog(*command, servers=servers)
    assert (done.code, done.err) == (0, "")
    again = oncelog(*command, servers=servers)
    assert (again.code, "is complete" in again.err) == (0, True)
    # Apache Kafka may answer a commit before its markers are written. InitProducerId waits for them.
    assert content(servers, topic) == expected(ROWS)
    write_csv(file, 1, ROWS)
    refused = oncelog(*command, servers=servers)
    assert (refused.code, "changed since it was read" in refused.err) == (1, True)
    assert content(servers, topic) == expected(ROWS)
