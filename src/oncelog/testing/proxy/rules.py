"""The rules of the proxy: which messages they match, how they count matches, and their one-line grammar.

Each rule counts the messages that it matches, from 1, over all connections. A rule with a probability decides
by the seed, the number of the rule and the number of the match. Therefore one seed selects the same matches,
even if connections interleave differently. If several rules apply to a message, the delays of DELAY and
THROTTLE add up. Of the other rules, only the first one is applied.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from oncelog.errors import ERROR_BY_CODE, ConfigError
from oncelog.testing.proxy.apis import API_NAMES
from oncelog.testing.proxy.events import Direction, WireEvent

E = TypeVar("E", bound=StrEnum)


class Action(StrEnum):
    """The action of a rule on a message.

    DROP       lose the message. Clients reject a response out of order, so the proxy delivers no
               response after a dropped message. The connection stays open and silent until the
               client's time-out. Requests after the message still reach the broker.
    CUT        lose the message and close its connection. If the message is a response (the default), the
               broker has handled the request. If it is a request, it never reaches the broker.
    DELAY      wait `delay_ms`. Later messages of the same direction wait, too.
    HOLD       keep the message until `release_after` later requests of the same API have passed on
               its connection, for `delay_ms`, or until Proxy.release(). Later requests overtake a
               held request (reordering). A held request survives its connection (late arrival).
    DUPLICATE  send the request twice. With `delay_ms` or `release_after`, the copy is held first.
    FAIL       respond with `error`. If the rule is for requests (the default), the broker does not get the
               request. If it is for responses, the broker has handled the request. Produce only.
    THROTTLE   forward at most `rate_bytes_s` bytes per second.
    """

    DROP = "drop"
    CUT = "cut"
    DELAY = "delay"
    HOLD = "hold"
    DUPLICATE = "duplicate"
    FAIL = "fail"
    THROTTLE = "throttle"


_DEFAULT_DIRECTION = {Action.CUT: Direction.RESPONSE}
_NEEDS = {Action.DELAY: "delay_ms", Action.FAIL: "error", Action.THROTTLE: "rate_bytes_s"}
_ALLOWED_FOR = {
    "delay_ms": {Action.DELAY, Action.HOLD, Action.DUPLICATE},
    "release_after": {Action.HOLD, Action.DUPLICATE},
    "rate_bytes_s": {Action.THROTTLE},
    "error": {Action.FAIL},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of fault, and the messages to which it applies.

    - `api`: Kafka's name of the API, such as "Produce"; None matches any API.
    - `direction`: None means "response" for the action cut, and "request" for other actions.
    - `nth`: the number of the first match to which the rule applies, from 1.
    - `count`: the number of matches to which the rule applies, beginning with `nth`. None means one if `nth`
      is set, otherwise all.
    - `probability`: the probability (0 to 1) with which the rule applies to each of these matches. None
      means that it always applies.
    - `topic`: match only messages with a batch of this topic. Allowed only with api="Produce".
    - `match`: a further condition on the event.

    Raises ConfigError if the options contradict each other.
    """

    action: Action | str
    api: str | None = None
    direction: Direction | str | None = None
    nth: int | None = None
    count: int | None = None
    probability: float | None = None
    delay_ms: float | None = None
    release_after: int | None = None
    rate_bytes_s: int | None = None
    error: str | None = None
    topic: str | None = None
    match: Callable[[WireEvent], bool] | None = None

    def __post_init__(self) -> None:
        action = _one_of(Action, self.action, "action")
        default = _DEFAULT_DIRECTION.get(action, Direction.REQUEST)
        direction = _one_of(Direction, self.direction or default, "direction")
        object.__setattr__(self, "action", action)
        object.__setattr__(self, "direction", direction)
        self._check_options(action)
        self._check_numbers()
        if direction is Direction.NOTE or (action is Action.DUPLICATE and direction is Direction.RESPONSE):
            raise ConfigError(f"action={action} does not work on direction={direction}; use request")
        if action is Action.FAIL and self.api != "Produce":
            raise ConfigError("action=fail can only answer api=Produce")
        if self.topic is not None and self.api != "Produce":
            raise ConfigError("topic can only select messages of api=Produce")

    def _check_options(self, action: Action) -> None:
        if self.api is not None and self.api not in API_NAMES:
            raise ConfigError(
                f"api={self.api} is not a Kafka API; use for example Produce, Fetch or Metadata"
            )
        needed = _NEEDS.get(action)
        if needed and getattr(self, needed) is None:
            raise ConfigError(f"action={action} needs {needed}")
        for option, actions in _ALLOWED_FOR.items():
            if getattr(self, option) is not None and action not in actions:
                raise ConfigError(f"{option} has no effect with action={action}; leave it out")
        if self.error is not None:
            error_code_of(self.error)

    def _check_numbers(self) -> None:
        for option in ("nth", "count", "release_after", "rate_bytes_s"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"{option}={value} must be 1 or more")
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability} must be between 0 and 1")
        if self.delay_ms is not None and not 0 <= self.delay_ms < math.inf:
            # This comparison also rejects NaN.
            raise ConfigError(f"delay_ms={self.delay_ms} must be 0 or more, and finite")

    def matches(self, event: WireEvent) -> bool:
        """Return True if the message matches, so that the rule counts it."""
        return (
            event.direction == self.direction
            and (self.api is None or self.api == event.api)
            and (self.topic is None or any(part.topic == self.topic for part in event.partitions))
            and (self.match is None or self.match(event))
        )

    def __str__(self) -> str:
        """Return the rule as a line that `parse_rule` accepts. `match` is left out."""
        words = [str(self.direction), *([self.api] if self.api else []), str(self.action)]
        options = ((name, getattr(self, name)) for name in _OPTIONS)
        return " ".join([*words, *(f"{name}={value}" for name, value in options if value is not None)])

    def applies(self, match_number: int, seed: int, rule_number: int) -> bool:
        """Return True if the rule applies to its match with this number. The first match has number 1."""
        first = self.nth or 1
        count = self.count or (1 if self.nth else None)
        if match_number < first or (count is not None and match_number >= first + count):
            return False
        if self.probability is None:
            return True
        number: float = random.Random(f"{seed}/{rule_number}/{match_number}").random()
        return number < self.probability


def error_code_of(name: str) -> int:
    """Return the code of a Kafka error name. Raises ConfigError if it is unknown."""
    for code, error in ERROR_BY_CODE.items():
        if error.kafka_name == name:
            return code
    raise ConfigError(f"error={name} is not a Kafka error name; use for example NOT_ENOUGH_REPLICAS")


@dataclass(frozen=True, slots=True)
class RuleState:
    """A rule of a proxy: its number, from 0, and how many messages it matched and was applied to."""

    number: int
    rule: Rule
    match_count: int
    applied_count: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one message: wait `delay_ms`, then apply `rule`.

    If `rule` is None, forward the message.
    """

    delay_ms: float = 0.0
    rule: Rule | None = None


_PASS = Decision()


class RuleBook:
    """The rules of a proxy and their counters. Any thread may change the rules at any time."""

    def __init__(self, rules: Iterable[Rule] = (), seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._seed = seed
        self._next_number = 0
        self._entries: list[_Entry] = []
        for rule in rules:
            self.add(rule)

    def add(self, rule: Rule) -> int:
        """Append a rule, and return its number. The rule counts matches from now on."""
        with self._lock:
            number = self._next_number
            self._entries.append(_Entry(rule, number))
            self._next_number += 1
            return number

    def remove(self, number: int) -> bool:
        """Remove the rule with this number. Return False if there is none."""
        with self._lock:
            kept = [entry for entry in self._entries if entry.number != number]
            was_there = len(kept) < len(self._entries)
            self._entries = kept
            return was_there

    def states(self) -> list[RuleState]:
        """Return the rules with their counters, in the order in which they were added."""
        with self._lock:
            return [
                RuleState(entry.number, entry.rule, entry.match_count, entry.applied_count)
                for entry in self._entries
            ]

    def clear(self) -> None:
        """Remove all rules. Messages that are held stay held."""
        with self._lock:
            self._entries.clear()

    def decide(self, event: WireEvent) -> Decision:
        """Count the message in every rule that matches it. Return the decision about the message."""
        with self._lock:
            applied = [entry.rule for entry in self._entries if entry.count(event, self._seed)]
        if not applied:
            return _PASS
        delay_ms = sum(_delay_of(rule, event.size_bytes) for rule in applied)
        rest = (rule for rule in applied if rule.action not in (Action.DELAY, Action.THROTTLE))
        return Decision(delay_ms, next(rest, None))


@dataclass(slots=True)
class _Entry:
    rule: Rule
    number: int
    match_count: int = 0
    applied_count: int = 0

    def count(self, event: WireEvent, seed: int) -> bool:
        """Count the message if it matches. Return True if the rule applies to it."""
        if not self.rule.matches(event):
            return False
        self.match_count += 1
        is_applied = self.rule.applies(self.match_count, seed, self.number)
        self.applied_count += is_applied
        return is_applied


def _delay_of(rule: Rule, size_bytes: int) -> float:
    if rule.action is Action.THROTTLE and rule.rate_bytes_s:
        return size_bytes * 1000 / rule.rate_bytes_s
    return (rule.delay_ms or 0.0) if rule.action is Action.DELAY else 0.0


_OPTIONS: dict[str, Callable[[str], object]] = {
    "nth": int,
    "count": int,
    "probability": float,
    "delay_ms": float,
    "release_after": int,
    "rate_bytes_s": int,
    "error": str,
    "topic": str,
}


def parse_rule(text: str) -> Rule:
    """Return the rule in one line of text: `[request|response] [API] ACTION [option=value ...]`.

    Examples: `response Produce cut nth=2`, `request Produce hold nth=2 release_after=1`, `cut
    probability=0.05`, `Fetch delay delay_ms=200`. Raises ConfigError, whose text names the invalid word.
    """
    words = text.split()
    positional = [word for word in words if "=" not in word]
    fields: dict[str, object] = {}
    for word in positional:
        kind = _kind_of(word, text)
        if kind in fields:
            raise ConfigError(f"rule {text!r}: {word!r} is a second {kind}")
        fields[kind] = word
    if "action" not in fields:
        raise ConfigError(f"rule {text!r}: no action; expected one of {', '.join(Action)}")
    fields.pop("any", None)
    for word in words:
        if "=" in word:
            key, value = _option(word, text)
            fields[key] = value
    try:
        return Rule(**fields)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"rule {text!r}: {error}") from None


def _kind_of(word: str, text: str) -> str:
    if word in (Direction.REQUEST, Direction.RESPONSE):
        return "direction"
    if word in set(Action):
        return "action"
    if word in API_NAMES:
        return "api"
    if word in ("*", "any"):
        return "any"
    raise ConfigError(
        f"rule {text!r}: {word!r} is not a direction (request, response), an API name or an "
        f"action ({', '.join(Action)})"
    )


def _option(word: str, text: str) -> tuple[str, object]:
    key, _, value = word.partition("=")
    convert = _OPTIONS.get(key)
    if convert is None:
        raise ConfigError(f"rule {text!r}: no option {key!r}; expected {', '.join(_OPTIONS)}")
    try:
        return key, convert(value)
    except ValueError:
        raise ConfigError(f"rule {text!r}: {key}={value} is not a number") from None


def _one_of(kind: type[E], value: str, option: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{option}={value}: expected one of {', '.join(kind)}") from None
