"""Several listeners: each has its protocol, settings and address, and all lead to one node."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.broker import RawClient
from support.security.brokers import (
    AUTHORIZER,
    PASSWORD,
    Certificates,
    add_users,
    make_certificates,
)

import oncelog
from oncelog.broker.settings.listeners import parse_listeners
from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.types import ConfigResource
from oncelog.config import BROKER
from oncelog.errors import AuthenticationError, ConfigError, StorageError, TopicAuthorizationFailed
from oncelog.server.embedded import Broker, checked_listeners
from oncelog.server.listener import AcceptedConnection, listen
from oncelog.wire.messages import DescribeClusterRequest, FindCoordinatorRequest, MetadataRequest

MAP = "listener.security.protocol.map"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["PLAINTEXT PLAINTEXT 127.0.0.1:9092"]),
        ({"security.protocol": "SSL", "listeners": "h:1"}, ["SSL SSL h:1"]),
        (
            {"listeners": "PLAINTEXT://h:1,sasl_ssl://:2"},
            ["PLAINTEXT PLAINTEXT h:1", "SASL_SSL SASL_SSL me:2"],
        ),
        ({"listeners": "SSL://[::1]:1, in://h:2", MAP: "IN:SASL_SSL"}, ["SSL SSL ::1:1", "IN SASL_SSL h:2"]),
        ({"advertised.listeners": "far:7"}, ["PLAINTEXT PLAINTEXT far:7"]),
        (
            {"listeners": "SSL://0.0.0.0:1,PLAINTEXT://h:2", "advertised.listeners": "SSL://far:7"},
            ["SSL SSL far:7", "PLAINTEXT PLAINTEXT h:2"],
        ),
    ],
)
def test_listener_addresses_are_parsed(given: dict[str, str], expected: Sequence[str]) -> None:
    found = parse_listeners(BROKER.parse(given), "me")
    assert expected == [
        f"{each.name} {each.settings['security.protocol']} {each.address[0]}:{each.address[1]}"
        for each in found
    ]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"listeners": ""}, "is empty"),
        ({"listeners": "h"}, "HOST:PORT"),
        ({"listeners": "h:70000"}, "HOST:PORT"),
        ({"listeners": "IN://h:1"}, "listener.security.protocol.map=IN:PROTOCOL"),
        ({"listeners": "h:1,i:2"}, "two have the name PLAINTEXT"),
        ({MAP: "IN:TLS"}, "NAME:PROTOCOL"),
        (
            {"listeners": "SSL://h:1,PLAINTEXT://h:2", "advertised.listeners": "far:7"},
            "several listeners",
        ),
        ({"advertised.listeners": "SSL://far:7"}, "listener SSL does not exist; use one of PLAINTEXT"),
        ({"advertised.listeners": "0.0.0.0:7"}, "all interfaces"),
        ({"advertised.listeners": "a:7,b:7"}, "twice"),
        ({"listener.name.ssl.ssl.client.auth": "required"}, "listener SSL does not exist"),
        ({"listener.name.ssl.node.id": "2"}, "node.id applies to all listeners"),
        ({"listener.name.ssl.ssl.client.auth": "maybe"}, "listener.name.ssl.ssl.client.auth"),
        ({"listener.name.ssl.ssl.nothing": "x"}, "unknown"),
    ],
)
def test_impossible_listeners_are_refused(given: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        parse_listeners(BROKER.parse(given), "me")


def test_each_listener_beyond_loopback_requires_authentication() -> None:
    inside = {"listeners": "SASL_SSL://0.0.0.0:1,PLAINTEXT://127.0.0.1:2"}
    assert len(checked_listeners(BROKER.parse(inside))) == 2
    open_door = {"listeners": "SASL_SSL://0.0.0.0:1,PLAINTEXT://0.0.0.0:2"}
    with pytest.raises(ConfigError, match=r"(every|all) interfaces?|0\.0\.0\.0 \(PLAINTEXT\)"):
        checked_listeners(BROKER.parse(open_door))
    assert checked_listeners(BROKER.parse({**open_door, "oncelog.insecure": True}))
    certified = {"listeners": "SSL://0.0.0.0:1", "listener.name.ssl.ssl.client.auth": "required"}
    assert checked_listeners(BROKER.parse(certified))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("others"), "carol")


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates, others: Certificates
) -> Iterator[Broker]:
    """Run a broker with three listeners, one of which has certificates of another authority."""
    data_dir = tmp_path_factory.mktemp("data")
    add_users(data_dir, "alice")
    config = {
        "listeners": "PLAINTEXT://127.0.0.1:0,SASL_SSL://localhost:0,CERTIFIED://127.0.0.1:0",
        MAP: "CERTIFIED:SSL",
        "ssl.keystore.location": str(certificates.broker),
        "listener.name.sasl_ssl.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.certified.ssl.keystore.location": str(others.broker),
        "listener.name.certified.ssl.truststore.location": str(others.authority),
        "listener.name.certified.ssl.client.auth": "required",
        "listener.name.certified.ssl.principal.mapping.rules": "RULE:^.*CN=([a-z]+).*$/$1/",
        "authorizer.class.name": AUTHORIZER,
        "super.users": "User:alice;User:carol",
    }
    with Broker(data_dir, config=config) as broker:
        yield broker


def configs(broker: Broker, certificates: Certificates, others: Certificates) -> dict[str, dict[str, str]]:
    """Return the settings for a client of each listener."""
    at = broker.listeners
    return {
        "PLAINTEXT": {"bootstrap.servers": at["PLAINTEXT"]},
        "SASL_SSL": {
            "bootstrap.servers": at["SASL_SSL"],
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(certificates.authority),
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": PASSWORD,
        },
        "CERTIFIED": {
            "bootstrap.servers": at["CERTIFIED"],
            "security.protocol": "SSL",
            "ssl.ca.location": str(others.authority),
            "ssl.certificate.location": str(others.client),
            "ssl.key.location": str(others.client),
        },
    }


def test_each_listener_has_its_protocol_settings_and_principal(
    broker: Broker, certificates: Certificates, others: Certificates
) -> None:
    given = configs(broker, certificates, others)
    for name in ("SASL_SSL", "CERTIFIED"):
        with oncelog.Producer(given[name]) as producer:
            producer.send("shared", name.encode()).result(timeout=60)
    with oncelog.Producer(given["PLAINTEXT"]) as producer, pytest.raises(TopicAuthorizationFailed):
        producer.send("shared", b"as ANONYMOUS").result(timeout=60)
    with oncelog.Consumer({**given["SASL_SSL"], "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([oncelog.TopicPartition("shared", 0)])
        read: list[bytes | None] = []
        while len(read) < 2:
            read += [record.value for record in consumer.poll(timeout=30)]
    assert read == [b"SASL_SSL", b"CERTIFIED"]
    with (
        # The error names PLAIN, the mechanism that this listener has.
        pytest.raises(AuthenticationError, match="PLAIN"),
        Admin({**given["SASL_SSL"], "sasl.mechanism": "SCRAM-SHA-256"}) as admin,
    ):
        admin.list_topics()
    with (
        # The client has the authority of the other listener's certificates.
        pytest.raises(AuthenticationError, match="certificate"),
        Admin({**given["CERTIFIED"], "ssl.ca.location": str(certificates.authority)}) as admin,
    ):
        admin.list_topics()


def test_librdkafka_stays_on_the_listener_that_it_connected_to(
    broker: Broker, certificates: Certificates, others: Certificates
) -> None:
    """Metadata and FindCoordinator must return the addresses of the listener that the client uses."""
    from confluent_kafka import Consumer, Producer

    given = configs(broker, certificates, others)
    for name in ("SASL_SSL", "CERTIFIED"):
        topic = f"librdkafka-{name}"
        producer = Producer(given[name])
        producer.produce(topic, b"1")
        assert producer.flush(60) == 0
        consumer = Consumer({**given[name], "group.id": topic, "auto.offset.reset": "earliest"})
        consumer.subscribe([topic])
        try:
            assert [message.value() for message in consumer.consume(1, 120)] == [b"1"]
            consumer.commit(asynchronous=False)
        finally:
            consumer.close()


def test_metadata_names_the_listener_of_the_connection(tmp_path: Path) -> None:
    config = {
        "listeners": "PLAINTEXT://127.0.0.1:0,OTHER://127.0.0.1:0,FAR://127.0.0.1:0",
        MAP: "OTHER:PLAINTEXT,FAR:PLAINTEXT",
        "advertised.listeners": "FAR://broker.example:19092",
    }
    with Broker(tmp_path, config=config) as broker:
        for name, address in broker.listeners.items():
            host, _, port = address.partition(":")
            expected = ("broker.example", 19092) if name == "FAR" else (host, int(port))
            assert expected == _told(address)
        before = broker.listeners
        with Admin({"bootstrap.servers": before["OTHER"]}) as admin:
            (found,) = admin.describe_configs([ConfigResource("broker", "1")]).values()
        assert found.entries["listeners"].value == config["listeners"]
    broker = Broker(tmp_path, config=config)
    broker.start()
    kept = broker.listeners
    broker.stop()
    with broker:
        assert broker.listeners == kept
        assert len(set(kept.values())) == 3


def _told(address: str) -> tuple[str, int]:
    with RawClient(address) as client:
        (broker,) = client.ask(MetadataRequest(topics=[]), 9).brokers
        found = client.ask(FindCoordinatorRequest(key="g"), 2)
        (described,) = client.ask(DescribeClusterRequest(), 0).brokers
    assert (broker.host, broker.port) == (found.host, found.port) == (described.host, described.port)
    return broker.host, broker.port


def test_a_listener_that_cannot_be_bound_frees_the_others(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = [each.getsockname()[1] for each in (free, taken)]
        free.close()
        config = {
            "listeners": f"PLAINTEXT://127.0.0.1:{ports[0]},B://127.0.0.1:{ports[1]}",
            MAP: "B:PLAINTEXT",
        }
        with pytest.raises(StorageError, match=f"cannot listen on 127.0.0.1:{ports[1]}"):
            Broker(tmp_path, config=config).start()
        # the failed start has released both the port and the directory
        with Broker(tmp_path, port=ports[0]) as broker:
            assert broker.port == ports[0]


def test_a_missing_ipv6_address_does_not_prevent_other_listeners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers without IPv6 may still map localhost to ::1 in /etc/hosts."""
    real = socket.socket.bind

    def bind(this: socket.socket, address: tuple[object, ...]) -> None:
        if this.family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        real(this, address)

    async def addresses(host: str) -> list[str]:
        found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))]
        if host == "localhost":
            found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)))

        async def getaddrinfo(*_: object, **__: object) -> list[object]:
            return list(found)

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        listening = await listen(AcceptedConnection, host, 0)
        try:
            return [each.getsockname()[0] for each in listening.sockets]
        finally:
            listening.close()

    monkeypatch.setattr(socket.socket, "bind", bind)
    assert asyncio.run(addresses("localhost")) == ["127.0.0.1"]
    with pytest.raises(OSError, match="Cannot assign"):
        asyncio.run(addresses("::1"))
