"""A fault-injecting proxy: it drops, delays, repeats or holds chosen Kafka messages, or cuts their
connections.
"""

from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, Outcome, WireEvent
from oncelog.testing.proxy.proxy import Proxy
from oncelog.testing.proxy.rules import Action, Rule, RuleState, parse_rule

__all__ = [
    "Action",
    "BatchSummary",
    "Direction",
    "Fate",
    "Outcome",
    "Proxy",
    "Rule",
    "RuleState",
    "WireEvent",
    "parse_rule",
]
