"""Which messages suffer what: rules, their counting, and the one-line grammar for them.

Every rule counts the messages it matches by itself, over all connections, from 1. Whether a
probability strikes is a function of (seed, rule, match number) alone, so one seed chooses the
same matches however the connections interleave. Delays of several rules add up; of the other
actions the first rule that strikes decides.
"""

from __future__ import annotations

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
    """What a rule does to a message it strikes.

    DROP       lose it alone. TCP has no holes, so clients refuse an answer out of turn: the
               answers behind a dropped request or response never come, the connection stays
               open and silent until the client's own time-out. Requests behind it do arrive.
    CUT        lose it together with its connection. A response (the default): the broker has
               handled the request, its acknowledgement is lost. A request: it never arrives.
    DELAY      wait `delay_ms`; later messages of that direction wait behind it.
    HOLD       keep it until `release_after` later requests of the same API went by on its
               connection, until `delay_ms`, or until Proxy.release(). Later requests overtake a
               held request: a reordering. It survives its connection: a late arrival.
    DUPLICATE  send the request twice; with `delay_ms` or `release_after` the copy comes later.
    FAIL       answer with `error`. A request (the default) never reaches the broker; a response
               hides that the broker handled it. Produce only.
    THROTTLE   at most `rate_bytes_s` bytes a second.
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
    """One kind of fault and the messages it strikes.

    `api` is Kafka's name ("Produce"), None for any; `direction` None means "response" for cut and
    "request" for the others. `nth` is the first match it strikes (from 1), `count` how many matches
    from there on (None: one when `nth` is given, else all). `probability` 0..1 strikes each of
    those by chance. `match` narrows by the decoded event. Raises ConfigError when they contradict.
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

    def _check_options(self, action: Action) -> None:
        if self.api is not None and self.api not in API_NAMES:
            raise ConfigError(
                f"api={self.api} is no Kafka API; expected for example Produce, Fetch, Metadata"
            )
        needed = _NEEDS.get(action)
        if needed and getattr(self, needed) is None:
            raise ConfigError(f"action={action} needs {needed}")
        for option, actions in _ALLOWED_FOR.items():
            if getattr(self, option) is not None and action not in actions:
                raise ConfigError(f"{option} means nothing with action={action}")
        if self.error is not None:
            error_code_of(self.error)

    def _check_numbers(self) -> None:
        for option in ("nth", "count", "release_after", "rate_bytes_s"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"{option}={value} must be 1 or more")
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability} must be between 0 and 1")
        if self.delay_ms is not None and self.delay_ms < 0:
            raise ConfigError(f"delay_ms={self.delay_ms} must be 0 or more")

    def matches(self, event: WireEvent) -> bool:
        """Whether the rule counts this message at all."""
        return (
            event.direction == self.direction
            and (self.api is None or self.api == event.api)
            and (self.match is None or self.match(event))
        )

    def strikes(self, match_number: int, seed: int, rule_number: int) -> bool:
        """Whether the rule strikes its `match_number`-th match (from 1)."""
        first = self.nth or 1
        count = self.count or (1 if self.nth else None)
        if match_number < first or (count is not None and match_number >= first + count):
            return False
        if self.probability is None:
            return True
        chance: float = random.Random(f"{seed}/{rule_number}/{match_number}").random()
        return chance < self.probability


def error_code_of(name: str) -> int:
    """The number of a Kafka error name; raises ConfigError for an unknown one."""
    for code, error in ERROR_BY_CODE.items():
        if error.kafka_name == name:
            return code
    raise ConfigError(f"error={name} is no Kafka error name; expected for example NOT_ENOUGH_REPLICAS")


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done with one message: wait `delay_ms`, then `rule`'s action (None: pass)."""

    delay_ms: float = 0.0
    rule: Rule | None = None


_PASS = Decision()


class RuleBook:
    """The rules in force with their counters; may be changed from any thread at any time."""

    def __init__(self, rules: Iterable[Rule] = (), seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._seed = seed
        self._next_number = 0
        self._entries: list[_Entry] = []
        for rule in rules:
            self.add(rule)

    def add(self, rule: Rule) -> None:
        """Put `rule` in force after those there; its count starts now."""
        with self._lock:
            self._entries.append(_Entry(rule, self._next_number))
            self._next_number += 1

    def clear(self) -> None:
        """Drop all rules; what was held stays held."""
        with self._lock:
            self._entries.clear()

    def decide(self, event: WireEvent) -> Decision:
        """Count the message in every rule that matches it and say what is to be done."""
        with self._lock:
            struck = [entry.rule for entry in self._entries if entry.count_and_strike(event, self._seed)]
        if not struck:
            return _PASS
        delay_ms = sum(_delay_of(rule, event.size_bytes) for rule in struck)
        rest = (rule for rule in struck if rule.action not in (Action.DELAY, Action.THROTTLE))
        return Decision(delay_ms, next(rest, None))


@dataclass(slots=True)
class _Entry:
    rule: Rule
    number: int
    matched: int = 0

    def count_and_strike(self, event: WireEvent, seed: int) -> bool:
        if not self.rule.matches(event):
            return False
        self.matched += 1
        return self.rule.strikes(self.matched, seed, self.number)


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
}


def parse_rule(text: str) -> Rule:
    """A rule from one line: `[request|response] [API] ACTION [option=value ...]`.

    Examples: `response Produce cut nth=2`, `request Produce hold nth=2 release_after=1`,
    `cut probability=0.05`, `Fetch delay delay_ms=200`. Raises ConfigError that shows the word.
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
        f"rule {text!r}: {word!r} is no direction (request, response), no API name and no action "
        f"({', '.join(Action)})"
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
