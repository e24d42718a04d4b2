"""The marker rule, against tests/tables/marker.txt."""

from __future__ import annotations

import re

import pytest
from support.append_notation import NOW_MS, format_entry, parse_entry, rows

from oncelog.rules.idempotence.append import Reject
from oncelog.rules.idempotence.markers import EndMarker, StoreMarker, decide_marker, reject_same_epoch
from oncelog.types import Origin

CASES = list(rows("marker.txt"))


@pytest.mark.behaviour("I6")
@pytest.mark.parametrize(
    ("entry", "marker", "origin", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES]
)
def test_row(entry: str, marker: str, origin: str, expected: str) -> None:
    verdict = decide_marker(
        parse_entry(entry), _parse_marker(marker), Origin(origin), offset=100, now_ms=NOW_MS
    )
    assert _format(verdict) == expected


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize(
    ("entry", "epoch", "is_refused"),
    [
        ("e3 0-4@10 txn@10", 3, True),
        ("e3 0-4@10 txn@10", 4, False),
        ("e3 0-4@10", 3, False),
        ("e32767 0-4@10 txn@10", 32_767, False),
        ("-", 3, False),
    ],
)
def test_with_an_epoch_for_each_transaction_a_marker_raises_it(
    entry: str, epoch: int, is_refused: bool
) -> None:
    refusal = reject_same_epoch(parse_entry(entry), 7, epoch)
    assert (refusal is not None) is is_refused
    if refusal is not None:
        assert _format(refusal) == "refuse 47"


def _parse_marker(text: str) -> EndMarker:
    epoch, coordinator_epoch, outcome = re.fullmatch(r"e(\d+) c(\d+) (commit|abort)", text).groups()
    return EndMarker(7, int(epoch), int(coordinator_epoch), outcome == "commit", 700)


def _format(verdict: StoreMarker | Reject) -> str:
    if isinstance(verdict, Reject):
        assert "producer id 7" in verdict.reason
        return f"refuse {verdict.error.code}"
    text = f"store {format_entry(verdict.entry)}"
    assert (verdict.entry.last_timestamp_ms, verdict.entry.last_append_ms) == (700, NOW_MS)
    if verdict.completed is not None:
        done = verdict.completed
        text += f" completes {done.first_offset}-{done.last_offset}" + (" aborted" if done.is_aborted else "")
    return text
