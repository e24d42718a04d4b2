"""Decides what follows the exit of a supervised query: a restart after a pause, or a stop with an exit code.

    exit                                         stop requested   otherwise
    done: the query has ended without an error   Stop 0           Stop 0
    refused: a restart would also be refused     Stop 2           Stop 2
    setup: no query was started in any run yet   Stop 2           Stop 2
    setup in a later run, failed, died           Stop 1           Restart; Stop 1 after max_failures

A run is one child process with the query. Failures of the last `window_ms` count. The pause doubles with each
counted failure, up to a maximum. Half of the pause is random, so that queries that failed together do not
restart together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ExitKind(Enum):
    """The kind of a run's exit. The values appear in logs and in the status file."""

    DONE = "done"
    REFUSED = "refused"
    SETUP = "setup"
    FAILED = "failed"
    DIED = "died"


class ExitInfo(NamedTuple):
    """The exit of a run. `error`: one line about the error, or None."""

    kind: ExitKind
    error: str | None


EXIT_DONE, EXIT_GAVE_UP, EXIT_REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of restarts.

    The supervisor gives up after `max_failures` failures within `window_ms`.
    """

    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000
    max_failures: int = 10
    window_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class History:
    """The state of the supervisor at an exit.

    `failed_at_ms`: times of the counted failures. `has_run`: True once any run has started its query.
    `is_stopping`: True if a stop was requested.
    """

    failed_at_ms: tuple[int, ...] = ()
    has_run: bool = False
    is_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """The decision to start a new run after `pause_ms`.

    `failed_at_ms`: times of the failures within `window_ms`, including this one.
    """

    pause_ms: int
    failed_at_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The decision to start no further run, and to exit with `exit_code`."""

    exit_code: int


def decide_next(
    kind: ExitKind, history: History, limits: Limits, *, now_ms: int, jitter: float
) -> Restart | Stop:
    """Decide what follows the exit of a run, by the table in the module docstring.

    `now_ms`: time of the exit. `jitter`: a random number from 0 to 1, drawn by the caller.
    """
    if kind is ExitKind.DONE:
        return Stop(EXIT_DONE)
    if kind is ExitKind.REFUSED or (kind is ExitKind.SETUP and not history.has_run):
        return Stop(EXIT_REFUSED)
    if history.is_stopping:
        return Stop(EXIT_GAVE_UP)
    recent = tuple(time_ms for time_ms in history.failed_at_ms if now_ms - time_ms < limits.window_ms)
    failures = (*recent, now_ms)
    if len(failures) >= limits.max_failures:
        return Stop(EXIT_GAVE_UP)
    # Limit the exponent: a large one would produce a huge number, which is above the maximum anyway.
    pause_ms = min(limits.backoff_max_ms, limits.backoff_ms << min(len(recent), 30))
    return Restart(int(pause_ms * (1 + jitter) / 2), failures)


_PERMANENT = frozenset({"SinkRefused", "RowRefused", "DataLossError", "ConfigError"})
"""Errors of the source and the sink that would occur again after a restart of the same query."""
_SETUP = frozenset(
    {"AnalysisException", "ConfigError", "MisuseError", "SyntaxError", "ImportError", "NameError"}
    | {"AttributeError", "TypeError", "ValueError", "LookupError"}
)
"""Errors that, if raised before the query starts, mean a mistake in the file or its arguments."""
_ERROR_NAME = re.compile(r"^oncelog(?:\.\w+)*\.(\w+): ", re.MULTILINE)


def classify_exit(types: Iterable[str], text: str, *, is_started: bool) -> ExitKind:
    """Return the kind of exit for an error.

    `types`: the names of the error's class and base classes. `text`: the error's message, with the tracebacks
    of tasks. `is_started`: True if the query had been started.
    """
    if not is_started:
        return ExitKind.SETUP if _SETUP & set(types) else ExitKind.FAILED
    names = {match[1] for match in _ERROR_NAME.finditer(text)}
    return ExitKind.REFUSED if _PERMANENT & (names | set(types)) else ExitKind.FAILED


def headline(text: str) -> str:
    """Return the most useful line of an error's text: the last exception of its tracebacks.

    Without a traceback, return the first line.
    """
    last_error, is_in_traceback = "", False
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.endswith("Traceback (most recent call last):"):
            is_in_traceback = True
        elif is_in_traceback and not line[0].isspace():
            last_error, is_in_traceback = line, False
    kind, colon, message = last_error.partition(": ")
    return kind.rpartition(".")[2] + colon + message if last_error else "".join(lines[:1])
