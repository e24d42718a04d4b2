"""Certificates, users, and brokers that authenticate their clients."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from cryptography.hazmat.primitives import serialization
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from joserfc.jws import JWSRegistry

from oncelog import Producer
from oncelog.broker.security.users import Users
from oncelog.client.admin.blocking import Admin
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.rules.security.scram import Mechanism, salt_password
from oncelog.server.disk import RealDisk
from oncelog.server.embedded import Broker
from support import ROOT
from support.wait import LIMIT_S, wait_until

PASSWORD = "correct horse, battery=staple"
SALT = b"sixteen bytes!!!"
AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
DOCS = ROOT / "docs" / "security.md"


@dataclass(frozen=True)
class Certificates:
    """PEM files of a certificate authority, of a broker with its key, and of a client with its key."""

    authority: Path
    broker: Path
    client: Path


def make_certificates(directory: Path, client_name: str = "alice") -> Certificates:
    """Return a new authority and the certificates that it signs."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Certificates(*(directory / f"{name}.pem" for name in ("authority", "broker", "client")))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(made.authority)
    _write(authority.issue_cert("127.0.0.1", "localhost"), made.broker)
    _write(authority.issue_cert(f"{client_name}@example.org", common_name=client_name), made.client)
    return made


def _write(issued: trustme.LeafCert, path: Path) -> None:
    """Write a certificate and its key. The key has the form PKCS #8, the only one that Java reads."""
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(text + b"".join(pem.bytes() for pem in issued.cert_chain_pems))


def add_users(data_dir: Path, *names: str, password: str = PASSWORD) -> None:
    """Add SCRAM users with both mechanisms while the broker is not running."""
    data_dir.mkdir(parents=True, exist_ok=True)
    users = Users(RealDisk(data_dir))
    for name in names:
        changes = [
            (int(mechanism), SALT, salt_password(mechanism, password, SALT, 4096), 4096)
            for mechanism in Mechanism
        ]
        users.alter(name, [], changes)


def secured_broker(
    data_dir: Path,
    certificates: Certificates | None = None,
    *,
    users: tuple[str, ...] = (),
    sasl: bool = True,
    **config: object,
) -> Broker:
    """Run a broker with SASL, and with TLS if there are certificates.

    Names of settings may have dots or underscores.
    """
    add_users(data_dir, *users)
    protocol = ("SASL_" if sasl else "") + ("SSL" if certificates else "PLAINTEXT")
    settings: dict[str, object] = {"security.protocol": protocol}
    if certificates is not None:
        settings["ssl.keystore.location"] = str(certificates.broker)
        settings["ssl.truststore.location"] = str(certificates.authority)
    return Broker(data_dir, config={**settings, **config})


def client_config(
    broker: Broker,
    certificates: Certificates | None = None,
    user: str | None = None,
    mechanism: str = "SCRAM-SHA-256",
    password: str = PASSWORD,
) -> dict[str, str]:
    """Return client settings by librdkafka's names, which Oncelog accepts too."""
    config = {
        "bootstrap.servers": broker.bootstrap_servers,
        "security.protocol": ("SASL_" if user else "") + ("SSL" if certificates else "PLAINTEXT"),
    }
    if certificates is not None:
        config["ssl.ca.location"] = str(certificates.authority)
    if user is not None:
        config |= {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password}
    return config


def without(config: Mapping[str, str], *keys: str) -> dict[str, str]:
    return {key: value for key, value in config.items() if key not in keys}


def signed_token(
    key: Any, alg: str = "RS256", header: Mapping[str, Any] | None = None, **changed: object
) -> str:
    """Return a token (JWT) of alice for the next five minutes. A claim that is None is left out.

    `header`: further parameters of the header.
    """
    good = {"sub": "alice", "iss": "https://id.example", "aud": ["kafka"], "exp": int(time.time()) + 300}
    good |= {"iat": int(time.time())}
    claims = {name: value for name, value in {**good, **changed}.items() if value is not None}
    registry = JWSRegistry(algorithms=[alg], strict_check_header=False)
    return jwt.encode({"alg": alg, "kid": "one", **(header or {})}, claims, key, registry=registry)


def write_keys(path: Path, *keys: RSAKey) -> None:
    """Write a key set (JWKS)."""
    path.write_text(json.dumps(KeySet(list(keys)).as_dict(private=False)))


_SHORT = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP}
_SHORT |= {"transactional id": ResourceType.TRANSACTIONAL_ID}


def add_acls(admin: Admin, acls: list[Acl]) -> None:
    """Create ACLs, and wait until the broker applies them.

    Apache Kafka's broker learns of ACLs from the controller a moment later. By then, it also knows the users
    that were created before.
    """
    admin.create_acls(acls)
    wait_until(lambda: set(acls) <= set(admin.describe_acls()))


def documented_acls(role: str, principal: str) -> list[Acl]:
    """Return the ACLs that a row of the table in docs/security.md names."""
    table = DOCS.read_text().partition("| who | resource | operations |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    acls: list[Acl] = []
    current = ""
    for name, resource, operations in rows:
        current = name or current
        match = re.fullmatch(r"(topic|group|transactional id) `([^`]+)`( prefixed)?", resource)
        assert match is not None, resource
        pattern = PatternType.PREFIXED if match[3] else PatternType.LITERAL
        acls += [
            Acl(
                _SHORT[match[1]],
                match[2],
                pattern,
                f"User:{principal}",
                "*",
                Operation[operation],
                Permission.ALLOW,
            )
            for operation in re.findall(r"[A-Z_]{4,}", operations)
            if current == role
        ]
    assert acls, f"docs/security.md lists nothing for {role!r}"
    return acls


def apache_properties(certificates: Certificates, keys: Path | None = None) -> dict[str, object]:
    """Return the properties of an Apache Kafka with listeners for SASL_SSL and for SSL with client
    certificates.

    On the listener PLAINTEXT, everybody may do everything. `keys` is the key set of tokens (JWKS), which the
    JVM must be allowed to read.
    """
    module = "org.apache.kafka.common.security"
    at = "listener.name.sasl_ssl"
    properties: dict[str, object] = {
        "authorizer.class.name": AUTHORIZER,
        "super.users": "User:ANONYMOUS;User:admin",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512" + (",OAUTHBEARER" if keys else ""),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": certificates.broker,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": certificates.authority,
        "listener.name.ssl.ssl.client.auth": "required",
        "listener.name.ssl.ssl.principal.mapping.rules": "RULE:^.*CN=([a-z]+).*$/$1/",
        f"{at}.connections.max.reauth.ms": 2000,
        f"{at}.plain.sasl.jaas.config": f'{module}.plain.PlainLoginModule required user_alice="{PASSWORD}";',
    }
    for mechanism in ("scram-sha-256", "scram-sha-512"):
        properties[f"{at}.{mechanism}.sasl.jaas.config"] = f"{module}.scram.ScramLoginModule required;"
    if keys is not None:
        bearer = f"{module}.oauthbearer.OAuthBearer"
        properties |= {
            f"{at}.oauthbearer.sasl.jaas.config": f"{bearer}LoginModule required;",
            f"{at}.oauthbearer.sasl.server.callback.handler.class": f"{bearer}ValidatorCallbackHandler",
            "sasl.oauthbearer.jwks.endpoint.url": f"file://{keys}",
            "sasl.oauthbearer.expected.audience": "kafka",
            "sasl.oauthbearer.expected.issuer": "https://id.example",
        }
    return properties


def reauthenticate(producer: Producer) -> None:
    """Let the producer's connections authenticate again now. Otherwise their timers would do that later."""

    async def begin() -> None:
        assert producer._driver is not None
        for connection in producer._driver.cluster._connections.values():
            if connection._protocol is not None:
                assert connection._reauthentication_timer is not None
                connection._reauthenticate(connection._protocol)

    producer._thread.run(begin(), LIMIT_S)


def logins_again(broker: Broker) -> int:
    """Return the number of open connections whose clients have authenticated again. The broker must be in
    this process.
    """
    assert broker._running is not None
    authenticators = [connection.auth.authenticator for connection in broker._running.server.connections]
    return sum(
        authenticator._authenticated_again_ms is not None and not authenticator.is_authenticating
        for authenticator in authenticators
    )
