"""The transactional calls of both producer faces (row T4).

producer = Producer({"bootstrap.servers": "127.0.0.1:9092", "transactional.id": "payments-1"})
producer.init_transactions()
with producer.transaction():          # commits, or aborts when the block raises
    producer.send("payments", b"42.00")
    producer.send_offsets_to_transaction({TopicPartition("orders", 0): 17}, consumer.group_metadata())
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from oncelog.client.producer.driver import ProducerDriver
from oncelog.client.producer.transaction_requests import Transactions
from oncelog.errors import MisuseError, OncelogError
from oncelog.rules.transactions.client_session import State
from oncelog.runtime.loop_thread import ClientThread
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition, TransactionShare

Offsets = Mapping[TopicPartition, OffsetAndMetadata | int]


def session_of(driver: ProducerDriver) -> Transactions | None:
    """The driver's transactions; None without a transactional.id."""
    return Transactions(driver) if driver.options.transactional_id is not None else None


def _required(transactions: Transactions | None) -> Transactions:
    if transactions is None:
        raise MisuseError("this producer has no transactional.id; set one to use transactions")
    transactions.check_not_held()
    return transactions


class TransactionalCalls:
    """The calls that block. A `timeout` is in seconds; None: max.block.ms. All raise MisuseError when the
    call is not possible in the session's state, and the session's error when it cannot go on.
    """

    _thread: ClientThread
    _transactions: Transactions | None

    def init_transactions(self, timeout: float | None = None) -> None:
        """Get an epoch, which fences every other producer of this transactional.id; once, before all else.

        What an earlier instance left open is aborted, what it had decided is finished. Raises ProducerFenced,
        TimedOut (call it again), NotConnectedError when no broker answers at first.
        """
        self._thread.run(_required(self._transactions).init(timeout))

    def begin_transaction(self) -> None:
        """What is sent from now on is one transaction. Sends nothing itself."""
        _required(self._transactions).begin()

    def send_offsets_to_transaction(
        self, offsets: Offsets, group: ConsumerGroupMetadata | str, timeout: float | None = None
    ) -> None:
        """Commit a consumer's positions with the transaction, as the member `consumer.group_metadata()`.

        `offsets`: the next to read. A bare group id fences no zombie member. Raises TimedOut, or an error
        that says to abort (IllegalGeneration, UnknownMemberId, UnknownTopicOrPartition, ...). After TimedOut,
        or an interruption, the transaction may lack the offsets: repeat the same call until it returns, or
        abort. `commit_transaction` raises TransactionAbortable until then.
        """
        self._thread.run(_required(self._transactions).send_offsets(offsets, group, timeout))

    def share_transaction(self) -> TransactionShare:
        """What other producers, in other processes, need to write into this transaction too."""
        return _required(self._transactions).share()

    def join_transaction(self, share: TransactionShare) -> None:
        """Instead of `init_transactions`: write into the transaction of another producer, which will end it.

        Only `send` and `flush` may follow. Each partition must have one writer: their numbers would collide.
        """
        self._thread.run(_required(self._transactions).join(share))

    def hand_over_transaction(self, timeout: float | None = None) -> TransactionShare:
        """Send the rest, and leave the open transaction to another producer: `take_over_transaction` there.

        Closing this producer then ends nothing. Raises what `commit_transaction` raises.
        """
        share: TransactionShare = self._thread.run(_required(self._transactions).hand_over(timeout))
        return share

    def take_over_transaction(self, share: TransactionShare) -> None:
        """Instead of `init_transactions`: take a transaction that was handed over, to commit or abort it.

        Fences nobody; once another producer has called `init_transactions`, its end is refused.
        """
        self._thread.run(_required(self._transactions).take_over(share))

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Send the rest and make everything visible at once.

        Raises the first failure of a record, TransactionAbortable when it ran out of time (then call
        `abort_transaction`), ProducerFenced (make a new producer), TimedOut: whether it is committed is not
        known; call `commit_transaction` again.
        """
        self._thread.run(_required(self._transactions).commit(timeout))

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Nothing that was sent in the transaction will be seen by read_committed readers.

        Raises ProducerFenced (nothing is seen either), TimedOut: call `abort_transaction` again.
        """
        self._thread.run(_required(self._transactions).abort(timeout))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin, then commit; or abort when the block raises, or when the commit says so."""
        session = _required(self._transactions).session
        self.begin_transaction()
        try:
            yield
            self.commit_transaction()
        except BaseException:
            if session.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR):
                with suppress(OncelogError):  # what happened first is what matters
                    self.abort_transaction()
            raise


class AsyncTransactionalCalls:
    """The same for asyncio; see TransactionalCalls."""

    _transactions: Transactions | None

    async def init_transactions(self, timeout: float | None = None) -> None:
        """As TransactionalCalls.init_transactions."""
        await self._session().init(timeout)

    async def begin_transaction(self) -> None:
        """As TransactionalCalls.begin_transaction."""
        self._session().begin()

    async def send_offsets_to_transaction(
        self, offsets: Offsets, group: ConsumerGroupMetadata | str, timeout: float | None = None
    ) -> None:
        """As TransactionalCalls.send_offsets_to_transaction."""
        await self._session().send_offsets(offsets, group, timeout)

    async def commit_transaction(self, timeout: float | None = None) -> None:
        """As TransactionalCalls.commit_transaction."""
        await self._session().commit(timeout)

    async def abort_transaction(self, timeout: float | None = None) -> None:
        """As TransactionalCalls.abort_transaction."""
        await self._session().abort(timeout)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """As TransactionalCalls.transaction."""
        session = self._session().session
        await self.begin_transaction()
        try:
            yield
            await self.commit_transaction()
        except BaseException:
            if session.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR):
                with suppress(OncelogError):
                    await self.abort_transaction()
            raise

    def _session(self) -> Transactions:
        self._started()  # type: ignore[attr-defined]
        return _required(self._transactions)
