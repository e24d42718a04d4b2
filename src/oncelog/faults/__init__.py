"""Faults on purpose: a proxy that loses, delays, repeats, holds and cuts chosen Kafka messages."""

from oncelog.faults.events import BatchSummary, Direction, Fate, Outcome, WireEvent
from oncelog.faults.proxy import Proxy
from oncelog.faults.rules import Action, Rule, parse_rule

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
