"""SASL of the listener and of the clients over real sockets, and single SASL messages to the broker."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import scramp.core
from support.broker import RawClient, assert_unanswered
from support.security.brokers import (
    PASSWORD,
    Certificates,
    client_config,
    logins_again,
    make_certificates,
    reauthenticate,
    secured_broker,
    without,
)
from support.wait import HeldTimers, attempts, pass_time, wait_until

import oncelog
from oncelog.broker.security import authenticator, sasl
from oncelog.broker.security import users as users_module
from oncelog.broker.security.sasl import ScramExchange
from oncelog.broker.security.users import Users
from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.types import ConfigResource
from oncelog.errors import (
    AuthenticationError,
    ConfigError,
    OncelogError,
    SaslAuthenticationFailed,
    UnacceptableCredential,
)
from oncelog.rules.security.scram import Mechanism, salt_password
from oncelog.server import request_handler
from oncelog.server.disk import RealDisk
from oncelog.server.embedded import Broker
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import (
    ApiVersionsRequest,
    MetadataRequest,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
)

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Broker]:
    offered = {"sasl.enabled.mechanisms": ",".join(MECHANISMS)}
    data_dir = tmp_path_factory.mktemp("data")
    with secured_broker(data_dir, certificates, users=("alice", "bob, =the builder"), **offered) as broker:
        yield broker


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Run a broker without TLS, so that a test can send and read raw bytes."""
    config = {"sasl.enabled.mechanisms": ",".join(MECHANISMS), "connection.failed.authentication.delay.ms": 0}
    with secured_broker(tmp_path_factory.mktemp("data"), users=("alice",), **config) as broker:
        yield broker


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("user", ["alice", "bob, =the builder"])
def test_a_client_with_the_password_is_authenticated(
    broker: Broker, certificates: Certificates, mechanism: str, user: str
) -> None:
    with oncelog.Producer(client_config(broker, certificates, user, mechanism)) as producer:
        assert producer.send("t", b"v").result(timeout=60).topic == "t"


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("nobody", PASSWORD)])
def test_a_client_without_the_password_is_refused_and_learns_nothing(
    broker: Broker, certificates: Certificates, mechanism: str, user: str, password: str
) -> None:
    config = client_config(broker, certificates, user, mechanism, password)
    failed = broker.metrics()["authentications_failed"]
    with pytest.raises(AuthenticationError, match="wrong user or password"), Admin(config) as admin:
        admin.list_topics()
    assert broker.metrics()["authentications_failed"] == failed + 1


def test_the_settings_of_java_clients_are_accepted(broker: Broker, certificates: Certificates) -> None:
    config = client_config(broker, certificates, "alice")
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    jaas = f'{module} required username="alice" password="{PASSWORD}";'
    java = without(config, "sasl.username", "sasl.password", "ssl.ca.location") | {
        "sasl.jaas.config": jaas,
        "ssl.truststore.location": str(certificates.authority),
        "ssl.truststore.type": "PEM",
    }
    with Admin(java) as admin:
        assert admin.list_topics() is not None
    with (
        pytest.raises(ConfigError, match="keep one of them"),
        Admin(config | {"sasl.jaas.config": jaas}) as both,
    ):
        both.list_topics()
    with pytest.raises(ConfigError) as caught, Admin(java | {"sasl.jaas.config": jaas.rstrip(";")}) as bad:
        bad.list_topics()
    assert PASSWORD not in str(caught.value)


def test_a_mechanism_that_is_not_offered_is_refused(
    broker: Broker, certificates: Certificates, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    config = without(client_config(broker, certificates, "alice"), "sasl.username", "sasl.password")
    config |= {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.token.endpoint.url": f"file://{token}"}
    with pytest.raises(AuthenticationError, match="SCRAM-SHA-512"), Admin(config) as admin:
        admin.list_topics()


def test_a_client_without_credentials_is_told_about_sasl(plain: Broker) -> None:
    config = {"bootstrap.servers": plain.bootstrap_servers, "request.timeout.ms": 3000}
    with pytest.raises(OncelogError, match="if its listener requires SASL"), Admin(config) as admin:
        admin.list_topics()


def test_requests_before_authentication_are_refused(plain: Broker) -> None:
    address = plain.bootstrap_servers
    with RawClient(address) as client:  # version 0 is advertised, but bare SASL tokens are not read
        client.socket.sendall(b"\0\0\0\x11\0\x11\0\0\0\0\0\1\xff\xff\0\5PLAIN")
        assert client.is_closed()
    with RawClient(address) as client:
        assert client.ask(ApiVersionsRequest(), 0).error_code == 0
        client.send(MetadataRequest(topics=[]), 9)
        assert client.is_closed()
    with RawClient(address) as client:  # SaslAuthenticate without a handshake
        client.send(SaslAuthenticateRequest(auth_bytes=b"\0alice\0x"), 0)
        assert client.is_closed()
    with RawClient(address) as client:  # another request between handshake and authentication
        assert client.ask(SaslHandshakeRequest(mechanism="PLAIN"), 1).mechanisms == list(MECHANISMS)
        client.send(ApiVersionsRequest(), 0)
        assert client.is_closed()
    with RawClient(address) as client:  # a longer request than an unauthenticated client may send
        client.socket.sendall((524_289).to_bytes(4, "big"))
        assert client.is_closed()


@pytest.mark.parametrize(("suffix", "error"), [("", 0), ("x", 58)])
@pytest.mark.parametrize("mechanism", MECHANISMS[1:])
def test_a_nonce_is_accepted_as_old_librdkafka_sends_it(
    plain: Broker, mechanism: str, suffix: str, error: int
) -> None:
    """Before 2.6.1, librdkafka sent its own nonce twice, and Apache Kafka accepts that."""
    scram = scramp.ScramClient([mechanism], "alice", PASSWORD)
    with RawClient(plain.bootstrap_servers) as client:
        client.ask(SaslHandshakeRequest(mechanism=mechanism), 1)
        first = client.ask(SaslAuthenticateRequest(auth_bytes=str(scram.get_client_first()).encode()), 2)
        scram.set_server_first(first.auth_bytes.decode())
        scram.nonce = scramp.core.Nonce(f"{scram.c_nonce}{scram.nonce}{suffix}")
        final = client.ask(SaslAuthenticateRequest(auth_bytes=str(scram.get_client_final()).encode()), 2)
        assert final.error_code == error
        if not error:
            scram.set_server_final(final.auth_bytes.decode())


@pytest.mark.parametrize(
    "message", [b"", b"\0", b"alice", b"\0alice\0", b"bob\0alice\0x", b"\xff\xfe\0a\0b", b"\0" * 100_000]
)
def test_malformed_sasl_messages_are_refused(plain: Broker, message: bytes) -> None:
    for mechanism in MECHANISMS:
        with RawClient(plain.bootstrap_servers) as client:
            client.ask(SaslHandshakeRequest(mechanism=mechanism), 1)
            assert client.ask(SaslAuthenticateRequest(auth_bytes=message), 2).error_code == 58
            assert client.is_closed()


@pytest.mark.behaviour("I29")
@pytest.mark.parametrize("mechanism", MECHANISMS[1:])
def test_a_long_name_is_refused_before_it_is_prepared(
    plain: Broker, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    prepared: list[int] = []
    saslprep = scramp.core.saslprep
    monkeypatch.setattr(scramp.core, "saslprep", lambda text: prepared.append(len(text)) or saslprep(text))
    for size, is_refused in ((500_000, True), (sasl.MAX_SCRAM_BYTES - 10, False)):
        with RawClient(plain.bootstrap_servers) as client:
            client.ask(SaslHandshakeRequest(mechanism=mechanism), 1)
            first = f"n,,n={'a' * size},r=x".encode()
            answer = client.ask(SaslAuthenticateRequest(auth_bytes=first), 2)
            assert (answer.error_code == SaslAuthenticationFailed.code) is is_refused
            assert not is_refused or client.is_closed()
    assert max(prepared) <= sasl.MAX_SCRAM_BYTES


@pytest.mark.parametrize("mechanism", MECHANISMS[1:])
def test_a_name_that_grows_when_it_is_normalized_is_refused_before_it_is_prepared(
    plain: Broker, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    """U+FDFA has three bytes, and normalization turns it into 18 characters."""
    prepared: list[str] = []
    saslprep = scramp.core.saslprep
    monkeypatch.setattr(scramp.core, "saslprep", lambda text: prepared.append(text) or saslprep(text))
    for count, is_refused in ((1_300, True), (100, False)):
        with RawClient(plain.bootstrap_servers) as client:
            client.ask(SaslHandshakeRequest(mechanism=mechanism), 1)
            first = f"n,,n={chr(0xFDFA) * count},r=x".encode()
            assert len(first) < sasl.MAX_SCRAM_BYTES
            answer = client.ask(SaslAuthenticateRequest(auth_bytes=first), 2)
            assert (answer.error_code == SaslAuthenticationFailed.code) is is_refused
    assert max(map(len, prepared)) == 100


@pytest.mark.parametrize("mechanism", MECHANISMS[1:])
def test_a_user_with_a_short_salt_can_log_in(tmp_path: Path, mechanism: str) -> None:
    """Apache Kafka requires no minimum length of salts, and examples of other clients have salts such as
    b"salt".
    """
    (tmp_path / "data").mkdir()
    number = Mechanism[mechanism.replace("-", "_")]
    credential = int(number), b"salt", salt_password(number, PASSWORD, b"salt", 4096), 4096
    Users(RealDisk(tmp_path / "data")).alter("alice", [], [credential])
    with (
        secured_broker(tmp_path / "data") as broker,
        Admin(client_config(broker, user="alice", mechanism=mechanism)) as admin,
    ):
        assert admin.list_topics() == []


def _log_in(client: RawClient, user: str = "alice", password: str = PASSWORD) -> int:
    assert client.ask(SaslHandshakeRequest(mechanism="PLAIN"), 1).error_code == 0
    message = f"\0{user}\0{password}".encode()
    answer = client.ask(SaslAuthenticateRequest(auth_bytes=message), 2)
    assert answer.error_code == 0, answer.error_message
    return int(answer.session_lifetime_ms)


def test_a_listener_without_sasl_refuses_sasl_requests() -> None:
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.ask(SaslHandshakeRequest(mechanism="PLAIN"), 1).error_code == 34
        assert client.ask(SaslAuthenticateRequest(auth_bytes=b""), 2).error_code == 34


@pytest.mark.parametrize("mechanisms", ["GSSAPI", "SCRAM-SHA-256,SCRAM-SHA-1", ""])
def test_unknown_mechanisms_are_config_errors(tmp_path: Path, mechanisms: str) -> None:
    with pytest.raises(ConfigError, match="SCRAM-SHA-512"):
        secured_broker(tmp_path, **{"sasl.enabled.mechanisms": mechanisms}).start()


def test_sessions_expire(tmp_path: Path) -> None:
    config = {"connections.max.reauth.ms": 600_000, "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256"}
    with secured_broker(tmp_path, users=("alice", "bob"), **config) as broker:
        with RawClient(broker.bootstrap_servers) as client:
            assert _log_in(client) == 600_000
            assert _log_in(client) == 600_000  # the client re-authenticates before its session ends
            assert client.ask(MetadataRequest(topics=[]), 9).error_code == 0
            pass_time(broker, 600_001)
            client.send(MetadataRequest(topics=[]), 9)
            assert client.is_closed()
        with RawClient(broker.bootstrap_servers) as client:
            _log_in(client)
            client.ask(SaslHandshakeRequest(mechanism="PLAIN"), 1)
            message = f"\0bob\0{PASSWORD}".encode()
            assert client.ask(SaslAuthenticateRequest(auth_bytes=message), 2).error_code == 58
            assert client.is_closed()


def test_a_client_whose_session_does_not_expire_is_refused_reauthentication_and_stays(plain: Broker) -> None:
    with RawClient(plain.bootstrap_servers) as client:
        _log_in(client)
        assert client.ask(SaslHandshakeRequest(mechanism="PLAIN"), 1).error_code == 34
        assert client.ask(SaslAuthenticateRequest(auth_bytes=b"\0alice\0wrong"), 2).error_code == 34
        assert client.ask(MetadataRequest(topics=[]), 9).error_code == 0


def test_records_stay_in_order_during_reauthentication(tmp_path: Path) -> None:
    with secured_broker(tmp_path, users=("alice",), **{"connections.max.reauth.ms": 600_000}) as broker:
        with oncelog.Producer(client_config(broker, None, "alice") | {"linger.ms": "0"}) as producer:
            sent = [producer.send("t", b"0")]
            sent[0].result(timeout=60)
            opened = broker.metrics()["connections_opened"]
            pass_time(broker, 400_000)
            reauthenticate(producer)
            for _ in attempts():
                sent.append(producer.send("t", b"%d" % len(sent)))
                if len(sent) > 100 and logins_again(broker):
                    break
            pass_time(broker, 400_000)  # by now the first session would have expired
            sent.append(producer.send("t", b"%d" % len(sent)))
            offsets = [future.result(timeout=60).offset for future in sent]
        assert offsets == list(range(len(sent)))
        assert broker.metrics()["connections_opened"] == opened


def test_a_failed_authentication_is_answered_after_a_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = HeldTimers(monkeypatch, request_handler)
    with (
        secured_broker(
            tmp_path, users=("alice",), **{"connection.failed.authentication.delay.ms": 400}
        ) as broker,
        RawClient(broker.bootstrap_servers) as client,
    ):
        client.ask(SaslHandshakeRequest(mechanism="SCRAM-SHA-256"), 1)
        client.send(SaslAuthenticateRequest(auth_bytes=b"n,,x"), 2)
        wait_until(lambda: timers.delays_s == [0.4])
        client.send(MetadataRequest(topics=[]), 9)
        assert_unanswered(client)
        timers.fire()
        assert client.receive(SaslAuthenticateResponse, 2)[1].error_code == 58
        assert client.is_closed()


def test_secrets_are_in_no_log_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "s3cr3t-s3cr3t"
    key_file = make_certificates(tmp_path / "pem")
    config = {"ssl.key.password": secret, "sasl.enabled.mechanisms": "PLAIN"}
    with secured_broker(tmp_path / "data", key_file, users=("alice",), **config) as broker:
        mine = client_config(broker, key_file, "alice", "PLAIN")
        with Admin(mine) as admin:
            (described,) = admin.describe_configs([ConfigResource("broker", "1")]).values()
            shown = {entry.name: entry for entry in described.entries.values()}
            assert shown["ssl.key.password"].value is None
            assert secret not in repr(described)
            assert PASSWORD not in repr(admin.settings["sasl.password"]) + str(dict(admin.settings))
        with pytest.raises(AuthenticationError), Admin({**mine, "sasl.password": secret}) as admin:
            admin.list_topics()
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "wrong user or password" in logged
    assert secret not in logged and PASSWORD not in logged
    stored = (tmp_path / "data" / "oncelog-users.json").read_text()
    assert PASSWORD not in stored and base64.b64encode(PASSWORD.encode()).decode() not in stored
    assert {row["user"] for row in json.loads(stored)["credentials"]} == {"alice"}
    assert (tmp_path / "data" / "oncelog-users.json").stat().st_mode & 0o077 == 0


def test_sparks_options_are_the_same_settings() -> None:
    from oncelog.spark.source.source_options import parse_options

    options = {
        "kafka.bootstrap.servers": "h:1",
        "subscribe": "t",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": f'a.b.ScramLoginModule required username="u" password="{PASSWORD}";',
    }
    assert parse_options(options).client["sasl.mechanism"] == "SCRAM-SHA-512"
    assert PASSWORD not in repr(parse_options(options))
    with pytest.raises(ConfigError, match=r"security\.protocol"):
        parse_options({**options, "kafka.security.protocol": "TLS"})


def test_salts_of_unknown_users_survive_a_restart_and_look_like_real_ones() -> None:
    def salt_of(users: Users, name: str) -> bytes:
        return ScramExchange(users, Mechanism.SCRAM_SHA_256, "nonce")._credential(name).salt

    disk = MemoryDisk()
    users = Users(disk, new_secret=b"first")
    users.alter("alice", [], [(int(Mechanism.SCRAM_SHA_256), b"s" * 26, b"p" * 32, 4096)])
    made_up = salt_of(users, "nobody")
    assert len(made_up) == 26
    again = Users(disk, new_secret=b"second")
    assert salt_of(again, "nobody") == made_up != salt_of(again, "nobody else")
    # This is how `oncelog users` changes the file of a broker that is not running.
    Users(disk).alter("bob", [], [(int(Mechanism.SCRAM_SHA_256), b"s" * 26, b"p" * 32, 4096)])
    assert salt_of(Users(disk, new_secret=b"third"), "nobody") == made_up


def test_an_unknown_user_costs_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1566: the time of this look told clients that the user is unknown."""
    users = Users(MemoryDisk(), new_secret=b"secret")
    change = int(Mechanism.SCRAM_SHA_256), b"s" * 26, b"p" * 32, 4096
    users.alter_all([(f"u{number}", [], [change]) for number in range(100)])
    looks: list[int] = []
    monkeypatch.setattr(users_module, "_most_common", lambda numbers, default: looks.append(default) or 8192)
    for name in ("nobody", "nobody else"):
        credential = ScramExchange(users, Mechanism.SCRAM_SHA_256, "nonce")._credential(name)
        assert credential.iterations == 8192
        assert not users.has_password(name, "password")
    assert len(looks) == 2
    users.alter("bob", [], [change])
    assert users.usual.iterations == 8192 and len(looks) == 4


def test_a_file_of_an_earlier_release_gets_a_secret_that_stays() -> None:
    disk = MemoryDisk()
    Users(disk).alter("alice", [], [(int(Mechanism.SCRAM_SHA_256), b"salt", b"p" * 32, 4096)])
    assert Users(disk, new_secret=b"first").secret == Users(disk, new_secret=b"second").secret == b"first"


@pytest.mark.behaviour("I29")
def test_users_are_changed_by_one_write_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, writes = MemoryDisk(), []
    replace = disk.replace
    monkeypatch.setattr(disk, "replace", lambda name, *a, **k: writes.append(name) or replace(name, *a, **k))
    users = Users(disk)
    change = int(Mechanism.SCRAM_SHA_256), b"salt", b"p" * 32, 4096
    errors = users.alter_all([("", [], [change]), *((f"u{n}", [], [change]) for n in range(100))])
    assert [type(error) for error in errors] == [UnacceptableCredential] + [type(None)] * 100
    assert len(users.names()) == 100 and len(writes) == 1
    assert users.alter_all([("nobody", [1], [])]) and len(writes) == 1


def test_only_one_password_is_checked_per_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule must also hold for a client that authenticates more often than it is allowed to."""
    monkeypatch.setattr(authenticator, "may_authenticate_again", lambda *_: True)
    checked: list[str] = []
    begun, sent, answered = threading.Event(), threading.Event(), threading.Event()
    was_answered: list[bool] = []

    def has_password(_users: Users, name: str, _password: str) -> bool:
        checked.append(name)
        begun.set()
        assert sent.wait(60)
        if len(checked) == 5:
            was_answered.append(answered.wait(20))
        return True

    monkeypatch.setattr(Users, "has_password", has_password)
    token = SaslAuthenticateRequest(auth_bytes=b"\0alice\0" + PASSWORD.encode())
    again = encode_request(SaslHandshakeRequest(mechanism="PLAIN"), 1, 1, "x")
    again += encode_request(token, 2, 2, "x")
    config = {"connections.max.reauth.ms": 3_600_000, "sasl.enabled.mechanisms": "PLAIN"}
    with (
        secured_broker(tmp_path, users=("alice",), **config) as broker,
        RawClient(broker.bootstrap_servers) as client,
        RawClient(broker.bootstrap_servers) as other,
    ):
        other.ask(ApiVersionsRequest(), 0)
        client.socket.sendall(again * 100)
        assert begun.wait(60)
        other.send(ApiVersionsRequest(), 0)
        sent.set()
        assert other.read_frame() is not None
        answered.set()
        wait_until(lambda: bool(was_answered))
    assert was_answered == [True]
