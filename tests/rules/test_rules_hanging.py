"""Which open transactions nobody will ever end."""

from __future__ import annotations

import pytest

from oncelog.rules.hanging import KnownTransaction, OpenTransaction, why_hanging
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
        (known("PrepareAbort", epoch=6), None),  # the end has raised it, and its marker is under way
        (known("Ongoing", epoch=6), "'x' is at epoch 6"),
        (known("Empty"), "'x' is in state Empty"),
        (known("CompleteCommit"), "'x' is in state CompleteCommit"),
        (known("CompleteAbort"), "'x' is in state CompleteAbort"),
        (known("Ongoing", at=OTHER), "it is not part of the transaction of 'x'"),
    ],
)
def test_why(transaction: KnownTransaction | None, why: str | None) -> None:
    assert why_hanging(OPENED, transaction) == why
