"""SCRAM users: what the broker keeps of a password is enough to check it, not to use it (RFC 5802).

One file, replaced durably with every change. PLAIN checks against the same users.
"""

from __future__ import annotations

import base64
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from oncelog.broker.state_file import read_state, write_state
from oncelog.errors import (
    BrokerError,
    ResourceNotFound,
    StorageError,
    UnacceptableCredential,
)
from oncelog.log.disk import Disk
from oncelog.rules.security.scram import (
    LEAST_ITERATIONS,
    MOST_ITERATIONS,
    Credential,
    Mechanism,
    check_mechanism,
    make_credential,
    salt_password,
)

FILE_NAME = "oncelog-users.json"

UserChange = tuple[str, Iterable[int], Iterable[tuple[int, bytes, bytes, int]]]
"""(user, mechanisms to delete, (mechanism, salt, salted password, iterations) to set)."""
_Key = tuple[str, Mechanism]


SALT_BYTES = 24
"""Of the salts that our tools make."""


class Users:
    """Credentials by (user, mechanism).

    `secret` makes up the salts of users who are not there. It is kept in the file, so that a made-up salt
    stays the same over restarts, as a user's does; `new_secret` is taken where the file has none.
    """

    def __init__(self, disk: Disk, new_secret: bytes = b"") -> None:
        self._disk = disk
        self._credentials: dict[_Key, Credential] = {}
        self.secret = new_secret
        found = read_state(disk, FILE_NAME, _parse, is_private=True)
        if found is None:
            return
        self._credentials, stored = found
        if stored:
            self.secret = stored
        elif new_secret:
            with suppress(StorageError):  # a broker starts on a full disk, too
                self._save(self._credentials)

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

    @property
    def usual_salt_bytes(self) -> int:
        """Return the length of most users' salts, for the same reason."""
        counted = Counter(len(held.salt) for held in self._credentials.values())
        return counted.most_common(1)[0][0] if counted else SALT_BYTES

    def alter(
        self, name: str, deletions: Iterable[int], upsertions: Iterable[tuple[int, bytes, bytes, int]]
    ) -> None:
        """Remove mechanisms of a user, add or replace (mechanism, salt, salted password, iterations).

        Raises ResourceNotFound, UnacceptableCredential, UnsupportedSaslMechanism, StorageError; then nothing
        has changed.
        """
        (error,) = self.alter_all([(name, deletions, upsertions)])
        if error is not None:
            raise error

    def alter_all(self, changes: Iterable[UserChange]) -> list[BrokerError | None]:
        """Change several users as `alter` does; returns what was wrong with each.

        The file is written once, however many they are. Raises StorageError; then nothing has changed.
        """
        credentials, errors = dict(self._credentials), []
        for name, deletions, upsertions in changes:
            error = None
            try:
                removed, added = self._checked(credentials, name, deletions, upsertions)
            except BrokerError as refusal:
                error = refusal
            else:
                for key in removed:
                    del credentials[key]
                credentials.update(added)
            errors.append(error)
        if credentials != self._credentials:
            self._save(credentials)
        return errors

    def check(
        self, name: str, deletions: Iterable[int], upsertions: Iterable[tuple[int, bytes, bytes, int]]
    ) -> None:
        """Raise as `alter` would; nothing changes."""
        self._checked(self._credentials, name, deletions, upsertions)

    def _checked(
        self,
        credentials: Mapping[_Key, Credential],
        name: str,
        deletions: Iterable[int],
        upsertions: Iterable[tuple[int, bytes, bytes, int]],
    ) -> tuple[set[_Key], dict[_Key, Credential]]:
        """Return what a change removes and adds. Raises as `alter`."""
        removed: set[_Key] = set()
        if not name:
            raise UnacceptableCredential("a user needs a name")
        for number in deletions:
            key = name, check_mechanism(number)
            if key not in credentials or key in removed:
                raise ResourceNotFound(f"user {name!r} has no {key[1].label} credential")
            removed.add(key)
        added: dict[_Key, Credential] = {}
        for number, salt, salted_password, iterations in upsertions:
            mechanism = check_mechanism(number)
            _check(salt, salted_password, iterations)
            added[name, mechanism] = make_credential(mechanism, salt, salted_password, iterations)
        return removed, added

    def take_over(self, credentials: dict[tuple[str, Mechanism], Credential]) -> None:
        """Replace all credentials by another broker's. Raises StorageError."""
        self._save(dict(credentials))

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
        content: dict[str, object] = {"credentials": rows}
        if self.secret:
            content["secret"] = _to_text(self.secret)
        write_state(self._disk, FILE_NAME, content, is_private=True)
        self._credentials = credentials


def _check(salt: bytes, salted_password: bytes, iterations: int) -> None:
    if not LEAST_ITERATIONS <= iterations <= MOST_ITERATIONS:
        raise UnacceptableCredential(
            f"{iterations} iterations; {LEAST_ITERATIONS} to {MOST_ITERATIONS} are accepted"
        )
    if not salt or not salted_password:
        raise UnacceptableCredential("neither salt nor password may be empty")


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _parse(content: dict[str, Any]) -> tuple[dict[_Key, Credential], bytes]:
    """Return the credentials, and the secret; empty if an earlier release wrote the file."""
    credentials = {
        (row["user"], Mechanism[row["mechanism"].replace("-", "_")]): Credential(
            base64.b64decode(row["salt"]),
            base64.b64decode(row["stored_key"]),
            base64.b64decode(row["server_key"]),
            int(row["iterations"]),
        )
        for row in content["credentials"]
    }
    return credentials, base64.b64decode(content.get("secret", ""))
