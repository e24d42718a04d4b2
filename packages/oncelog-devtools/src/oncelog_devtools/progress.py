"""Progress on standard error: a line per step, with a bar if the total is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars


class Progress:
    """The steps of a long job: live bars on a terminal, otherwise one line per finished step."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = ProgressBars(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    @contextmanager
    def step(self, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Show one step, and yield a function that sets how much of `total` is done.

        `total` is None if it is unknown."""
        task = self._bars.add_task(title, total=total)
        yield lambda done: self._bars.update(task, completed=done)
        self._bars.update(task, total=total or 1, completed=total or 1)
        if not self._console.is_terminal:
            self._console.print(f"{title}: done")
