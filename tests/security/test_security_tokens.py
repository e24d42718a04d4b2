"""OAUTHBEARER with signed tokens, and principals of client certificates; both with ACLs."""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from joserfc.jws import JWSRegistry
from joserfc.registry import HeaderParameter
from support.security.brokers import (
    AUTHORIZER,
    Certificates,
    client_config,
    logins_again,
    reauthenticate,
    secured_broker,
    signed_token,
    write_keys,
)
from support.wait import pass_time, set_wall_clock, wait_until

import oncelog
from oncelog.client.admin.blocking import Admin
from oncelog.errors import AuthenticationError, ConfigError, TopicAuthorizationFailed
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.server.embedded import Broker


@cache
def rsa_key(name: str = "one") -> RSAKey:
    """Return the key of this name. Every process of xdist imports this module, and a key takes a sixth of a
    second.
    """
    return RSAKey.generate_key(2048, {"kid": "one"})


def signed(key: Any = None, alg: str = "RS256", **changed: object) -> str:
    return signed_token(key or rsa_key(), alg, **changed)


def signed_with_critical() -> str:
    """Return a token with a parameter that a broker must know, or else refuse the token."""
    header = {"alg": "RS256", "kid": "one", "crit": ["oncelog"], "oncelog": "x"}
    registry = JWSRegistry({"oncelog": HeaderParameter("", "str")}, algorithms=["RS256"])
    claims = {"sub": "alice", "iss": "https://id.example", "aud": "kafka", "exp": int(time.time()) + 300}
    return jwt.encode(header, claims, rsa_key(), registry=registry)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "jwks.json"
    write_keys(path, rsa_key())
    return path


def settings(keys: Path) -> dict[str, str]:
    return {
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": f"file://{keys}",
        "sasl.oauthbearer.expected.audience": "kafka,events",
        "sasl.oauthbearer.expected.issuer": "https://id.example",
        "authorizer.class.name": AUTHORIZER,
        "super.users": "User:alice",
    }


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[Broker]:
    with secured_broker(tmp_path_factory.mktemp("data"), **settings(keys)) as broker:
        yield broker


def with_token(broker: Broker, path: Path, token: str) -> dict[str, str]:
    path.write_text(token)
    return {
        "bootstrap.servers": broker.bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": f"file://{path}",
    }


def test_a_token_authenticates_its_subject(broker: Broker, tmp_path: Path) -> None:
    with oncelog.Producer(with_token(broker, tmp_path / "token", signed())) as producer:
        assert producer.send("tokens", b"v").result(timeout=60).topic == "tokens"
    bob = with_token(broker, tmp_path / "token", signed(sub="bob"))
    with oncelog.Producer(bob) as producer, pytest.raises(TopicAuthorizationFailed):
        producer.send("tokens", b"v").result(timeout=60)


@pytest.mark.parametrize("exp", [2**63, 2**70, 1e300], ids=str)
def test_a_token_with_a_very_late_expiry_is_accepted(broker: Broker, tmp_path: Path, exp: float) -> None:
    assert Admin(with_token(broker, tmp_path / "token", signed(exp=exp))).list_topics() is not None


def test_a_token_is_accepted_once_a_clock_that_was_ahead_is_right(tmp_path: Path, keys: Path) -> None:
    with secured_broker(tmp_path / "data", **settings(keys)) as broker:
        assert broker._running is not None
        set_wall_clock(broker._running.clock, 86_400_000)
        set_wall_clock(broker._running.clock, -86_400_000)
        with Admin(with_token(broker, tmp_path / "token", signed())) as admin:
            assert admin.list_topics() is not None


HEADERS: dict[str, dict[str, Any]] = {
    "a parameter of PingFederate": {"pi.atm": "2"},
    "a parameter of Azure": {"typ": "JWT", "nonce": "abc"},
    "a chain of certificates": {"x5c": ["A" * 3000, "A" * 3000]},
}


@pytest.mark.parametrize("why", HEADERS)
def test_a_token_may_have_a_header_with_more_than_its_algorithm(
    broker: Broker, tmp_path: Path, why: str
) -> None:
    token = signed_token(rsa_key(), header=HEADERS[why])
    assert Admin(with_token(broker, tmp_path / "token", token)).list_topics() is not None


def test_keys_that_cannot_be_used_do_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    write_keys(path, rsa_key())
    unusable = [{"kty": "AKP", "alg": "ML-DSA-44"}, {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}]
    unusable += [{"kty": "RSA", "kid": "one"}]
    keys = [*unusable, *json.loads(path.read_text())["keys"]]
    path.write_text(json.dumps({"keys": keys}))
    with secured_broker(tmp_path / "data", **settings(path)) as broker:
        assert Admin(with_token(broker, tmp_path / "token", signed())).list_topics() is not None


BAD = {
    "over": lambda: signed(exp=int(time.time()) - 100),
    "without an end": lambda: signed(exp=None),
    "for others": lambda: signed(aud=["web"]),
    "for nobody": lambda: signed(aud=None),
    "of another issuer": lambda: signed(iss="https://elsewhere.example"),
    "names nobody": lambda: signed(sub=None),
    "names a number": lambda: signed(sub=7),
    "signed by another": lambda: signed(rsa_key("other")),
    "signed with a shared secret": lambda: signed(OctKey.import_key(b"k" * 32), "HS256"),
    "not signed": lambda: "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGljZSJ9.",
    "none": lambda: "garbage",
    "cut": lambda: signed()[:-5],
    "with a critical parameter": lambda: signed_with_critical(),
    "with a nested header": lambda: urlsafe_b64encode(b"[" * 12_000).decode() + ".e30.AAAA",
}


@pytest.mark.parametrize("why", BAD)
def test_invalid_tokens_are_refused(broker: Broker, tmp_path: Path, why: str) -> None:
    token = BAD[why]()
    with pytest.raises(AuthenticationError) as caught:
        Admin(with_token(broker, tmp_path / "token", token)).list_topics()
    assert token not in str(caught.value)


def test_a_client_reauthenticates_with_a_new_token_and_stays(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "token"
    with secured_broker(tmp_path / "data", **settings(keys)) as broker:
        config = with_token(broker, path, signed(exp=int(time.time()) + 300))
        with oncelog.Producer(config) as producer:
            producer.send("tokens", b"v").result(timeout=60)
            opened = broker.metrics()["connections_opened"]
            path.write_text(signed(exp=int(time.time()) + 6_000))
            reauthenticate(producer)
            wait_until(lambda: logins_again(broker) > 0)
            pass_time(broker, 400_000)
            producer.send("tokens", b"v").result(timeout=60)
        assert broker.metrics()["connections_opened"] == opened


def test_a_session_ends_with_its_token(tmp_path: Path, keys: Path) -> None:
    with secured_broker(tmp_path / "data", **settings(keys)) as broker:
        config = with_token(broker, tmp_path / "token", signed(exp=int(time.time()) + 300))
        with oncelog.Producer(config) as producer:
            producer.send("tokens", b"v").result(timeout=60)
            opened = broker.metrics()["connections_opened"]
            (tmp_path / "token").write_text(signed(exp=int(time.time()) + 6_000))
            pass_time(broker, 400_000)
            producer.send("tokens", b"v").result(timeout=60)
        assert broker.metrics()["connections_opened"] > opened, "the old connection is of no use"


def test_changed_keys_are_reloaded(tmp_path: Path) -> None:
    keys = tmp_path / "jwks.json"
    write_keys(keys, rsa_key())
    with secured_broker(tmp_path / "data", **settings(keys)) as broker:
        config = with_token(broker, tmp_path / "token", signed(rsa_key("other")))

        def may_enter() -> bool:
            try:
                with Admin(config) as admin:
                    admin.list_topics()
            except AuthenticationError:
                return False
            return True

        assert not may_enter()
        write_keys(keys, rsa_key(), rsa_key("other"))
        write_keys(keys, rsa_key("other"))
        wait_until(may_enter)


def test_librdkafka_authenticates_with_a_token(broker: Broker) -> None:
    from confluent_kafka import Producer

    def token(_: str) -> tuple[str, float]:
        return signed(), time.time() + 300

    config = {
        "bootstrap.servers": broker.bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": token,
    }
    producer = Producer(config)
    producer.produce("tokens", b"v")
    assert producer.flush(60) == 0


def test_invalid_token_settings_are_refused(tmp_path: Path, broker: Broker) -> None:
    with pytest.raises(ConfigError, match="file:///PATH"):
        Broker(tmp_path, config={"sasl.oauthbearer.jwks.endpoint.url": "gopher://x"}).start()
    lacking = with_token(broker, tmp_path / "token", "t")
    del lacking["sasl.oauthbearer.token.endpoint.url"]
    with pytest.raises(ConfigError, match="token"):
        Admin(lacking).list_topics()


def test_certificates_name_principals(tmp_path: Path, certificates: Certificates) -> None:
    config = {
        "ssl.client.auth": "requested",
        "ssl.principal.mapping.rules": r"RULE:.*CN=([a-z]+).*/$1/,DEFAULT",
        "authorizer.class.name": AUTHORIZER,
        "super.users": "User:admin",
    }
    grant = Acl(
        ResourceType.TOPIC, "t", PatternType.LITERAL, "User:alice", "*", Operation.ALL, Permission.ALLOW
    )
    broker = secured_broker(tmp_path, certificates, sasl=False, **config)
    anonymous = {"super.users": "User:ANONYMOUS"}
    with (
        secured_broker(tmp_path, certificates, sasl=False, **{**config, **anonymous}) as first,
        Admin(client_config(first, certificates)) as admin,
    ):
        admin.create_acls([grant])
    with broker:
        nobody = client_config(broker, certificates)
        alice = nobody | {"ssl.keystore.location": str(certificates.client)}
        with oncelog.Producer(alice) as producer:
            producer.send("t", b"v").result(timeout=60)
        with oncelog.Producer(nobody) as producer, pytest.raises(TopicAuthorizationFailed):
            producer.send("t", b"v").result(timeout=60)
