"""Sequences of other subjects with short time-outs, and with pauses in which these expire.

All time-outs have the same length, and a pause is 1.35 times as long. So a time-out expires either well
before the end of a pause or well after it. A sequence has at most two pauses, because three last about as
long as four time-outs.
"""

from __future__ import annotations

from random import Random
from typing import Any

from differential.operations import classic_groups, consumer_groups, transactions
from differential.sequence import SENTINEL, Sequence, Step, Subject

UNIT_MS, PAUSE_MS, LONG_MS = 2_000, 2_700, 60_000
TIMEOUTS = ("transaction_timeout_ms", "session_timeout_ms", "rebalance_timeout_ms")
GROUP_SETTING = "consumer.session.timeout.ms"


def draw_transactions(random: Random) -> Sequence:
    """Draw transactions that stay open longer than their time-out."""
    return _with_pauses(random, _shortened(random, transactions.draw(random)))


def draw_classic(random: Random) -> Sequence:
    """Draw classic members that stop sending, and rebalances in which a member does not join."""
    return _with_pauses(random, _shortened(random, classic_groups.draw(random)))


def draw_consumer(random: Random) -> Sequence:
    """Draw members of the consumer protocol that stop sending, or release their partitions too late."""
    sequence = _shortened(random, consumer_groups.draw_few(random))
    setting = {"name": GROUP_SETTING, "config_operation": 0, "value": str(UNIT_MS)}
    resource = {"resource_type": 32, "resource_name": consumer_groups.GROUP, "configs": [setting]}
    first = Step("IncrementalAlterConfigs", 1, {"resources": [resource]})
    sequence = _with_pauses(random, sequence)
    return sequence._replace(topics={**sequence.topics, SENTINEL: {}}, steps=(first, *sequence.steps))


def _shortened(random: Random, sequence: Sequence) -> Sequence:
    """Return the sequence with short time-outs in place of most long ones."""

    def shorten(step: Step) -> Step:
        short: dict[str, Any] = {
            key: UNIT_MS for key in TIMEOUTS if step.body.get(key) == LONG_MS and random.random() < 0.6
        }
        return step._replace(body={**step.body, **short})

    return sequence._replace(steps=tuple(shorten(step) for step in sequence.steps))


def _with_pauses(random: Random, sequence: Sequence) -> Sequence:
    steps = list(sequence.steps)
    for _ in range(random.choice((1, 1, 2))):
        steps.insert(random.randint(len(steps) // 3, len(steps)), Step(kind="pause", body={"ms": PAUSE_MS}))
    return sequence._replace(steps=tuple(steps))


SUBJECTS = (
    Subject("transaction_timeouts", draw_transactions, transactions.RULES),
    Subject("classic_timeouts", draw_classic, classic_groups.RULES),
    Subject("consumer_timeouts", draw_consumer, consumer_groups.RULES),
)
