"""The transaction coordinator: carries out what `rules.transactions.coordinator` decides.

The order that makes a transaction whole or absent: the decision (PrepareCommit, PrepareAbort) is durable,
then a marker stands in every partition, then these are durable, then the entry is Complete. Whatever is
missing after a crash is done at the next start; a marker that cannot be written is tried again by `tick`.
Source: rows T1, T2, T5, T6; Kafka's TransactionCoordinator, TransactionMarkerChannelManager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from oncelog.broker.coordinators.expiry import ExpiryRounds
from oncelog.broker.coordinators.internal_topic import (
    StateTopic,
    StoredBatch,
    UnreadableRecord,
    Written,
    must_wait,
    when_durable,
)
from oncelog.broker.coordinators.markers import MARKER_COST, Marker, MarkerWriter
from oncelog.broker.coordinators.producer_ids import ProducerIds
from oncelog.broker.coordinators.transaction_log import decode_key, decode_value, encode_key, encode_value
from oncelog.broker.group_commit import FlushQueue
from oncelog.broker.stepwise import StepBudget
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
from oncelog.rules.idempotence.append import Refuse
from oncelog.rules.idempotence.lost_markers import (
    abort_of,
    aborted_classic,
    decided_transaction,
    ended_transaction,
    is_awaited,
    lost_end,
)
from oncelog.rules.idempotence.markers import refuse_same_epoch
from oncelog.rules.idempotence.sequencer import Identity
from oncelog.rules.transactions.coordinator import (
    Append,
    FenceAndAbort,
    NeedsProducerId,
    NoChange,
    complete,
    decide_add,
    decide_end,
    decide_init,
    fence,
    is_expired,
    is_timed_out,
    retire,
    verify,
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
"""Markers that one round of requests or syncs writes at once; more transactions are left to steps."""
MARKERS_REACH_THE_DISK_MS = 60_000
"""Age of a decision below which a power loss may still take its markers: Linux writes what is 30 s old."""
_GONE = (UnknownTopicOrPartition, InvalidProducerEpoch)
"""A partition that answers a marker with these has no use for it: deleted, or a newer epoch was there."""


class Done(NamedTuple):
    """What a request decided: the entry that holds now, and what its answer waits for."""

    entry: TransactionEntry
    written: tuple[Written, ...]


class TransactionCoordinator:
    """Every transactional id of this node."""

    def __init__(
        self,
        topic: StateTopic,
        settings: Settings,
        *,
        topics: Topics,
        producer_ids: ProducerIds,
        markers: MarkerWriter,
        flush_queue: FlushQueue,
        background: BackgroundQueue,
        limits: Limits,
    ) -> None:
        self.topic, self._settings, self._topics = topic, settings, topics
        self._producer_ids, self._markers, self._flush_queue = producer_ids, markers, flush_queue
        self._background, self._limits = background, limits
        self.version: int = settings["oncelog.transaction.version"]
        self._entries: dict[str, TransactionEntry] = {}
        self._seen_epochs: dict[int, int] = {}
        """By producer id: the highest epoch of a partition at the start, if the log had a lower one."""
        self._last_offsets: dict[str, int] = {}
        """Offset of the newest record of each transactional id."""
        self._unfinished: dict[str, set[TopicPartition]] = {}
        """Where a marker is still to be written, by transactional id."""
        self._marked: dict[str, list[Written]] = {}
        """And the markers that are written, perhaps in an earlier attempt, and not durable yet."""
        self._writing: set[str] = set()
        """Transactional ids whose markers are being written, in several steps."""
        self._markers_at_once = MAX_MARKERS_AT_ONCE
        self._undecided: list[tuple[TransactionEntry, Written]] = []
        """Decisions that could not be made durable: no marker may be written for them yet."""
        self._decisions: dict[Identity, TransactionEntry | None] = {}
        """Of transactions that partitions showed as open at the start: what the log says of each."""
        self._aborted_classic: dict[Identity, set[TopicPartition]] = {}
        """Of the same: where the log aborts a classic transaction of that epoch. The open one may be it."""
        self._leftovers: list[tuple[TopicPartition, Identity]] = []
        """The same by partition, as long as it is open and the end of no transaction under way ends it."""
        self._opened_ids: set[int] = set()
        """Producer ids of the same."""
        self._owners: dict[int, str] = {}
        """By producer id of the same: the transactional id that the log names it with."""
        self._ends: tuple[int, dict[int, int]] = -1, {}
        """A time, and where the log ended then."""
        self._timing_out = ExpiryRounds(background, limits.expire_step_entries)
        self._expiring = ExpiryRounds(background, limits.expire_step_entries)

    # Requests

    def get(self, transactional_id: str) -> TransactionEntry | None:
        """None for an id that is not known, or was forgotten. Raises NotCoordinator."""
        self.topic.check(transactional_id)
        return self._entries.get(transactional_id)

    def all(self) -> Iterator[TransactionEntry]:
        return iter(self._entries.values())

    def init(
        self,
        transactional_id: str,
        given: Identity | None,
        timeout_ms: int,
        now_ms: int,
        take_id: Callable[[], int] | None = None,
    ) -> Done:
        """A producer begins, or begins anew. `take_id` gives it a new producer id if it needs one.

        Raises ConcurrentTransactions when an earlier instance's transaction is being ended first, and
        what `decide_init` refuses with; InvalidTransactionTimeout.
        """
        _check_id(transactional_id)
        self.topic.check(transactional_id)
        most_ms = self._settings["transaction.max.timeout.ms"]
        if not 0 < timeout_ms <= most_ms:
            raise InvalidTransactionTimeout(
                f"transaction.timeout.ms={timeout_ms} is not within 1..{most_ms} (transaction.max.timeout.ms)"
            )
        entry = self._above_seen_epochs(self._entries.get(transactional_id))

        def decide(new_producer_id: int | None) -> Append | FenceAndAbort | NeedsProducerId | Refuse:
            return decide_init(
                entry,
                transactional_id,
                given,
                timeout_ms=timeout_ms,
                server_version=self.version,
                new_producer_id=new_producer_id,
                now_ms=now_ms,
                first_epoch=self._limits.first_producer_epoch,
            )

        verdict = decide(None)
        if isinstance(verdict, NeedsProducerId):
            verdict = decide((take_id or self._new_producer_id)())
        if isinstance(verdict, Refuse):
            raise verdict.error(verdict.reason)
        assert not isinstance(verdict, NeedsProducerId)
        if isinstance(verdict, FenceAndAbort):
            self._end(verdict.entry, now_ms)
            raise ConcurrentTransactions("the transaction of an earlier instance is being aborted; try again")
        return Done(verdict.entry, (self._persist(verdict.entry, now_ms),))

    def _above_seen_epochs(self, entry: TransactionEntry | None) -> TransactionEntry | None:
        """Return an entry with the highest epoch that a partition had seen of its producer at the start.

        With the default flush a power loss may take an epoch from the coordinator's log alone. Given again,
        it made a new instance's batches duplicates of the older one's: acknowledged, and not stored. Guarded
        by test_an_epoch_that_only_a_partition_remembers_is_not_given_again.
        """
        seen_epoch = NO_EPOCH if entry is None else self._seen_epochs.get(entry.producer_id, NO_EPOCH)
        if entry is None or seen_epoch <= entry.producer_epoch:
            return entry
        return entry._replace(producer_epoch=seen_epoch, last_producer_epoch=NO_EPOCH)

    def _note_seen_epochs(self) -> None:
        """Note epochs that only partitions remember, at each start: a stop may follow the power loss."""
        stored = {entry.producer_id: entry.producer_epoch for entry in self._entries.values()}
        # An end may have given out the next id, and a power loss taken the record that it is complete.
        next_ids = (entry.next_producer_id for entry in self._entries.values())
        stored |= {next_id: 0 for next_id in next_ids if next_id != NO_ID}
        for _, partition in self._topics.all_partitions() if stored else ():
            for producer_id, epoch in partition.epochs_of(stored):
                if epoch > max(stored[producer_id], self._seen_epochs.get(producer_id, NO_EPOCH)):
                    self._seen_epochs[producer_id] = epoch

    def add_partitions(
        self, transactional_id: str, who: Identity, partitions: Collection[TopicPartition], now_ms: int
    ) -> Done:
        """Make partitions part of the producer's transaction. Raises what `decide_add` refuses with."""
        _check_id(transactional_id)
        entry = self.get(transactional_id)
        verdict = decide_add(entry, who, partitions, now_ms=now_ms)
        if isinstance(verdict, Refuse):
            raise verdict.error(verdict.reason)
        if isinstance(verdict, NoChange):
            assert entry is not None
            return Done(entry, (self._newest(transactional_id),))
        return Done(verdict.entry, (self._persist(verdict.entry, now_ms),))

    def newest(self, transactional_id: str) -> list[Written]:
        """Return what must be durable before anything is stored by what is known of an id."""
        return [self._newest(transactional_id)] if transactional_id in self._entries else []

    def verify(self, transactional_id: str, who: Identity, at: TopicPartition) -> None:
        """Raises the refusal of the rule `verify` if the partition is in no transaction."""
        _check_id(transactional_id)
        refusal = verify(self.get(transactional_id), who, at)
        if refusal is not None:
            raise refusal.error(refusal.reason)

    def end(
        self, transactional_id: str, who: Identity, is_commit: bool, client_version: int, now_ms: int
    ) -> Done:
        """Decide the transaction's outcome; its markers follow. Raises what `decide_end` refuses with."""
        _check_id(transactional_id)
        entry = self.get(transactional_id)

        def decide(new_producer_id: int | None) -> Append | NoChange | NeedsProducerId | Refuse:
            return decide_end(
                entry,
                who,
                is_commit,
                client_version=client_version,
                new_producer_id=new_producer_id,
                now_ms=now_ms,
            )

        verdict = decide(None)
        if isinstance(verdict, NeedsProducerId):
            verdict = decide(self._new_producer_id())
        if isinstance(verdict, Refuse):
            raise verdict.error(verdict.reason)
        assert not isinstance(verdict, NeedsProducerId)
        if isinstance(verdict, NoChange):
            assert entry is not None
            return Done(entry, (self._newest(transactional_id),))
        return Done(verdict.entry, (self._end(verdict.entry, now_ms),))

    def _new_producer_id(self) -> int:
        try:
            return self._producer_ids.take()
        except (OSError, StorageError) as error:
            raise CoordinatorLoadInProgress(f"no block of producer ids: {error}") from error

    # Time, and the start

    def load(self) -> None:
        """Read back what was decided; a partition that cannot be read is in `topic.damaged`."""
        self._leftovers = [
            (tp, who)
            for tp, partition in self._topics.all_partitions()
            for who in partition.open_transactions()
        ]
        self._decisions = dict.fromkeys(who for _, who in self._leftovers)
        self._opened_ids = {who.producer_id for who in self._decisions}
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
        """Keep the decision about a transaction that a partition shows as open."""
        if record.value is None:
            return
        # Older records need not be readable; `_load_partition` looks at the newest.
        with suppress(PeerError, ValueError):
            entry = decode_value(decode_key(record.key or b""), record.value)
            named = (entry.producer_id, entry.previous_producer_id, entry.next_producer_id)
            for producer_id in self._opened_ids.intersection(named):
                self._owners[producer_id] = entry.transactional_id
            who = decided_transaction(entry)
            if who in self._decisions:
                self._decisions[who] = entry
            classic = aborted_classic(entry)
            if classic in self._decisions:
                self._aborted_classic.setdefault(classic, set()).update(entry.partitions)

    def _outcome(self, who: Identity, tp: TopicPartition, decision: TransactionEntry) -> TransactionEntry:
        """Return the decision for what a partition shows as open, as an abort if it may be an older one.

        See test_an_aborted_classic_transaction_is_not_committed_with_the_next_one_of_its_epoch.
        """
        if tp not in self._aborted_classic.get(who, ()):
            return decision
        return decision._replace(state=TransactionState.PREPARE_ABORT)

    def _forget_partition(self, index: int) -> None:
        # Not aborted either: what was decided of them may be a commit.
        for key in [key for key in self._entries if self.topic.partition_of(key) == index]:
            del self._entries[key]
            self._last_offsets.pop(key, None)
        for who, decision in self._decisions.items():
            if decision is not None and self.topic.partition_of(decision.transactional_id) == index:
                self._decisions[who] = None
        for producer_id, owner in list(self._owners.items()):
            if self.topic.partition_of(owner) == index:
                del self._owners[producer_id]

    def fence_all(self, now_ms: int) -> None:
        """Fence every producer that may have been initialized before this start.

        On a restored backup a new instance would get epochs that producers of the time after the backup
        have already. See test_no_producer_of_the_time_after_a_backup_is_taken_for_a_new_one.
        Raises StorageError.
        """
        fenced: dict[Partition, None] = {}
        for entry in list(self._entries.values()):
            try:
                fenced[self._persist(retire(entry, now_ms), now_ms).partition] = None
            except NotCoordinator as error:
                raise StorageError(f"{entry.transactional_id} cannot be fenced: {error}") from error
        # Later starts do not fence, so a power loss must not undo it, whatever flush.messages says.
        # See test_a_power_loss_after_a_fencing_start_brings_no_producer_back.
        for partition in fenced:
            try:
                partition.flush()
            except KafkaStorageError as error:
                raise StorageError(f"fenced producers cannot be made durable: {error}") from error

    def write_lost_markers(self, now_ms: int, at_once: int | None = None) -> None:
        """Write the markers that a power loss took, as far as the log tells.

        At a start, and again from time to time, at most `at_once`: the log may have failed, or a
        transactional id may have left its producer id since.
        """
        kept: list[tuple[TopicPartition, Identity]] = []
        for number, (tp, who) in enumerate(self._leftovers):
            if number == at_once:
                kept = self._leftovers[number:] + kept  # the others come first the next time
                break
            try:
                if self._may_lack_marker(tp, who, now_ms):
                    kept.append((tp, who))
            except KafkaStorageError:
                kept.append((tp, who))
            except BrokerError:
                continue  # deleted, or a newer epoch was there
        self._leftovers = kept

    def _may_lack_marker(self, tp: TopicPartition, who: Identity, now_ms: int) -> bool:
        """Write the marker that a partition lacks; return whether it may be known later.

        Raises BrokerError.
        """
        _, partition = self._topics.partition(tp)
        owner = self._owners.get(who.producer_id)
        if owner is None or partition.open_transaction(who.producer_id) != who:
            return False
        newest = self._entries.get(owner)
        lost = lost_end(tp, who, self._decisions.get(who), newest)
        if lost is None:
            return newest is not None and not is_awaited(tp, who, newest)
        self._markers.write(tp, self._marker(self._outcome(who, tp, lost), tp), now_ms)
        return False

    def end_leftovers(self, who: Identity, tps: Collection[TopicPartition], now_ms: int) -> None:
        """End what an older epoch of the producer left open in partitions where it begins a transaction.

        Raises NotCoordinator.
        """
        for tp in tps:
            try:
                self._end_leftover(who, tp, now_ms)
            except BrokerError as error:
                raise NotCoordinator(f"{tp} shows an older transaction as open: {error}") from error

    def _end_leftover(self, who: Identity, tp: TopicPartition, now_ms: int) -> None:
        _, partition = self._topics.partition(tp)
        leftover = partition.open_transaction(who.producer_id)
        if leftover is None or leftover.producer_epoch >= who.producer_epoch:
            return
        decision = self._decisions.get(leftover)
        if decision is None or tp not in decision.partitions:
            decision = abort_of(leftover)
        outcome = self._outcome(leftover, tp, decision)
        self._markers.write(tp, self._marker(outcome, tp), now_ms)

    def resume(self, now_ms: int) -> None:
        """Finish what was decided before the last stop or crash, and may not be durable yet.

        Raises StorageError where `oncelog.fence.transactions` asks for a fence, and it cannot be written.
        """
        self._note_seen_epochs()
        self.write_lost_markers(now_ms)
        if self._settings["oncelog.fence.transactions"]:
            self.fence_all(now_ms)
        for entry in [entry for entry in self._entries.values() if entry.state.is_prepared]:
            self._follow(entry, self._newest(entry.transactional_id), now_ms)

    def abort_timed_out(self, now_ms: int) -> None:
        """Abort every transaction past its timeout and fence its producer (row T8)."""

        budget = StepBudget(self._limits.request_step_elements)

        def look(transactional_id: str) -> BackgroundTask:
            entry = self._entries.get(transactional_id)
            if entry is not None and is_timed_out(entry, now_ms):
                # The log failed, or no producer id could be reserved: the next round decides again.
                with suppress(NotCoordinator, CoordinatorLoadInProgress):
                    self._end(self._fenced(entry, now_ms), now_ms)
                # Its first markers are written at once.
                if budget.spend(MARKER_COST * len(entry.partitions)):
                    yield None

        timed_out = [key for key, entry in self._entries.items() if is_timed_out(entry, now_ms)]
        self._timing_out.begin(timed_out, look)

    def _fenced(self, entry: TransactionEntry, now_ms: int) -> TransactionEntry:
        fenced = fence(entry, server_version=self.version, new_producer_id=None, now_ms=now_ms)
        if isinstance(fenced, NeedsProducerId):
            new_id = self._new_producer_id()
            fenced = fence(entry, server_version=self.version, new_producer_id=new_id, now_ms=now_ms)
        assert not isinstance(fenced, NeedsProducerId)
        return fenced

    def retry_markers(self, now_ms: int) -> None:
        """Try again what could not be made durable, and markers that could not be written."""
        self.write_lost_markers(now_ms, MAX_MARKERS_AT_ONCE)
        undecided, self._undecided = self._undecided, []
        for prepared, written in undecided:
            self._follow(prepared, written, now_ms)
        for transactional_id in list(self._unfinished):
            self._write_markers(transactional_id, now_ms)

    def hold_young_decisions(self, now_ms: int) -> None:
        """Keep decisions from compaction until their markers are on the disk, also with the default flush.

        After a power loss the start needs them to write lost markers again
        (`rules.idempotence.lost_markers`). Measured from round to round: records may have times of a clock
        that was set back over a restart. See
        test_a_decision_is_not_compacted_away_while_a_power_loss_may_take_its_markers.
        """
        since_ms, ends = self._ends
        if ends and now_ms < since_ms + MARKERS_REACH_THE_DISK_MS:
            return
        topic = self.topic.topic
        for index, partition in enumerate(topic.partitions if topic else ()):
            partition.cleaner.held_from = ends.get(index, 0)
        self._ends = now_ms, self.topic.ends()

    def forget_expired(self, now_ms: int) -> None:
        """Write tombstones for ids that have been idle for long enough (row T9)."""
        expiration_ms = self._settings["transactional.id.expiration.ms"]

        def look(key: str) -> None:
            entry = self._entries.get(key)
            if entry is not None and is_expired(entry, now_ms, expiration_ms):
                with suppress(NotCoordinator):
                    self.topic.append(self.topic.partition_of(key), [(encode_key(key), None)], now_ms)
                    del self._entries[key]
                    self._last_offsets.pop(key, None)

        expired = [key for key, entry in self._entries.items() if is_expired(entry, now_ms, expiration_ms)]
        self._expiring.begin(expired, look)

    def close(self) -> None:
        """End the rounds under way."""
        self._timing_out.close()
        self._expiring.close()

    # Effects

    def _persist(self, entry: TransactionEntry, now_ms: int) -> Written:
        key, version = entry.transactional_id, min(self.version, 1)
        record = encode_key(key), encode_value(entry, version)
        written = self.topic.append(self.topic.partition_of(key), [record], now_ms)
        self._entries[key], self._last_offsets[key] = entry, written.last_offset
        return written

    def _newest(self, transactional_id: str) -> Written:
        """Return a record that is no earlier than the newest one of an id.

        That is the id's own newest record where it is known. The partition's newest one may belong to another
        id, and with flush.messages=1 a request that waits for it may find a newer one after each sync.
        """
        newest = self.topic.newest(self.topic.partition_of(transactional_id))
        return newest._replace(last_offset=self._last_offsets.get(transactional_id, newest.last_offset))

    def _end(self, prepared: TransactionEntry, now_ms: int) -> Written:
        """Write the decision; when it is durable, its markers."""
        written = self._persist(prepared, now_ms)
        self._follow(prepared, written, now_ms)
        return written

    def _follow(self, prepared: TransactionEntry, written: Written, now_ms: int) -> None:
        def on_durable(error: BrokerError | None) -> None:
            if error is not None:
                self._undecided.append((prepared, written))
                return
            self._unfinished[prepared.transactional_id] = set(prepared.partitions)
            self._write_markers(prepared.transactional_id, now_ms)

        when_durable(self._flush_queue, [written], on_durable)

    def _write_markers(self, transactional_id: str, now_ms: int) -> None:
        """Write the markers that are missing; many of them in steps, between which others are served.

        One sync may make many decisions durable, and a round of `retry_markers` comes back to many.
        See test_the_markers_of_many_transactions_are_written_a_few_at_once.
        """
        if transactional_id in self._writing:
            return
        self._writing.add(transactional_id)
        work = self._write_in_steps(transactional_id, now_ms)
        if self._markers_at_once > 0:
            self._markers_at_once -= max(len(self._unfinished[transactional_id]), 1)
            if next(work, work) is work:
                return
        self._background.add(work, Kind.REQUEST)

    def end_round(self) -> None:
        """Let the next requests write markers at once: others have had their turn."""
        self._markers_at_once = MAX_MARKERS_AT_ONCE

    def _write_in_steps(self, transactional_id: str, now_ms: int) -> BackgroundTask:
        # The entry stays as it is: nothing but its markers ends the state Prepare*.
        entry, remaining = self._entries[transactional_id], self._unfinished[transactional_id]
        marked = self._marked.setdefault(transactional_id, [])
        ended = ended_transaction(entry)
        budget = StepBudget(self._limits.request_step_elements)
        try:
            for at in sorted(remaining):
                with suppress(BrokerError):  # `retry_markers` comes back to it
                    with suppress(*_GONE):
                        if ended is not None:
                            self._end_leftover(ended, at, now_ms)
                        marked.append(self._markers.write(at, self._marker(entry, at), now_ms))
                    remaining.discard(at)
                # On a full disk nothing is written, which takes time too.
                if remaining and budget.spend(MARKER_COST):
                    yield None
        finally:
            self._writing.discard(transactional_id)
        if not remaining:
            del self._unfinished[transactional_id], self._marked[transactional_id]
            when_durable(self._flush_queue, marked, partial(self._complete, entry, marked, now_ms))

    def _complete(
        self, prepared: TransactionEntry, marked: list[Written], now_ms: int, error: BrokerError | None
    ) -> None:
        if error is not None:
            # The fate of what is not durable is unknown. A second marker does no harm: no transaction of
            # this producer begins before this one is complete.
            unknown = {each.partition.topic_partition for each in marked if must_wait([each])}
            self._unfinished[prepared.transactional_id] = unknown
            return
        try:
            self._persist(complete(prepared, now_ms=now_ms), now_ms)
        except BrokerError:
            self._unfinished[prepared.transactional_id] = set()

    def _marker(self, entry: TransactionEntry, at: TopicPartition) -> Marker:
        """Return the marker for a partition. Raises UnknownTopicOrPartition, InvalidProducerEpoch."""
        topic = self.topic.topic
        assert topic is not None
        own_epoch = topic.partition(self.topic.partition_of(entry.transactional_id)).leader_epoch
        _, partition = self._topics.partition(at)
        known = partition.producer(entry.producer_id)
        if entry.client_version >= EPOCH_PER_TRANSACTION:
            # If the next transaction is open, the marker is there: a power loss took the record of that.
            refusal = refuse_same_epoch(known, entry.producer_id, entry.producer_epoch)
            if refusal is not None:
                raise refusal.error(refusal.reason)
        # A higher epoch than ours is an operator's, or from before `__transaction_state` was lost: one node
        # has no other coordinator. Fenced by it, the transaction would stay open in this partition.
        # See test_a_marker_of_a_higher_coordinator_epoch_does_not_fence_the_coordinator.
        epoch = own_epoch if known is None else max(own_epoch, known.coordinator_epoch or 0)
        is_commit = entry.state is TransactionState.PREPARE_COMMIT
        return Marker(entry.producer_id, entry.producer_epoch, epoch, is_commit)


def _check_id(transactional_id: str) -> None:
    if not transactional_id:
        raise InvalidRequest("a transactional id may not be empty")
