"""Random legal histories of transactions have no findings; with one planted fault, they have exactly one
finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.audit.partition import FindingKind, PartitionAudit, StoredBatch
from oncelog.rules.idempotence.sequence import SEQUENCE_MAX, advance
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.types import Isolation

pytestmark = pytest.mark.behaviour("P5")

ACTIONS = ["data", "data", "data", "commit", "abort", "fence", "again"]
ONE_MORE = [(2, "data", 2), (2, "commit", 1), (2, "data", 1)]
"""Steps that add a transaction to a history. So each history has at least one transaction in which a fault
can be planted.
"""
LOG_START = 1
"""A log start above 0, so that a producer may begin with any sequence."""
STEPS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(ACTIONS), st.integers(1, 5)), min_size=5, max_size=60
)


@dataclass
class Writer:
    """A producer id and its coordinator.

    A Writer of the kind "old" has one epoch for all transactions. "new" raises the epoch at every end
    (transaction.version 2), and "plain" has no transactions.
    """

    producer_id: int
    kind: str
    sequence: int
    epoch: int = 0
    coordinator_epoch: int = 0
    is_open: bool = False
    may_repeat: StoredBatch | None = None

    def write(self, action: str, count: int) -> Iterator[StoredBatch]:
        """Yield the batches that a correct broker stores for this action. They have no offsets yet."""
        if action == "data":
            self.is_open, self.may_repeat = self.kind != "plain", None
            yield self._data(count)
        elif self.kind == "plain":
            if action == "fence":
                self._raise_epoch()
        elif action == "again":
            if self.may_repeat is not None:
                self.coordinator_epoch += 1
                yield self.may_repeat._replace(coordinator_epoch=self.coordinator_epoch)
        elif action == "fence":
            was_open = self.is_open
            self._raise_epoch()
            if was_open:
                yield self._marker(is_commit=False)
                self._raise_epoch()
        else:
            if self.kind == "new":
                self._raise_epoch()
            yield self._marker(is_commit=action == "commit")

    def _raise_epoch(self) -> None:
        self.epoch, self.sequence, self.may_repeat = self.epoch + 1, 0, None

    def _data(self, count: int) -> StoredBatch:
        first, self.sequence = self.sequence, advance(self.sequence, count)
        is_transactional = self.kind != "plain"
        numbers = (self.producer_id, self.epoch, first, count, count)
        return StoredBatch(0, 0, *numbers, False, True, is_transactional=is_transactional)

    def _marker(self, *, is_commit: bool) -> StoredBatch:
        marker = StoredBatch(
            0, 0, self.producer_id, self.epoch, None, 1, 1, True, True, is_transactional=True
        )
        marker = marker._replace(is_commit=is_commit, coordinator_epoch=self.coordinator_epoch)
        self.is_open, self.may_repeat = False, marker
        return marker


def history(steps: list[tuple[int, str, int]], start: int) -> list[StoredBatch]:
    kinds = {1: "old", 2: "new", 3: "new", 4: "plain"}
    writers = {number: Writer(number, kind, start) for number, kind in kinds.items()}
    return placed([batch for who, action, count in steps for batch in writers[who].write(action, count)])


def placed(log: list[StoredBatch]) -> list[StoredBatch]:
    """Return the same batches with offsets that begin at the log start and have no gaps."""
    offset, found = LOG_START, []
    for batch in log:
        found.append(batch._replace(base_offset=offset, last_offset=offset + batch.sequence_count - 1))
        offset += batch.sequence_count
    return found


def judged_for_readers(log: list[StoredBatch]) -> list[StoredBatch]:
    """Return the batches with their visibility for read_committed readers, from a correct index."""
    opened: dict[int | None, int] = {}
    aborted = []
    for batch in log:
        if batch.is_commit is not None:
            first = opened.pop(batch.producer_id, None)
            if first is not None and not batch.is_commit and batch.producer_id is not None:
                aborted.append((batch.producer_id, first))
        elif batch.is_transactional:
            opened.setdefault(batch.producer_id, batch.base_offset)
    judge = VisibilityFilter(Isolation.READ_COMMITTED, aborted)
    seen = [judge.decide(batch, is_abort_marker=batch.is_commit is False) for batch in log]
    return [b._replace(is_visible=v is Verdict.DELIVER) for b, v in zip(log, seen, strict=True)]


def violations(log: list[StoredBatch]) -> list[tuple[FindingKind, int]]:
    audit = PartitionAudit(log_start_offset=LOG_START)
    for batch in log:
        audit.see(batch)
    return [(f.kind, f.base_offset) for f in audit.finish()[0] if f.kind.is_violation]


@settings(deadline=None, max_examples=200)
@given(steps=STEPS, start=st.sampled_from([0, SEQUENCE_MAX - 5]))
def test_legal_histories_are_clean(steps: list[tuple[int, str, int]], start: int) -> None:
    assert violations(judged_for_readers(history(steps, start))) == []


@dataclass
class Ended:
    """A transaction that has data in the log. The fields are the positions of its batches and of its marker
    in the list.
    """

    data: list[int]
    marker: int


def ended(log: list[StoredBatch]) -> list[Ended]:
    opened: dict[int | None, list[int]] = {}
    found = []
    for index, batch in enumerate(log):
        if batch.is_commit is not None:
            if data := opened.pop(batch.producer_id, []):
                found.append(Ended(data, index))
        elif batch.is_transactional:
            opened.setdefault(batch.producer_id, []).append(index)
    return found


def is_raised(log: list[StoredBatch], one: Ended) -> bool:
    """Return True if the marker has a higher epoch than the data."""
    return (log[one.marker].producer_epoch or 0) > (log[one.data[0]].producer_epoch or 0)


def is_followed_by_data(log: list[StoredBatch], one: Ended) -> bool:
    """Return True if the marker has a higher epoch than the data and the producer's next batch is data."""
    who = log[one.marker].producer_id
    following = next((batch for batch in log[one.marker + 1 :] if batch.producer_id == who), None)
    return is_raised(log, one) and following is not None and not following.is_control


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, data=st.data())
def test_a_record_shown_or_hidden_wrongly_is_found(
    steps: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    log = judged_for_readers(history([*steps, *ONE_MORE], 0))
    transactions = ended(log)
    one = data.draw(st.sampled_from(transactions))
    at = data.draw(st.sampled_from(one.data))
    log[at] = log[at]._replace(is_visible=not log[at].is_visible)
    is_commit = log[one.marker].is_commit
    kind = FindingKind.HIDDEN_THOUGH_COMMITTED if is_commit else FindingKind.VISIBLE_THOUGH_ABORTED
    assert violations(log) == [(kind, log[at].base_offset)]


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, data=st.data())
def test_a_second_outcome_is_found(steps: list[tuple[int, str, int]], data: st.DataObject) -> None:
    log = history([*steps, *ONE_MORE], 0)
    transactions = [one for one in ended(log) if is_raised(log, one)]
    marker = data.draw(st.sampled_from(transactions)).marker
    # Insert the second marker directly after the first one. Further on, it could end the producer's next
    # transaction.
    second = log[marker]._replace(is_commit=not log[marker].is_commit)
    assert violations(placed([*log[: marker + 1], second, *log[marker + 1 :]])) == [
        (FindingKind.TWO_OUTCOMES, log[marker].base_offset + 1)
    ]


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, data=st.data())
def test_a_transaction_that_was_never_ended_is_found(
    steps: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    log = history([*steps, *ONE_MORE], 0)
    one = data.draw(st.sampled_from([each for each in ended(log) if is_followed_by_data(log, each)]))
    faulty = placed([*log[: one.marker], *log[one.marker + 1 :]])
    first = faulty[one.data[0]].base_offset
    assert violations(faulty) == [(FindingKind.TRANSACTION_WITHOUT_OUTCOME, first)]


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, data=st.data())
def test_data_after_its_marker_raised_the_epoch_is_found(
    steps: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    log = history([*steps, *ONE_MORE], 0)
    transactions = [one for one in ended(log) if is_raised(log, one)]
    one = data.draw(st.sampled_from(transactions))
    place = data.draw(st.integers(one.marker + 1, len(log)))
    faulty = placed([*log[:place], log[one.data[0]], *log[place:]])
    assert violations(faulty) == [(FindingKind.EPOCH_WENT_BACK, faulty[place].base_offset)]


@settings(deadline=None, max_examples=100)
@given(steps=STEPS, data=st.data())
def test_a_marker_of_a_producer_without_transactions_is_found(
    steps: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    log = history([*steps, (4, "data", 1)], 0)
    plain = [index for index, batch in enumerate(log) if batch.producer_id == 4]
    at = data.draw(st.sampled_from(plain))
    stray = StoredBatch(0, 0, 4, log[at].producer_epoch, None, 1, 1, True, True, is_transactional=True)
    stray = stray._replace(is_commit=data.draw(st.booleans()), coordinator_epoch=0)
    faulty = placed([*log[: at + 1], stray, *log[at + 1 :]])
    assert violations(faulty) == [(FindingKind.MARKER_WITHOUT_TRANSACTION, faulty[at + 1].base_offset)]


@settings(deadline=None, max_examples=100)
@given(steps=STEPS, data=st.data())
def test_data_without_sequences_in_a_transaction_is_found(
    steps: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    log = history([*steps, *ONE_MORE], 0)
    transactions = ended(log)
    at = data.draw(st.sampled_from(data.draw(st.sampled_from(transactions)).data))
    plain = log[at]._replace(is_transactional=False, base_sequence=None)
    faulty = placed([*log[: at + 1], plain, *log[at + 1 :]])
    assert violations(faulty) == [(FindingKind.HALF_NUMBERED, faulty[at + 1].base_offset)]
