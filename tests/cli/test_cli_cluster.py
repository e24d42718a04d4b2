"""`oncelog cluster`, `oncelog configs`, `oncelog topics trim` and `sizes`, on our broker and Apache Kafka."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.cli import oncelog
from support.topics import new_topic, producer_of

from oncelog import Admin, TopicPartition
from oncelog.cli.common import size_text
from oncelog.client.admin.blocking import ConfigResource

BEGIN_MS = 1_700_000_000_000


def rows(*arguments: str, servers: str) -> list[dict[str, Any]]:
    got = oncelog(*arguments, "-o", "json", servers=servers)
    assert got.code == 0, got.err
    found: list[dict[str, Any]] = json.loads(got.out)
    return found


def filled(servers: str) -> str:
    """Create a topic of two partitions with five records each, one second apart, from BEGIN_MS on."""
    topic = new_topic(servers, 2)
    with producer_of(servers) as producer:
        for number in range(10):
            at_ms = BEGIN_MS + number // 2 * 1000
            producer.send(topic, b"%d" % number, partition=number % 2, timestamp_ms=at_ms)
    return topic


def starts(servers: str, topic: str) -> list[int | None]:
    with Admin({"bootstrap.servers": servers}) as admin:
        tps = [TopicPartition(topic, partition) for partition in (0, 1)]
        return [found.offset for found in admin.list_offsets(dict.fromkeys(tps, "earliest")).values()]


def test_a_cluster_is_described_with_features_and_versions(servers: str) -> None:
    (broker,) = rows("cluster", "describe", servers=servers)
    assert broker["broker"] == 1 and broker["controller"] is True and len(broker["cluster_id"]) == 22
    assert f"{broker['host']}:{broker['port']}".endswith(servers.rpartition(":")[2])
    features = {row["feature"]: row for row in rows("cluster", "features", servers=servers)}
    assert features["transaction.version"]["level"] == 2
    assert features["transaction.version"]["max_level"] >= 2
    (produce,) = rows("cluster", "versions", "--api", "produce", servers=servers)
    assert (produce["api"], produce["key"], produce["broker"]) == ("Produce", 0, 1)
    assert produce["min_version"] < produce["max_version"]
    assert rows("cluster", "versions", "--api", "0", servers=servers) == [produce]
    every = rows("cluster", "versions", servers=servers)
    assert produce in every and len(every) > 30
    unknown = oncelog("cluster", "versions", "--api", "Prodcue", servers=servers)
    assert unknown.code == 1 and "no broker has the API Prodcue" in unknown.err


def test_settings_are_described_with_default_and_meaning(servers: str) -> None:
    topic = new_topic(servers, segment_bytes=2_097_152)
    (own,) = [
        row for row in rows("configs", "describe", "--topic", topic, servers=servers)
        if row["source"] == "topic"
    ]  # fmt: skip
    assert (own["name"], own["value"], own["default"]) == ("segment.bytes", "2097152", "1073741824")
    assert (own["resource"], own["type"], own["read_only"]) == (f"topic {topic}", "int", False)
    assert "segment" in own["meaning"].lower()
    named = rows(
        "configs", "describe", "--topic", topic, "--broker", "1", "max.message.bytes", servers=servers
    )
    assert [(row["resource"], row["value"]) for row in named] == [(f"topic {topic}", "1048588")]
    every = rows("configs", "describe", "--broker", "1", "--all", servers=servers)
    assert {"num.partitions", "log.retention.ms"} <= {row["name"] for row in every}
    typo = oncelog("configs", "describe", "--topic", topic, "retention.m", servers=servers)
    assert typo.code == 1 and "no setting 'retention.m'; did you mean retention.ms?" in typo.err


def test_settings_are_altered_only_with_yes(servers: str) -> None:
    topic = new_topic(servers, retention_ms=5000)
    resource = ConfigResource("topic", topic)

    def value() -> str | None:
        with Admin({"bootstrap.servers": servers}) as admin:
            return admin.describe_configs(resource)[resource].entries["retention.ms"].value

    change = ["configs", "alter", "--topic", topic, "--set", "retention.ms=6000", "--delete", "segment.bytes"]
    dry = oncelog(*change, "-o", "json", servers=servers)
    assert json.loads(dry.out) == [
        {"resource": f"topic {topic}", "name": "retention.ms", "value": "5000", "new_value": "6000"},
        {
            "resource": f"topic {topic}",
            "name": "segment.bytes",
            "value": "1073741824",
            "new_value": "(default)",
        },
    ]
    assert "nothing was changed; repeat with --yes" in dry.err and value() == "5000"
    wrong = oncelog("configs", "alter", "--topic", topic, "--set", "retention.ms=soon", servers=servers)
    assert wrong.code == 1 and "INVALID_CONFIG" in wrong.err, "the broker checks a dry run, too"
    assert oncelog(*change, "--yes", servers=servers).code == 0
    assert value() == "6000"


def test_a_setting_of_the_whole_cluster_is_altered(ours: str) -> None:
    cluster = ["--cluster", "-o", "json"]
    assert rows("configs", "describe", "--cluster", servers=ours) == []
    assert (
        oncelog("configs", "alter", *cluster, "--set", "log.retention.ms=1234567", "--yes", servers=ours).code
        == 0
    )
    (row,) = rows("configs", "describe", "--cluster", servers=ours)
    assert (row["resource"], row["name"], row["value"]) == ("cluster", "log.retention.ms", "1234567")
    assert (
        oncelog("configs", "alter", *cluster, "--delete", "log.retention.ms", "--yes", servers=ours).code == 0
    )
    assert rows("configs", "describe", "--cluster", servers=ours) == []


@pytest.mark.parametrize(
    "arguments",
    [["describe"], ["describe", "--broker", "x"], ["alter", "--set", "a=b"], ["alter", "--topic", "t"],
     ["alter", "--topic", "t", "--set", "a"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_options_of_configs_are_usage_errors(arguments: list[str], ours: str) -> None:
    assert oncelog("configs", *arguments, servers=ours).code == 2


@pytest.mark.parametrize(
    ("where", "way", "wanted"),
    [
        ("{}", ["--to-offset", "2"], [2, 2]),
        ("{}:1", ["--to-offset", "99"], [0, 5]),
        ("{}:0,1", ["--before", "2023-11-14T22:13:23Z"], [3, 3]),
        ("{}", ["--before", "now"], [5, 5]),
        ("{}:0", ["--to-end"], [5, 0]),
        ("{}", ["--before", "0"], [0, 0]),
    ],
    ids=str,
)
def test_a_topic_is_trimmed_only_with_yes(
    servers: str, where: str, way: list[str], wanted: list[int]
) -> None:
    topic = filled(servers)
    trim = ["topics", "trim", where.format(topic), *way, "-o", "json"]
    dry = oncelog(*trim, servers=servers)
    assert "nothing was deleted; repeat with --yes to delete on the cluster at" in dry.err
    planned = {row["partition"]: row["new_start_offset"] for row in json.loads(dry.out)}
    assert planned == {partition: wanted[partition] for partition in planned}
    assert starts(servers, topic) == [0, 0]
    assert oncelog(*trim, "--yes", servers=servers).code == 0
    assert starts(servers, topic) == wanted
    again = json.loads(oncelog(*trim, "--yes", servers=servers).out)
    assert [row["offsets"] for row in again] == [0] * len(again)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["t"], 2, "use exactly one of --to-offset, --before and --to-end"),
        (["t", "--to-end", "--to-offset", "1"], 2, "use exactly one of"),
        (["t:x", "--to-end"], 2, "'t:x': expected TOPIC"),
        (["t", "--before", "soon"], 2, "'soon' is not a time"),
        (["{}:7", "--to-end"], 1, "has no partition 7, but 0 to 1"),
        (["nosuch", "--to-end"], 1, "topic 'nosuch' does not exist"),
    ],
)
def test_wrong_trims_are_refused(ours: str, arguments: list[str], code: int, says: str) -> None:
    topic = new_topic(ours, 2)
    got = oncelog("topics", "trim", *(part.format(topic) for part in arguments), servers=ours)
    assert got.code == code and says in got.err


def test_sizes_are_shown_by_topic_and_partition(servers: str) -> None:
    large, small = new_topic(servers, 2), new_topic(servers, 1)
    with producer_of(servers) as producer:
        producer.send(large, b"x" * 100_000, partition=1)
        producer.send(small, b"x")
    listed = [row for row in rows("topics", "sizes", servers=servers) if row["topic"] in (large, small)]
    assert [(row["topic"], row["partitions"], row["replicas"]) for row in listed] == [
        (large, 2, 2),
        (small, 1, 1),
    ]
    assert listed[0]["bytes"] > 100_000 and listed[0]["size"].endswith(" KiB")
    parts = rows("topics", "sizes", large, "--partitions", servers=servers)
    assert [(row["partition"], row["broker"]) for row in parts] == [(1, 1), (0, 1)]
    assert sum(row["bytes"] for row in parts) == listed[0]["bytes"] and parts[0]["directory"]
    gone = oncelog("topics", "sizes", "nosuch", servers=servers)
    assert gone.code == 1 and "topic 'nosuch' does not exist" in gone.err


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (3 << 40, "3.0 TiB")],
)
def test_a_size_is_shown_in_a_readable_unit(count: int, text: str) -> None:
    assert size_text(count) == text
