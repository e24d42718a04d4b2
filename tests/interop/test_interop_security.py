"""Clients of other projects use our broker over TLS and SASL, and our clients use Apache Kafka."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from joserfc.jwk import RSAKey
from oncelog_devtools.apache_kafka import ApacheKafka
from support.foreign.clients import compiled_java, run
from support.security.brokers import (
    AUTHORIZER,
    PASSWORD,
    Certificates,
    add_acls,
    apache_properties,
    client_config,
    secured_broker,
    signed_token,
    write_keys,
)
from support.wait import pause

import oncelog
from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.errors import AuthenticationError, GroupAuthorizationFailed, TopicAuthorizationFailed
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.rules.security.scram import Mechanism
from oncelog.server.embedded import Broker

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Broker]:
    config = {
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "connections.max.reauth.ms": 2000,
        "authorizer.class.name": AUTHORIZER,
        "super.users": "User:admin",
    }
    data_dir = tmp_path_factory.mktemp("data")
    with secured_broker(data_dir, certificates, users=("admin", "alice"), **config) as broker:
        yield broker


def _confluent(config: dict[str, str]) -> list[bytes]:
    from confluent_kafka import Consumer, Producer

    producer = Producer(config)
    errors: list[object] = []
    producer.produce("librdkafka", b"1", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    assert errors == [None]
    consumer = Consumer({**config, "group.id": "librdkafka", "auto.offset.reset": "earliest"})
    consumer.subscribe(["librdkafka"])
    try:
        found = consumer.consume(1, 120)
        return [message.value() for message in found if not message.error()]
    finally:
        consumer.close()


def _kafka_python(config: dict[str, str]) -> list[bytes]:
    from kafka import KafkaConsumer, KafkaProducer

    settings = {
        "bootstrap_servers": config["bootstrap.servers"],
        "security_protocol": config["security.protocol"],
        "ssl_cafile": config["ssl.ca.location"],
        "sasl_mechanism": config["sasl.mechanism"],
        "sasl_plain_username": config["sasl.username"],
        "sasl_plain_password": config["sasl.password"],
    }
    producer = KafkaProducer(**settings)
    producer.send("kafka-python", b"1").get(30)
    producer.close()
    consumer = KafkaConsumer(
        "kafka-python", **settings, auto_offset_reset="earliest", consumer_timeout_ms=30_000, group_id="kp"
    )
    try:
        return [next(consumer).value]
    finally:
        consumer.close()


def _aiokafka(config: dict[str, str]) -> list[bytes]:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    settings = {
        "bootstrap_servers": config["bootstrap.servers"],
        "security_protocol": config["security.protocol"],
        "ssl_context": ssl.create_default_context(cafile=config["ssl.ca.location"]),
        "sasl_mechanism": config["sasl.mechanism"],
        "sasl_plain_username": config["sasl.username"],
        "sasl_plain_password": config["sasl.password"],
    }

    async def pass_through() -> list[bytes]:
        async with AIOKafkaProducer(**settings, enable_idempotence=True) as producer:
            await producer.send_and_wait("aiokafka", b"1")
        async with AIOKafkaConsumer("aiokafka", **settings, auto_offset_reset="earliest") as consumer:
            return [(await asyncio.wait_for(consumer.getone(), 30)).value]

    return asyncio.run(pass_through())


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("client", [_confluent, _kafka_python, _aiokafka])
def test_other_clients_authenticate(
    broker: Broker,
    certificates: Certificates,
    client: Callable[[dict[str, str]], list[bytes]],
    mechanism: str,
) -> None:
    assert client(client_config(broker, certificates, "admin", mechanism)) == [b"1"]


def test_librdkafka_gets_an_authentication_error_for_a_wrong_password(
    broker: Broker, certificates: Certificates
) -> None:
    from confluent_kafka import KafkaError
    from confluent_kafka import Producer as Confluent

    config = client_config(broker, certificates, "admin", password="wrong")
    told: list[int] = []
    producer = Confluent({**config, "error_cb": lambda error: told.append(error.code())})
    for _ in range(100):
        producer.poll(0.1)
        if KafkaError._AUTHENTICATION in told:
            return
    raise AssertionError(told)


def test_the_java_client_authenticates(
    broker: Broker, certificates: Certificates, kafka_class_path: str, tmp_path: Path
) -> None:
    files = []
    for user in ("admin", "alice"):
        module = "org.apache.kafka.common.security.scram.ScramLoginModule"
        settings = {
            "bootstrap.servers": broker.bootstrap_servers,
            "security.protocol": "SASL_SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": certificates.authority,
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{module} required username="{user}" password="{PASSWORD}";',
        }
        files.append(tmp_path / f"{user}.properties")
        files[-1].write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    found = run(compiled_java("Secured", kafka_class_path)(*map(str, files)))
    assert found == ["denied", "acls", "users", "transaction", "group", "expiry"]
    # Our clients read the same properties as Java's clients, so Spark's options kafka.* have the same names
    # for both.
    with Admin(_properties(files[0])) as admin:
        assert "secured" in [topic.name for topic in admin.list_topics()]


def _properties(path: Path) -> dict[str, str]:
    from oncelog.cli.properties import read_properties

    return read_properties(path)


@cache
def token_key() -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": "one"})


@pytest.fixture(scope="module")
def apache(
    kafka_class_path: str, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApacheKafka]:
    keys = tmp_path_factory.mktemp("keys") / "jwks.json"
    write_keys(keys, token_key())
    properties = apache_properties(certificates, keys)
    with pytest.MonkeyPatch.context() as patch:
        # A JVM property lists the locations from which Kafka may read key sets.
        allowed = "org.apache.kafka.sasl.oauthbearer.allowed.urls"
        patch.setenv("JAVA_TOOL_OPTIONS", f"-D{allowed}=file://{keys}")
        yield from _apache(properties)


def _apache(properties: dict[str, object]) -> Iterator[ApacheKafka]:
    with ApacheKafka(properties=properties, also_listen=["SASL_SSL", "SSL"]) as kafka:
        with Admin({"bootstrap.servers": kafka.bootstrap_servers}) as admin:
            admin.set_user("alice", PASSWORD)
            admin.create_topics([NewTopic("secured", num_partitions=1)])
            add_acls(
                admin,
                [
                    Acl(
                        ResourceType.TOPIC,
                        "sec",
                        PatternType.PREFIXED,
                        "User:alice",
                        "*",
                        Operation.ALL,
                        Permission.ALLOW,
                    )
                ],
            )
            assert set(admin.list_users()["alice"]) == set(Mechanism)
        yield kafka


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_our_clients_authenticate_on_apache_kafka(apache: ApacheKafka, certificates: Certificates) -> None:
    node = apache.nodes[0]
    for mechanism in MECHANISMS:
        config = {
            "bootstrap.servers": f"127.0.0.1:{node.ports['SASL_SSL']}",
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(certificates.authority),
            "sasl.mechanism": mechanism,
            "sasl.username": "alice",
            "sasl.password": PASSWORD,
        }
        _use(config)
        with pytest.raises(AuthenticationError), Admin({**config, "sasl.password": "wrong"}) as admin:
            admin.list_topics()
    _use(
        {
            "bootstrap.servers": f"127.0.0.1:{node.ports['SSL']}",
            "security.protocol": "SSL",
            "ssl.ca.location": str(certificates.authority),
            "ssl.keystore.location": str(certificates.client),
        }
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_our_clients_authenticate_on_apache_kafka_with_a_token(
    apache: ApacheKafka, certificates: Certificates, tmp_path: Path
) -> None:
    """Apache Kafka ends each session after two seconds.

    The client reads the token file before each session.
    """
    token = tmp_path / "token"
    config = {
        "bootstrap.servers": f"127.0.0.1:{apache.nodes[0].ports['SASL_SSL']}",
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(certificates.authority),
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": f"file://{token}",
        "socket.connection.setup.timeout.ms": "60000",  # the JVM's first token takes long on a busy machine
    }
    token.write_text(signed_token(token_key()))
    _use(config)
    stranger = RSAKey.generate_key(2048, {"kid": "one"})
    for bad in (
        signed_token(token_key(), exp=int(time.time()) - 300, iat=int(time.time()) - 600),
        signed_token(token_key(), aud=["web"]),
        signed_token(stranger),
        "garbage",
    ):
        token.write_text(bad)
        with pytest.raises(AuthenticationError) as caught, Admin(config) as admin:
            admin.list_topics()
        assert bad not in str(caught.value)


def _use(config: dict[str, str]) -> None:
    """Use topics `sec...` for longer than a session lasts, as user alice, who has all permissions on them."""
    with oncelog.Producer(config) as producer:
        offsets = []
        for _ in range(150):
            offsets.append(producer.send("secured", b"v").result(timeout=60).offset)
            pause(0.02)
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
        with pytest.raises(TopicAuthorizationFailed):
            producer.send("elsewhere", b"v").result(timeout=60)
    at = oncelog.TopicPartition("secured", 0)
    with oncelog.Consumer({**config, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([at])
        assert consumer.poll(timeout=30)
    with Admin(config) as admin, pytest.raises(GroupAuthorizationFailed):
        admin.group_offsets("any")
