"""`oncelog serve --config` reads a server.properties of Apache Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncelog.broker.settings.listeners import parse_listeners
from oncelog.cli.kafka_properties import adapt
from oncelog.cli.properties import read_properties
from oncelog.config import BROKER
from oncelog.errors import ConfigError

# The settings of config/server.properties of Apache Kafka 4.3, without its comments.
STOCK = """
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=localhost:9093
listeners=PLAINTEXT://:9092,CONTROLLER://:9093
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
log.dirs=/tmp/kraft-combined-logs
num.partitions=1
num.recovery.threads.per.data.dir=1
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.retention.hours=168
log.segment.bytes=1073741824
log.retention.check.interval.ms=300000
"""


def test_a_stock_file_of_apache_kafka_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    path.write_text(STOCK)
    found = adapt(read_properties(path))
    settings = BROKER.parse(found.settings)
    assert settings["log.retention.ms"] == 168 * 3_600_000 and settings["node.id"] == 1
    (listener,) = parse_listeners(settings, "host")
    assert (listener.name, listener.host, listener.port) == ("PLAINTEXT", "", 9092)
    assert listener.advertised == ("localhost", 9092)
    assert found.without_effect == [
        "controller.listener.names",
        "controller.quorum.bootstrap.servers",
        "inter.broker.listener.name",
        "log.dirs",
        "num.io.threads",
        "num.network.threads",
        "num.recovery.threads.per.data.dir",
        "process.roles",
        "share.coordinator.state.topic.min.isr",
        "share.coordinator.state.topic.replication.factor",
        "socket.receive.buffer.bytes",
        "socket.send.buffer.bytes",
    ]


def test_times_in_hours_and_minutes_become_ms_and_ms_wins() -> None:
    hours = {"log.retention.hours": "1", "log.roll.hours": "2"}
    assert adapt(hours).settings == {"log.retention.ms": "3600000", "log.roll.ms": "7200000"}
    both = {"log.retention.hours": "1", "log.retention.minutes": "5"}
    assert adapt(both).settings == {"log.retention.ms": "300000"}
    assert adapt({**both, "log.retention.ms": "7"}).settings == {"log.retention.ms": "7"}
    assert adapt({"log.retention.hours": "-1"}).settings == {"log.retention.ms": "-1"}
    with pytest.raises(ConfigError, match=r"log\.retention\.hours"):
        adapt({"log.retention.hours": "a week"})


@pytest.mark.parametrize("key", ["log.retention.hours", "log.retention.minutes", "log.roll.hours"])
def test_a_time_of_0_hours_or_minutes_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="must not be 0"):
        adapt({key: "0"})
    unused = {key: "0", "log.retention.ms": "7", "log.roll.ms": "8"}
    assert adapt(unused).settings == {"log.retention.ms": "7", "log.roll.ms": "8"}


def test_an_older_file_names_the_node_by_broker_id() -> None:
    found = adapt({"broker.id": "3", "zookeeper.connect": "localhost:2181", "log.dir": "/data"})
    assert found.settings == {"node.id": "3"}
    assert found.without_effect == ["log.dir", "zookeeper.connect"]


@pytest.mark.parametrize(
    "key",
    [
        "alter.config.policy.class.name",
        "create.topic.policy.class.name",
        "delegation.token.secret.key",
        "log.retention.hour",
        "max.connection.creation.rate",
        "principal.builder.class",
        "sasl.server.callback.handler.class",
        "ssl.cipher.suites",
        "ssl.keystore.password",
    ],
)
def test_a_setting_that_restricts_something_and_a_misspelt_one_stay_errors(key: str) -> None:
    found = adapt({key: "5"})
    assert found.without_effect == []
    with pytest.raises(ConfigError, match="unknown broker setting"):
        BROKER.parse(found.settings)


def test_a_feature_that_is_switched_on_is_an_error_and_switched_off_is_left_out() -> None:
    for key in ("remote.log.storage.system.enable", "transaction.two.phase.commit.enable"):
        assert adapt({key: "False"}).without_effect == [key]
        assert adapt({key: "true"}).settings == {key: "true"}


def test_a_file_for_a_controller_is_refused() -> None:
    with pytest.raises(ConfigError, match="for a controller"):
        adapt({"process.roles": "controller"})


def test_settings_of_the_controllers_listeners_are_left_out() -> None:
    own = {
        "listener.name.controller.ssl.keystore.location": "/c.pem",
        "listener.name.CONTROLLER.ssl.client.auth": "required",
        "listener.name.controller.plain.sasl.jaas.config": "x",
    }
    kept = {"listener.name.controllers.ssl.client.auth": "none", "listener.name.ssl.ssl.client.auth": "none"}
    found = adapt({"controller.listener.names": "CONTROLLER", **own, **kept})
    assert found.settings == kept
    assert found.without_effect == sorted(["controller.listener.names", *own])
    assert adapt(kept | own).settings == kept | own


def test_settings_of_this_broker_pass_unchanged() -> None:
    ours = {"oncelog.metrics.names": "true", "listeners": "127.0.0.1:0", "log.retention.ms": "5"}
    assert adapt(ours).settings == ours
    assert all(adapt({key: "1"}).without_effect == [] for key in BROKER.key_names())
