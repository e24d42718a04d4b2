"""Progress on standard error: a line per step, a bar where its length is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Showing:
    """Steps of long work. On a terminal they move; elsewhere each prints one line when it is done."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Show one step; the body gets a function to say how far of `total` it is (None: not known)."""
        task = self._progress.add_task(title, total=total)
        yield lambda done: self._progress.update(task, completed=done)
        self._progress.update(task, total=total or 1, completed=total or 1)
        if not self._console.is_terminal:
            self._console.print(f"{title}: done")
