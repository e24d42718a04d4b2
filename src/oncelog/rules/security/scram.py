"""SCRAM credentials. A broker derives them from a password and stores them instead of the password.

Source: RFC 5802; KIP-84, KIP-554.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum
from types import ModuleType
from typing import NamedTuple

from oncelog.errors import UnsupportedSaslMechanism

MIN_ITERATIONS, MAX_ITERATIONS = 4_096, 16_384
"""Smallest and largest iteration count. Source: kafka ScramMechanism, ScramControlManager."""


class Mechanism(IntEnum):
    """The SCRAM mechanisms with their protocol numbers. Source: kafka ScramMechanism."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def label(self) -> str:
        """The name of the mechanism in SASL, such as SCRAM-SHA-256."""
        return self.name.replace("_", "-")

    @property
    def hash_name(self) -> str:
        """The name of the hash in hashlib, such as sha256."""
        return f"sha{self.name[-3:]}"


class Credential(NamedTuple):
    """The stored form of a password, from which the password cannot be read."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


def make_credential(mechanism: Mechanism, salt: bytes, salted_password: bytes, iterations: int) -> Credential:
    """Return the credential for a salted password, which clients compute with PBKDF2."""
    digest = mechanism.hash_name
    client_key = hmac.digest(salted_password, b"Client Key", digest)
    return Credential(
        bytes(salt),
        hashlib.new(digest, client_key).digest(),
        hmac.digest(salted_password, b"Server Key", digest),
        iterations,
    )


def salt_password(mechanism: Mechanism, password: str, salt: bytes, iterations: int) -> bytes:
    """Return the salted password, computed with PBKDF2. This takes milliseconds of CPU time."""
    return hashlib.pbkdf2_hmac(mechanism.hash_name, password.encode(), salt, iterations)


def check_mechanism(number: int) -> Mechanism:
    """Return the mechanism with this protocol number. Raises UnsupportedSaslMechanism."""
    try:
        return Mechanism(number)
    except ValueError:
        raise UnsupportedSaslMechanism(
            f"{number} is not a SCRAM mechanism; use 1 (SCRAM-SHA-256) or 2 (SCRAM-SHA-512)"
        ) from None


def load_scramp() -> ModuleType:
    """Return the package scramp, which computes the messages of SCRAM, and let it accept salts of any length.

    From version 1.5 on, scramp requires salts of at least 12 bytes. Kafka has no minimum, so its users may
    have shorter salts. Without the change, they would be told that their password is wrong. See
    test_a_user_with_a_short_salt_can_log_in.
    """
    import scramp
    import scramp.core

    if hasattr(scramp.core, "Salt"):
        scramp.core.Salt.MIN_LENGTH = 1
    module: ModuleType = scramp
    return module
