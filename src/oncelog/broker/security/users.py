"""The SCRAM users of the broker, stored in a file.

A stored credential is enough to verify a password, but not to log in with it (RFC 5802). PLAIN logins are
checked against the same users. Each change durably replaces the whole file `oncelog-users.json`.
"""

from __future__ import annotations

import base64
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from oncelog.broker.state_file import (
    ChangeLock,
    EncodedRow,
    EncodedRows,
    PreparedRows,
    read_state,
    write_state,
)
from oncelog.broker.stepwise import Work, run_work
from oncelog.errors import (
    BrokerError,
    ResourceNotFound,
    StorageError,
    UnacceptableCredential,
    without_traceback,
)
from oncelog.log.disk import Disk
from oncelog.rules.security.scram import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    Credential,
    Mechanism,
    check_mechanism,
    make_credential,
    salt_password,
)

FILE_NAME = "oncelog-users.json"

UserChange = tuple[str, Iterable[int], Iterable[tuple[int, bytes, bytes, int]]]
"""(user, mechanisms to delete, credentials to set as (mechanism, salt, salted password, iterations))"""
_Key = tuple[str, Mechanism]


class PreparedChange(NamedTuple):
    """The credentials that a checked change removes and adds."""

    removed: set[_Key]
    added: dict[_Key, Credential]
    rows: PreparedRows[_Key, Credential]
    """The rows of `added` in the file."""


CHANGES_PER_STEP = 1_000
"""Changes of users that one step applies."""
SALT_BYTES = 24
"""Length in bytes of the salts that this project's tools generate."""


class UsualCredential(NamedTuple):
    """The most common iteration count of all credentials, and the most common length of a salt in bytes."""

    iterations: int
    salt_bytes: int


class Users:
    """Credentials by (user, mechanism).

    `secret` is the key from which the fake salts of unknown users are derived. It is stored in the file, so a
    fake salt survives restarts, like a real salt. If the file has no secret, `new_secret` is used.
    """

    def __init__(self, disk: Disk, new_secret: bytes = b"") -> None:
        self._disk = disk
        self._credentials: dict[_Key, Credential] = {}
        self._usual: UsualCredential | None = None
        """The result of `usual`; None after a change."""
        self._rows, self._lock = EncodedRows(_row), ChangeLock()
        self.secret = new_secret
        content = read_state(disk, FILE_NAME, _parse, is_private=True)
        if content is None:
            return
        self._credentials, stored_secret = content
        if stored_secret:
            self.secret = stored_secret
        elif new_secret:
            # If the secret cannot be stored, continue with it in memory: the broker must start even on a full
            # disk.
            with suppress(StorageError):
                run_work(self._save(self._credentials))

    def get(self, name: str, mechanism: Mechanism) -> Credential | None:
        return self._credentials.get((name, mechanism))

    def names(self) -> list[str]:
        """Return the names of all users, in no particular order."""
        return [*dict.fromkeys(name for name, _ in self._credentials)]

    def of(self, name: str) -> Iterator[tuple[Mechanism, Credential]]:
        """Yield a user's credentials with their mechanisms."""
        for mechanism in Mechanism:
            credential = self.get(name, mechanism)
            if credential is not None:
                yield mechanism, credential

    @property
    def usual(self) -> UsualCredential:
        """The most common values, which the fake credentials of unknown users have. Clients therefore cannot
        distinguish these from known users.
        """
        # Counting all credentials for each unknown user took 1.4 ms with 10,000 users, and this time told
        # clients that the user is unknown. See test_an_unknown_user_costs_no_look_at_all_others.
        if self._usual is None:
            credentials = self._credentials.values()
            self._usual = UsualCredential(
                _most_common((held.iterations for held in credentials), MIN_ITERATIONS),
                _most_common((len(held.salt) for held in credentials), SALT_BYTES),
            )
        return self._usual

    def alter(
        self, name: str, deletions: Iterable[int], upsertions: Iterable[tuple[int, bytes, bytes, int]]
    ) -> None:
        """Delete credentials of a user, and add or replace others.

        `deletions` are mechanisms, `upsertions` are (mechanism, salt, salted password, iterations). Raises
        ResourceNotFound, UnacceptableCredential, UnsupportedSaslMechanism or StorageError. After an error
        nothing has changed.
        """
        (error,) = self.alter_all([(name, deletions, upsertions)])
        if error is not None:
            raise error

    def alter_all(self, changes: Iterable[UserChange]) -> list[BrokerError | None]:
        """Change several users as `alter` does, with one write of the file.

        Return an error or None for each user. After a StorageError nothing has changed.
        """
        prepared: list[PreparedChange | BrokerError] = []
        for change in changes:
            try:
                prepared.append(self.prepare(*change))
            except BrokerError as refusal:
                prepared.append(without_traceback(refusal))
        return run_work(self.apply_in_steps(prepared))

    def apply_in_steps(
        self, changes: Iterable[PreparedChange | BrokerError]
    ) -> Work[list[BrokerError | None]]:
        """Apply prepared changes with one write of the file, in another thread.

        The caller must run all steps. Return an error or None for each change: ResourceNotFound if another
        request has deleted a credential since `prepare`. An error among the changes is returned as it is.
        After a StorageError nothing has changed.
        """
        return self._lock.hold(self._apply(changes))

    def _apply(self, changes: Iterable[PreparedChange | BrokerError]) -> Work[list[BrokerError | None]]:
        credentials = dict(self._credentials)
        rows: dict[_Key, tuple[Credential, EncodedRow]] = {}
        errors: list[BrokerError | None] = []
        for count, change in enumerate(changes, 1):
            if isinstance(change, BrokerError):
                errors.append(change)
            elif change.removed <= credentials.keys():
                for key in change.removed:
                    del credentials[key]
                credentials.update(change.added)
                rows.update(change.rows)
                errors.append(None)
            else:
                errors.append(ResourceNotFound("another request has deleted the credential"))
            if count % CHANGES_PER_STEP == 0:
                yield None
        if credentials != self._credentials:
            yield from self._save(credentials, rows)
        return errors

    def prepare(
        self, name: str, deletions: Iterable[int], upsertions: Iterable[tuple[int, bytes, bytes, int]]
    ) -> PreparedChange:
        """Check a change of a user, and make its credentials and their rows, without changing anything.

        Raises the errors of `alter`, except StorageError.
        """
        removed: set[_Key] = set()
        if not name:
            raise UnacceptableCredential("the user name is empty")
        for number in deletions:
            key = name, check_mechanism(number)
            if key not in self._credentials or key in removed:
                raise ResourceNotFound(f"user {name!r} has no {key[1].label} credential")
            removed.add(key)
        added: dict[_Key, Credential] = {}
        for number, salt, salted_password, iterations in upsertions:
            mechanism = check_mechanism(number)
            _check(salt, salted_password, iterations)
            added[name, mechanism] = make_credential(mechanism, salt, salted_password, iterations)
        return PreparedChange(removed, added, self._rows.prepare(added))

    def take_over(self, credentials: dict[tuple[str, Mechanism], Credential]) -> None:
        """Replace all credentials durably by those from Kafka's metadata (`broker.topics.takeover`).

        Raises StorageError.
        """
        run_work(self._save(dict(credentials)))

    def has_password(self, name: str, password: str) -> bool:
        """Return True if the password matches the user's first credential.

        This takes milliseconds of CPU time.
        """
        for mechanism, stored in self.of(name):
            salted = salt_password(mechanism, password, stored.salt, stored.iterations)
            received = make_credential(mechanism, stored.salt, salted, stored.iterations)
            return hmac.compare_digest(received.stored_key, stored.stored_key)
        # An unknown user takes as long as a known one, so that the time does not reveal which users exist.
        salt_password(Mechanism.SCRAM_SHA_256, password, b"nobody", self.usual.iterations)
        return False

    def _save(
        self,
        credentials: dict[_Key, Credential],
        prepared: PreparedRows[_Key, Credential] = MappingProxyType({}),
    ) -> Work[None]:
        content: dict[str, object] = {"credentials": (yield from self._rows.of(credentials, prepared))}
        if self.secret:
            content["secret"] = _to_text(self.secret)
        yield partial(write_state, self._disk, FILE_NAME, content, is_private=True)
        self._credentials, self._usual = credentials, None


def _most_common(numbers: Iterable[int], default: int) -> int:
    counted = Counter(numbers)
    return counted.most_common(1)[0][0] if counted else default


def _check(salt: bytes, salted_password: bytes, iterations: int) -> None:
    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise UnacceptableCredential(f"{iterations} iterations: must be {MIN_ITERATIONS} to {MAX_ITERATIONS}")
    if not salt or not salted_password:
        raise UnacceptableCredential("salt and password must not be empty")


def _row(key: _Key, held: Credential) -> dict[str, object]:
    name, mechanism = key
    return {
        "user": name,
        "mechanism": mechanism.label,
        "salt": _to_text(held.salt),
        "stored_key": _to_text(held.stored_key),
        "server_key": _to_text(held.server_key),
        "iterations": held.iterations,
    }


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _parse(content: dict[str, Any]) -> tuple[dict[_Key, Credential], bytes]:
    """Return the credentials and the secret. If an earlier release wrote the file, the secret is empty."""
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
