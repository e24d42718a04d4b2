"""`oncelog audit` on a real broker with a real Spark session: output and exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.spark.topics import create_topic, fill, records, store

import oncelog
from oncelog.cli.main import cli
from oncelog.errors import UnknownTopicOrPartition
from oncelog.wire.batch import build_batch

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P5")]


def audit(bootstrap: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", *arguments, "-b", bootstrap])


def test_a_clean_audit_exits_0_with_a_summary(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    store(bootstrap, topic, [build_batch(records(0, 4), producer_id=7, producer_epoch=0, base_sequence=0)])
    run = audit(bootstrap, topic)
    assert run.exit_code == 0, run.output
    assert run.stdout == ""
    assert run.stderr.splitlines() == [
        "4 records in 1 batches of 1 partitions, 1 producer sequences",
        "verdict: clean (by its header each numbered batch occurs once, in order and undamaged; "
        "the contents of the records were not read)",
    ]


def test_violations_are_printed_with_offsets_and_exit_3(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 5)
    fill(bootstrap, topic, 2, 2)
    run = audit(bootstrap, topic, "--keys", "-o", "json")
    assert run.exit_code == 3, run.output
    found = [
        (row["kind"], row["key"], row["other_offset"], row["base_offset"]) for row in json.loads(run.stdout)
    ]
    assert found == [("repeated_key", "k2", 2, 5), ("repeated_key", "k3", 3, 6)]
    assert "verdict: violated (2 findings)" in run.stderr


def test_a_topic_that_does_not_exist_is_an_error(spark: Any, shared_broker: oncelog.Broker) -> None:
    run = audit(shared_broker.bootstrap_servers, "no-such-topic")
    assert isinstance(run.exception, UnknownTopicOrPartition)
    assert "no-such-topic" in str(run.exception)
