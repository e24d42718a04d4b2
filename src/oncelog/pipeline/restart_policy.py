"""A supervised query has ended: start it again, after how long, or leave it and with which exit code?

    ended                                  asked to stop    not asked
    by itself, as its trigger says         Leave 0          Leave 0
    refused: it would be refused again     Leave 2          Leave 2
    setup, before a query ever ran         Leave 2          Leave 2
    setup later, failed, or died           Leave 1          Restart; Leave 1 at the last failure allowed

A failure counts for as long as the window. The pause doubles with each one that counts, up to a maximum, and
its second half is left to chance, so that queries that failed together do not all come back together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """How a run of the query ended; the value is the word for it in logs and status."""

    DONE = "done"
    REFUSED = "refused"
    SETUP = "setup"
    FAILED = "failed"
    DIED = "died"


EXIT_DONE, EXIT_GAVE_UP, EXIT_REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Limits:
    """How often and how soon. `max_failures`: this many within `window_ms` are one too many."""

    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000
    max_failures: int = 10
    window_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class History:
    """What is known of the runs so far. `failed_at_ms`: those that count; `has_run`: a query was started."""

    failed_at_ms: tuple[int, ...] = ()
    has_run: bool = False
    is_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after `pause_ms`. `failed_at_ms`: the failures that count from now on."""

    pause_ms: int
    failed_at_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """No more runs."""

    exit_code: int


def decide_next(
    ending: Ending, history: History, limits: Limits, *, now_ms: int, chance: float
) -> Restart | Leave:
    """What follows, by the table above. `chance`: from 0 up to 1, drawn by the caller."""
    if ending is Ending.DONE:
        return Leave(EXIT_DONE)
    if ending is Ending.REFUSED or (ending is Ending.SETUP and not history.has_run):
        return Leave(EXIT_REFUSED)
    if history.is_stopping:
        return Leave(EXIT_GAVE_UP)
    recent = tuple(at for at in history.failed_at_ms if now_ms - at < limits.window_ms)
    failures = (*recent, now_ms)
    if len(failures) >= limits.max_failures:
        return Leave(EXIT_GAVE_UP)
    # The exponent is bounded: nobody needs 2**1000 to find out that it is above the maximum.
    pause = min(limits.backoff_max_ms, limits.backoff_ms << min(len(recent), 30))
    return Restart(int(pause * (1 + chance) / 2), failures)


_FOR_GOOD = frozenset({"SinkRefused", "RowRefused", "DataLossError", "ConfigError"})
"""Errors of source and sink that the same query meets again, however often it is started."""
_OF_SETUP = frozenset(
    {"AnalysisException", "ConfigError", "MisuseError", "SyntaxError", "ImportError", "NameError"}
    | {"AttributeError", "TypeError", "ValueError", "LookupError"}
)
"""Errors of the file or of what it was given, when they come before there is a query."""
_NAMED = re.compile(r"^oncelog(?:\.\w+)*\.(\w+): ", re.MULTILINE)


def decide_ending(types: Iterable[str], text: str, *, is_started: bool) -> Ending:
    """What an error means. `types`: names of its class and bases; `text`: what it says, with tracebacks of
    tasks; `is_started`: the query was."""
    if not is_started:
        return Ending.SETUP if _OF_SETUP & set(types) else Ending.FAILED
    named = {match[1] for match in _NAMED.finditer(text)}
    return Ending.REFUSED if _FOR_GOOD & (named | set(types)) else Ending.FAILED


def headline(text: str) -> str:
    """The line of an error that says most: what was raised last of the tracebacks in it, else its first."""
    raised, is_within = "", False
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.endswith("Traceback (most recent call last):"):
            is_within = True
        elif is_within and not line[0].isspace():
            raised, is_within = line, False
    kind, colon, said = raised.partition(": ")
    return kind.rpartition(".")[2] + colon + said if raised else "".join(lines[:1])
