"""Regular expressions from clients, matched by RE2 in linear time and in bounded steps.

Two requests contain a regular expression: ListTransactions (for transactional ids) and ConsumerGroupHeartbeat
(for topic names). Kafka uses RE2J, which has the same syntax as RE2. Neither of them backtracks. A match
still costs up to the size of the compiled program times the length of the text. This product is the number of
steps of a match. After enough steps, the broker's thread handles other requests before the next text. Guarded
by tests/broker/test_broker_patterns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import re2

from oncelog.errors import InvalidRegularExpression
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.background import BackgroundQueue, BackgroundTask, Kind

MAX_PATTERN_BYTES = 4096
"""Longest pattern in bytes.

Real patterns are far shorter; a pattern of this length compiles in milliseconds.
"""
MAX_UNICODE_CLASSES = 16
"""Largest number of \\p and \\P together in a pattern.

Each of them costs as much to parse as 250 other bytes.
"""
_MAX_MEMORY_BYTES = 262_144
"""Memory limit of a compiled pattern in bytes. It allows about 10,000 instructions."""
_COMPILING_STEPS = 200
"""Steps that are counted for compiling one character of a pattern."""

T = TypeVar("T")


class Pattern:
    """A compiled regular expression. It matches only whole texts."""

    def __init__(self, text: str) -> None:
        """Compile the pattern. Raises InvalidRegularExpression if RE2 rejects it, or if it is above
        MAX_PATTERN_BYTES or MAX_UNICODE_CLASSES.
        """
        encoded = _encode(text)
        if len(encoded) > MAX_PATTERN_BYTES:
            raise InvalidRegularExpression(
                f"the pattern has {len(encoded)} bytes; the limit is {MAX_PATTERN_BYTES}"
            )
        if text.count("\\p") + text.count("\\P") > MAX_UNICODE_CLASSES:
            raise InvalidRegularExpression(
                f"the pattern has more than {MAX_UNICODE_CLASSES} Unicode classes (\\p, \\P)"
            )
        options = re2.Options()
        options.max_mem = _MAX_MEMORY_BYTES
        options.log_errors = False
        options.never_capture = True
        try:
            self._compiled = re2.compile(encoded, options)
        except re2.error as error:
            raise InvalidRegularExpression(f"{text!r}: {_reason(error)}") from None
        self._size = max(int(self._compiled.programsize), 1)

    def matches(self, text: str) -> bool:
        return self._compiled.fullmatch(_encode(text)) is not None

    def steps(self, text: str) -> int:
        """Return the maximum number of steps that matching `text` takes."""
        return self._size * (len(text) + 1)


def _encode(text: str) -> bytes:
    # Encode lone surrogates, too: the wire decoder rejects them, but a stored pattern may contain them.
    return text.encode("utf-8", "surrogatepass")


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)


def matching_texts(
    pattern: Pattern,
    candidates: Iterable[T],
    text_of: Callable[[T], str],
    step_cost: int = DEFAULT_LIMITS.pattern_step_cost,
) -> Generator[None, None, list[T]]:
    """Return the candidates for which `text_of` returns a matching text. Yields after each `step_cost` steps
    of matching.
    """
    matches, steps = [], 0
    for candidate in candidates:
        text = text_of(candidate)
        if pattern.matches(text):
            matches.append(candidate)
        steps += pattern.steps(text)
        if steps >= step_cost:
            steps = 0
            yield
    return matches


@dataclass(slots=True)
class _Resolution:
    """The topic names that match one pattern, and the progress of the search.

    `pattern` is None before it is compiled, after all names were examined, and if RE2 rejected it
    (`is_rejected`). `examined` is the number of names in `_in_order` that were compared with the pattern.
    `was_complete` is true once all names were examined. After that, `names` can only lack names that were
    listed later.
    """

    pattern: Pattern | None = None
    is_rejected: bool = False
    examined: int = 0
    was_complete: bool = False
    names: list[str] = field(default_factory=list)


class TopicPatterns:
    """The topic names that match each pattern. Each name is matched only once with each pattern.

    If matching all names takes too many steps for one heartbeat, the pattern is resolved in the background.
    Until then it matches nothing, as in Kafka, which always resolves patterns in the background.
    """

    def __init__(
        self, background: BackgroundQueue, step_cost: int = DEFAULT_LIMITS.pattern_step_cost
    ) -> None:
        self._background = background
        self._step_cost = step_cost
        self._resolutions: dict[str, _Resolution] = {}
        self._listed: dict[str, None] = {}
        self._in_order: list[str] = []
        self._steps_left = self._step_cost
        self._unresolved: dict[str, None] = {}
        self._is_resolving = False
        self.revision = 0
        """Incremented when `find` may return more names for an existing pattern."""

    def __len__(self) -> int:
        return len(self._resolutions)

    def begin(self) -> None:
        """Allow the next heartbeat to use up to `step_cost` steps immediately."""
        self._steps_left = self._step_cost

    @property
    def steps_used(self) -> int:
        """The steps that were taken since `begin`, without those in the background."""
        return self._step_cost - self._steps_left

    def list_topics(self, names: Collection[str]) -> None:
        """Set the names of the existing topics. Names that are new will be matched with each pattern."""
        if len(self._in_order) > 2 * len(names) + 1000:
            self._forget_deleted(names)
        added = [name for name in names if name not in self._listed]
        self._listed.update(dict.fromkeys(added))
        self._in_order += added

    def _forget_deleted(self, names: Collection[str]) -> None:
        there = set(names)
        kept_before = list(accumulate((name in there for name in self._in_order), initial=0))
        self._in_order = [name for name in self._in_order if name in there]
        self._listed = dict.fromkeys(self._in_order)
        for resolution in self._resolutions.values():
            resolution.examined = kept_before[resolution.examined]
            resolution.names = [name for name in resolution.names if name in there]

    def find(self, text: str) -> list[str]:
        """Return the topic names that match, which may include deleted topics.

        While the pattern is being resolved for the first time, return an empty list. A pattern that RE2
        rejects matches nothing; a data directory of an older version may contain one.
        """
        resolution = self._resolutions.get(text)
        is_new = resolution is None
        if resolution is None:
            resolution = self._resolutions[text] = _Resolution()
        found_count = len(resolution.names) if resolution.was_complete else -1
        self._steps_left = self._advance(text, resolution, self._steps_left)
        if not is_new and resolution.was_complete and len(resolution.names) != found_count:
            # Without a new revision, other members would keep the cached result of an earlier heartbeat. See
            # test_a_pattern_that_a_heartbeat_has_resolved_holds_for_all_members.
            self.revision += 1
        if self._is_behind(resolution):
            self._unresolved[text] = None
            if not self._is_resolving:
                self._is_resolving = True
                self._background.add(self._resolve(), Kind.REQUEST)
        return resolution.names if resolution.was_complete else []

    def is_unresolved(self, texts: Collection[str]) -> bool:
        """Return True if the result of `find` may lack names for one of these patterns."""
        return any(text in self._resolutions and self._is_behind(self._resolutions[text]) for text in texts)

    def keep(self, texts: Collection[str]) -> None:
        """Forget all patterns except these."""
        self._resolutions = {
            text: resolution for text, resolution in self._resolutions.items() if text in texts
        }

    def close(self) -> None:
        """Stop resolving patterns, because a closing broker waits for the end of its background tasks."""
        self._unresolved.clear()

    def _is_behind(self, resolution: _Resolution) -> bool:
        return not resolution.is_rejected and resolution.examined < len(self._in_order)

    def _advance(self, text: str, resolution: _Resolution, steps: int) -> int:
        """Match the remaining names until `steps` are used up. Return the number of steps left, which may be
        negative.
        """
        if steps > 0 and resolution.pattern is None and not resolution.is_rejected:
            steps -= _COMPILING_STEPS * len(text)
            try:
                resolution.pattern = Pattern(text)
            except InvalidRegularExpression:
                resolution.is_rejected = True
        pattern = resolution.pattern
        if pattern is None:
            return steps
        while resolution.examined < len(self._in_order):
            if steps <= 0:
                return steps
            name = self._in_order[resolution.examined]
            steps -= pattern.steps(name)
            if pattern.matches(name):
                resolution.names.append(name)
            resolution.examined += 1
        resolution.was_complete = True
        # A compiled pattern may take 256 KB, so drop it, and compile the pattern again for the next new
        # topic.
        resolution.pattern = None
        return steps

    def _resolve(self) -> BackgroundTask:
        try:
            while self._unresolved:
                text = next(iter(self._unresolved))
                resolution = self._resolutions.get(text)
                if resolution is not None:
                    self._advance(text, resolution, self._step_cost)
                if resolution is None or not self._is_behind(resolution):
                    self._unresolved.pop(text, None)
                    self.revision += 1
                yield None
        finally:
            self._is_resolving = False
