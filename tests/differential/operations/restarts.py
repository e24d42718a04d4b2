"""Sequences of other subjects in which both brokers are restarted after a clean stop or after SIGKILL.

The observations of the other subject are compared right after the restart and at the end.
"""

from __future__ import annotations

from random import Random
from typing import Any

from differential.operations import (
    classic_groups,
    consumer_groups,
    idempotence,
    offsets,
    records,
    transactions,
)
from differential.sequence import Rule, Sequence, Step, Subject, answers

BASES = {
    subject.name: subject
    for module in (classic_groups, consumer_groups, idempotence, offsets, records, transactions)
    for subject in module.SUBJECTS
}


def draw(random: Random) -> Sequence:
    """Draw a sequence of another subject, and insert one restart, clean or by SIGKILL."""
    base = BASES[random.choice(sorted(BASES))]
    sequence = base.draw(random)
    place = random.randint(1, len(sequence.steps))
    restart = Step(kind=random.choice(("restart", "kill")))
    steps = (*sequence.steps[:place], restart, *sequence.observations, *sequence.steps[place:])
    return sequence._replace(steps=steps)


def _is_epoch(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    """Return True if the differing value is a leader epoch or follows from one.

    On Kafka, leader epochs rise with each start; on our broker they do not.
    """
    is_shown = path.rpartition(".")[2] in ("leader_epoch", "partition_leader_epoch", "committed_leader_epoch")
    is_judged = any(value in ("FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH") for value in (ours, theirs))
    is_of_an_epoch = step.api == "OffsetForLeaderEpoch" or "diverging_epoch" in path
    # a coordinator's epoch is the leader epoch of its partition
    is_coordinators = path.endswith((".marker.1", "coordinator_epoch"))
    return is_shown or is_judged or is_of_an_epoch or is_coordinators


def _is_older_than_one(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    """Return True if our broker recognises a repeated batch and returns its offsets, and Kafka has forgotten
    the batch.
    """
    pair = {"error_code": ("NONE", "OUT_OF_ORDER_SEQUENCE_NUMBER")}.get(path.rpartition(".")[2])
    is_told = isinstance(ours, int) and theirs in (-1, None)
    is_offset = path.endswith(("base_offset", "log_start_offset")) and is_told
    return step.api == "Produce" and ((ours, theirs) == pair or is_offset)


def _is_unused(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    """Return True if only Kafka still knows the group, which was in its first rebalance at the restart."""
    pairs = (("GROUP_ID_NOT_FOUND", "NONE"), ("Dead", "Empty"))
    return step.api == "DescribeGroups" and (ours, theirs) in pairs


RULES = (
    Rule(
        "the leader epoch rises with every start of Kafka",
        "there is one node, so nobody else has led in between",
        _is_epoch,
        key="leader-epoch-stays",
    ),
    Rule(
        "Kafka remembers one batch of a producer over a restart",
        "we remember five",
        _is_older_than_one,
        key="five-remembered-over-a-restart",
        ends=True,
    ),
    Rule(
        "a marker by hand with an epoch that the coordinator no longer has",
        "there is one node, so that no other coordinator can be meant",
        answers("WriteTxnMarkers", ours="NONE", theirs="TRANSACTION_COORDINATOR_FENCED"),
        key="After an operator's WriteTxnMarkers",
        ends=True,
    ),
    Rule(
        "a group that was in its first rebalance",
        "Kafka has stored that there is a group",
        _is_unused,
        key="An empty group without offsets is removed immediately",
        ends=True,
    ),
)
_ALL = {rule.name: rule for base in BASES.values() for rule in (*base.rules, *RULES)}
SUBJECTS = (Subject("restarts", draw, tuple(_ALL.values()), weight=0),)
