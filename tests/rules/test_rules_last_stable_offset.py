"""The last stable offset: with and without open transactions, and after markers."""

from __future__ import annotations

import pytest

from oncelog.rules.idempotence.last_stable_offset import last_stable_offset, stable_offset_after
from oncelog.rules.idempotence.markers import CompletedTransaction


@pytest.mark.parametrize(
    ("start", "high_watermark", "open_first", "unreplicated", "expected"),
    [
        (0, 10, None, None, 10),
        (0, 10, 4, None, 4),
        (0, 10, 12, None, 10),
        (0, 10, None, 3, 3),
        (0, 10, 7, 3, 3),
        (6, 10, 4, None, 6),
    ],
)
def test_last_stable_offset(
    start: int, high_watermark: int, open_first: int | None, unreplicated: int | None, expected: int
) -> None:
    stable = last_stable_offset(
        log_start_offset=start,
        high_watermark=high_watermark,
        open_first_offset=open_first,
        unreplicated_first_offset=unreplicated,
    )
    assert stable == expected


def test_stable_offset_after_a_transaction_looks_at_the_others() -> None:
    done = CompletedTransaction(producer_id=1, first_offset=3, last_offset=9, is_aborted=True)
    assert stable_offset_after(done, None) == 10
    assert stable_offset_after(done, 5) == 5
