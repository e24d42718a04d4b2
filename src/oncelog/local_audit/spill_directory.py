"""A temporary directory for data that an audit cannot keep in memory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self


class SpillDirectory:
    """A temporary directory that exists from its first file to the end of the `with` block."""

    def __init__(self) -> None:
        self._directory: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._directory is not None:
            self._directory.cleanup()

    def path(self, name: str) -> Path:
        """Return the path of a file in the directory. Create the directory if it does not exist."""
        if self._directory is None:
            self._directory = TemporaryDirectory(prefix="oncelog-audit-")
        return Path(self._directory.name, name)
