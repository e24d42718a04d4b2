"""A fault-injecting proxy: it loses, delays, repeats, holds and cuts chosen Kafka messages."""

from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent
from oncelog.testing.proxy.proxy import Proxy
from oncelog.testing.proxy.rules import Action, Rule, parse_rule

__all__ = [
    "Action",
    "BatchSummary",
    "Direction",
    "Fate",
    "Outcome",
    "Proxy",
    "Rule",
    "WireEvent",
    "parse_rule",
]
