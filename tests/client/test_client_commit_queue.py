"""The order of a consumer's commits: the cases of a table, and a search for an older position that follows a
newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.client.group.commit_queue import Commit, CommitQueue, Offsets
from oncelog.errors import (
    CoordinatorLoadInProgress,
    DisconnectedError,
    IllegalGeneration,
    OffsetMetadataTooLarge,
    OncelogError,
    RebalanceInProgress,
    UnknownMemberId,
)
from oncelog.types import OffsetAndMetadata, TopicPartition

TABLE = Path(__file__).parents[1] / "tables" / "commit_queue.txt"
RETRY_MS, LATE_MS = 100, 200
ANSWERS = {"ok": None, "passes": CoordinatorLoadInProgress(), "refused": OffsetMetadataTooLarge()}
KEPT = {"next-generation": IllegalGeneration(), "rebalancing": RebalanceInProgress()}


def rows() -> Iterator[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines[1:]:
        yield [cell.strip() for cell in line.split("|")]


def positions(words: list[str]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {TopicPartition(word[0], 0): OffsetAndMetadata(int(word[1:])) for word in words}


def text(commit: Commit | None) -> str:
    if commit is None:
        return "-"
    kind = ("not " if commit.refusal else "") + ("requested" if commit.is_requested else "automatic")
    return " ".join([kind, *sorted(f"{tp.topic}{offset.offset}" for tp, offset in commit.offsets.items())])


class QueueRun:
    """A CommitQueue, and the steps of one row of the table that are played on it."""

    def __init__(self) -> None:
        self.queue, self.now_ms = CommitQueue(), 0
        self.requested: list[Commit] = []
        self.sent: Commit | None = None

    def play(self, step: str) -> None:
        word, *rest = step.split()
        match word:
            case "auto" | "by-time":
                self.queue.add_automatic(
                    positions(rest), self.now_ms + RETRY_MS, is_by_time=word == "by-time"
                )
            case "commit":
                self.requested.append(self.queue.add_requested(positions(rest)))
            case "withdraw":
                self.queue.withdraw(self.requested.pop(0))
            case "send" | "again":
                self.sent = self.queue.next()
            case "late":
                self.now_ms = LATE_MS
            case "release":
                self.queue.release([TopicPartition(name, 0) for name in rest], UnknownMemberId())
            case "lose":
                self.queue.lose(UnknownMemberId())
            case _:
                assert self.sent is not None
                error = (ANSWERS | KEPT)[word]
                is_settled = self.queue.on_result(self.sent, error, self.now_ms, is_kept=word in KEPT)
                assert is_settled or word in ("passes", *KEPT)


@pytest.mark.parametrize("row", list(rows()), ids=": ".join)
def test_table(row: list[str]) -> None:
    steps, expected = row
    run = QueueRun()
    for step in steps.split(", ") if steps != "-" else ():
        run.play(step)
    assert text(run.queue.next()) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["auto", "commit", "withdraw", "send", "release", "ok", "lost", "passes", "refused", *KEPT]
            ),
            st.sets(st.sampled_from("abc"), min_size=1),
        ),
        max_size=40,
    )
)
def test_no_older_position_follows_a_newer_one(steps: list[tuple[str, set[str]]]) -> None:
    """Each step commits its own number as offset.

    In the step `lost`, a commit is stored but its response is lost.
    """
    queue, requested, stored = CommitQueue(), list[Commit](), dict[TopicPartition, int]()
    sent: Commit | None = None
    errors: dict[str, OncelogError | None] = {"lost": DisconnectedError(), **ANSWERS, **KEPT}

    def store(offsets: Offsets) -> None:
        for tp, position in offsets.items():
            assert position.offset >= stored.get(tp, 0)
            stored[tp] = position.offset

    for number, (step, names) in enumerate(steps, 1):
        positions = {TopicPartition(name, 0): OffsetAndMetadata(number) for name in names}
        match step:
            case "auto":
                queue.add_automatic(positions, RETRY_MS)
            case "commit":
                requested.append(queue.add_requested(positions))
            case "withdraw" if requested:
                queue.withdraw(requested.pop())
            case "release":
                queue.release(positions, UnknownMemberId())
            case "send":
                sent = queue.next()
                if sent is not None and sent.refusal is not None:
                    assert queue.on_result(sent, sent.refusal, 0)
                    sent = None
            case _ if step in errors and sent is not None:
                if step in ("ok", "lost"):
                    store(sent.offsets)
                queue.on_result(sent, errors[step], 0, is_kept=step in KEPT)
                sent = None
    while (commit := queue.next()) is not None:
        if commit.refusal is None:
            store(commit.offsets)
        assert queue.on_result(commit, commit.refusal, 0)
