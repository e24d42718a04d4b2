"""SCRAM credentials: from a password to what a broker keeps of it. Source: RFC 5802, KIP-84, KIP-554."""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum
from typing import NamedTuple

from oncelog.errors import UnsupportedSaslMechanism

LEAST_ITERATIONS, MOST_ITERATIONS = 4_096, 16_384
"""Source: Kafka's ScramMechanism, ScramControlManager."""


class Mechanism(IntEnum):
    """Source: Kafka's ScramMechanism."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def label(self) -> str:
        """SCRAM-SHA-256, as SASL calls it."""
        return self.name.replace("_", "-")

    @property
    def hash_name(self) -> str:
        return f"sha{self.name[-3:]}"


class Credential(NamedTuple):
    """What is kept of a password."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


def make_credential(mechanism: Mechanism, salt: bytes, salted_password: bytes, iterations: int) -> Credential:
    """`salted_password`: PBKDF2 of the password, as clients send it."""
    digest = mechanism.hash_name
    client_key = hmac.digest(salted_password, b"Client Key", digest)
    return Credential(
        bytes(salt),
        hashlib.new(digest, client_key).digest(),
        hmac.digest(salted_password, b"Server Key", digest),
        iterations,
    )


def salt_password(mechanism: Mechanism, password: str, salt: bytes, iterations: int) -> bytes:
    """PBKDF2. Takes milliseconds."""
    return hashlib.pbkdf2_hmac(mechanism.hash_name, password.encode(), salt, iterations)


def check_mechanism(number: int) -> Mechanism:
    """Raises UnsupportedSaslMechanism."""
    try:
        return Mechanism(number)
    except ValueError:
        raise UnsupportedSaslMechanism(f"{number} is no SCRAM mechanism; 1 is SHA-256, 2 SHA-512") from None
