"""Apache Kafka's own command-line tools against our broker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import run_tool
from support.broker import RawClient, batch

from oncelog import Broker
from oncelog.errors import OncelogError

pytestmark = pytest.mark.usefixtures("kafka_class_path")

TOOLS = "org.apache.kafka.tools."


@pytest.fixture
def server(broker: Broker) -> list[str]:
    return ["--bootstrap-server", broker.bootstrap_servers]


def test_kafka_topics_creates_alters_and_deletes(server: list[str]) -> None:
    topics = TOOLS + "TopicCommand"
    create = ["--create", "--topic", "tools", "--partitions", "2", "--config", "retention.ms=5000"]
    assert "Created topic tools" in run_tool(topics, *server, *create)
    with pytest.raises(OncelogError, match="already"):
        run_tool(topics, *server, *create)
    assert "tools" in run_tool(topics, *server, "--list").split()
    run_tool(topics, *server, "--alter", "--topic", "tools", "--partitions", "3")
    described = run_tool(topics, *server, "--describe", "--topic", "tools")
    assert "PartitionCount: 3" in described and "retention.ms=5000" in described
    assert len(re.findall(r"Leader: 1\s+Replicas: 1\s+Isr: 1", described)) == 3
    run_tool(topics, *server, "--delete", "--topic", "tools")
    assert "tools" not in run_tool(topics, *server, "--list").split()


def test_kafka_configs_changes_topic_settings(broker: Broker, server: list[str]) -> None:
    with RawClient(broker.bootstrap_servers) as client:
        client.create_topic("configured")
    configs, topic = "kafka.admin.ConfigCommand", ["--entity-type", "topics", "--entity-name", "configured"]
    add = "retention.ms=7000,cleanup.policy=[compact,delete]"
    run_tool(configs, *server, *topic, "--alter", "--add-config", add)
    described = run_tool(configs, *server, *topic, "--describe")
    assert "retention.ms=7000" in described and "cleanup.policy=compact,delete" in described
    run_tool(configs, *server, *topic, "--alter", "--delete-config", "retention.ms")
    described = run_tool(configs, *server, *topic, "--describe")
    assert "retention.ms" not in described and "DYNAMIC_TOPIC_CONFIG" in described
    everything = run_tool(configs, *server, *topic, "--describe", "--all")
    assert "retention.ms=604800000" in everything
    of_broker = ["--entity-type", "brokers", "--entity-name", "1"]
    assert "log.segment.bytes" in run_tool(configs, *server, *of_broker, "--describe", "--all")


def test_log_dirs_and_offsets_show_what_the_perf_test_produced(broker: Broker, server: list[str]) -> None:
    with RawClient(broker.bootstrap_servers) as client:
        client.create_topic("perf", 3)
    sizes = ["--topic", "perf", "--num-records", "3000", "--record-size", "100", "--throughput", "-1"]
    printed = run_tool(
        TOOLS + "ProducerPerformance", *sizes, "--producer-props", f"bootstrap.servers={server[1]}"
    )
    assert "3000 records sent" in printed

    offsets = run_tool(TOOLS + "GetOffsetShell", *server, "--topic", "perf").split()
    assert sum(int(line.split(":")[2]) for line in offsets) == 3000
    earliest = run_tool(TOOLS + "GetOffsetShell", *server, "--topic", "perf", "--time", "earliest")
    assert earliest.split() == ["perf:0:0", "perf:1:0", "perf:2:0"]

    at = ["--topic", "perf", "--partition", "1"]
    described = run_tool(TOOLS + "TransactionsCommand", *server, "describe-producers", *at)
    heading, producer = (re.split(r"\s+", line) for line in described.splitlines()[:2])
    state = dict(zip(heading, producer, strict=True))
    end = int(next(line for line in offsets if line.startswith("perf:1:")).split(":")[2])
    assert (state["ProducerEpoch"], state["LastSequence"]) == ("0", str(end - 1))

    printed = run_tool(TOOLS + "LogDirsCommand", *server, "--describe", "--topic-list", "perf")
    (found,) = json.loads(printed.splitlines()[-1])["brokers"]
    partitions = found["logDirs"][0]["partitions"]
    assert {partition["partition"] for partition in partitions} == {"perf-0", "perf-1", "perf-2"}
    assert sum(partition["size"] for partition in partitions) > 3000 * 100


def test_kafka_delete_records_moves_the_log_start(
    broker: Broker, server: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with RawClient(broker.bootstrap_servers) as client:
        client.create_topic("shrinking")
        client.produce("shrinking", batch(*[b"%d" % n for n in range(10)]))
    wanted = {"partitions": [{"topic": "shrinking", "partition": 0, "offset": 4}], "version": 1}
    file = tmp_path_factory.mktemp("delete") / "offsets.json"
    file.write_text(json.dumps(wanted))
    printed = run_tool(TOOLS + "DeleteRecordsCommand", *server, "--offset-json-file", str(file))
    assert re.search(r"shrinking-0\s+low_watermark: 4", printed)
    with RawClient(broker.bootstrap_servers) as client:
        assert client.offset("shrinking", -2) == 4


def test_the_console_consumer_reads_what_the_console_producer_wrote(
    broker: Broker, server: list[str]
) -> None:
    with RawClient(broker.bootstrap_servers) as client:
        client.create_topic("console")
    lines = [f"k{number}:line {number}" for number in range(20)]
    keyed = ["--reader-property", "parse.key=true", "--reader-property", "key.separator=:"]
    run_tool(TOOLS + "ConsoleProducer", *server, "--topic", "console", *keyed, text="\n".join(lines) + "\n")
    take = ["--topic", "console", "--partition", "0", "--offset", "5", "--max-messages", "15"]
    show = ["--formatter-property", "print.key=true", "--formatter-property", "key.separator=:"]
    printed = run_tool(TOOLS + "consumer.ConsoleConsumer", *server, *take, *show)
    assert printed.splitlines() == lines[5:]


def test_the_verifiable_producer_succeeds(broker: Broker, server: list[str]) -> None:
    with RawClient(broker.bootstrap_servers) as client:
        client.create_topic("verified")
    printed = run_tool(TOOLS + "VerifiableProducer", *server, "--topic", "verified", "--max-messages", "200")
    rows = [json.loads(line) for line in printed.splitlines()]
    offsets = [row["offset"] for row in rows if row["name"] == "producer_send_success"]
    assert sorted(offsets) == list(range(200))


def test_versions_and_the_cluster_id_are_read(server: list[str]) -> None:
    versions = run_tool(TOOLS + "BrokerApiVersionsCommand", *server)
    assert re.search(r"Produce\(0\): 0 to 13 \[usable: 13\]", versions)
    assert re.search(r"Fetch\(1\): 4 to \d+ \[usable: \d+\]", versions)
    cluster = run_tool(TOOLS + "ClusterTool", "cluster-id", *server)
    assert re.search(r"Cluster ID: [\w-]{22}", cluster)


def test_a_java_producer_splits_a_batch_that_is_too_large(broker: Broker, tmp_path: Path) -> None:
    """Java's producer limits a batch by its estimated compressed size, so batches get more and more records.

    The broker must decompress these batches, and refuses any with more than 400,000 bytes decompressed.
    """
    count = 60_000
    payload = tmp_path / "payload"
    payload.write_text("v" * 200)
    with RawClient(broker.bootstrap_servers) as client:
        client.create_topic("split", compression_type="gzip", max_message_bytes=100_000)
        wanted = ["--topic", "split", "--num-records", str(count), "--payload-file", str(payload)]
        settings = ["compression.type=zstd", "batch.size=390000", "linger.ms=100", "acks=all"]
        servers = f"bootstrap.servers={broker.bootstrap_servers}"
        rate = ["--throughput", "-1", "--producer-props", servers, *settings]
        run_tool(TOOLS + "ProducerPerformance", *wanted, *rate)
        assert client.offset("split") == count
