"""Mutants for seeds that have small limits, begin near the maximum of a number, or let days pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oncelog.broker.coordinators import offsets as coordinators_offsets
from oncelog.broker.coordinators import transactions
from oncelog.log import segment
from oncelog.rules.groups import consumer as groups_consumer
from oncelog.rules.groups.committed_offsets import is_expired
from oncelog.rules.idempotence import append
from oncelog.rules.idempotence import producer_state as producer_table
from oncelog.rules.idempotence.sequencer import MAX_EPOCH
from oncelog.rules.transactions.entry import TransactionEntry
from oncelog_simulator.mutants.mutant import Mutant, false, nothing


def _next_without_wrap(last: int | None, base_sequence: int) -> bool:
    return base_sequence == (0 if last is None else last + 1)


def _share_the_shard(self: Any, index: int) -> Any:
    return self._idle[index]


def _no_steps(*_: Any) -> Iterator[None]:
    return iter(())


def _write_indexes_without_last_time(self: Any) -> None:
    self.index.holds_back = self.times.holds_back = False
    self._sync_indexes()


def _topics_without_members(self: Any) -> Any:
    return self._topics or frozenset()


def _is_expired_by_timestamp(entry: Any, oldest_ms: int) -> bool:
    return entry.last_timestamp_ms <= oldest_ms and entry.current_txn_first_offset is None


def _is_expired_at_half(committed: Any, *, retention_ms: int, **how: Any) -> bool:
    return _IS_EXPIRED(committed, retention_ms=retention_ms // 2, **how)


_IS_EXPIRED = is_expired

MUTANTS = [
    Mutant("no sequence follows the last one", ((append, "is_next", _next_without_wrap),), "start"),
    Mutant(
        "clients get the last epoch",
        ((TransactionEntry, "is_exhausted", property(lambda self: self.producer_epoch >= MAX_EPOCH)),),
        "epochs",
        findings=("C17",),
    ),
    Mutant(
        "an idle producer is forgotten", ((producer_table.ProducerTable, "put_packed", nothing),), "limits"
    ),
    Mutant(
        "a snapshot shares memory with the producer table",
        ((producer_table.ProducerTable, "_own", _share_the_shard),),
        guards=("log/test_log_background.py::test_a_large_snapshot_is_written_while_appends_go_on",),
    ),
    Mutant(
        "a closed segment lacks its last time index entry",
        (
            (segment.Segment, "note_last_time", nothing),
            (segment.Segment, "_write_indexes_again", _write_indexes_without_last_time),
            (segment.Segment, "confirm_times", _no_steps),
        ),
        "expiry",
        findings=("C9",),
        guards=("log/test_log_time_index.py::test_retention_by_time_keeps_what_is_young_after_a_kill",),
    ),
    Mutant(
        "records without a timestamp count as old",
        ((segment.Segment, "largest_timestamp_ms", property(lambda self: self.max_timestamp_ms)),),
        "expiry",
        findings=("C18",),
    ),
    Mutant(
        "an empty group keeps its topics",
        ((groups_consumer.ConsumerGroup, "subscribed", _topics_without_members),),
        "expiry",
        findings=("G3",),
    ),
    Mutant(
        "offsets expire too early", ((coordinators_offsets, "is_expired", _is_expired_at_half),), "expiry"
    ),
    Mutant("no transactional id expires", ((transactions, "is_expired", false),), "expiry"),
    Mutant(
        "producers expire by their records' times",
        ((producer_table, "_is_expired", _is_expired_by_timestamp),),
        "expiry",
    ),
]
NOT_CAUGHT: dict[str, str] = {
    "a snapshot shares memory with the producer table": (
        "seed 304 noticed it before the draws changed: no seed of the first 10 since"
    ),
    "a closed segment lacks its last time index entry": (
        "needs a kill just after a roll, a clean start, and a look-up of the last times: no seed of the"
        " first 25"
    ),
}
