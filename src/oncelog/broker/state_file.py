"""Small text files of the node beside the partitions, replaced whole and durably."""

from __future__ import annotations

from oncelog.errors import StorageError
from oncelog.log.disk import Disk, SyncFailed, explain


class NotDurable(StorageError):
    """The new text is in the file, and a power loss may bring back the old one."""


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
    """After this a crash finds the new text, during it the old or the new.

    Raises NotDurable, or another StorageError when the old text stands.
    """
    try:
        disk.replace(name, text.encode(), is_private=is_private)
    except SyncFailed as error:
        raise NotDurable(f"{disk.describe(name)} could not be synced: {explain(error)}") from error
    except OSError as error:
        raise StorageError(f"{disk.describe(name)} cannot be written: {explain(error)}") from error
