"""SCRAM users: what the broker keeps of a password is enough to check it, not to use it (RFC 5802).

One file, replaced durably with every change. PLAIN checks against the same users.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from oncelog.broker.state_file import read_state, write_state
from oncelog.errors import (
    BrokerError,
    ResourceNotFound,
    StorageError,
    UnacceptableCredential,
    UnsupportedSaslMechanism,
)
from oncelog.log.disk import Disk

FILE_NAME = "oncelog-users.json"
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


class Users:
    """Credentials by (user, mechanism)."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._credentials: dict[tuple[str, Mechanism], Credential] = {}
        text = read_state(disk, FILE_NAME)
        if text is not None:
            self._credentials = _parse(text)

    def get(self, name: str, mechanism: Mechanism) -> Credential | None:
        return self._credentials.get((name, mechanism))

    def names(self) -> list[str]:
        return sorted({name for name, _ in self._credentials})

    def of(self, name: str) -> Iterator[tuple[Mechanism, Credential]]:
        """A user's credentials."""
        for mechanism in Mechanism:
            found = self.get(name, mechanism)
            if found is not None:
                yield mechanism, found

    def alter(
        self, name: str, deletions: Iterable[int], upsertions: Iterable[tuple[int, bytes, bytes, int]]
    ) -> None:
        """Remove mechanisms of a user, add or replace (mechanism, salt, salted password, iterations).

        Raises ResourceNotFound, UnacceptableCredential, UnsupportedSaslMechanism, StorageError; then nothing
        has changed.
        """
        changed = dict(self._credentials)
        for number in deletions:
            key = name, check_mechanism(number)
            if changed.pop(key, None) is None:
                raise ResourceNotFound(f"user {name!r} has no {key[1].label} credential")
        for number, salt, salted_password, iterations in upsertions:
            mechanism = check_mechanism(number)
            _check(name, salt, salted_password, iterations)
            changed[name, mechanism] = make_credential(mechanism, salt, salted_password, iterations)
        self._save(changed)

    def has_password(self, name: str, password: str) -> bool:
        """Whether it is the user's; the first credential there is tells. Takes milliseconds."""
        for mechanism, held in self.of(name):
            salted = salt_password(mechanism, password, held.salt, held.iterations)
            given = make_credential(mechanism, held.salt, salted, held.iterations)
            return hmac.compare_digest(given.stored_key, held.stored_key)
        salt_password(Mechanism.SCRAM_SHA_256, password, b"nobody", LEAST_ITERATIONS)  # as slow as for a user
        return False

    def _save(self, credentials: dict[tuple[str, Mechanism], Credential]) -> None:
        rows = [
            {
                "user": name,
                "mechanism": mechanism.label,
                "salt": _to_text(held.salt),
                "stored_key": _to_text(held.stored_key),
                "server_key": _to_text(held.server_key),
                "iterations": held.iterations,
            }
            for (name, mechanism), held in credentials.items()
        ]
        text = json.dumps({"version": 1, "credentials": rows}, indent=1)
        write_state(self._disk, FILE_NAME, text, is_private=True)
        self._credentials = credentials


def _check(name: str, salt: bytes, salted_password: bytes, iterations: int) -> None:
    if not name:
        raise UnacceptableCredential("a user needs a name")
    if not LEAST_ITERATIONS <= iterations <= MOST_ITERATIONS:
        raise UnacceptableCredential(
            f"{iterations} iterations; {LEAST_ITERATIONS} to {MOST_ITERATIONS} are accepted"
        )
    if not salt or not salted_password:
        raise UnacceptableCredential("neither salt nor password may be empty")


def check_mechanism(number: int) -> Mechanism:
    """Raises UnsupportedSaslMechanism."""
    try:
        return Mechanism(number)
    except ValueError:
        raise UnsupportedSaslMechanism(f"{number} is no SCRAM mechanism; 1 is SHA-256, 2 SHA-512") from None


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _parse(text: str) -> dict[tuple[str, Mechanism], Credential]:
    try:
        content = json.loads(text)
        if content["version"] != 1:
            raise ValueError(f"version {content['version']}")
        return {
            (row["user"], Mechanism[row["mechanism"].replace("-", "_")]): Credential(
                base64.b64decode(row["salt"]),
                base64.b64decode(row["stored_key"]),
                base64.b64decode(row["server_key"]),
                int(row["iterations"]),
            )
            for row in content["credentials"]
        }
    except (ValueError, KeyError, TypeError, BrokerError) as error:
        raise StorageError(
            f"{FILE_NAME} is unreadable ({type(error).__name__}); restore it from a backup"
        ) from None
