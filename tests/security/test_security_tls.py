"""TLS of the listener and of the clients, over real sockets."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.security.brokers import Certificates, client_config, make_certificates, secured_broker
from support.wait import pass_time, wait_until

import oncelog
from oncelog.client.admin.blocking import Admin
from oncelog.client.connection.broker_protocol import BrokerProtocol
from oncelog.client.connection.core import ConnectionCore
from oncelog.config import ADMIN, BROKER
from oncelog.errors import (
    AuthenticationError,
    ConfigError,
    DisconnectedError,
    NotConnectedError,
    OncelogError,
)
from oncelog.runtime.tls import ServerTls, WatchedFile, client_context
from oncelog.server.embedded import Broker
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import MetadataRequest


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Broker]:
    with secured_broker(tmp_path_factory.mktemp("data"), certificates, sasl=False) as broker:
        yield broker


def test_records_of_all_sizes_are_delivered_over_tls(broker: Broker, certificates: Certificates) -> None:
    config = client_config(broker, certificates)
    values = [bytes([n]) * size for n, size in enumerate((1, 1_000, 70_000, 300_000, 900_000))]
    with oncelog.Producer(config) as producer:
        for value in values:
            producer.send("sizes", value)
        producer.flush()
    with oncelog.Consumer({**config, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([oncelog.TopicPartition("sizes", 0)])
        read: list[bytes | None] = []
        while len(read) < len(values):
            read += [record.value for record in consumer.poll(timeout=60)]
    assert read == values


def test_a_broker_of_another_authority_is_refused(broker: Broker, tmp_path: Path) -> None:
    config = client_config(broker, make_certificates(tmp_path))
    with pytest.raises(AuthenticationError, match=r"ssl\.ca\.location"), Admin(config) as admin:
        admin.list_topics()


def test_the_certificate_must_name_the_host(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificates = Certificates(*(tmp_path / name for name in ("authority", "broker", "none")))
    authority.cert_pem.write_to_path(certificates.authority)
    authority.issue_cert("elsewhere.example").private_key_and_cert_chain_pem.write_to_path(
        certificates.broker
    )
    with secured_broker(tmp_path / "data", certificates, sasl=False) as broker:
        config = client_config(broker, certificates)
        with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1"), Admin(config) as admin:
            admin.list_topics()
        with Admin({**config, "ssl.endpoint.identification.algorithm": "none"}) as admin:
            assert admin.list_topics() == []


def test_tls_on_one_side_only_names_security_protocol(broker: Broker, certificates: Certificates) -> None:
    quick = {"oncelog.bootstrap.timeout.ms": "0"}
    plain = {"bootstrap.servers": broker.bootstrap_servers, **quick}
    with pytest.raises(DisconnectedError, match=r"security\.protocol"), Admin(plain) as admin:
        admin.list_topics()
    with Broker() as other, pytest.raises((AuthenticationError, DisconnectedError)):
        Admin({**client_config(other, certificates), **quick}).list_topics()


def test_changed_certificates_hold_for_the_next_connection(tmp_path: Path) -> None:
    old = make_certificates(tmp_path / "old")
    with (
        secured_broker(tmp_path / "data", old, sasl=False) as broker,
        Admin(client_config(broker, old)) as stays,
    ):
        assert stays.list_topics() == []
        new = make_certificates(tmp_path / "new")
        os.replace(new.broker, old.broker)
        os.replace(new.authority, old.authority)
        pass_time(broker, 0)
        with Admin(client_config(broker, old)) as admin:
            assert admin.list_topics() == []
        assert stays.list_topics() == []
        old.broker.write_text("no certificate")
        pass_time(broker, 0)
        # If the file has no valid certificate, the broker continues with the old one.
        with Admin(client_config(broker, old)) as admin:
            assert admin.list_topics() == []


@pytest.mark.parametrize("key", ["ssl.truststore.location", "ssl.ca.location"])
@pytest.mark.parametrize(
    "name", ["keystore.jks", "empty.pem", "directory", "none.pem", "loop.pem", "long.pem"]
)
def test_a_truststore_that_cannot_be_used_is_named(tmp_path: Path, name: str, key: str) -> None:
    (tmp_path / "keystore.jks").write_bytes(b"\xfe\xed\xfe\xed\0\0\0\2")
    (tmp_path / "empty.pem").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "long.pem").symlink_to("x" * 300)
    settings = ADMIN.parse({"security.protocol": "SSL", key: str(tmp_path / name)})
    with pytest.raises(ConfigError, match=rf"{key}.*{name}"):
        client_context(settings)


def test_a_truststore_that_cannot_be_looked_at_leaves_the_old_one(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Regression: an error in this look-up ended the periodic task that also enforces the deadlines of
    connections.
    """
    truststore = tmp_path / "trusted.pem"
    truststore.write_bytes(certificates.authority.read_bytes())
    tls = ServerTls(
        BROKER.parse(
            {
                "security.protocol": "SSL",
                "ssl.keystore.location": str(certificates.broker),
                "ssl.client.auth": "required",
                "ssl.truststore.location": str(truststore),
            }
        )
    )
    old = tls.context
    truststore.unlink()
    truststore.symlink_to("x" * 300)
    tls.refresh()
    assert tls.context is old
    truststore.unlink()
    truststore.write_bytes(certificates.authority.read_bytes())
    tls.refresh()
    assert tls.context is not old


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("shown", "alert"), [("none", "CERTIFICATE|HANDSHAKE_FAILURE"), ("other", "UNKNOWN_CA")]
)
def test_a_client_whose_certificate_is_refused_learns_why(
    tmp_path: Path, certificates: Certificates, version: ssl.TLSVersion, shown: str, alert: str
) -> None:
    """Regression: the socket was closed before the alert was sent, so the client saw only a closed
    connection."""
    context = ssl.create_default_context(cafile=certificates.authority)
    context.minimum_version = context.maximum_version = version
    if shown == "other":
        context.load_cert_chain(make_certificates(tmp_path / "other").client)
    config = {"ssl.client.auth": "required"}
    with secured_broker(tmp_path / "data", certificates, sasl=False, **config) as broker:
        host, _, port = broker.bootstrap_servers.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=60) as plain,
            pytest.raises(ssl.SSLError, match=alert),
            context.wrap_socket(plain, server_hostname=host) as client,
        ):
            client.recv(1)
        wait_until(lambda: broker.metrics()["connections"] == 0)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Make every open() in the block fail, but not stat(), so the broker still sees the modification times of
    files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_renewed_certificate_that_could_not_be_read_is_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker must try again, although the file's modification time does not change, for example after a
    `chmod`.
    """
    used, renewed = make_certificates(tmp_path / "used"), make_certificates(tmp_path / "renewed")
    settings = {"security.protocol": "SSL", "ssl.keystore.location": str(used.broker)}
    tls, keys = ServerTls(BROKER.parse(settings)), WatchedFile(f"file://{used.client}", "token keys")
    old, old_text = tls.context, keys.refresh()
    os.replace(renewed.broker, used.broker)
    os.replace(renewed.client, used.client)
    with no_descriptors():
        for _ in range(3):
            tls.refresh()
            assert (tls.context, keys.refresh()) == (old, old_text)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2, "one for each file"
    tls.refresh()
    assert tls.context is not old
    assert keys.refresh() == used.client.read_text() != old_text


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_removed_authority_does_not_come_back_by_resuming_a_session(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new", "bob")
    certificates = make_certificates(tmp_path / "broker")
    truststore = tmp_path / "trusted.pem"
    truststore.write_bytes(old.authority.read_bytes())

    def context(client: Path) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=certificates.authority)
        made.minimum_version = made.maximum_version = version
        made.load_cert_chain(client)
        return made

    config = {"ssl.client.auth": "required", "ssl.truststore.location": str(truststore)}
    with secured_broker(tmp_path / "data", certificates, sasl=False, **config) as broker:
        removed = context(old.client)
        session = _talk(broker, removed, None)
        assert session is not None
        os.replace(new.authority, truststore)
        pass_time(broker, 0)
        assert _talk(broker, context(new.client), None) is not None
        assert _talk(broker, removed, None) is None
        assert _talk(broker, removed, session) is None


def _talk(broker: Broker, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """Send one request.

    Return the TLS session for a resumption, or None if the broker closes the connection.
    """
    host, _, port = broker.bootstrap_servers.rpartition(":")
    frame = encode_request(MetadataRequest(topics=[]), 9, 1, "x")
    try:
        with (
            socket.create_connection((host, int(port)), 60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secured,
        ):
            secured.sendall(frame)
            return secured.session if len(secured.recv(4)) == 4 else None
    except OSError:
        return None


def test_a_listener_may_require_client_certificates(tmp_path: Path, certificates: Certificates) -> None:
    config = {"ssl.client.auth": "required"}
    with secured_broker(tmp_path, certificates, sasl=False, **config) as broker:
        without = client_config(broker, certificates) | {"oncelog.bootstrap.timeout.ms": "0"}
        with pytest.raises(DisconnectedError, match=r"ssl\.keystore\.location"), Admin(without) as admin:
            admin.list_topics()
        mine = str(certificates.client)
        for own in (
            {"ssl.keystore.location": mine},
            {"ssl.certificate.location": mine, "ssl.key.location": mine},
        ):
            with Admin(client_config(broker, certificates) | own) as admin:
                assert admin.list_topics() == []
        text = certificates.client.read_text()
        inline = {"ssl.keystore.certificate.chain": text, "ssl.keystore.key": text}
        with Admin(client_config(broker, certificates) | inline) as admin:
            assert admin.list_topics() == []


def test_a_client_that_never_completes_the_handshake_delays_no_other(
    broker: Broker, certificates: Certificates
) -> None:
    idle = [socket.create_connection(("127.0.0.1", broker.port)) for _ in range(20)]
    idle[0].sendall(os.urandom(1000))
    try:
        with Admin(client_config(broker, certificates)) as admin:
            assert admin.list_topics() is not None
    finally:
        for connection in idle[:-1]:  # one connection stays open, and the stop of the broker must close it
            connection.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_tls_is_refused(broker: Broker, certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(certificates.authority))
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", broker.port)) as raw, pytest.raises(OSError):
        context.wrap_socket(raw, server_hostname="127.0.0.1")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "ssl.keystore.location"),
        ({"ssl.keystore.location": "/nowhere.pem"}, "/nowhere.pem"),
        ({"ssl.enabled.protocols": "TLSv1.1"}, "TLSv1.2 and TLSv1.3"),
    ],
)
def test_a_broker_without_a_good_certificate_does_not_start(
    tmp_path: Path, config: dict[str, str], named: str
) -> None:
    # The second attempt would fail differently if the first one had left the directory locked.
    for _ in range(2):
        with pytest.raises(ConfigError, match=named):
            Broker(tmp_path, config={"security.protocol": "SSL", **config}).start()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"security.protocol": "SSL"},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.enabled.mechanisms": "PLAIN"},
    ],
)
def test_listening_beyond_loopback_requires_authentication(config: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        Broker(host="0.0.0.0", config=config)
    Broker(host="0.0.0.0", config={**config, "oncelog.insecure": "true"})
    Broker(host="localhost", config=config)


def test_tls_at_a_plaintext_listener_names_the_protocol(certificates: Certificates) -> None:
    with Broker() as plaintext:
        config = {
            "bootstrap.servers": plaintext.bootstrap_servers,
            "security.protocol": "SSL",
            "ssl.ca.location": str(certificates.authority),
            "oncelog.bootstrap.timeout.ms": 1,
        }
        with (
            pytest.raises(NotConnectedError, match=r"TLS handshake.*security\.protocol=SSL") as raised,
            Admin(config) as admin,
        ):
            admin.list_topics()
        assert plaintext.bootstrap_servers in str(raised.value)


def test_plaintext_at_a_tls_listener_names_the_protocol(broker: Broker) -> None:
    config = {"bootstrap.servers": broker.bootstrap_servers, "oncelog.bootstrap.timeout.ms": 1}
    with pytest.raises(NotConnectedError, match=r"security\.protocol"), Admin(config) as admin:
        admin.list_topics()


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_refused_re_authentication_leaves_the_outcome_unknown(is_ready: bool) -> None:
    """Requests in flight may have been carried out: only a failed first log-in means that none was sent."""
    errors: list[OncelogError] = []

    class Events:
        loop: Any = None

        def now_ms(self) -> float:
            return 0.0

        def on_lost(self, _: BrokerProtocol, error: OncelogError) -> None:
            errors.append(error)

    class RefusingCore:
        is_ready = False

        def room(self, size_bytes: int) -> None:
            return None

        def receive(self, data: bytes, now_ms: float) -> None:
            raise AuthenticationError("refused")

    async def lose() -> None:
        events: Any = Events()
        events.loop = asyncio.get_running_loop()
        core: Any = RefusingCore()
        protocol = BrokerProtocol(events, core)
        if is_ready:
            protocol.ready.set_result(None)
        protocol.get_buffer(1)
        protocol.buffer_updated(1)

    asyncio.run(lose())
    assert isinstance(errors[0], DisconnectedError)
    assert isinstance(errors[0], NotConnectedError) is not is_ready


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_damaged_tls_record_leaves_the_outcome_unknown(is_ready: bool) -> None:
    """Requests in flight may have been carried out: only a failed handshake means that none was sent."""
    errors: list[OncelogError] = []

    class Events:
        loop: Any = None

        def on_lost(self, _: BrokerProtocol, error: OncelogError) -> None:
            errors.append(error)

    async def lose() -> None:
        events: Any = Events()
        events.loop = asyncio.get_running_loop()
        protocol = BrokerProtocol(events, ConnectionCore("client", "127.0.0.1:9"))
        if is_ready:
            protocol.ready.set_result(None)
        damaged = ssl.SSLError(1, "damaged")
        damaged.reason = "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"
        protocol.connection_lost(damaged)

    asyncio.run(lose())
    assert isinstance(errors[0], DisconnectedError)
    assert isinstance(errors[0], AuthenticationError) is not is_ready
    assert isinstance(errors[0], NotConnectedError) is not is_ready
