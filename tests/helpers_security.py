"""Certificates, users and brokers with locked doors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

from oncelog.broker.users import Users
from oncelog.edge.broker import Broker
from oncelog.edge.disk import RealDisk
from oncelog.rules.scram import Mechanism, salt_password

PASSWORD = "correct horse, battery=staple"
SALT = b"sixteen bytes!!!"
AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority, the broker with its key, a client with its key."""

    authority: Path
    broker: Path
    client: Path


def make_certificates(directory: Path, client_name: str = "alice") -> Certificates:
    """A new authority and what it signs."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Certificates(*(directory / f"{name}.pem" for name in ("authority", "broker", "client")))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(made.authority)
    _write(authority.issue_cert("127.0.0.1", "localhost"), made.broker)
    _write(authority.issue_cert(f"{client_name}@example.org", common_name=client_name), made.client)
    return made


def _write(issued: trustme.LeafCert, path: Path) -> None:
    """Java reads private keys as PKCS #8 only."""
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(text + b"".join(each.bytes() for each in issued.cert_chain_pems))


def add_users(data_dir: Path, *names: str, password: str = PASSWORD) -> None:
    """SCRAM users with both mechanisms, written while the broker does not run."""
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
    """A broker that wants TLS (with certificates) and SASL; settings with dots or underscores."""
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
    """Settings by librdkafka's names, which ours are too."""
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
