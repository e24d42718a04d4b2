"""Transactions over asyncio: asks the coordinators what the session needs, again until it is answered.

A request without an answer is sent again as it was. A commit whose answer was lost is never followed by an
abort: the outcome may be decided, and an abort could end the transaction after it (row T13).
Source: rows T3-T5; Kafka's TransactionManager.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from oncelog.client.arguments import offsets_of
from oncelog.client.connection.coordinator import GROUP, TRANSACTION, find_coordinator
from oncelog.client.group.core import refused_partition
from oncelog.client.producer.driver import ProducerDriver
from oncelog.errors import (
    BrokerError,
    ConcurrentTransactions,
    MisuseError,
    OncelogError,
    OperationNotAttempted,
    ProducerFenced,
    TimedOut,
    TransactionAborted,
    error_for_code,
)
from oncelog.rules.idempotence.error_policy import Mark
from oncelog.rules.idempotence.sequencer import Identity
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
    may_have_succeeded,
    operation_at_close,
)
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
"""Later versions are for brokers."""
_FIRST_EPOCH_VERSION = {COMMIT_OFFSETS.name: 5, END.name: 5}
"""Where the epoch is raised by every end."""
_LOOK_AGAIN_S = 0.1
"""What is settled is told; what comes back without an outcome is not, and an abort drops it."""
_CONCURRENT_PAUSE_S = 0.02
"""The transaction before is completed in moments, mostly."""


def transaction_manager_of(driver: ProducerDriver) -> TransactionManager | None:
    """Return a manager for the driver's transactions; None without a transactional.id."""
    return TransactionManager(driver) if driver.options.transactional_id is not None else None


def require_manager(manager: TransactionManager | None) -> TransactionManager:
    """Return the manager for a transactional call.

    Raises MisuseError without a transactional.id, and in a signal handler that interrupted another call.
    """
    if manager is None:
        raise MisuseError("this producer has no transactional.id; set one to use transactions")
    manager.check_lock_not_held()
    return manager


class TransactionManager:
    """The session of one transactional producer, on its driver's loop."""

    def __init__(self, driver: ProducerDriver) -> None:
        transaction, transactional_id = driver.core.transaction, driver.options.transactional_id
        assert transaction is not None and transactional_id is not None
        self._driver, self._cluster = driver, driver.cluster
        self._core = driver.core
        """Methods that touch records are called with `driver.lock` held."""
        self._transaction = transaction
        self.session = transaction.session
        self._transactional_id: str = transactional_id
        self._coordinators: dict[tuple[int, str], int] = {}
        self._is_adding = False
        self._may_be_committed = False
        self._is_joined = False
        driver.on_turn = self._on_turn

    @property
    def is_open(self) -> bool:
        """Return True while a transaction is open and no call has begun to end it."""
        return self.session.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR)

    def check_lock_not_held(self) -> None:
        """Raise MisuseError in a signal handler that interrupted a call of the same producer."""
        self._driver.check_lock_not_held()

    # The calls

    async def init(self, timeout_s: float | None = None) -> None:
        """Get the producer id and an epoch that fences every other instance of the transactional id."""
        self.session.check(Operation.INIT)
        await self._cluster.start()
        self._core.give_identity(*await self._new_epoch(None, self._deadline_ms(timeout_s)))
        self.session.enter(State.READY)

    def begin(self) -> None:
        """A transaction begins; nothing is sent."""
        with self._driver.lock:
            self._transaction.begin(raises_epoch=self._raises_epoch())

    def share(self) -> TransactionShare:
        """What other producers need to write into this transaction."""
        self.session.check(Operation.SEND)
        identity = self._core.identity
        assert identity is not None
        return TransactionShare(self._transactional_id, *identity, self._transaction.raises_epoch)

    async def join(self, share: TransactionShare) -> None:
        """Write into a transaction that another producer has begun and will end."""
        self.session.check(Operation.INIT)
        await self._cluster.start()
        with self._driver.lock:
            self._core.give_identity(share.producer_id, share.producer_epoch)
            self._is_joined = True
            self.session.enter(State.READY)
            self._transaction.begin(raises_epoch=share.raises_epoch)

    async def hand_over(self, timeout_s: float | None = None) -> TransactionShare:
        """Send the rest, and leave the open transaction to another producer, which ends it.

        The session stays IN_TRANSACTION until then: should this fail, close() aborts. In COMMITTING, which a
        commit enters, close() would commit what the other producer has not decided.
        """
        self.session.check(Operation.SEND)
        self.session.check(Operation.COMMIT)
        with self._driver.lock:
            self._core.flush()
        await self._settled(self._deadline_ms(timeout_s))
        self.session.check(Operation.COMMIT)
        identity = self._core.identity
        assert identity is not None
        share = TransactionShare(self._transactional_id, *identity, self._transaction.raises_epoch)
        with self._driver.lock:
            self._core.on_transaction_ended(None)
        return share

    async def take_over(self, share: TransactionShare) -> None:
        """Take a transaction that was handed over, in order to end it."""
        await self.join(share)
        self._is_joined = False  # it has no other owner any more
        self._transaction.has_offsets = True  # so that `commit` and `abort` send EndTxn

    async def send_offsets(
        self,
        offsets: Offsets,
        group: ConsumerGroupMetadata | str,
        timeout_s: float | None = None,
    ) -> None:
        """Commit the group's positions with the transaction.

        Raises what makes it to be aborted. After TimedOut, or a cancellation, repeat the same call or abort.
        """
        self.session.check(Operation.SEND_OFFSETS)
        given = offsets_of(offsets)
        if not given:
            return
        who = ConsumerGroupMetadata(group) if isinstance(group, str) else group
        deadline_ms = self._deadline_ms(timeout_s)
        call = OffsetsCall.of(who, given)
        self.session.begin_offsets(call)
        number = self.session.number
        if not self._transaction.raises_epoch:
            adding = self._add_offsets_request(who.group_id)
            self._transaction.may_have_begun = True
            await self._ask(ADD_OFFSETS, adding, None, deadline_ms, number)
            self._check_going_on(number)
        self._transaction.has_offsets = True
        request = self._offsets_request(given, who)
        await self._ask(COMMIT_OFFSETS, request, who.group_id, deadline_ms, number)
        self._check_going_on(number)
        self.session.confirm_offsets(call)

    async def commit(self, timeout_s: float | None = None) -> None:
        """Everything sent becomes visible at once. Raises its first failure; TimedOut: call it again."""
        deadline_ms = self._deadline_ms(timeout_s)
        await self._flushed(deadline_ms)
        identity = await self._end(True, deadline_ms) if self._transaction.has_begun else None
        self._may_be_committed = False
        with self._driver.lock:
            self._core.on_transaction_ended(identity)

    async def _flushed(self, deadline_ms: float) -> None:
        """Send everything. Raises the first failure of a record."""
        self.session.check(Operation.COMMIT)
        with self._driver.lock:
            self.session.enter(State.COMMITTING)
            self._core.flush()
        await self._settled(deadline_ms)
        self.session.check(Operation.COMMIT)

    async def abort(self, timeout_s: float | None = None) -> None:
        """Nothing of the transaction will be seen. Raises TimedOut: call it again."""
        self.session.check(Operation.ABORT)
        deadline_ms = self._deadline_ms(timeout_s)
        with self._driver.lock:
            self.session.enter(State.ABORTING)
            self._core.drop_unsent()
        self._driver.notify()
        await self._settled(deadline_ms)
        self.session.check(Operation.ABORT)
        if self.session.unconfirmed and not self._transaction.raises_epoch:
            # Another epoch keeps offsets that arrive late out of the next transaction.
            self._transaction.is_epoch_spent = True
        identity = await self._aborted(deadline_ms)
        # If the next request times out, a repeated abort must not end the transaction twice.
        self._transaction.forget_parts()
        if identity is None and self._transaction.is_epoch_spent:
            identity = await self._new_epoch(self._core.identity, deadline_ms)
        with self._driver.lock:
            self._core.on_transaction_ended(identity)

    async def end_open(self, timeout_s: float | None = None) -> None:
        """End what is open before the producer closes; without it readers wait for transaction.timeout.ms.

        Aborts, or repeats a commit that was asked for. A transaction that was joined is left to its owner.
        What cannot be ended in time is logged, not raised: the coordinator aborts it.
        """
        deadline_ms = self._deadline_ms(timeout_s)
        try:
            while not self._is_joined and (ending := operation_at_close(self.session.state)) is not None:
                end = self.commit if ending is Operation.COMMIT else self.abort
                try:
                    await end(max(deadline_ms - self._driver.now_ms(), 0) / 1000)
                except OncelogError:
                    if operation_at_close(self.session.state) in (ending, None):
                        raise
        except OncelogError as error:
            _LOG.warning(
                "close() could not end the open transaction of %r; the coordinator aborts it after "
                "transaction.timeout.ms=%d: %s",
                self._transactional_id,
                self._driver.options.transaction_timeout_ms,
                error,
            )

    async def _aborted(self, deadline_ms: float) -> Identity | None:
        """End the transaction where the coordinator may know of it; another epoch alone would not.

        InitProducerId fences a producer whose own transaction is open.
        """
        if not self._transaction.has_begun and not self._transaction.may_have_begun:
            return None
        if self._transaction.raises_epoch:
            asked, end = ABORT_OWN_EPOCH, self._abort_own_epoch(deadline_ms)
        else:
            asked = END if self._transaction.has_begun else END_IF_BEGUN
            end = self._end(False, deadline_ms, asked)
        try:
            return await end
        except BrokerError as error:
            if error_action(asked, error) is not ErrorAction.ABORT:
                raise
            # The coordinator does not know us any more, or never heard of it: begin anew.
            self._transaction.is_epoch_spent = True
            return None

    async def _abort_own_epoch(self, deadline_ms: float) -> Identity | None:
        """Abort a transaction with an epoch of its own, once the one before it is complete."""
        entry = None
        for attempt in itertools.count():
            try:
                return await self._end(False, deadline_ms, ABORT_OWN_EPOCH)
            except ProducerFenced as error:
                previous, entry = entry, await self._entry_at_coordinator(deadline_ms)
                identity = self._core.identity
                assert identity is not None
                if fenced_abort_action(entry, identity, previous) is ErrorAction.FAIL_PRODUCER:
                    self._give_up(error, ErrorAction.FAIL_PRODUCER)
                    raise
                await self._pause(
                    ABORT_OWN_EPOCH, self._cluster.retry_pause_ms(attempt) / 1000, deadline_ms, error
                )
        raise AssertionError("unreachable")

    async def _entry_at_coordinator(self, deadline_ms: float) -> CoordinatorEntry | None:
        """What the coordinator knows of the transactional id; None where it does not say."""
        request = DescribeTransactionsRequest(transactional_ids=[self._transactional_id])
        try:
            answer = await self._ask(DESCRIBE, request, None, deadline_ms)
        except BrokerError as error:
            if error_action(DESCRIBE, error) is not ErrorAction.RAISE:
                raise
            return None
        (row,) = answer.transaction_states
        return CoordinatorEntry(Identity(row.producer_id, row.producer_epoch), row.transaction_state)

    async def _settled(self, deadline_ms: float) -> None:
        """Until every record has its outcome; an abort drops those that come back without one.

        And until no partition is being added: added after its end, it would open another transaction.
        """
        while not self._core.is_idle or self._is_adding:
            self._driver.wake()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._driver.next_settled()
            if self.session.state is State.ABORTING:
                with self._driver.lock:
                    self._core.drop_unsent()
                self._driver.notify()
            elif self.session.state not in (State.COMMITTING, State.IN_TRANSACTION):
                return
            if self._driver.now_ms() > deadline_ms:
                raise TimedOut("records of the transaction are still under way; call the same again")

    # Requests

    async def _new_epoch(self, given: Identity | None, deadline_ms: float) -> Identity:
        request = InitProducerIdRequest(
            transactional_id=self._transactional_id,
            transaction_timeout_ms=self._driver.options.transaction_timeout_ms,
            producer_id=given.producer_id if given else -1,
            producer_epoch=given.producer_epoch if given else -1,
        )
        answer = await self._ask(INIT, request, None, deadline_ms)
        return Identity(answer.producer_id, answer.producer_epoch)

    async def _end(self, is_commit: bool, deadline_ms: float, asked: RequestKind = END) -> Identity | None:
        """The identity that the next transaction goes on with; None: the same."""
        identity = self._core.identity
        assert identity is not None
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            committed=is_commit,
        )
        answer = await self._ask(asked, request, None, deadline_ms)
        if not self._transaction.raises_epoch:
            return None
        return Identity(answer.producer_id, answer.producer_epoch)

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
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], who: ConsumerGroupMetadata
    ) -> TxnOffsetCommitRequest:
        identity = self._core.identity
        assert identity is not None
        topics: dict[str, list[TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition]] = {}
        for tp, each in offsets.items():
            topics.setdefault(tp.topic, []).append(
                TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
                    partition_index=tp.partition,
                    committed_offset=each.offset,
                    committed_leader_epoch=-1 if each.leader_epoch is None else each.leader_epoch,
                    committed_metadata=each.metadata,
                )
            )
        return TxnOffsetCommitRequest(
            transactional_id=self._transactional_id,
            group_id=who.group_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            generation_id=who.generation_id,
            member_id=who.member_id,
            group_instance_id=who.group_instance_id,
            topics=[
                TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=topic, partitions=partitions)
                for topic, partitions in topics.items()
            ],
        )

    def _on_turn(self) -> None:
        if self._transaction.pending and not self._is_adding:
            self._is_adding = True
            self._driver.spawn(self._add_wanted())

    async def _add_wanted(self) -> None:
        """AddPartitionsToTxn for what waits to be sent; what comes meanwhile goes with the next."""
        identity, wanted = self._core.identity, set(self._transaction.pending)
        assert identity is not None
        topics: dict[str, list[int]] = {}
        for at in sorted(wanted):
            topics.setdefault(at.topic, []).append(at.partition)
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
            await self._ask(ADD_PARTITIONS, request, None, self._deadline_ms(None), number)
            with self._driver.lock:
                self._core.on_partitions_added(wanted)
        except OncelogError as error:
            with self._driver.lock:
                self._transaction.pending -= wanted
                self._core.require_abort(error)
            self._driver.notify()
        finally:
            self._is_adding = False
            self._driver.wake()

    async def _ask(
        self,
        asked: RequestKind,
        request: Any,
        group_id: str | None,
        deadline_ms: float,
        number: int | None = None,
    ) -> Any:
        """The answer, once it is without error. `group_id` None: the transaction's coordinator is asked.

        `number`: of the transaction that it is a part of. Once that has ended, an error means nothing for the
        next one: TransactionAborted.
        """
        key = (TRANSACTION, self._transactional_id) if group_id is None else (GROUP, group_id)
        attempt, is_commit = 0, asked is END and request.committed
        started_ms = self._driver.now_ms()
        while True:
            may_be_committed = self._may_be_committed
            try:
                node_id = await self._coordinator(key, deadline_ms)
                # This call may be cancelled while the request is under way; the next one must know.
                self._may_be_committed = may_be_committed or is_commit
                answer = await self._request(asked, node_id, request, deadline_ms)
                refusal = first_error(answer)
                if refusal is None:
                    return answer
                error: OncelogError = refusal
            except OncelogError as raised:
                error = raised
            self._may_be_committed = may_be_committed or (is_commit and may_have_succeeded(error))
            self._check_going_on(number, error)
            reaction = error_action(asked, error, self._driver.now_ms() - started_ms)
            if reaction is ErrorAction.ABORT and is_commit and may_be_committed:
                reaction = ErrorAction.FAIL_PRODUCER
            if reaction in (ErrorAction.ABORT, ErrorAction.FAIL_PRODUCER):
                self._give_up(error, reaction)
            if reaction in (ErrorAction.ABORT, ErrorAction.FAIL_PRODUCER, ErrorAction.RAISE):
                raise error
            if reaction is ErrorAction.FIND_COORDINATOR:
                self._coordinators.pop(key, None)
            await self._pause(asked, self._pause_s(error, attempt), deadline_ms, error)
            self._check_going_on(number, error)
            attempt += 1

    def _check_going_on(self, number: int | None, error: OncelogError | None = None) -> None:
        if number is not None and not self.session.is_open(number):
            raise TransactionAborted("the transaction ended while parts of it were sent") from error

    async def _request(self, asked: RequestKind, node_id: int, request: Any, deadline_ms: float) -> Any:
        min_version, max_version = self._versions(asked)
        return await self._cluster.request(
            node_id,
            request,
            timeout_ms=self._patience_ms(deadline_ms),
            min_version=min_version,
            max_version=max_version,
        )

    def _give_up(self, error: OncelogError, reaction: ErrorAction) -> None:
        is_fatal = reaction is ErrorAction.FAIL_PRODUCER
        if isinstance(error, BrokerError):
            error.reaction = (Mark.FATAL if is_fatal else Mark.ABORTABLE).value
        with self._driver.lock:
            (self._core.die if is_fatal else self._core.require_abort)(error)
        self._driver.notify()

    async def _pause(
        self, asked: RequestKind, pause_s: float, deadline_ms: float, error: OncelogError
    ) -> None:
        """Wait before a request is sent again. Raises TimedOut where that would be too late."""
        if self._driver.now_ms() + pause_s * 1000 > deadline_ms:
            raise TimedOut(
                f"{asked.name} was not answered in time; the last that was heard: {error}"
            ) from error
        await asyncio.sleep(pause_s)

    def _pause_s(self, error: OncelogError, attempt: int) -> float:
        if isinstance(error, ConcurrentTransactions) and attempt < 10:
            return _CONCURRENT_PAUSE_S
        return self._cluster.retry_pause_ms(attempt) / 1000

    def _versions(self, asked: RequestKind) -> tuple[int | None, int | None]:
        """The lowest and the highest version that do what this transaction needs; None: any."""
        if asked is ADD_PARTITIONS:
            return None, _LAST_ADD_VERSION
        first_epoch_version = _FIRST_EPOCH_VERSION.get(asked.name)
        if first_epoch_version is None:
            return None, None
        if self._transaction.raises_epoch:
            return first_epoch_version, None
        return None, first_epoch_version - 1

    async def _coordinator(self, key: tuple[int, str], deadline_ms: float) -> int:
        if key not in self._coordinators:
            patience_ms = self._patience_ms(deadline_ms)
            self._coordinators[key] = await find_coordinator(self._cluster, *key, timeout_ms=patience_ms)
        return self._coordinators[key]

    def _raises_epoch(self) -> bool:
        node_id = self._coordinators.get((TRANSACTION, self._transactional_id))
        if node_id is None:
            return self._transaction.raises_epoch
        level = self._cluster.feature(node_id, _FEATURE)
        return level >= _EPOCH_PER_TRANSACTION if level else self._transaction.raises_epoch

    def _patience_ms(self, deadline_ms: float) -> float:
        """How long one request may go unanswered: the call ends in its time on a silent broker as well."""
        left_ms = max(deadline_ms - self._driver.now_ms(), 1)
        return min(left_ms, self._driver.options.request_timeout_ms)

    def _deadline_ms(self, timeout_s: float | None) -> float:
        block_ms = self._driver.options.max_block_ms
        return self._driver.now_ms() + (block_ms if timeout_s is None else timeout_s * 1000)


def first_error(answer: Any) -> BrokerError | None:
    """The error of an answer, or of the first partition that was refused for a reason of its own."""
    errors = [error_for_code(code, what) for code, what in _codes(answer) if code]
    telling = [error for error in errors if not isinstance(error, OperationNotAttempted)]
    return next(iter(telling or errors), None)


def _codes(answer: Any) -> Iterator[tuple[int, str]]:
    if hasattr(answer, "error_code"):
        yield answer.error_code, ""
    for row in getattr(answer, "transaction_states", ()):
        yield row.error_code, ""
    for topic in _topics(answer):
        partitions: Iterable[Any] = getattr(topic, "partitions", ()) or getattr(
            topic, "results_by_partition", ()
        )
        for partition in partitions:
            code = getattr(partition, "error_code", 0) or getattr(partition, "partition_error_code", 0)
            yield code, refused_partition(code, TopicPartition(topic.name, partition.partition_index))


def _topics(answer: Any) -> Iterable[Any]:
    topics: Iterable[Any] = getattr(answer, "topics", ()) or getattr(
        answer, "results_by_topic_v3_and_below", ()
    )
    return topics
