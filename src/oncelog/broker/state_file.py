"""Small JSON files of the broker, such as ACLs and quotas, which every change replaces durably.

A file contains `"version": 1`, and at its end the CRC-32C of the text before the checksum. Without a
checksum, one flipped bit in a setting could delete records. Files of Oncelog before 0.5.1 have no checksum
and are still read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from crc32c import crc32c

from oncelog.broker.stepwise import Work
from oncelog.errors import BrokerError, StorageError
from oncelog.log.disk import Disk, SyncFailed, explain, write_synced

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
ROWS_PER_STEP = 4_000
"""Rows that one step of a change looks at. It takes 1 ms."""
_ASIDE = ".new"
_CHECKSUM = re.compile(rb',\n "crc32c": "([0-9a-f]{8})"\n}\s*\Z')


class NotDurable(StorageError):
    """The file has the new content, but a power loss may restore the old content."""


def read_state(
    disk: Disk, name: str, parse: Callable[[dict[str, Any]], T], *, is_private: bool = False
) -> T | None:
    """Return the file's content as parsed by `parse`; None if there is no file.

    `is_private`: error texts do not quote the content. Raises StorageError, which names the file, if the file
    cannot be read, if its checksum is wrong, or if `parse` raises ValueError, KeyError, TypeError,
    AttributeError or a BrokerError.
    """
    try:
        data = disk.read(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{disk.describe(name)} cannot be read: {explain(error)}") from error
    try:
        content: dict[str, Any] = json.loads(data)
        if content["version"] != 1:
            raise ValueError(f"version {content['version']}")
        _check(data)
        content.pop("crc32c", None)
        return parse(content)
    except (ValueError, KeyError, TypeError, AttributeError, BrokerError) as error:
        # Not repr(error), because the repr of a UnicodeDecodeError contains the whole file.
        why = type(error).__name__ + ("" if is_private else f": {error}")
        text = f"{disk.describe(name)} is unreadable ({why}); restore it from a backup"
        raise StorageError(text) from (None if is_private else error)


def _check(data: bytes) -> None:
    checksum = _CHECKSUM.search(data)
    if checksum and crc32c(data[: checksum.start()]) != int(checksum[1], 16):
        raise ValueError("its checksum is wrong; if you changed it by hand, remove crc32c from it")


def write_state(disk: Disk, name: str, content: Mapping[str, Any], *, is_private: bool = False) -> None:
    """Replace the file's content durably and atomically: a crash leaves the old or the new content.

    Raises NotDurable if the new content could not be synced. Raises another StorageError if the old content
    stays.
    """
    try:
        disk.replace(name, _encode(content), is_private=is_private)
    except SyncFailed as error:
        raise not_durable(disk, name, error) from error
    except OSError as error:
        raise _not_written(disk, name, error) from error


def write_state_aside(disk: Disk, name: str, content: Mapping[str, Any]) -> None:
    """Write and sync the file's new content under another name. `put_state` then replaces the file by it.

    May run in another thread. Raises StorageError.
    """
    try:
        write_synced(disk, name + _ASIDE, _encode(content))
    except OSError as error:
        with suppress(OSError):
            disk.remove(name + _ASIDE)
        raise _not_written(disk, name, error) from error


def put_state(disk: Disk, name: str) -> None:
    """Replace the file by the one that `write_state_aside` has written. The caller then syncs the directory.

    Raises StorageError.
    """
    try:
        disk.rename(name + _ASIDE, name)
    except OSError as error:
        raise _not_written(disk, name, error) from error


def not_durable(disk: Disk, name: str, error: OSError) -> NotDurable:
    """Return the error for a file whose new content could not be synced."""
    return NotDurable(f"{disk.describe(name)} could not be synced: {explain(error)}")


class EncodedRow(str):
    """An element of a list in a state file, encoded as JSON."""

    __slots__ = ()


def encode_row(row: Mapping[str, Any]) -> EncodedRow:
    """Encode an element of a list."""
    return EncodedRow(json.dumps(row))


PreparedRows = Mapping[K, tuple[V, EncodedRow]]
"""Values and their encoded rows, by key."""


class EncodedRows(Generic[K, V]):
    """The encoded rows of a list, so that a change encodes only the rows that it changes.

    Without it, each change of one user or quota would encode those of all others. See
    test_a_change_encodes_only_its_own_rows. `to_row` returns the row of a key and its value.
    """

    def __init__(self, to_row: Callable[[K, V], Mapping[str, Any]]) -> None:
        self._to_row = to_row
        self._rows: dict[K, tuple[V, EncodedRow]] = {}

    def prepare(self, values: Mapping[K, V]) -> PreparedRows[K, V]:
        """Encode rows for a later call of `of`.

        They are not kept here, because the caller may refuse the change. See
        test_a_change_that_is_not_made_keeps_no_memory.
        """
        return {key: (value, encode_row(self._to_row(key, value))) for key, value in values.items()}

    def of(
        self, values: Mapping[K, V], prepared: PreparedRows[K, V] = MappingProxyType({})
    ) -> Work[list[EncodedRow]]:
        """Return the rows of all values, in their order. `prepared` are rows that `prepare` has encoded.

        It takes several steps, between which `values` must not change.
        """
        before, rows = self._rows, {}
        for count, (key, value) in enumerate(values.items(), 1):
            row = before.get(key)
            if row is None or row[0] != value:
                row = prepared.get(key)
            if row is None or row[0] != value:
                row = value, encode_row(self._to_row(key, value))
            rows[key] = row
            if count % ROWS_PER_STEP == 0:
                yield None
        self._rows = rows
        return [row for _, row in rows.values()]


class ChangeLock:
    """Lets one request at a time change the content of a state file, in steps and with a write in a thread.

    Other requests see the old content until the new one is written.
    """

    def __init__(self) -> None:
        self._is_held = False

    def hold(self, change: Work[T]) -> Work[T]:
        """Wait until no other change is in progress, then run `change`."""
        while self._is_held:
            yield None
        self._is_held = True
        try:
            return (yield from change)
        finally:
            self._is_held = False


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    rows = [row if isinstance(row, EncodedRow) else json.dumps(row) for row in value]
    return "[\n  " + ",\n  ".join(rows) + "\n ]"


def _not_written(disk: Disk, name: str, error: OSError) -> StorageError:
    return StorageError(f"{disk.describe(name)} cannot be written: {explain(error)}")


def _encode(content: Mapping[str, Any]) -> bytes:
    """Return the file's text, with a line for each element of a list.

    `json.dumps` with an indent takes six times as long, 0.1 s for ten thousand topics.
    """
    fields = [f"{json.dumps(key)}: {_lines(value)}" for key, value in {"version": 1, **content}.items()]
    body = ("{\n " + ",\n ".join(fields)).encode()
    return body + b',\n "crc32c": "%08x"\n}' % crc32c(body)
