"""The consume-transform-produce loop without I/O: the loop decides, and `LoopIO` does the I/O.

    poll -> begin -> transform and send each record -> send the offsets -> commit -> poll ...

One transaction holds up to `max_records` consumed records, their output and their offsets. So a record is
processed once, or its transaction leaves no trace. The reactions to errors, failed records and rebalances are
tables in `oncelog.rules.transactions.process_loop`.

The methods are coroutines, which asyncio runs. In the blocking loop, `run_now` runs them, because the methods
of a BlockingLoopIO never await.

After an abort the consumer's position must move back to the committed offsets (KAFKA-17582). A partition
without a committed offset goes back to the first record that the loop got from it since the last commit:
auto.offset.reset=latest would skip the aborted records.

Source: behaviour T16 (docs/behaviours.md); KIP-447.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, assert_never

from oncelog.client.process.dead_letter import dead_letter
from oncelog.client.process.loop_metrics import LoopMetrics
from oncelog.client.process.loop_plan import LoopPlan, Sources
from oncelog.errors import (
    InvalidProducerEpoch,
    InvalidTopicException,
    MessageTooLarge,
    MisuseError,
    OncelogError,
    ProducerFenced,
)
from oncelog.rules.transactions.client_session import State
from oncelog.rules.transactions.process_loop import (
    MAX_ERRORS,
    AtRebalance,
    Reaction,
    Rebalance,
    Step,
    Verdict,
    at_rebalance,
    is_given_up,
    is_outage,
    is_refused_record,
    may_be_replaced,
    reaction_to,
    verdict_on,
)
from oncelog.types import OffsetAndMetadata, ProducerRecord, Record, TopicPartition

T = TypeVar("T")
Place = tuple[TopicPartition, int]
"""A record's partition and offset."""

_LOG = logging.getLogger("oncelog.process")
_POLL_S = 0.2
"""Maximum length of one poll in seconds. After each poll, the loop checks whether it was stopped."""
_FENCED = (InvalidProducerEpoch, ProducerFenced)
_BY_OUTPUT = (InvalidTopicException, MessageTooLarge, MisuseError)
"""Errors of `send` that concern the record it was called with, and not an earlier record."""
_UNDER_WAY = (State.IN_TRANSACTION, State.ABORTABLE_ERROR, State.COMMITTING, State.ABORTING, State.FATAL)


def outputs_of(result: Any) -> list[ProducerRecord]:
    """Return a transform's result as a list: it may be None, one ProducerRecord, or an iterable of them.

    Raises MisuseError for any other result.
    """
    if result is None:
        return []
    if isinstance(result, ProducerRecord):
        return [result]
    is_several = isinstance(result, Iterable) and not isinstance(result, (str, bytes))
    outputs: list[Any] = list(result) if is_several else [result]
    for output in outputs:
        if not isinstance(output, ProducerRecord):
            raise MisuseError(f"a transform must return ProducerRecords or None, not {_shown(output)}")
    return outputs


def _shown(value: object) -> str:
    if isinstance(value, Coroutine):
        value.close()
        return "a coroutine: use oncelog.aio.process for it"
    return f"{value!r:.200}"


class LoopIO(Protocol):
    """The two clients and the application's functions, as the loop uses them."""

    @property
    def state(self) -> State:
        """The state of the producer's session."""
        ...

    def now_ms(self) -> float:
        """Return the monotonic time in milliseconds."""
        ...

    async def open_producer(self) -> None:
        """Close the current producer, if there is one. Then create and initialize another one."""
        ...

    async def subscribe(self, sources: Sources, loop: ProcessLoop) -> None:
        """Create the consumer and subscribe, with the loop's callbacks `assigned`, `revoked` and `lost`."""
        ...

    async def poll(self, timeout_s: float, max_records: int) -> list[Record]: ...

    async def begin(self) -> None: ...

    async def transform(self, record: Record) -> list[ProducerRecord]:
        """Call the application's `transform` and return its output. Exceptions of `transform` are passed
        on.
        """
        ...

    async def restore(self) -> None:
        """Call the application's `restore`. Exceptions of `restore` are passed on."""
        ...

    async def send(self, output: ProducerRecord) -> None: ...

    async def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Send the offsets to the transaction, with the identity of the current group member."""
        ...

    async def commit(self) -> None: ...

    async def abort(self) -> None: ...

    async def is_replaced(self, *, may_have_timed_out: bool) -> bool:
        """Return True if another producer has certainly started with this transactional id.

        `may_have_timed_out` is True if the coordinator may have aborted the transaction after a timeout.
        """
        ...

    async def go_back(self, firsts: Mapping[TopicPartition, int]) -> None:
        """Seek to the committed offsets, or to the offsets in `firsts`: see `seeks_to`."""
        ...

    async def pause(self, seconds: float) -> None: ...

    async def close(self) -> None:
        """Close the producer, which aborts an open transaction, and then the consumer. Raises no
        OncelogError.
        """
        ...


def seeks_to(
    committed: Mapping[TopicPartition, OffsetAndMetadata | None], firsts: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Return the offset to seek to, by partition: the greater of `firsts` and the committed offset.

    Without a committed offset, it is the offset in `firsts`. The committed offset is greater if a commit
    without a response has succeeded. The first offset is greater if the records at the committed offset were
    deleted, and auto.offset.reset=latest skipped to the end. A seek to the committed offset would then skip
    once more, past the records of the aborted transaction. Guard:
    test_records_behind_a_committed_offset_that_is_gone_are_processed_after_an_abort.
    """
    offsets = {tp: first for tp, first in firsts.items() if tp in committed}
    for tp, first in offsets.items():
        position = committed[tp]
        offsets[tp] = first if position is None else max(first, position.offset)
    return offsets


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("a blocking loop has waited for an event loop")


class Failure(NamedTuple):
    """The number of failed attempts to process a record, and the last error."""

    attempts: int
    error: Exception


@dataclass(slots=True)
class OpenTransaction:
    """The open transaction: its start time, and the records that it has consumed and sent.

    `sent_ms` is the earliest time at which the coordinator may have learned of the transaction. It is None
    before the first output.
    """

    begun_ms: float
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    last: Record | None = None
    consumed: int = 0
    produced: int = 0
    dead_letters: int = 0
    sent_ms: float | None = None


class _Ended(Exception):
    """The end of the loop with an error of a client or of the application."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class ProcessLoop:
    """One loop over one consumer and, in turn, one or more producers."""

    def __init__(self, plan: LoopPlan, io: LoopIO) -> None:
        self._plan, self._options, self._io = plan, plan.options, io
        self.metrics = LoopMetrics()
        self._step = Step.START
        self._open: OpenTransaction | None = None
        self._has_run = self._is_stopping = self._is_closing = False
        # True after an abort, until the consumer's positions are the committed offsets again.
        self._must_go_back = False
        # True until `restore` has run for the current assignment and positions.
        self._must_restore = True
        self._failures: dict[Place, Failure] = {}
        # The first offset of each partition that polls have returned since the last commit. Only these
        # partitions go back after an abort, because the positions of the others are right.
        self._firsts: dict[TopicPartition, int] = {}
        # The number of coming records that each get their own transaction. It is set to find the record that
        # a broker has refused, and after a transaction of several records that took too long.
        self._single_records = 0
        # Two counts of errors since the last commit or, if polls failed, since the last successful poll. Only
        # `_recoveries` includes outages.
        self._errors_in_a_row = self._recoveries = 0
        self._failed_step: Step | None = None
        self._is_assigned = False
        # The start of the first poll in the current series of polls without a record. An error or a rebalance
        # ends a series. None if the last poll returned records.
        self._idle_since_ms: float | None = None

    def stop(self) -> None:
        """Make the loop commit its open transaction, close its clients and end. Safe in signal handlers."""
        self._is_stopping = True

    async def run(self) -> None:
        """Run until `stop`, an error, an interrupt or a cancellation.

        After `stop`, an open transaction is committed. Any other end commits nothing of it.
        """
        if self._has_run:
            raise MisuseError("this loop has run already; make a new one")
        self._has_run = True
        error: Exception | None = None
        try:
            await self._work()
        except _Ended as ended:
            error = ended.error
        except OncelogError as raised:
            error = raised
        finally:
            self._is_closing = True
            await self._io.close()
            self.metrics.in_flight = 0
        if error is not None:
            raise error

    async def _work(self) -> None:
        await self._io.open_producer()
        await self._io.subscribe(self._options.sources, self)
        while not self._is_stopping and not self._is_idle():
            await self._turn()
        if self._open is not None and self._open.positions:
            try:
                await self._commit()
            except OncelogError as error:
                await self._recover(error)

    def _is_idle(self) -> bool:
        """Return True after consumer.timeout.ms without a record.

        Return False while a transaction or a seek is pending, and before the first assignment.
        """
        limit_ms = self._plan.idle_timeout_ms
        since_ms, is_busy = self._idle_since_ms, self._open is not None or self._must_go_back
        if limit_ms is None or since_ms is None or is_busy or not self._is_assigned:
            return False
        return self._io.now_ms() - since_ms >= limit_ms

    async def _turn(self) -> None:
        """Poll once, process the returned records, and commit if a commit is due."""
        try:
            if self._must_go_back:
                await self._go_back()
            records = await self._poll()
            if records and not self._must_go_back:
                await self._restore_if_due()
                await self._process(records)
            if not self._must_go_back and self._ms_until_commit() == 0:
                await self._commit()
        except OncelogError as error:
            await self._recover(error)

    async def _poll(self) -> list[Record]:
        self._step = Step.POLL
        transaction, due_ms = self._open, self._ms_until_commit()
        timeout_s = _POLL_S if due_ms is None else min(_POLL_S, due_ms / 1000)
        limit = 1 if self._single_records else self._options.max_records
        consumed = transaction.consumed if transaction is not None else 0
        if self._idle_since_ms is None:
            self._idle_since_ms = self._io.now_ms()
        if transaction is None:
            # Everything that earlier polls have returned is committed. Keep none of their offsets, because a
            # topic may have been deleted and created again since. Guard:
            # test_records_of_a_topic_that_was_created_again_are_processed_after_an_abort.
            self._firsts.clear()
        records = await self._io.poll(timeout_s, max(limit - consumed, 1))
        if records:
            self._idle_since_ms = None
        if self._failed_step is Step.POLL:
            self._errors_in_a_row, self._recoveries, self._failed_step = 0, 0, None
        last = None
        for record in records:
            tp = TopicPartition(record.topic, record.partition)
            if tp != last:
                self._firsts[tp] = min(self._firsts.get(tp, record.offset), record.offset)
                last = tp
        return records

    def _ms_until_commit(self) -> float | None:
        """Return the time in ms until the commit is due, 0 if it is due; None if there is nothing to commit.

        The result is rounded to 1 us. Otherwise the difference of two floats could stay slightly above 0 when
        the commit is due, and the loop would poll without a pause. Guard:
        test_a_commit_is_due_at_the_end_of_its_interval_for_all_floats.
        """
        transaction = self._open
        if transaction is None or not transaction.positions:
            return None
        if self._single_records or transaction.consumed >= self._options.max_records:
            return 0
        due_ms = transaction.begun_ms + self._options.commit_interval_ms
        return max(round(due_ms - self._io.now_ms(), 3), 0)

    # Records

    async def _restore_if_due(self) -> None:
        """Call `restore` if the application's state may differ from the committed records."""
        if not self._options.has_state or not self._must_restore:
            return
        if self._open is not None:
            # Commit first: the state contains changes by this transaction, which `restore` could not read.
            await self._commit()
        try:
            await self._io.restore()
        except Exception as error:
            raise _Ended(error) from error
        self._must_restore = False

    async def _process(self, records: list[Record]) -> None:
        for record in records:
            if self._is_stopping or not await self._process_one(record):
                return
            # Do not wait for the next poll: with a slow transform, the transaction could time out before that
            # poll.
            if self._ms_until_commit() == 0:
                await self._commit()

    async def _process_one(self, record: Record) -> bool:
        """Transform a record and send its output. Begin a transaction if none is open. Return False if the
        transaction was aborted because the record failed.
        """
        tp = TopicPartition(record.topic, record.partition)
        place = (tp, record.offset)
        if self._open is None:
            self._step = Step.SEND
            await self._io.begin()
            self._open = OpenTransaction(self._io.now_ms())
        transaction = self._open
        outputs = await self._outputs_of(place, record)
        if outputs is None:
            await self._abort()
            return False
        self._step = Step.SEND
        transaction.last = record
        transaction.consumed += 1
        self.metrics.in_flight = transaction.consumed
        self._note_sent(transaction)
        try:
            for output in outputs:
                await self._io.send(output)
        except Exception as error:
            is_by_output = isinstance(error, _BY_OUTPUT) or not isinstance(error, OncelogError)
            # If the session is in another state, the error is that of an earlier record.
            if not is_by_output or self._io.state is not State.IN_TRANSACTION:
                raise
            self._note_failure(place, record, error, is_sent=True)
            await self._abort()
            return False
        transaction.positions[tp] = record.offset + 1
        transaction.produced += len(outputs)
        return True

    async def _outputs_of(self, place: Place, record: Record) -> list[ProducerRecord] | None:
        """Return a record's output or its dead letter. Return None if the transaction must be aborted."""
        topic, attempts = self._options.dead_letter_topic, self._options.max_attempts
        while True:
            failure = self._failures.get(place)
            if failure is not None and topic is not None and is_given_up(failure.attempts, attempts):
                assert self._open is not None
                self._open.dead_letters += 1
                return [dead_letter(topic, record, failure.error, failure.attempts, self._options.group_id)]
            try:
                return await self._io.transform(record)
            except Exception as error:
                verdict = self._note_failure(place, record, error, is_sent=False)
            if verdict is Verdict.GO_BACK:
                return None

    def _note_failure(self, place: Place, record: Record, error: Exception, *, is_sent: bool) -> Verdict:
        """Count a failure of a record, and return the verdict. If the verdict is RAISE, raise _Ended."""
        count = self._failures[place].attempts + 1 if place in self._failures else 1
        self._failures[place] = Failure(count, error)
        self.metrics.failed_attempts += 1
        tp, offset = place
        where = f"{tp} at offset {offset}, attempt {count} of {self._options.max_attempts}"
        verdict = verdict_on(
            count,
            self._options.max_attempts,
            has_dead_letter_topic=self._options.dead_letter_topic is not None,
            must_go_back=is_sent or self._options.has_state,
        )
        if verdict is Verdict.RAISE:
            error.add_note(f"{where}: the loop has stopped, and nothing of this transaction is committed")
            raise _Ended(error) from error
        is_last = is_given_up(count, self._options.max_attempts)
        _LOG.log(logging.WARNING if is_last else logging.DEBUG, "%s failed: %r", where, error)
        _LOG.debug("the transaction continues with: %s", verdict.value, exc_info=error)
        return verdict

    # The end of a transaction

    async def _commit(self) -> None:
        """Send the offsets and commit. A commit with an unknown outcome is repeated until it is known."""
        transaction = self._open
        assert transaction is not None
        self._step = Step.SEND_OFFSETS
        self._note_sent(transaction)
        await self._io.send_offsets(transaction.positions)
        self._step = Step.COMMIT
        while True:
            try:
                await self._io.commit()
                break
            except OncelogError as error:
                if self._reaction_to(error) is not Reaction.REPEAT:
                    raise
                self._check_not_stopping(error)
                self.metrics.repeated_commits += 1
                _LOG.warning("the outcome of a commit is unknown, so it is repeated: %s", error)
        self._count(transaction)
        self._firsts.update(transaction.positions)
        for tp, offset in list(self._failures):
            if offset < transaction.positions.get(tp, 0):
                del self._failures[tp, offset]
        self._open, self._errors_in_a_row, self._recoveries = None, 0, 0
        self._single_records = max(self._single_records - transaction.consumed, 0)

    def _note_sent(self, transaction: OpenTransaction) -> None:
        if transaction.sent_ms is None:
            transaction.sent_ms = self._io.now_ms()

    def _count(self, transaction: OpenTransaction) -> None:
        metrics = self.metrics
        metrics.commits += 1
        metrics.consumed += transaction.consumed
        metrics.produced += transaction.produced
        metrics.dead_letters += transaction.dead_letters
        metrics.in_flight = 0

    async def _abort(self) -> None:
        """Abort the open transaction, and let the next turn seek to the committed offsets.

        Replace a producer that cannot abort.
        """
        self._must_go_back, self._step = True, Step.ABORT
        attempt = 0
        while self._io.state in _UNDER_WAY:
            try:
                await self._io.abort()
                break
            except OncelogError as error:
                match self._reaction_to(error):
                    case Reaction.REPEAT:
                        self._check_not_stopping(error)
                        _LOG.warning("an abort is repeated: %s", error)
                        attempt += 1
                        await self._pause(attempt)
                    case Reaction.NEW_PRODUCER:
                        _LOG.warning("an abort failed, so the producer is replaced: %s", error)
                        return await self._replace_producer(error)
                    case _:
                        raise _Ended(self._explained(error)) from error
        self._drop_transaction()

    def _drop_transaction(self) -> None:
        if self._open is not None:
            self._open = None
            self.metrics.aborts += 1
        self.metrics.in_flight = 0

    async def _replace_producer(self, error: OncelogError) -> None:
        """Create a new producer. Its start aborts an open transaction, or completes a commit that was
        decided.
        """
        # If this loop was stuck in its transform for too long, a successor may be running. A new producer
        # would fence the successor's producer. The successor's consumer has fenced this loop's consumer. So
        # both loops would end. Guard: test_a_loop_that_was_stuck_does_not_fence_its_successor.
        if may_be_replaced(self._step, error) and await self._is_replaced():
            raise _Ended(self._fenced(error)) from error
        self._must_go_back = True
        self._drop_transaction()
        self.metrics.replaced_producers += 1
        self._step, attempt = Step.INIT, 0
        while True:
            try:
                return await self._io.open_producer()
            except OncelogError as error:
                if self._reaction_to(error) is not Reaction.REPEAT:
                    raise _Ended(self._explained(error)) from error
                self._check_not_stopping(error)
                self._count_error(error)
                _LOG.warning("a new producer has not started yet: %s", error)
            attempt += 1
            await self._pause(attempt)

    async def _is_replaced(self) -> bool:
        try:
            return await self._io.is_replaced(may_have_timed_out=self._is_overdue)
        except OncelogError as error:
            _LOG.warning("it is unknown if another producer has this transactional id: %s", error)
            return False

    async def _go_back(self) -> None:
        self._step = Step.GO_BACK
        await self._io.go_back(self._firsts)
        self._idle_since_ms = None
        self._must_go_back, self._must_restore = False, True

    # Errors

    async def _recover(self, error: OncelogError) -> None:
        """React to an error of a client: repeat the step, abort, or replace the producer. Then pause, unless
        a broker has refused a record. Raises _Ended if the loop must stop.
        """
        self._idle_since_ms, self._failed_step = None, self._step
        reaction = self._reaction_to(error)
        if reaction is Reaction.STOP:
            raise _Ended(self._explained(error)) from error
        is_refused = is_refused_record(error) and self._open is not None
        if is_refused:
            self._narrow(error)
        else:
            self._separate_if_overdue(error)
            self._count_error(error)
        _LOG.warning("%s failed (%s): %s", self._step.value, reaction.value, error)
        match reaction:
            case Reaction.REPEAT:
                pass
            case Reaction.ABORT:
                await self._abort()
            case Reaction.NEW_PRODUCER:
                await self._replace_producer(error)
            case _:
                assert_never(reaction)
        if not is_refused:
            self._recoveries += 1
            await self._pause(self._recoveries)

    def _narrow(self, error: OncelogError) -> None:
        """Count a failure of the record whose output was refused, or begin to find that record.

        The broker's error does not say which record of a batch it refused. So if the transaction has several
        records, each of them is processed again in a transaction of its own.
        """
        transaction = self._open
        assert transaction is not None and transaction.last is not None
        if transaction.consumed > 1:
            self._single_records = transaction.consumed
            return
        record = transaction.last
        place = (TopicPartition(record.topic, record.partition), record.offset)
        self._note_failure(place, record, error, is_sent=True)

    def _separate_if_overdue(self, error: OncelogError) -> None:
        """If the open transaction took too long, process each of its records again in its own transaction.

        Otherwise a record whose transform always takes longer than transaction.timeout.ms would always fail:
        the transaction would begin with the output of the records before it, and time out. Guard:
        test_a_record_that_always_takes_longer_than_a_transaction_may_be_open_is_processed.
        """
        if self._open is not None and self._is_overdue and not is_outage(error):
            self._single_records = max(self._single_records, self._open.consumed)

    def _count_error(self, error: OncelogError) -> None:
        """Count an error that is not an outage. Raises _Ended after MAX_ERRORS such errors without a
        commit.
        """
        if is_outage(error):
            return
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= MAX_ERRORS:
            error.add_note(f"the loop has stopped after {MAX_ERRORS} errors in a row")
            raise _Ended(error) from error

    @property
    def _is_overdue(self) -> bool:
        """True if the transaction has been open for so long that the coordinator may have aborted it."""
        if self._open is None or self._open.sent_ms is None:
            return False
        return self._io.now_ms() - self._open.sent_ms >= self._plan.transaction_timeout_ms

    def _reaction_to(self, error: OncelogError) -> Reaction:
        return reaction_to(self._step, error, self._io.state, is_overdue=self._is_overdue)

    def _explained(self, error: OncelogError) -> OncelogError:
        """Return the error with which the loop ends. If the producer was fenced, its text says what to do."""
        return self._fenced(error) if isinstance(error, _FENCED) else error

    def _fenced(self, error: OncelogError) -> OncelogError:
        name = self._options.transactional_id
        explained = ProducerFenced(
            f"another producer with transactional.id={name!r} has started, so this loop has stopped, and its "
            "open transaction is aborted: run one loop for each transactional_id"
        )
        explained.reaction, explained.__cause__ = "fatal", error
        return explained

    def _check_not_stopping(self, error: OncelogError) -> None:
        """Raise _Ended if the loop was stopped. Called before each retry, which might otherwise never end."""
        if self._is_stopping:
            raise _Ended(error) from error

    async def _pause(self, attempt: int) -> None:
        doubled_ms = self._plan.retry_backoff_ms * 2 ** min(max(attempt - 1, 0), 20)
        await self._io.pause(min(doubled_ms, self._plan.retry_backoff_max_ms) / 1000)

    # Rebalance callbacks, which run within a poll

    async def assigned(self, partitions: list[TopicPartition]) -> None:
        """Record that partitions were assigned. The consumer starts at their committed offsets."""
        self._is_assigned, self._idle_since_ms = True, None
        if partitions:
            self.metrics.rebalances += 1
            self._must_restore = True

    async def revoked(self, partitions: list[TopicPartition]) -> None:
        """Commit the transaction if it has records of these partitions, before other members get them."""
        await self._give_up(Rebalance.REVOKED, partitions)

    async def lost(self, partitions: list[TopicPartition]) -> None:
        """Abort the open transaction, because other members may own these partitions already."""
        await self._give_up(Rebalance.LOST, partitions)

    async def _give_up(self, change: Rebalance, partitions: list[TopicPartition]) -> None:
        if self._is_closing:
            return
        self.metrics.rebalances += 1
        self._idle_since_ms = None
        transaction = self._open
        is_affected = transaction is not None and not transaction.positions.keys().isdisjoint(partitions)
        match at_rebalance(change, is_open=transaction is not None, is_affected=is_affected):
            case AtRebalance.COMMIT:
                try:
                    await self._commit()
                except OncelogError as error:
                    await self._recover(error)
            case AtRebalance.ABORT:
                await self._abort()
            case AtRebalance.KEEP:
                pass
        given = frozenset(partitions)
        self._firsts = {tp: offset for tp, offset in self._firsts.items() if tp not in given}
        self._failures = {place: old for place, old in self._failures.items() if place[0] not in given}
        self._step = Step.POLL
