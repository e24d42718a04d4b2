"""What a consumer commits next: the cases of a table, and that no older position follows a newer one."""

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
OWED_MS, LATE_MS = 100, 200
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
    kind = ("not " if commit.refusal else "") + ("asked" if commit.is_asked else "owed")
    return " ".join([kind, *sorted(f"{tp.topic}{each.offset}" for tp, each in commit.offsets.items())])


class Played:
    """A queue to which the steps of a row happen."""

    def __init__(self) -> None:
        self.queue, self.now_ms = CommitQueue(), 0
        self.asked: list[Commit] = []
        self.sent: Commit | None = None

    def play(self, step: str) -> None:
        word, *rest = step.split()
        match word:
            case "owe" | "by-time":
                self.queue.owe(positions(rest), self.now_ms + OWED_MS, is_by_time=word == "by-time")
            case "ask":
                self.asked.append(self.queue.ask(positions(rest)))
            case "withdraw":
                self.queue.withdraw(self.asked.pop(0))
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
                is_settled = self.queue.answered(self.sent, error, self.now_ms, is_kept=word in KEPT)
                assert is_settled or word in ("passes", *KEPT)


@pytest.mark.parametrize("row", list(rows()), ids=": ".join)
def test_table(row: list[str]) -> None:
    steps, expected = row
    played = Played()
    for step in steps.split(", ") if steps != "-" else ():
        played.play(step)
    assert text(played.queue.next()) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["owe", "ask", "withdraw", "send", "release", "ok", "lost", "passes", "refused", *KEPT]
            ),
            st.sets(st.sampled_from("abc"), min_size=1),
        ),
        max_size=40,
    )
)
def test_no_older_position_follows_a_newer_one(steps: list[tuple[str, set[str]]]) -> None:
    """The offsets number the statements. `lost`: it was stored, and the acknowledgement did not come."""
    queue, asked, stored = CommitQueue(), list[Commit](), dict[TopicPartition, int]()
    sent: Commit | None = None
    errors: dict[str, OncelogError | None] = {"lost": DisconnectedError(), **ANSWERS, **KEPT}

    def store(offsets: Offsets) -> None:
        for tp, position in offsets.items():
            assert position.offset >= stored.get(tp, 0)
            stored[tp] = position.offset

    for number, (step, names) in enumerate(steps, 1):
        stated = {TopicPartition(name, 0): OffsetAndMetadata(number) for name in names}
        match step:
            case "owe":
                queue.owe(stated, OWED_MS)
            case "ask":
                asked.append(queue.ask(stated))
            case "withdraw" if asked:
                queue.withdraw(asked.pop())
            case "release":
                queue.release(stated, UnknownMemberId())
            case "send":
                sent = queue.next()
                if sent is not None and sent.refusal is not None:
                    assert queue.answered(sent, sent.refusal, 0)
                    sent = None
            case _ if step in errors and sent is not None:
                if step in ("ok", "lost"):
                    store(sent.offsets)
                queue.answered(sent, errors[step], 0, is_kept=step in KEPT)
                sent = None
    while (commit := queue.next()) is not None:
        if commit.refusal is None:
            store(commit.offsets)
        assert queue.answered(commit, commit.refusal, 0)
