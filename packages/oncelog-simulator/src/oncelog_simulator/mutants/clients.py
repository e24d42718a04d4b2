"""Mutants that hostile, pipelining and sharing clients, the sink, `write_atomic` and the loader catch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from oncelog.client.consumer import fetch_messages
from oncelog.client.producer import transaction as client_transaction
from oncelog.client.producer import transaction_manager
from oncelog.load import decisions as load_decisions
from oncelog.load import loader, record_boundaries
from oncelog.log import partition
from oncelog.rules.idempotence import append
from oncelog.rules.transactions.client_session import ErrorAction
from oncelog.rules.transactions.roles import Ending, Role, abort_ending, commit_ending
from oncelog.spark.sink import atomic, atomic_task
from oncelog.spark.sink import decisions as lane_rules
from oncelog.spark.sink import state as sink_state
from oncelog.spark.sink import task as sink_task
from oncelog.spark.sink import topic_ids as sink_topic_ids
from oncelog_simulator.mutants.mutant import Mutant, nothing

_DECIDE = append.decide_append
_MARKER = sink_task._SinkTask._marker
_MARKERS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_START = load_decisions.decide_start


def _any_first_sequence(*arguments: Any, begins_epoch: bool = False, **how: Any) -> Any:
    return _DECIDE(*arguments, **how)


def _always(*_: Any, **__: Any) -> bool:
    return True


def _die(*_: Any) -> ErrorAction:
    return ErrorAction.FAIL_PRODUCER


def _changed_by_time(checkpoints: Any, sources: Any, *, in_part: bool = False) -> Any:
    pairs = enumerate(zip(checkpoints, sources, strict=False))
    return tuple(
        index for index, (checkpoint, source) in pairs if checkpoint.modified_ns != source.modified_ns
    )


def _start_again(marks: Any, *rest: Any, **how: Any) -> Any:
    return _START([], *rest, **how)


def _keep_for_the_default(self: Any, admin: Any, group: str, kept: Any, *, retention_ms: int = 0) -> None:
    admin.alter_group_offsets(group, {self.marker_at: kept})


def _quoted_by_parity(column: Any, quotes: Any, delimiter: int) -> tuple[Any, Any]:
    """Treat a text as quoted if an odd number of quotes precedes it, even where a quote is plain text."""
    return quotes, np.arange(len(quotes) + 1) % 2 == 1


def _remembered_marker(self: Any, admin: Any, finished: Any) -> Any:
    """Read a task's marker once and return it from memory afterwards, so commits of other workers are
    missed.
    """
    markers = _MARKERS.setdefault(admin, {})
    name = self._sink.task_id(self._task)
    if name not in markers:
        markers[name] = _MARKER(self, admin, finished)
    return markers[name]


async def _hand_over_committing(self: Any, timeout_s: float | None = None) -> Any:
    """Start a commit before the transaction is handed over. close() then repeats the commit."""
    share = self.share()
    await self._flush_records(self._deadline_ms(timeout_s))
    with self._driver.lock:
        self._core.on_transaction_ended(None)
    return share


def _end_own_parts(role: Role, *, has_parts: bool, is_ongoing: bool | None) -> Ending:
    """Let the owner of a shared transaction commit only what it has sent itself."""
    return commit_ending(Role.ALONE if role is Role.OWNER else role, has_parts=has_parts, is_ongoing=None)


def _abort_own_parts(role: Role, **known: Any) -> Ending:
    """Let the owner of a shared transaction abort only what it has sent itself."""
    return abort_ending(Role.ALONE if role is Role.OWNER else role, **known)


def _keep_empty_epoch(role: Role, *, has_parts: bool, is_ongoing: bool | None) -> Ending:
    """Let a shared commit without records keep the epoch."""
    ending = commit_ending(role, has_parts=has_parts, is_ongoing=is_ongoing)
    return Ending.NOTHING if ending is Ending.NEW_EPOCH else ending


def _no_claim(_call: Any, _name: str, _plan: Any) -> Any:
    """Allow each call of write_atomic, whatever was called before."""
    return nullcontext(True)


MUTANTS = [
    Mutant(
        "a second frame of a micro-batch is taken for the first",
        ((atomic, "_claimed", _no_claim),),
        "atomic",
        findings=("C5",),
    ),
    Mutant(
        "the owner of a shared transaction ends only what it has sent",
        (
            (transaction_manager, "commit_ending", _end_own_parts),
            (transaction_manager, "abort_ending", _abort_own_parts),
            (client_transaction, "check_role", nothing),
        ),
        "shared",
        findings=("R1751",),
        guards=(
            "client/test_client_transactions_close.py"
            "::test_the_owner_ends_a_transaction_to_which_only_others_have_sent",
        ),
    ),
    Mutant(
        "a shared commit without records fences nobody",
        (
            (transaction_manager, "commit_ending", _keep_empty_epoch),
            (client_transaction, "check_role", nothing),
        ),
        "shared",
        findings=("R1772",),
        guards=(
            "client/test_client_transactions_close.py"
            "::test_a_joined_producer_that_sends_after_the_commit_is_fenced",
        ),
    ),
    Mutant(
        "a producer begins a transaction under an epoch that others have used",
        ((client_transaction, "check_role", nothing),),
        "shared",
        findings=("R1773", "R1800", "R1801"),
        guards=(
            "client/test_client_transactions_close.py"
            "::test_a_producer_that_took_over_loses_no_record_of_its_next_transaction",
            "client/test_client_transactions_close.py"
            "::test_a_producer_that_handed_its_transaction_over_adds_nothing_to_it",
            "client/test_client_transactions_close.py::test_only_the_owner_ends_a_shared_transaction",
        ),
    ),
    Mutant(
        "aborted batches are skipped unchecked",
        ((fetch_messages, "verify_crc", _always),),
        findings=("R740",),
        guards=("client/test_client_consumer_core.py::test_a_damaged_aborted_batch_is_an_error",),
    ),
    Mutant(
        "a refused abort counts as the abort of a fenced producer",
        ((transaction_manager, "fenced_abort_action", _die),),
        findings=("R687",),
        guards=(
            "client/test_client_transactions_early_abort.py"
            "::test_an_abort_waits_for_the_markers_of_the_transaction_before",
        ),
    ),
    Mutant(
        "every attempt of a task writes into the transaction",
        ((atomic_task, "may_acquire_lease", _always),),
        "atomic",
        guards=("spark/test_spark_atomic.py::test_one_attempt_of_a_task_writes",),
    ),
    Mutant(
        "rows in a topic and in the next one of its name are committed together",
        ((sink_topic_ids, "decide_same_topics", nothing),),
        findings=("R1240", "R1242", "R1270", "R1291", "R1294", "R1342", "R1460"),
        guards=(
            "spark/test_spark_atomic.py::test_a_topic_created_again_while_its_tasks_write_gets_no_rows",
            "spark/test_spark_kept_clients.py::test_a_topic_created_again_while_a_task_writes_gets_no_rows",
            "spark/test_spark_kept_clients.py::test_a_topic_created_again_before_the_driver_commits_gets_no_rows",
            "spark/test_spark_atomic.py"
            "::test_a_second_attempt_of_a_task_whose_lease_was_deleted_gets_no_rows_committed",
            "spark/test_spark_kept_clients.py::test_a_late_task_of_an_ended_write_finds_its_topic_replaced",
            "spark/test_spark_kept_clients.py"
            "::test_the_first_micro_batch_is_written_as_a_whole_to_a_topic_created_again",
        ),
    ),
    Mutant(
        "a writeId is known, whatever topic its rows were written to",
        ((lane_rules, "_is_other", nothing),),
        findings=("R1462",),
        guards=("spark/test_spark_kept_clients.py::test_a_write_id_of_another_topic_is_refused",),
    ),
    Mutant(
        "a worker that keeps its clients keeps a task's marker, too",
        ((sink_task._SinkTask, "_marker", _remembered_marker),),
        "lanes",
        guards=(
            "spark/test_spark_kept_clients.py::test_a_marker_is_read_again_after_another_worker_ran_the_task",
        ),
    ),
    Mutant(
        "a repeated micro-batch is committed task by task",
        ((lane_rules.PlanNote, "is_repeat", property(lambda self: False)),),
        "lanes",
        findings=("C10", "P2"),
    ),
    Mutant(
        "a sink's notes expire with offsets.retention.minutes",
        ((sink_state.Sink, "keep", _keep_for_the_default),),
        "lanes",
        findings=("C11", "G2"),
    ),
    Mutant(
        "an attempt writes after a write without a writeId has ended",
        ((sink_state.Sink, "has_ended", nothing),),
        "lanes",
        findings=("R77",),
    ),
    Mutant(
        "a file is identified by its size and time",
        ((load_decisions, "_possibly_changed", _changed_by_time),),
        "loaded",
        findings=("C12",),
    ),
    Mutant("a load ignores its marks", ((loader, "decide_start", _start_again),), "loaded"),
    Mutant(
        "a transaction with its own epoch begins with any sequence",
        ((partition, "decide_append", _any_first_sequence),),
        "pipelined",
        findings=("C14", "F1"),
        guards=(
            "log/test_log_partition.py::test_a_transaction_with_an_epoch_of_its_own_begins_with_its_first_batch",
        ),
    ),
    Mutant(
        "CSV files are split by counting quotes",
        ((record_boundaries, "_quoted_behind_runs", _quoted_by_parity),),
        "loaded",
        findings=("C13",),
    ),
    Mutant(
        "a task hands its transaction over as a commit begins",
        ((transaction_manager.TransactionManager, "hand_over", _hand_over_committing),),
        "lanes",
        findings=("R76",),
        guards=(
            "client/test_client_transactions_close.py::test_a_transaction_that_is_not_handed_over_in_time_is_not_committed",
        ),
    ),
]
NOT_CAUGHT = {
    "rows in a topic and in the next one of its name are committed together": (
        "no simulated topic of the sink is deleted and created again"
    ),
    "a writeId is known, whatever topic its rows were written to": (
        "no two simulated writes have the same writeId and other topics"
    ),
    "a transaction with its own epoch begins with any sequence": (
        "what repaired F39 guards the same, at least in the first 115 seeds"
    ),
    "a refused abort counts as the abort of a fenced producer": (
        "simulated transactions have few partitions, so their markers are soon written: no seed in 50 s"
    ),
    "every attempt of a task writes into the transaction": (
        "its records are numbered from 0 again, so the broker refuses most of them as out of order: no seed"
        " of the first 12"
    ),
    "a task hands its transaction over as a commit begins": (
        "needs a task of a repeated micro-batch that cannot store its rows in time: no seed of the first 10"
    ),
}
"""Mutants that no seed catches, with the reason."""
