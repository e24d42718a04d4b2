"""The decision after a supervised query has exited: restart it, after which pause, or stop with which exit
code.

    exit                                   stop requested   otherwise
    done, as its trigger says              Stop 0           Stop 0
    refused: a restart would be too        Stop 2           Stop 2
    setup, before a query ever ran         Stop 2           Stop 2
    setup later, failed, or died           Stop 1           Restart; Stop 1 at the last failure allowed

A failure counts while it is in the window. The pause doubles with each failure that counts, up to a maximum.
Half of it is random, so that queries that failed together do not restart together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ExitKind(Enum):
    """The kind of exit of a query's run. The values appear in logs and status."""

    DONE = "done"
    REFUSED = "refused"
    SETUP = "setup"
    FAILED = "failed"
    DIED = "died"


class ExitInfo(NamedTuple):
    """The exit of a run, with its error if there was one."""

    kind: ExitKind
    error: str | None


EXIT_DONE, EXIT_GAVE_UP, EXIT_REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of restarts. With `max_failures` failures within `window_ms` the supervisor gives up."""

    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000
    max_failures: int = 10
    window_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class History:
    """The history of the runs. `failed_at_ms` has the failures that count; `has_run` is True after a query
    ran.
    """

    failed_at_ms: tuple[int, ...] = ()
    has_run: bool = False
    is_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after `pause_ms`. `failed_at_ms` has the failures that count from now on."""

    pause_ms: int
    failed_at_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Run no more."""

    exit_code: int


def decide_next(
    kind: ExitKind, history: History, limits: Limits, *, now_ms: int, jitter: float
) -> Restart | Stop:
    """Decide by the table above. `jitter` is a random number from 0 to 1, drawn by the caller."""
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
    # The exponent is limited: 2**1000 is not needed to see that the maximum is exceeded.
    pause_ms = min(limits.backoff_max_ms, limits.backoff_ms << min(len(recent), 30))
    return Restart(int(pause_ms * (1 + jitter) / 2), failures)


_PERMANENT = frozenset({"SinkRefused", "RowRefused", "DataLossError", "ConfigError"})
"""Errors of source and sink that a restart of the same query meets again."""
_SETUP = frozenset(
    {"AnalysisException", "ConfigError", "MisuseError", "SyntaxError", "ImportError", "NameError"}
    | {"AttributeError", "TypeError", "ValueError", "LookupError"}
)
"""Errors of the file or its arguments, if they come before there is a query."""
_ERROR_NAME = re.compile(r"^oncelog(?:\.\w+)*\.(\w+): ", re.MULTILINE)


def classify_exit(types: Iterable[str], text: str, *, is_started: bool) -> ExitKind:
    """Return what an error means.

    `types` are the names of its class and base classes. `text` is its message, with tracebacks of tasks.
    `is_started` is True if the query had been started.
    """
    if not is_started:
        return ExitKind.SETUP if _SETUP & set(types) else ExitKind.FAILED
    names = {match[1] for match in _ERROR_NAME.finditer(text)}
    return ExitKind.REFUSED if _PERMANENT & (names | set(types)) else ExitKind.FAILED


def headline(text: str) -> str:
    """Return the most useful line of an error: the last exception of its tracebacks, or else its
    first line.
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
