"""The rule that decides if an open transaction is hanging."""

from __future__ import annotations

import pytest

from oncelog.rules.transactions.hanging import (
    Hanging,
    HeldBack,
    KnownTransaction,
    OpenTransaction,
    hanging_reason,
    judge,
)
from oncelog.types import TopicPartition

AT, OTHER = TopicPartition("t", 0), TopicPartition("t", 1)
OPENED = OpenTransaction(AT, 7, 5, 10, 1_000, 0)


def known(state: str, epoch: int = 5, at: TopicPartition = AT) -> KnownTransaction:
    return KnownTransaction("x", 7, epoch, state, frozenset({at}))


@pytest.mark.parametrize(
    ("transaction", "why"),
    [
        (None, "no coordinator knows producer id 7 among the transactional ids that you may DESCRIBE"),
        (known("Ongoing"), None),
        (known("PrepareCommit"), None),
        # The next one is not hanging: its end has raised the epoch, and its marker will still be written.
        (known("PrepareAbort", epoch=6), None),
        (known("Ongoing", epoch=6), "'x' is at epoch 6"),
        (known("Empty"), "'x' is in state Empty"),
        (known("CompleteCommit"), "'x' is in state CompleteCommit"),
        (known("CompleteAbort"), "'x' is in state CompleteAbort"),
        (known("Ongoing", at=OTHER), "the transaction of 'x' does not contain the partition"),
    ],
)
def test_the_reason_says_why_nobody_will_end_a_transaction(
    transaction: KnownTransaction | None, why: str | None
) -> None:
    assert hanging_reason(OPENED, transaction) == why


@pytest.mark.parametrize(
    ("transaction", "now_ms", "verdict", "reason"),
    [
        (known("Ongoing"), 90_000, Hanging.NO, "'x' is Ongoing"),
        (known("Empty"), 6_000, Hanging.YES, "'x' is in state Empty"),
        (known("Empty"), 5_999, Hanging.PERHAPS, "'x' is in state Empty"),
    ],
)
def test_a_transaction_counts_as_hanging_only_from_an_age_on(
    transaction: KnownTransaction, now_ms: int, verdict: Hanging, reason: str
) -> None:
    judged = judge(OPENED, transaction, now_ms=now_ms, older_than_ms=5_000)
    assert judged == HeldBack(OPENED, verdict, reason)


def test_a_transaction_without_records_is_old() -> None:
    opened = OPENED._replace(last_timestamp_ms=None)
    assert judge(opened, known("Empty"), now_ms=5_000, older_than_ms=5_000).hanging is Hanging.YES
