"""SCRAM users: what the broker keeps of a password is enough to check it, not to use it (RFC 5802).

One file, replaced durably with every change. PLAIN checks against the same users.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections import Counter
from collections.abc import Iterable, Iterator

from oncelog.broker.state_file import read_state, write_state
from oncelog.errors import (
    BrokerError,
    ResourceNotFound,
    StorageError,
    UnacceptableCredential,
)
from oncelog.log.disk import Disk
from oncelog.rules.scram import (
    LEAST_ITERATIONS,
    MOST_ITERATIONS,
    Credential,
    Mechanism,
    check_mechanism,
    make_credential,
    salt_password,
)

FILE_NAME = "oncelog-users.json"


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

    @property
    def usual_iterations(self) -> int:
        """What most users have: a made-up one must not stand out."""
        counted = Counter(held.iterations for held in self._credentials.values())
        return counted.most_common(1)[0][0] if counted else LEAST_ITERATIONS

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
        # As slow as for a user.
        salt_password(Mechanism.SCRAM_SHA_256, password, b"nobody", self.usual_iterations)
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
