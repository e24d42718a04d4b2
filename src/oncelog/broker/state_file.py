"""Small text files of the node beside the partitions, replaced whole and durably."""

from __future__ import annotations

from oncelog.errors import StorageError
from oncelog.log.disk import Disk, explain


def read_state(disk: Disk, name: str) -> str | None:
    """The file's text; None when there is none. Raises StorageError."""
    try:
        return disk.read(name).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{disk.describe(name)} cannot be read: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"{disk.describe(name)} cannot be read: {error}") from error


def write_state(disk: Disk, name: str, text: str, *, is_private: bool = False) -> None:
    """After this a crash finds the new text, during it the old or the new. Raises StorageError."""
    try:
        disk.replace(name, text.encode(), is_private=is_private)
    except OSError as error:
        raise StorageError(f"{disk.describe(name)} cannot be written: {explain(error)}") from error
