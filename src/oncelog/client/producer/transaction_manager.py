"""Runs a producer's transactions over asyncio: requests to coordinators, repeated until there is a response.

A request without a response is sent again unchanged. An abort never follows a commit whose response was lost.
The commit may have happened, and then the abort would end the next transaction (KAFKA-17754).

Source: behaviours T3 to T5 and T13 (docs/behaviours.md); Kafka's TransactionManager.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from oncelog.client.arguments import offsets_of
from oncelog.client.connection.coordinator import GROUP, TRANSACTION, find_coordinator
from oncelog.client.group.automatic_commits import commits_automatically
from oncelog.client.group.core import refused_partition
from oncelog.client.producer.driver import ProducerDriver
from oncelog.errors import (
    BrokerError,
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    MisuseError,
    OncelogError,
    OperationNotAttempted,
    ProducerFenced,
    TimedOut,
    TransactionAborted,
    error_for_code,
)
from oncelog.rules.idempotence.error_policy import ErrorClass
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.client_session import (
    ABORT_OWN_EPOCH,
    ADD_OFFSETS,
    ADD_PARTITIONS,
    COMMIT_OFFSETS,
    DESCRIBE,
    END,
    END_IF_BEGUN,
    INIT,
    CoordinatorEntry,
    ErrorAction,
    OffsetsCall,
    Operation,
    RequestKind,
    State,
    error_action,
    fenced_abort_action,
    has_successor,
    may_have_succeeded,
    operation_at_close,
)
from oncelog.rules.transactions.roles import Ending, Role, abort_ending, commit_ending, fencing_identity
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition, TransactionShare
from oncelog.wire.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

Offsets = Mapping[TopicPartition, OffsetAndMetadata | int]
"""Positions to commit: the next offset to read, by partition."""

_LOG = logging.getLogger("oncelog.producer")
_FEATURE, _EPOCH_PER_TRANSACTION = "transaction.version", 2
_LAST_ADD_VERSION = 3
"""The last version of AddPartitionsToTxn for clients; later versions are for brokers."""
_FIRST_EPOCH_VERSION = {COMMIT_OFFSETS.name: 5, END.name: 5}
"""Kind of request -> its first version for transactions whose end raises the epoch (KIP-890)."""
_MAX_COORDINATORS = 1_000
"""The maximum number of remembered coordinators of a producer that changes its transactional.id."""
_IDLE_CHECK_S = 0.1
"""Seconds between checks that all records are complete.

A completed batch ends this pause. A batch whose retry is due does not.
"""
_CONCURRENT_PAUSE_S = 0.02
"""Seconds to pause after CONCURRENT_TRANSACTIONS: the previous transaction usually completes within
milliseconds.
"""


def transaction_manager_of(driver: ProducerDriver) -> TransactionManager | None:
    """Return a manager for the driver's transactions; None without a transactional.id."""
    return TransactionManager(driver) if driver.options.transactional_id is not None else None


def require_manager(manager: TransactionManager | None) -> TransactionManager:
    """Return the manager for a transactional call.

    Raises MisuseError if transactional.id is not set, or in a signal handler that interrupted another call.
    """
    if manager is None:
        raise MisuseError("this producer has no transactional.id; set one to use transactions")
    manager.check_lock_not_held()
    return manager


class TransactionManager:
    """The transactions of one producer, on its driver's loop.

    Timeouts are in seconds; None means max.block.ms.
    """

    def __init__(self, driver: ProducerDriver) -> None:
        transaction, transactional_id = driver.core.transaction, driver.options.transactional_id
        assert transaction is not None and transactional_id is not None
        self._driver, self._cluster = driver, driver.cluster
        self._core = driver.core
        """The producer's core. The caller of a method that changes or reads batches must hold
        `driver.lock`.
        """
        self._transaction = transaction
        self.session = transaction.session
        self._transactional_id: str = transactional_id
        self._coordinators: dict[tuple[int, str], int] = {}
        self._is_adding = False
        """True while AddPartitionsToTxn is in flight."""
        self._may_be_committed = False
        """True if a commit was sent and has no response. Then only another commit may follow.

        Guard: test_a_commit_without_a_response_can_be_called_again.
        """
        self._turn = asyncio.Lock()
        """Held by the call that initializes the producer or ends its transaction.

        Guard: test_two_calls_at_once_end_one_transaction.
        """
        driver.on_drained = self._on_drained

    @property
    def is_open(self) -> bool:
        """Return True while a transaction is open and no call has begun to end it."""
        return self.session.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR)

    def check_lock_not_held(self) -> None:
        """Raise MisuseError in a signal handler that interrupted a call of the same producer."""
        self._driver.check_lock_not_held()

    # Operations of the application

    async def init(self, timeout_s: float | None = None) -> None:
        """Get a producer id and an epoch that fences every other instance of the transactional id."""
        deadline_ms = self._deadline_ms(timeout_s)
        async with self._own_turn(deadline_ms):
            self.session.check(Operation.INIT)
            await self._connect(deadline_ms)
            identity = await self._new_epoch(None, deadline_ms)
            with self._driver.lock:
                self._core.set_identity(*identity)
                self.session.enter(State.READY)

    async def _connect(self, deadline_ms: float) -> None:
        """Find the cluster. Raises TimedOut at the deadline, and the errors of ClusterConnection.start."""
        connecting = asyncio.timeout(max(deadline_ms - self._driver.now_ms(), 0) / 1000)
        try:
            async with connecting:
                await self._cluster.start()
        except TimeoutError as error:
            if not connecting.expired():
                raise
            raise TimedOut(
                "no broker of bootstrap.servers has responded in time; call the same method again"
            ) from error

    async def change_id(self, transactional_id: str, *, forgets_topics: bool) -> None:
        """Take another transactional id. Keep the connections and known coordinators, and no other state.

        With `forgets_topics`, also forget the partitions of topics and look them up again.
        """
        with self._driver.lock:
            self._core.change_transactional_id(transactional_id)
            if forgets_topics:
                self._cluster.forget_topics(self._core.forget_topics())
        self._transactional_id = transactional_id
        self._may_be_committed = False
        if len(self._coordinators) > _MAX_COORDINATORS:
            self._coordinators.clear()

    def begin(self) -> None:
        """Begin a transaction without a request to the coordinator."""
        with self._driver.lock:
            self._transaction.begin(raises_epoch=self._raises_epoch())

    def share(self) -> TransactionShare:
        """Return the TransactionShare that lets other producers join this transaction."""
        self._transaction.check(Operation.SHARE)
        self._transaction.role = Role.OWNER
        return self._transaction_share(is_empty=False)

    def _transaction_share(self, *, is_empty: bool) -> TransactionShare:
        identity = self._core.identity
        assert identity is not None
        return TransactionShare(self._transactional_id, *identity, self._transaction.raises_epoch, is_empty)

    async def join(self, share: TransactionShare) -> None:
        """Join a transaction that another producer has begun and will end."""
        await self._enter_as(Role.JOINED, share)

    async def take_over(self, share: TransactionShare) -> None:
        """Take over a transaction from another producer, to end it."""
        await self._enter_as(Role.TOOK_OVER, share)

    async def _enter_as(self, role: Role, share: TransactionShare) -> None:
        self.session.check(Operation.INIT)
        await self._cluster.start()
        with self._driver.lock:
            self._core.set_identity(share.producer_id, share.producer_epoch)
            self._transaction.join(role, share)

    async def hand_over(self, timeout_s: float | None = None) -> TransactionShare:
        """Send the remaining records, and hand the open transaction over to another producer.

        While records are sent, the session stays IN_TRANSACTION, so that close() aborts if this call fails.
        If the session were COMMITTING, close() would commit, although only the other producer may decide
        that.
        """
        self._transaction.check(Operation.HAND_OVER)
        with self._driver.lock:
            self._core.flush()
        await self._wait_until_idle(self._deadline_ms(timeout_s))
        self._transaction.check(Operation.HAND_OVER)
        share = self._transaction_share(is_empty=not self._transaction.has_parts)
        with self._driver.lock:
            self._core.on_transaction_ended(None)
            self._transaction.role = Role.HANDED_OVER
        return share

    async def send_offsets(
        self,
        offsets: Offsets,
        group: ConsumerGroupMetadata | str,
        timeout_s: float | None = None,
    ) -> None:
        """Commit the group's positions with the transaction.

        Raises TimedOut, or an error that requires an abort. After TimedOut or a cancellation, repeat the same
        call or abort.
        """
        self._transaction.check(Operation.SEND_OFFSETS)
        member = self._member_of(group)
        positions = offsets_of(offsets)
        if not positions:
            return
        deadline_ms = self._deadline_ms(timeout_s)
        call = OffsetsCall.of(member, positions)
        self.session.begin_offsets(call)
        number = self.session.number
        if not self._transaction.raises_epoch:
            adding = self._add_offsets_request(member.group_id)
            self._transaction.may_have_begun = True
            await self._send_until_done(ADD_OFFSETS, adding, None, deadline_ms, number)
            self._check_still_open(number)
        self._transaction.has_offsets = True
        request = self._offsets_request(positions, member)
        await self._send_until_done(COMMIT_OFFSETS, request, member.group_id, deadline_ms, number)
        self._check_still_open(number)
        self.session.confirm_offsets(call)

    async def commit(self, timeout_s: float | None = None) -> None:
        """Commit the transaction: its records and offsets become visible together.

        Raises the error of the first failed record. After TimedOut, call it again. A transaction that can
        only be aborted raises TransactionAbortable and never TimedOut. See
        test_a_transaction_whose_requests_timed_out_must_be_aborted.
        """
        self._transaction.check(Operation.COMMIT)
        number = self.session.number
        deadline_ms = self._deadline_ms(timeout_s)
        async with self._own_turn(deadline_ms):
            if self._has_ended(number):
                return
            await self._flush_records(deadline_ms)
            identity: ProducerIdAndEpoch | None
            match await self._commit_ending(deadline_ms):
                case Ending.NOTHING:
                    identity = None
                case Ending.NEW_EPOCH:
                    # Fence producers that have joined and not sent yet. Their records would be in the next
                    # transaction. Guard: test_a_joined_producer_that_sends_after_the_commit_is_fenced.
                    self._transaction.fencing = self._core.identity
                    identity = await self._new_epoch(self._core.identity, deadline_ms)
                case _:
                    identity = await self._end(True, deadline_ms)
            self._may_be_committed = False
            with self._driver.lock:
                self._core.on_transaction_ended(identity)

    @asynccontextmanager
    async def _own_turn(self, deadline_ms: float) -> AsyncIterator[None]:
        """Wait until no other call initializes the producer or ends its transaction.

        Raises TimedOut at the deadline.
        """
        try:
            async with asyncio.timeout(max(deadline_ms - self._driver.now_ms(), 0) / 1000):
                await self._turn.acquire()
        except TimeoutError:
            raise TimedOut(
                "another call of this producer has not ended; call the same method again"
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    def _has_ended(self, number: int) -> bool:
        """Return True if another call has ended the transaction with this number."""
        return self.session.number != number or self.session.state is State.READY

    async def _flush_records(self, deadline_ms: float) -> None:
        """Send all records, and wait for their results. Raises the error of the first failed record."""
        self.session.check(Operation.COMMIT)
        with self._driver.lock:
            self.session.enter(State.COMMITTING)
            self._core.flush()
        await self._wait_until_idle(deadline_ms)
        self.session.check(Operation.COMMIT)

    async def abort(self, timeout_s: float | None = None) -> None:
        """Abort the transaction. After TimedOut, call it again."""
        self._transaction.check(Operation.ABORT)
        number = self.session.number
        deadline_ms = self._deadline_ms(timeout_s)
        async with self._own_turn(deadline_ms):
            if not self._has_ended(number):
                await self._abort(deadline_ms)

    async def _abort(self, deadline_ms: float) -> None:
        self.session.check(Operation.ABORT)  # the call that this one waited for may have failed the producer
        with self._driver.lock:
            self.session.enter(State.ABORTING)
            self._core.drop_unsent()
        self._driver.notify()
        await self._wait_until_idle(deadline_ms)
        self.session.check(Operation.ABORT)
        if self.session.unconfirmed and not self._transaction.raises_epoch:
            # Offsets that were sent without a response may arrive late. A new epoch keeps them out of the
            # next transaction.
            self._transaction.is_epoch_spent = True
        ending = self._abort_ending()
        identity = await self._end_aborted(ending, deadline_ms)
        # The transaction has ended. If the next request times out, a repeated abort must not end it again.
        self._transaction.forget_parts()
        if identity is None and self._transaction.is_epoch_spent:
            self._transaction.role = Role.ALONE
            if ending is Ending.NOTHING:
                await self._check_no_successor(deadline_ms)
            identity = await self._new_epoch(self._core.identity, deadline_ms)
        with self._driver.lock:
            self._core.on_transaction_ended(identity)

    async def is_replaced(self, *, may_have_timed_out: bool) -> bool:
        """Return True if another producer has certainly started with this producer's transactional id.

        `may_have_timed_out` is True if the transaction has been open for longer than transaction.timeout.ms.
        Then this call may take up to SUCCESSOR_PATIENCE_MS. Raises TimedOut after max.block.ms.
        """
        identity, deadline_ms = self._core.identity, self._deadline_ms(None)
        if identity is None:
            return False
        completed_at_ms: float | None = None
        for attempt in itertools.count():
            entry = await self._describe_own_entry(deadline_ms)
            now_ms = self._driver.now_ms()
            if completed_at_ms is None and entry is not None and entry.is_aborted:
                completed_at_ms = now_ms
            completed_for_ms = 0.0 if completed_at_ms is None else now_ms - completed_at_ms
            is_replaced = has_successor(
                entry, identity, may_have_timed_out=may_have_timed_out, completed_for_ms=completed_for_ms
            )
            if is_replaced is not None:
                return is_replaced
            pause_s = self._cluster.retry_pause_ms(attempt) / 1000
            await self._pause(DESCRIBE, pause_s, deadline_ms, TimedOut("the abort is not complete"))
        raise AssertionError("unreachable")

    async def end_open(self, timeout_s: float | None = None) -> None:
        """End the open transaction before the producer closes.

        Otherwise read_committed readers would wait until transaction.timeout.ms has passed. Abort the
        transaction, or repeat a commit that was called before. Leave a joined transaction to the producer
        that began it. Log failures and timeouts instead of raising them, because the coordinator will abort
        the transaction.
        """
        deadline_ms = self._deadline_ms(timeout_s)
        try:
            while (
                self._transaction.role is not Role.JOINED
                and (ending := operation_at_close(self.session.state)) is not None
            ):
                end = self.commit if ending is Operation.COMMIT else self.abort
                try:
                    await end(max(deadline_ms - self._driver.now_ms(), 0) / 1000)
                except OncelogError:
                    if operation_at_close(self.session.state) in (ending, None):
                        raise
        except OncelogError as error:
            _LOG.warning(
                "close() could not abort the open transaction of %r; the coordinator aborts "
                "it after transaction.timeout.ms=%d: %s",
                self._transactional_id,
                self._driver.options.transaction_timeout_ms,
                error,
            )

    def _abort_ending(self) -> Ending:
        transaction = self._transaction
        return abort_ending(
            transaction.role,
            has_parts=transaction.has_parts,
            may_have_parts=transaction.may_have_begun,
            raises_epoch=transaction.raises_epoch,
        )

    async def _end_aborted(self, ending: Ending, deadline_ms: float) -> ProducerIdAndEpoch | None:
        """Abort the transaction if the coordinator may know of it.

        Return the next identity, or None if it stays the same. InitProducerId replaces EndTxn only for an
        owner: the coordinator fences a producer that sends it under the epoch of its own open transaction.
        """
        if ending is Ending.NOTHING:
            return None
        if ending is Ending.NEW_EPOCH:
            return await self._fence_joined(deadline_ms)
        if self._transaction.raises_epoch:
            kind, end = ABORT_OWN_EPOCH, self._abort_own_epoch(deadline_ms)
        else:
            kind = END if ending is Ending.END else END_IF_BEGUN
            end = self._end(False, deadline_ms, kind)
        try:
            return await end
        except BrokerError as error:
            if error_action(kind, error) is not ErrorAction.ABORT:
                raise
            # The coordinator no longer knows this producer or transaction. The next transaction needs a new
            # epoch.
            await self._check_producer_id(error, deadline_ms)
            self._transaction.is_epoch_spent = True
            return None

    async def _commit_ending(self, deadline_ms: float) -> Ending:
        """Return the request that commits the transaction.

        Only the coordinator knows if producers that joined have sent records.
        """
        # A repeated commit sends the same request as the first one.
        has_parts = self._transaction.has_parts or self._may_be_committed
        ending = commit_ending(self._transaction.role, has_parts=has_parts, is_ongoing=None)
        if ending is not Ending.ASK:
            return ending
        entry = await self._own_entry(deadline_ms)
        is_ongoing = entry is None or entry.is_ongoing
        return commit_ending(self._transaction.role, has_parts=has_parts, is_ongoing=is_ongoing)

    async def _fence_joined(self, deadline_ms: float) -> ProducerIdAndEpoch:
        """Abort a transaction that other producers have joined, and return the next identity.

        They may still be sending. EndTxn would not raise the epoch, and brokers before Kafka 3.6 would store
        a late batch after the marker. InitProducerId raises the epoch first. Guard:
        test_a_late_record_of_a_joined_producer_is_in_no_later_transaction.
        """
        request = partial(self._fencing_request, deadline_ms)
        response = await self._send_until_done(INIT, await request(), None, deadline_ms, before_retry=request)
        return ProducerIdAndEpoch(response.producer_id, response.producer_epoch)

    async def _fencing_request(self, deadline_ms: float) -> InitProducerIdRequest:
        """Return the next request of `_fence_joined`. Raises ProducerFenced if another one has started."""
        entry, identity = await self._describe_own_entry(deadline_ms), self._core.identity
        assert identity is not None
        if entry is None:
            # Brokers before Kafka 3.0 do not describe transactions.
            return self._init_request(None)
        sent = self._transaction.fencing = fencing_identity(entry, identity, self._transaction.fencing)
        if sent is None:
            raise self._fenced("the shared transaction has ended, or another producer has started")
        return self._init_request(sent)

    async def _own_entry(self, deadline_ms: float) -> CoordinatorEntry | None:
        """Return the coordinator's entry of the transactional id; None if it cannot be described.

        Raises ProducerFenced if the entry is that of another producer or epoch. An earlier call, which got no
        response, may have raised the epoch itself: then this is raised only for an open transaction.
        """
        entry, identity = await self._describe_own_entry(deadline_ms), self._core.identity
        assert identity is not None
        if entry is None or entry.identity == identity:
            return entry
        if entry.is_ongoing or self._transaction.fencing is None:
            raise self._fenced("the shared transaction has ended, or another producer has started")
        return entry

    async def _check_producer_id(self, error: BrokerError, deadline_ms: float) -> None:
        """Fail the producer if its transactional id has another producer id, so that a successor has started.

        The successor of the last epoch gets another producer id. An InitProducerId under that epoch counts as
        a repetition of the successor's, and would abort its open transaction. If each transaction has its own
        epoch, the abort of this producer may itself have led to another producer id. Guard:
        test_an_abort_at_the_last_epoch_does_not_abort_the_successors_transaction.
        """
        if not isinstance(error, InvalidProducerIdMapping) or self._transaction.raises_epoch:
            return
        entry, identity = await self._describe_own_entry(deadline_ms), self._core.identity
        assert identity is not None
        if entry is not None and entry.identity.producer_id != identity.producer_id:
            raise self._fenced("the transactional id has another producer id") from error

    async def _check_no_successor(self, deadline_ms: float) -> None:
        """Fail the producer if another one has an open transaction under its transactional id.

        Call it before an InitProducerId that does not immediately follow a successful EndTxn. Guard:
        test_an_abort_of_nothing_does_not_abort_the_successors_transaction.
        """
        entry, identity = await self._describe_own_entry(deadline_ms), self._core.identity
        assert identity is not None
        if entry is not None and entry.is_open_elsewhere(identity):
            raise self._fenced("another producer has an open transaction under the transactional id")

    def _fenced(self, text: str) -> ProducerFenced:
        fenced = ProducerFenced(text)
        self._give_up(fenced, ErrorAction.FAIL_PRODUCER)
        return fenced

    async def _abort_own_epoch(self, deadline_ms: float) -> ProducerIdAndEpoch | None:
        """Abort a transaction whose epoch no other transaction uses.

        The coordinator also answers PRODUCER_FENCED while it completes the previous transaction. In that case
        repeat the abort: see `fenced_abort_action`.
        """
        entry = None
        for attempt in itertools.count():
            try:
                return await self._end(False, deadline_ms, ABORT_OWN_EPOCH)
            except ProducerFenced as error:
                previous, entry = entry, await self._describe_own_entry(deadline_ms)
                identity = self._core.identity
                assert identity is not None
                if fenced_abort_action(entry, identity, previous) is ErrorAction.FAIL_PRODUCER:
                    self._give_up(error, ErrorAction.FAIL_PRODUCER)
                    raise
                await self._pause(
                    ABORT_OWN_EPOCH, self._cluster.retry_pause_ms(attempt) / 1000, deadline_ms, error
                )
        raise AssertionError("unreachable")

    async def _describe_own_entry(self, deadline_ms: float) -> CoordinatorEntry | None:
        """Return the coordinator's entry of the transactional id; None if it cannot be described."""
        request = DescribeTransactionsRequest(transactional_ids=[self._transactional_id])
        try:
            response = await self._send_until_done(DESCRIBE, request, None, deadline_ms)
        except BrokerError as error:
            if error_action(DESCRIBE, error) is not ErrorAction.RAISE:
                raise
            return None
        (row,) = response.transaction_states
        return CoordinatorEntry(
            ProducerIdAndEpoch(row.producer_id, row.producer_epoch), row.transaction_state
        )

    async def _wait_until_idle(self, deadline_ms: float) -> None:
        """Wait until every record is complete and no partition is being added, or until the session fails.

        An abort drops records that would need a retry. A partition that is added after the end would open
        another transaction.
        """
        while not self._core.is_idle or self._is_adding:
            self._driver.wake()
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_CHECK_S):
                    await self._driver.next_completion()
            if self.session.state is State.ABORTING:
                with self._driver.lock:
                    self._core.drop_unsent()
                self._driver.notify()
            elif self.session.state not in (State.COMMITTING, State.IN_TRANSACTION):
                return
            if self._driver.now_ms() > deadline_ms:
                raise TimedOut("records of the transaction are still being sent; call the same method again")

    # Requests

    def _init_request(self, current: ProducerIdAndEpoch | None) -> InitProducerIdRequest:
        return InitProducerIdRequest(
            transactional_id=self._transactional_id,
            transaction_timeout_ms=self._driver.options.transaction_timeout_ms,
            producer_id=current.producer_id if current else -1,
            producer_epoch=current.producer_epoch if current else -1,
        )

    async def _new_epoch(self, current: ProducerIdAndEpoch | None, deadline_ms: float) -> ProducerIdAndEpoch:
        # A successor may have begun a transaction since the first attempt. Guard:
        # test_a_repeated_request_for_an_epoch_does_not_abort_the_successors_transaction. A producer that
        # starts has no successor.
        is_start = self._core.identity is None
        check = None if is_start else partial(self._check_no_successor, deadline_ms)
        request = self._init_request(current)
        response = await self._send_until_done(INIT, request, None, deadline_ms, before_retry=check)
        return ProducerIdAndEpoch(response.producer_id, response.producer_epoch)

    async def _end(
        self, is_commit: bool, deadline_ms: float, kind: RequestKind = END
    ) -> ProducerIdAndEpoch | None:
        """Send EndTxn. Return the identity for the next transaction, or None if it stays the same."""
        identity = self._core.identity
        assert identity is not None
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            committed=is_commit,
        )
        response = await self._send_until_done(kind, request, None, deadline_ms)
        if not self._transaction.raises_epoch:
            return None
        return ProducerIdAndEpoch(response.producer_id, response.producer_epoch)

    def _member_of(self, group: ConsumerGroupMetadata | str) -> ConsumerGroupMetadata:
        """Return the member for which offsets are sent.

        Raises MisuseError for an object of any other type, and if a consumer of this process commits
        automatically for the group.
        """
        member = ConsumerGroupMetadata(group) if isinstance(group, str) else group
        if not isinstance(member, ConsumerGroupMetadata):
            raise MisuseError(
                "pass consumer.group_metadata() or a group id to "
                f"send_offsets_to_transaction(), not {group!r}"
            )
        cluster_id = self._cluster.metadata.cluster_id
        if commits_automatically(self._driver.runtime, member.group_id, cluster_id):
            raise MisuseError(
                f"a consumer of this process commits automatically for group {member.group_id!r}, so the "
                "positions of aborted records would be committed, and those records would be lost: set "
                "enable.auto.commit=false"
            )
        return member

    def _add_offsets_request(self, group_id: str) -> AddOffsetsToTxnRequest:
        identity = self._core.identity
        assert identity is not None
        return AddOffsetsToTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            group_id=group_id,
        )

    def _offsets_request(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], member: ConsumerGroupMetadata
    ) -> TxnOffsetCommitRequest:
        identity = self._core.identity
        assert identity is not None
        topics: dict[str, list[TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition]] = {}
        for tp, position in offsets.items():
            topics.setdefault(tp.topic, []).append(
                TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
                    partition_index=tp.partition,
                    committed_offset=position.offset,
                    committed_leader_epoch=-1 if position.leader_epoch is None else position.leader_epoch,
                    committed_metadata=position.metadata,
                )
            )
        return TxnOffsetCommitRequest(
            transactional_id=self._transactional_id,
            group_id=member.group_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            generation_id=member.generation_id,
            member_id=member.member_id,
            group_instance_id=member.group_instance_id,
            topics=[
                TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=topic, partitions=partitions)
                for topic, partitions in topics.items()
            ],
        )

    def _on_drained(self) -> None:
        if self._transaction.pending and not self._is_adding:
            self._is_adding = True
            self._driver.spawn(self._add_pending())

    async def _add_pending(self) -> None:
        """Add the partitions that have records to send.

        Partitions that get their first record later are added by the next request. After an error, the
        transaction can only be aborted.
        """
        identity, pending = self._core.identity, set(self._transaction.pending)
        assert identity is not None
        topics: dict[str, list[int]] = {}
        for tp in sorted(pending):
            topics.setdefault(tp.topic, []).append(tp.partition)
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._transactional_id,
            v3_and_below_producer_id=identity.producer_id,
            v3_and_below_producer_epoch=identity.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=partitions)
                for topic, partitions in topics.items()
            ],
        )
        self._transaction.may_have_begun = True
        try:
            number = self.session.number
            await self._send_until_done(ADD_PARTITIONS, request, None, self._deadline_ms(None), number)
            with self._driver.lock:
                self._core.on_partitions_added(pending)
        except Exception as error:
            # An unexpected exception also requires an abort. Otherwise the next drain would start this task
            # again immediately.
            reason = error if isinstance(error, OncelogError) else OncelogError(repr(error))
            with self._driver.lock:
                self._transaction.pending -= pending
                self._core.require_abort(reason)
            self._driver.notify()
        finally:
            self._is_adding = False
            self._driver.wake()

    async def _send_until_done(
        self,
        kind: RequestKind,
        request: Any,
        group_id: str | None,
        deadline_ms: float,
        number: int | None = None,
        before_retry: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Send a request until its response has no error, and return the response.

        The request goes to the group's coordinator or, if `group_id` is None, to the transaction coordinator.
        `number` identifies the transaction that the request belongs to. If this transaction has ended, any
        error becomes TransactionAborted, because the error does not concern the next transaction. If the
        producer has failed, its own error is raised. `before_retry` is awaited before each repetition, may
        raise an error that ends the call, and may return another request to send.
        """
        key = (TRANSACTION, self._transactional_id) if group_id is None else (GROUP, group_id)
        attempt, is_commit = 0, kind is END and request.committed
        started_ms = self._driver.now_ms()
        while True:
            may_be_committed = self._may_be_committed
            try:
                node_id = await self._coordinator(key, deadline_ms)
                # Set this first, because this call may be cancelled while the request is in flight.
                self._may_be_committed = may_be_committed or is_commit
                response = await self._request(kind, node_id, request, deadline_ms)
                response_error = first_error(response)
                if response_error is None:
                    return response
                error: OncelogError = response_error
            except OncelogError as raised:
                error = raised
            self._may_be_committed = may_be_committed or (is_commit and may_have_succeeded(error))
            self._check_still_open(number, error)
            action = error_action(kind, error, self._driver.now_ms() - started_ms)
            if action is ErrorAction.ABORT and is_commit and may_be_committed:
                action = ErrorAction.FAIL_PRODUCER
            if action in (ErrorAction.ABORT, ErrorAction.FAIL_PRODUCER):
                self._give_up(error, action)
            if action in (ErrorAction.ABORT, ErrorAction.FAIL_PRODUCER, ErrorAction.RAISE):
                raise error
            if action is ErrorAction.FIND_COORDINATOR:
                self._coordinators.pop(key, None)
            await self._pause(kind, self._pause_s(error, attempt), deadline_ms, error)
            self._check_still_open(number, error)
            if before_retry is not None:
                request = await before_retry() or request
            attempt += 1

    def _check_still_open(self, number: int | None, error: OncelogError | None = None) -> None:
        """Raise the error of a failed producer, or TransactionAborted if the transaction has ended."""
        if number is not None and not self.session.is_open(number):
            if self.session.state is State.FATAL:
                # Another request has failed the producer. Its error may say that the producer is fenced.
                # Guard: test_a_producer_that_another_request_fails_raises_the_error_of_that_request.
                self.session.check(Operation.SEND_OFFSETS)
            raise TransactionAborted(
                "the transaction ended while some of its records were being sent"
            ) from error

    async def _request(self, kind: RequestKind, node_id: int, request: Any, deadline_ms: float) -> Any:
        min_version, max_version = self._versions(kind)
        return await self._cluster.request(
            node_id,
            request,
            timeout_ms=self._request_timeout_ms(deadline_ms),
            min_version=min_version,
            max_version=max_version,
        )

    def _give_up(self, error: OncelogError, action: ErrorAction) -> None:
        is_fatal = action is ErrorAction.FAIL_PRODUCER
        if isinstance(error, BrokerError):
            error.reaction = (ErrorClass.FATAL if is_fatal else ErrorClass.ABORTABLE).value
        with self._driver.lock:
            (self._core.fail_all if is_fatal else self._core.require_abort)(error)
        self._driver.notify()

    async def _pause(
        self, kind: RequestKind, pause_s: float, deadline_ms: float, error: OncelogError
    ) -> None:
        """Wait before a request is sent again. Raises TimedOut if the wait would end after the deadline."""
        if self._driver.now_ms() + pause_s * 1000 > deadline_ms:
            raise TimedOut(f"{kind.name} got no response in time; the last error: {error}") from error
        await asyncio.sleep(pause_s)

    def _pause_s(self, error: OncelogError, attempt: int) -> float:
        if isinstance(error, ConcurrentTransactions) and attempt < 10:
            return _CONCURRENT_PAUSE_S
        return self._cluster.retry_pause_ms(attempt) / 1000

    def _versions(self, kind: RequestKind) -> tuple[int | None, int | None]:
        """Return the lowest and highest version that this transaction may use; None for no limit."""
        if kind is ADD_PARTITIONS:
            return None, _LAST_ADD_VERSION
        first_epoch_version = _FIRST_EPOCH_VERSION.get(kind.name)
        if first_epoch_version is None:
            return None, None
        if self._transaction.raises_epoch:
            return first_epoch_version, None
        return None, first_epoch_version - 1

    async def _coordinator(self, key: tuple[int, str], deadline_ms: float) -> int:
        if key not in self._coordinators:
            self._coordinators[key] = await find_coordinator(self._cluster, *key, deadline_ms=deadline_ms)
        return self._coordinators[key]

    def _raises_epoch(self) -> bool:
        node_id = self._coordinators.get((TRANSACTION, self._transactional_id))
        if node_id is None:
            return self._transaction.raises_epoch
        level = self._cluster.feature(node_id, _FEATURE)
        return level >= _EPOCH_PER_TRANSACTION if level else self._transaction.raises_epoch

    def _request_timeout_ms(self, deadline_ms: float) -> float:
        """Return the time to wait for one response in ms.

        A silent broker must not delay a call past its deadline.
        """
        remaining_ms = max(deadline_ms - self._driver.now_ms(), 1)
        return min(remaining_ms, self._driver.options.request_timeout_ms)

    def _deadline_ms(self, timeout_s: float | None) -> float:
        block_ms = self._driver.options.max_block_ms
        return self._driver.now_ms() + (block_ms if timeout_s is None else timeout_s * 1000)


def first_error(response: Any) -> BrokerError | None:
    """Return the first error of a response; OPERATION_NOT_ATTEMPTED only if there is no other."""
    errors = [error_for_code(code, detail) for code, detail in _error_codes(response) if code]
    causes = [error for error in errors if not isinstance(error, OperationNotAttempted)]
    return next(iter(causes or errors), None)


def _error_codes(response: Any) -> Iterator[tuple[int, str]]:
    if hasattr(response, "error_code"):
        yield response.error_code, ""
    for row in getattr(response, "transaction_states", ()):
        yield row.error_code, ""
    for topic in _topics(response):
        partitions: Iterable[Any] = getattr(topic, "partitions", ()) or getattr(
            topic, "results_by_partition", ()
        )
        for partition in partitions:
            code = getattr(partition, "error_code", 0) or getattr(partition, "partition_error_code", 0)
            yield code, refused_partition(code, TopicPartition(topic.name, partition.partition_index))


def _topics(response: Any) -> Iterable[Any]:
    topics: Iterable[Any] = getattr(response, "topics", ()) or getattr(
        response, "results_by_topic_v3_and_below", ()
    )
    return topics
