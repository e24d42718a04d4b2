"""The transaction coordinator, which carries out the decisions of `rules.transactions.coordinator`.

A transaction is atomic because of the order of its writes. First the decision, PrepareCommit or PrepareAbort,
becomes durable, as far as flush.messages asks. Then a marker is written to every partition, and the markers
become durable. Then the entry becomes Complete. After a crash, the next start completes the remaining steps,
and `retry_markers` retries markers that could not be written.

A leftover is a transaction that was open in a partition when the broker started. Its marker may be lost: see
`rules.idempotence.lost_markers`.
Source: behaviours T1, T2, T5 and T6 (docs/behaviours.md); kafka TransactionCoordinator,
TransactionMarkerChannelManager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from oncelog.broker.coordinators.expiry import ExpiryRounds
from oncelog.broker.coordinators.internal_topic import (
    AppendHandle,
    InternalTopic,
    StoredBatch,
    UnreadableRecord,
    is_pending_flush,
    when_durable,
)
from oncelog.broker.coordinators.markers import MARKER_COST, Marker, MarkerWriter
from oncelog.broker.coordinators.producer_ids import ProducerIds
from oncelog.broker.coordinators.transaction_log import decode_key, decode_value, encode_key, encode_value
from oncelog.broker.group_commit import FlushQueue
from oncelog.broker.stepwise import RoundMeter, StepBudget
from oncelog.broker.topics.topics import Topics
from oncelog.errors import (
    BrokerError,
    ConcurrentTransactions,
    CoordinatorLoadInProgress,
    InvalidProducerEpoch,
    InvalidRequest,
    InvalidTransactionTimeout,
    KafkaStorageError,
    NotCoordinator,
    PeerError,
    StorageError,
    UnknownTopicOrPartition,
)
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue, BackgroundTask, Kind
from oncelog.log.partition import Partition
from oncelog.rules.idempotence.append import Reject
from oncelog.rules.idempotence.lost_markers import (
    abort_of,
    aborted_classic,
    decided_transaction,
    ended_transaction,
    is_awaited,
    lost_end,
)
from oncelog.rules.idempotence.markers import reject_same_epoch
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.coordinator import (
    Append,
    FenceAndAbort,
    NeedsProducerId,
    NoChange,
    complete,
    decide_add,
    decide_end,
    decide_init,
    decide_verify,
    fence,
    is_expired,
    is_timed_out,
    retire,
)
from oncelog.rules.transactions.entry import (
    EPOCH_PER_TRANSACTION,
    NO_EPOCH,
    NO_ID,
    TransactionEntry,
    TransactionState,
)
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.records import DecodedRecord

MAX_MARKERS_AT_ONCE = 100
"""Maximum number of markers that may be written immediately before the next call of `end_round`.

Further markers are written in background steps.
"""
PARTITION_RECORDS = 2
"""Cost of each partition in an entry that is written, in records of `RoundMeter`.

Every change of a transaction writes all its partitions: 17 ms for 10,000.
"""
MARKERS_REACH_THE_DISK_MS = 60_000
"""Age in ms up to which a power loss may still lose a decision's markers.

Linux writes changed pages to the disk after about 30 s.
"""
_GONE = (UnknownTopicOrPartition, InvalidProducerEpoch)
"""Errors of a partition that needs no marker, because it was deleted or knows a newer epoch of the
producer.
"""


class TransactionResult(NamedTuple):
    """The result of a request: the entry, and the appends that the response must wait for."""

    entry: TransactionEntry
    written: tuple[AppendHandle, ...]


class TransactionCoordinator:
    """The coordinator of all transactional ids of this broker."""

    def __init__(
        self,
        topic: InternalTopic,
        settings: Settings,
        *,
        topics: Topics,
        producer_ids: ProducerIds,
        markers: MarkerWriter,
        round_meter: RoundMeter,
        flush_queue: FlushQueue,
        background: BackgroundQueue,
        limits: Limits,
    ) -> None:
        self.topic, self._settings, self._topics = topic, settings, topics
        self._producer_ids, self._markers, self._flush_queue = producer_ids, markers, flush_queue
        self._background, self._limits, self._round_meter = background, limits, round_meter
        self.version: int = settings["oncelog.transaction.version"]
        self._entries: dict[str, TransactionEntry] = {}
        self._seen_epochs: dict[int, int] = {}
        """Producer id -> highest epoch that any partition knew at the start, if the coordinator's log has a
        lower one.
        """
        self._last_offsets: dict[str, int] = {}
        """Transactional id -> offset of its newest record in `__transaction_state`."""
        self._unfinished: dict[str, set[TopicPartition]] = {}
        """Transactional id -> partitions whose marker is not written yet."""
        self._marked: dict[str, list[AppendHandle]] = {}
        """Transactional id -> markers that are written, even by a failed attempt, and may not be durable yet.

        The entry becomes Complete only after all of these are durable. See
        test_only_a_marker_whose_fate_is_unknown_is_written_again.
        """
        self._writing: set[str] = set()
        """Transactional ids whose markers are being written in several steps."""
        self._markers_at_once = MAX_MARKERS_AT_ONCE
        self._undecided: list[tuple[TransactionEntry, AppendHandle]] = []
        """Decisions whose flush failed. They have no markers yet; `retry_markers` flushes them again.

        Without the retry, the transactional id would answer CONCURRENT_TRANSACTIONS forever. See
        test_a_decision_that_cannot_be_made_durable_is_followed_later.
        """
        self._decisions: dict[ProducerIdAndEpoch, TransactionEntry | None] = {}
        """Producer of a leftover (see module docstring) -> the newest logged decision about it, or None."""
        self._aborted_classic: dict[ProducerIdAndEpoch, set[TopicPartition]] = {}
        """Producer of a leftover -> partitions in which the log aborts a classic transaction of the same
        epoch.
        """
        self._leftovers: list[tuple[TopicPartition, ProducerIdAndEpoch]] = []
        """Partitions and producers of leftovers that may still need a marker from `write_lost_markers`."""
        self._opened_ids: set[int] = set()
        """Producer ids of the leftovers."""
        self._owners: dict[int, str] = {}
        """Producer id of a leftover -> the transactional id that uses or used it, according to the log."""
        self._ends: tuple[int, int, dict[int, int]] = -1, 0, {}
        """The state of `hold_young_decisions`: when it last stored the log ends (in ms), how often it was
        called since then, and the log end offset of each partition.
        """
        self._timing_out = ExpiryRounds(background, limits.expire_step_entries)
        self._expiring = ExpiryRounds(background, limits.expire_step_entries)

    # Requests

    def get(self, transactional_id: str) -> TransactionEntry | None:
        """Return the entry; None if the transactional id is unknown or has expired. Raises NotCoordinator."""
        self.topic.check(transactional_id)
        return self._entries.get(transactional_id)

    def all(self) -> Iterator[TransactionEntry]:
        """Return an iterator over all entries."""
        return iter(self._entries.values())

    def init(
        self,
        transactional_id: str,
        expected: ProducerIdAndEpoch | None,
        timeout_ms: int,
        now_ms: int,
        take_id: Callable[[], int] | None = None,
    ) -> TransactionResult:
        """Carry out InitProducerId. `take_id` returns a new producer id if the decision needs one.

        Raises InvalidRequest (empty id), InvalidTransactionTimeout, NotCoordinator, CoordinatorLoadInProgress
        or the error of `decide_init`. If a transaction of this id is open, this begins to abort it and raises
        ConcurrentTransactions.
        """
        _check_id(transactional_id)
        self.topic.check(transactional_id)
        max_ms = self._settings["transaction.max.timeout.ms"]
        if not 0 < timeout_ms <= max_ms:
            raise InvalidTransactionTimeout(
                f"transaction.timeout.ms={timeout_ms} is not within 1..{max_ms} (transaction.max.timeout.ms)"
            )
        entry = self._above_seen_epochs(self._entries.get(transactional_id))

        def decide(new_producer_id: int | None) -> Append | FenceAndAbort | NeedsProducerId | Reject:
            return decide_init(
                entry,
                transactional_id,
                expected,
                timeout_ms=timeout_ms,
                server_version=self.version,
                new_producer_id=new_producer_id,
                now_ms=now_ms,
                first_epoch=self._limits.first_producer_epoch,
            )

        verdict = decide(None)
        if isinstance(verdict, NeedsProducerId):
            verdict = decide((take_id or self._new_producer_id)())
        if isinstance(verdict, Reject):
            raise verdict.error(verdict.reason)
        assert not isinstance(verdict, NeedsProducerId)
        if isinstance(verdict, FenceAndAbort):
            self._end(verdict.entry, now_ms)
            raise ConcurrentTransactions("the transaction of an earlier instance is being aborted; retry")
        return TransactionResult(verdict.entry, (self._append(verdict.entry, now_ms),))

    def _above_seen_epochs(self, entry: TransactionEntry | None) -> TransactionEntry | None:
        """Return the entry, with its producer's epoch raised to the highest that a partition knew at the
        start.

        With the default flush settings, a power loss may remove an epoch from the coordinator's log, while a
        partition keeps it. If a new instance got that epoch again, its batches would be treated as
        duplicates: acknowledged, but not stored. See
        test_an_epoch_that_only_a_partition_remembers_is_not_given_again.
        """
        seen_epoch = NO_EPOCH if entry is None else self._seen_epochs.get(entry.producer_id, NO_EPOCH)
        if entry is None or seen_epoch <= entry.producer_epoch:
            return entry
        return entry._replace(producer_epoch=seen_epoch, last_producer_epoch=NO_EPOCH)

    def _note_seen_epochs(self) -> None:
        """Collect in `_seen_epochs` the epochs that partitions know and the coordinator's log lacks.

        Every start calls this, because the broker may start after a power loss.
        """
        stored = {entry.producer_id: entry.producer_epoch for entry in self._entries.values()}
        # Include next producer ids: an EndTxn response may have contained one, and a power loss may have
        # removed the Complete record that makes it current.
        next_ids = (entry.next_producer_id for entry in self._entries.values())
        stored |= {next_id: 0 for next_id in next_ids if next_id != NO_ID}
        for _, partition in self._topics.all_partitions() if stored else ():
            for producer_id, epoch in partition.epochs_of(stored):
                if epoch > max(stored[producer_id], self._seen_epochs.get(producer_id, NO_EPOCH)):
                    self._seen_epochs[producer_id] = epoch

    def add_partitions(
        self,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        partitions: Collection[TopicPartition],
        now_ms: int,
    ) -> TransactionResult:
        """Add partitions to the producer's transaction.

        Raises InvalidRequest (empty id), NotCoordinator or the error of `decide_add`.
        """
        _check_id(transactional_id)
        entry = self.get(transactional_id)
        verdict = decide_add(entry, producer, partitions, now_ms=now_ms)
        if isinstance(verdict, Reject):
            raise verdict.error(verdict.reason)
        if isinstance(verdict, NoChange):
            assert entry is not None
            return TransactionResult(entry, (self._last_append(transactional_id),))
        return TransactionResult(verdict.entry, (self._append(verdict.entry, now_ms),))

    def last_append(self, transactional_id: str) -> list[AppendHandle]:
        """Return the newest append of a transactional id, in a list; an empty list for an unknown id.

        This append must be durable before any batch of the id's transaction is stored.
        """
        return [self._last_append(transactional_id)] if transactional_id in self._entries else []

    def verify(self, transactional_id: str, producer: ProducerIdAndEpoch, tp: TopicPartition) -> None:
        """Raise an error if the partition is not in the transaction.

        Raises InvalidRequest (empty id), NotCoordinator or the error of
        `rules.transactions.coordinator.decide_verify`.
        """
        _check_id(transactional_id)
        refusal = decide_verify(self.get(transactional_id), producer, tp)
        if refusal is not None:
            raise refusal.error(refusal.reason)

    def end(
        self,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        is_commit: bool,
        client_version: int,
        now_ms: int,
    ) -> TransactionResult:
        """Carry out EndTxn: append the decision. Its markers follow later.

        Raises InvalidRequest (empty id), NotCoordinator, CoordinatorLoadInProgress or the error of
        `decide_end`.
        """
        _check_id(transactional_id)
        entry = self.get(transactional_id)

        def decide(new_producer_id: int | None) -> Append | NoChange | NeedsProducerId | Reject:
            return decide_end(
                entry,
                producer,
                is_commit,
                client_version=client_version,
                new_producer_id=new_producer_id,
                now_ms=now_ms,
            )

        verdict = decide(None)
        if isinstance(verdict, NeedsProducerId):
            verdict = decide(self._new_producer_id())
        if isinstance(verdict, Reject):
            raise verdict.error(verdict.reason)
        assert not isinstance(verdict, NeedsProducerId)
        if isinstance(verdict, NoChange):
            assert entry is not None
            return TransactionResult(entry, (self._last_append(transactional_id),))
        return TransactionResult(verdict.entry, (self._end(verdict.entry, now_ms),))

    def _new_producer_id(self) -> int:
        try:
            return self._producer_ids.take()
        except (OSError, StorageError) as error:
            raise CoordinatorLoadInProgress(f"cannot allocate producer ids: {error}") from error

    # Start, timeouts and expiry

    def load(self) -> None:
        """Find the leftovers, and replay the log. Unreadable partitions are in `topic.damaged` afterwards."""
        self._leftovers = [
            (tp, producer)
            for tp, partition in self._topics.all_partitions()
            for producer in partition.open_transactions()
        ]
        self._decisions = dict.fromkeys(producer for _, producer in self._leftovers)
        self._opened_ids = {producer.producer_id for producer in self._decisions}
        self.topic.load(self._load_partition, self._forget_partition)

    def _load_partition(self, index: int, batches: Iterator[StoredBatch]) -> None:
        newest: dict[bytes, DecodedRecord] = {}
        for batch in batches:
            for record in batch.records:
                newest[record.key or b""] = record
                if self._decisions:
                    self._note_decision(record)
        for key, record in newest.items():
            if record.value is None:
                continue
            try:
                transactional_id = decode_key(key)
                self._entries[transactional_id] = decode_value(transactional_id, record.value)
                self._last_offsets[transactional_id] = record.offset
            except (PeerError, ValueError) as error:
                raise UnreadableRecord(record.offset, str(error)) from error

    def _note_decision(self, record: DecodedRecord) -> None:
        """If the record is about leftovers, remember their transactional id and their decision."""
        if record.value is None:
            return
        # An unreadable record is ignored here, because a newer one may replace it. If it is the newest one of
        # its key, `_load_partition` raises an error.
        with suppress(PeerError, ValueError):
            entry = decode_value(decode_key(record.key or b""), record.value)
            named = (entry.producer_id, entry.previous_producer_id, entry.next_producer_id)
            for producer_id in self._opened_ids.intersection(named):
                self._owners[producer_id] = entry.transactional_id
            producer = decided_transaction(entry)
            if producer in self._decisions:
                self._decisions[producer] = entry
            classic = aborted_classic(entry)
            if classic in self._decisions:
                self._aborted_classic.setdefault(classic, set()).update(entry.partitions)

    def _outcome(
        self, producer: ProducerIdAndEpoch, tp: TopicPartition, decision: TransactionEntry
    ) -> TransactionEntry:
        """Return the outcome of a leftover in a partition: the decision, or an abort.

        If the log also aborts a classic transaction of the same epoch in this partition, the leftover may be
        that transaction, so it is aborted. See
        test_an_aborted_classic_transaction_is_not_committed_with_the_next_one_of_its_epoch.
        """
        if tp not in self._aborted_classic.get(producer, ()):
            return decision
        return decision._replace(state=TransactionState.PREPARE_ABORT)

    def _forget_partition(self, index: int) -> None:
        # The outcome of a leftover is unknown if its decision was in this partition. Do not abort the
        # leftover, because the decision may have been a commit.
        for key in [key for key in self._entries if self.topic.partition_of(key) == index]:
            del self._entries[key]
            self._last_offsets.pop(key, None)
        for producer, decision in self._decisions.items():
            if decision is not None and self.topic.partition_of(decision.transactional_id) == index:
                self._decisions[producer] = None
        for producer_id, owner in list(self._owners.items()):
            if self.topic.partition_of(owner) == index:
                del self._owners[producer_id]

    def fence_all(self, now_ms: int) -> None:
        """Fence every producer that was initialized before this start. Raises StorageError.

        After the restore of a backup, the coordinator does not know the epochs that it assigned since the
        backup. Without the fencing, it would assign them again. See
        test_a_producer_from_after_a_backup_is_not_taken_for_a_new_one.
        """
        fenced: dict[Partition, None] = {}
        for entry in list(self._entries.values()):
            try:
                fenced[self._append(retire(entry, now_ms), now_ms).partition] = None
            except NotCoordinator as error:
                raise StorageError(
                    f"transactional id {entry.transactional_id!r} cannot be fenced: {error}"
                ) from error
        # A power loss must not undo the fencing, because later starts do not fence again. So sync, whatever
        # flush.messages is. See test_a_power_loss_after_a_fencing_start_brings_no_producer_back.
        for partition in fenced:
            try:
                partition.flush()
            except KafkaStorageError as error:
                raise StorageError(f"fenced producers cannot be made durable: {error}") from error

    def write_lost_markers(self, now_ms: int, at_once: int | None = None) -> None:
        """Write the lost markers of leftovers whose outcome is known.

        This runs at the start, and then periodically for at most `at_once` leftovers. A later attempt may
        succeed after a failed one, because the disk may work again. An unknown outcome may become known,
        because the transactional id may get a new producer id.
        """
        kept: list[tuple[TopicPartition, ProducerIdAndEpoch]] = []
        for number, (tp, producer) in enumerate(self._leftovers):
            if number == at_once:
                # The limit is reached. Begin with the remaining leftovers next time.
                kept = self._leftovers[number:] + kept
                break
            try:
                if self._may_lack_marker(tp, producer, now_ms):
                    kept.append((tp, producer))
            except KafkaStorageError:
                kept.append((tp, producer))
            except BrokerError:
                # The partition was deleted, or it knows a newer epoch. In both cases it needs no marker.
                continue
        self._leftovers = kept

    def _may_lack_marker(self, tp: TopicPartition, producer: ProducerIdAndEpoch, now_ms: int) -> bool:
        """Write the lost marker of a leftover if its outcome is known.

        Return True if the outcome is unknown and may become known later. Raises BrokerError.
        """
        _, partition = self._topics.partition(tp)
        owner = self._owners.get(producer.producer_id)
        if owner is None or partition.open_transaction(producer.producer_id) != producer:
            return False
        newest = self._entries.get(owner)
        lost = lost_end(tp, producer, self._decisions.get(producer), newest)
        if lost is None:
            return newest is not None and not is_awaited(tp, producer, newest)
        self._markers.write(tp, self._marker(self._outcome(producer, tp, lost), tp), now_ms)
        return False

    def end_leftovers(
        self, producer: ProducerIdAndEpoch, tps: Collection[TopicPartition], now_ms: int
    ) -> None:
        """End the leftovers of the producer's older epochs in the partitions `tps`.

        The producer is about to begin a transaction there. Raises NotCoordinator.
        """
        for tp in tps:
            try:
                self._end_leftover(producer, tp, now_ms)
            except BrokerError as error:
                raise NotCoordinator(f"{tp} has an open transaction of an older epoch: {error}") from error

    def _end_leftover(self, producer: ProducerIdAndEpoch, tp: TopicPartition, now_ms: int) -> None:
        _, partition = self._topics.partition(tp)
        leftover = partition.open_transaction(producer.producer_id)
        if leftover is None or leftover.producer_epoch >= producer.producer_epoch:
            return
        decision = self._decisions.get(leftover)
        if decision is None or tp not in decision.partitions:
            decision = abort_of(leftover)
        outcome = self._outcome(leftover, tp, decision)
        self._markers.write(tp, self._marker(outcome, tp), now_ms)

    def resume(self, now_ms: int) -> None:
        """Finish the transactions that were decided before this start, once their decisions are durable.

        Before that, write lost markers and, with `oncelog.fence.transactions`, fence all producers. Raises
        StorageError if fencing fails.
        """
        self._note_seen_epochs()
        self._bound_start_times(now_ms)
        self.write_lost_markers(now_ms)
        if self._settings["oncelog.fence.transactions"]:
            self.fence_all(now_ms)
        for entry in [entry for entry in self._entries.values() if entry.state.is_prepared]:
            self._follow(entry, self._last_append(entry.transactional_id), now_ms)

    def _bound_start_times(self, now_ms: int) -> None:
        """Lower the start times of open transactions to `now_ms` if they are later.

        The clock may have been ahead when a transaction began. Without the correction, the transaction could
        not time out before the clock has reached that time, and would block read_committed readers. See
        test_a_transaction_that_began_while_the_clock_was_ahead_times_out_after_a_restart.
        """
        for key, entry in self._entries.items():
            if entry.state is TransactionState.ONGOING and entry.start_ms > now_ms:
                self._entries[key] = entry._replace(start_ms=now_ms)

    def abort_timed_out(self, now_ms: int) -> None:
        """Abort timed-out transactions and fence their producers, in background steps: behaviour T8
        (docs/behaviours.md). Nothing is done while an earlier round is running.
        """

        budget = StepBudget(self._limits.request_step_elements)

        def abort(entry: TransactionEntry) -> BackgroundTask:
            before = self._markers.extra_cost
            # If the append fails, or no producer id can be allocated, the next round tries again.
            with suppress(NotCoordinator, CoordinatorLoadInProgress):
                self._end(self._fence_timed_out(entry, now_ms), now_ms)
            # `_end` has written up to MAX_MARKERS_AT_ONCE of the markers immediately, so count their cost.
            cost = MARKER_COST * len(entry.partitions) + self._markers.extra_cost - before
            if budget.spend(cost):
                yield None

        def look(transactional_id: str) -> BackgroundTask | None:
            entry = self._entries.get(transactional_id)
            return abort(entry) if entry is not None and is_timed_out(entry, now_ms) else None

        # Even to look at all ids takes too long for one step: 0.05 s for 100,000. See
        # test_idle_transactional_ids_are_looked_at_a_few_in_a_step.
        self._timing_out.begin(list(self._entries), look)

    def _fence_timed_out(self, entry: TransactionEntry, now_ms: int) -> TransactionEntry:
        fenced = fence(entry, server_version=self.version, new_producer_id=None, now_ms=now_ms)
        if isinstance(fenced, NeedsProducerId):
            new_id = self._new_producer_id()
            fenced = fence(entry, server_version=self.version, new_producer_id=new_id, now_ms=now_ms)
        assert not isinstance(fenced, NeedsProducerId)
        return fenced

    def retry_markers(self, now_ms: int) -> None:
        """Write lost markers, retry decisions whose flush failed, and retry markers that could not be
        written.
        """
        self.write_lost_markers(now_ms, MAX_MARKERS_AT_ONCE)
        undecided, self._undecided = self._undecided, []
        for prepared, written in undecided:
            self._follow(prepared, written, now_ms)
        for transactional_id in list(self._unfinished):
            self._write_markers(transactional_id, now_ms)

    def hold_young_decisions(self, now_ms: int) -> None:
        """Protect decisions from compaction until no power loss can remove their markers.

        With the default flush settings, a power loss may lose markers that are younger than
        MARKERS_REACH_THE_DISK_MS. The next start then needs the decisions to write these markers again
        (`rules.idempotence.lost_markers`). A decision may be compacted if it was in the log at a call of this
        method at least MARKERS_REACH_THE_DISK_MS ago. Its timestamp does not show its age, because the clock
        may have been set back. See
        test_a_decision_is_not_compacted_away_while_a_power_loss_may_take_its_markers.

        The clock may also jump forward. So the method also requires a number of calls since then: at least
        log.cleaner.backoff.ms passes between two calls, except before the call that the jump causes. See
        test_a_clock_that_jumps_forward_makes_no_decision_old.
        """
        since_ms, calls, ends = self._ends
        min_calls = 1 + -(-MARKERS_REACH_THE_DISK_MS // max(self._settings["log.cleaner.backoff.ms"], 1))
        if ends and (now_ms < since_ms + MARKERS_REACH_THE_DISK_MS or calls + 1 < min_calls):
            self._ends = since_ms, calls + 1, ends
            return
        topic = self.topic.topic
        for index, partition in enumerate(topic.partitions if topic else ()):
            partition.cleaner.held_from = ends.get(index, 0)
        self._ends = now_ms, 0, self.topic.log_end_offsets()

    def expire(self, now_ms: int) -> None:
        """Write tombstones for expired transactional ids: behaviour T9 (docs/behaviours.md)."""
        expiration_ms = self._settings["transactional.id.expiration.ms"]

        def look(key: str) -> None:
            entry = self._entries.get(key)
            if entry is not None and is_expired(entry, now_ms, expiration_ms):
                with suppress(NotCoordinator):
                    self.topic.append(self.topic.partition_of(key), [(encode_key(key), None)], now_ms)
                    del self._entries[key]
                    self._last_offsets.pop(key, None)

        self._expiring.begin(list(self._entries), look)

    def close(self) -> None:
        """Stop the current rounds of timeouts and of expiry."""
        self._timing_out.close()
        self._expiring.close()

    # Effects

    def _append(self, entry: TransactionEntry, now_ms: int) -> AppendHandle:
        key, version = entry.transactional_id, min(self.version, 1)
        record = encode_key(key), encode_value(entry, version)
        self._round_meter.add(PARTITION_RECORDS * len(entry.partitions))
        written = self.topic.append(self.topic.partition_of(key), [record], now_ms)
        self._entries[key], self._last_offsets[key] = entry, written.last_offset
        return written

    def _last_append(self, transactional_id: str) -> AppendHandle:
        """Return a handle for the newest record of a transactional id.

        If that record is unknown, return the newest record of its partition. The id's own record is better:
        with flush.messages=1 other ids may append a newer one during each sync, and waiting for the
        partition's newest record could take forever. See
        test_a_durable_record_of_one_id_does_not_wait_for_those_of_another.
        """
        newest = self.topic.last_append(self.topic.partition_of(transactional_id))
        return newest._replace(last_offset=self._last_offsets.get(transactional_id, newest.last_offset))

    def _end(self, prepared: TransactionEntry, now_ms: int) -> AppendHandle:
        """Append the decision, and write its markers once the decision is durable.

        Return the append of the decision.
        """
        written = self._append(prepared, now_ms)
        self._follow(prepared, written, now_ms)
        return written

    def _follow(self, prepared: TransactionEntry, written: AppendHandle, now_ms: int) -> None:
        def on_durable(error: BrokerError | None) -> None:
            if error is not None:
                self._undecided.append((prepared, written))
                return
            self._unfinished[prepared.transactional_id] = set(prepared.partitions)
            self._write_markers(prepared.transactional_id, now_ms)

        when_durable(self._flush_queue, [written], on_durable)

    def _write_markers(self, transactional_id: str, now_ms: int) -> None:
        """Write the missing markers of a transactional id, immediately or in steps between other requests.

        Steps are necessary, because there may be many markers: one sync may make many decisions durable, and
        `retry_markers` may retry many. `_markers_at_once` is the number of markers that may still be written
        immediately. See test_the_markers_of_many_transactions_are_written_a_few_at_once.
        """
        if transactional_id in self._writing:
            return
        self._writing.add(transactional_id)
        work = self._write_in_steps(transactional_id, now_ms)
        if self._markers_at_once > 0:
            self._markers_at_once -= max(len(self._unfinished[transactional_id]), 1)
            before = self._markers.extra_cost
            is_done = next(work, work) is work
            self._markers_at_once -= (self._markers.extra_cost - before) // MARKER_COST
            if is_done:
                return
        self._background.add(work, Kind.REQUEST)

    def end_round(self) -> None:
        """Allow MAX_MARKERS_AT_ONCE markers to be written immediately again.

        Call this after a round of requests.
        """
        self._markers_at_once = MAX_MARKERS_AT_ONCE

    def _write_in_steps(self, transactional_id: str, now_ms: int) -> BackgroundTask:
        # The entry cannot change between the steps: it stays in Prepare* until all its markers are written.
        entry, remaining = self._entries[transactional_id], self._unfinished[transactional_id]
        marked = self._marked.setdefault(transactional_id, [])
        ended = ended_transaction(entry)
        budget = StepBudget(self._limits.request_step_elements)
        try:
            for tp in sorted(remaining):
                before = self._markers.extra_cost
                # If the write fails, `retry_markers` tries again.
                with suppress(BrokerError):
                    with suppress(*_GONE):
                        if ended is not None:
                            self._end_leftover(ended, tp, now_ms)
                        marked.append(self._markers.write(tp, self._marker(entry, tp), now_ms))
                    remaining.discard(tp)
                # Failed attempts count too, because they take time, for example on a full disk.
                cost = MARKER_COST + self._markers.extra_cost - before
                if remaining and budget.spend(cost):
                    yield None
        finally:
            self._writing.discard(transactional_id)
        if not remaining:
            del self._unfinished[transactional_id], self._marked[transactional_id]
            when_durable(self._flush_queue, marked, partial(self._complete, entry, marked, now_ms))

    def _complete(
        self, prepared: TransactionEntry, marked: list[AppendHandle], now_ms: int, error: BrokerError | None
    ) -> None:
        if error is not None:
            # The markers that are not durable may be lost, so write them again. A second marker is harmless,
            # because the producer begins no transaction before the current one is complete.
            unknown = {handle.partition.topic_partition for handle in marked if is_pending_flush([handle])}
            self._unfinished[prepared.transactional_id] = unknown
            return
        try:
            self._append(complete(prepared, now_ms=now_ms), now_ms)
        except BrokerError:
            self._unfinished[prepared.transactional_id] = set()

    def _marker(self, entry: TransactionEntry, tp: TopicPartition) -> Marker:
        """Return the marker of a decision for a partition.

        Raises UnknownTopicOrPartition, InvalidProducerEpoch.
        """
        topic = self.topic.topic
        assert topic is not None
        own_epoch = topic.partition(self.topic.partition_of(entry.transactional_id)).leader_epoch
        _, partition = self._topics.partition(tp)
        producer_state = partition.producer(entry.producer_id)
        if entry.client_version >= EPOCH_PER_TRANSACTION:
            # If the producer's next transaction is open in the partition, this marker is already there: a
            # power loss has lost only the Complete record. Do not write the marker again.
            refusal = reject_same_epoch(producer_state, entry.producer_id, entry.producer_epoch)
            if refusal is not None:
                raise refusal.error(refusal.reason)
        # Use this coordinator's epoch, or the epoch of the producer's last marker in the partition if that is
        # higher. It may be higher after a marker of an operator, or after a loss of `__transaction_state`. A
        # lower epoch would be refused, and the transaction would stay open in the partition. See
        # test_a_marker_of_a_higher_coordinator_epoch_does_not_fence_the_coordinator.
        epoch = own_epoch if producer_state is None else max(own_epoch, producer_state.coordinator_epoch or 0)
        is_commit = entry.state is TransactionState.PREPARE_COMMIT
        return Marker(entry.producer_id, entry.producer_epoch, epoch, is_commit)


def _check_id(transactional_id: str) -> None:
    if not transactional_id:
        raise InvalidRequest("a transactional id may not be empty")
