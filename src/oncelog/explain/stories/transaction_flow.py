"""Stories of transactions: their messages and records, a fenced instance, and a lost response to a commit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from oncelog.client.consumer.blocking import Consumer
from oncelog.client.producer.blocking import Producer
from oncelog.errors import BrokerError, OncelogError
from oncelog.explain.stories.environment import StoryEnvironment
from oncelog.explain.stories.story import story
from oncelog.explain.stories.story_run import PATIENCE_SECONDS, StoryRun, committed_values
from oncelog.server.embedded import Broker
from oncelog.testing.proxy.rules import Action, Rule
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from oncelog.wire.batch import iter_batches
from oncelog.wire.control import decode_control
from oncelog.wire.records import decode_records
from oncelog.wire.stored import TransactionLogKey, TransactionLogValue

TRANSACTION_LOG, OFFSETS_LOG = "__transaction_state", "__consumer_offsets"
_STATES = {
    0: "Empty", 1: "Ongoing", 2: "PrepareCommit", 3: "PrepareAbort", 4: "CompleteCommit", 5: "CompleteAbort",
    6: "Dead", 7: "PrepareEpochFence",
}  # fmt: skip


@story(
    name="transaction",
    title="A transaction, step by step",
    text=(
        "A transaction writes records to two partitions and commits a group's offsets, all or "
        "nothing. The producer finds the coordinator and gets a producer id. The partitions are added "
        "to the transaction: since transaction version 2 by the broker at the first batch, before by "
        "a separate request. EndTxn stores the decision (PrepareCommit). Then markers are written to "
        "every partition and to __consumer_offsets, and the transaction is complete (CompleteCommit). "
        "Finally the records are read back from the logs."
    ),
)
def transaction(environment: StoryEnvironment) -> None:
    with environment.run("Committed, with the cluster's transaction version", partitions=2) as run:
        _commit(run)
    with (
        Broker(config={"oncelog.transaction.version": 0}) as classic,
        environment.run(
            "Committed, with transaction version 0",
            partitions=2,
            upstream=classic.bootstrap_servers,
        ) as run,
    ):
        _commit(run)
        apis = [event.api for event in run.proxy.events]
        run.check(
            "the producer adds the group's offsets by a request (AddOffsetsToTxn)", "AddOffsetsToTxn" in apis
        )
    with environment.run(
        "Aborted: the records are in the log, but read_committed consumers skip them", partitions=2
    ) as run:
        _abort(run)


def _commit(run: StoryRun) -> None:
    name, group = _names()
    with _producer(run, name) as producer:
        _work(run, producer, group)
        run.proxy.note("commit")
        producer.commit_transaction()
    states = _describe_logs(run, name)
    run.check("the coordinator's log has the decision, then the completion", _ends_with(states, "Commit"))
    run.check("the group's offset is committed", _committed(run, group) == 3)


def _abort(run: StoryRun) -> None:
    name, group = _names()
    run.is_counted = False
    with _producer(run, name) as producer:
        _work(run, producer, group)
        run.proxy.note("abort")
        producer.abort_transaction()
    states = _describe_logs(run, name)
    run.check("the coordinator's log has the decision, then the completion", _ends_with(states, "Abort"))
    run.check("a read_committed consumer returns no record", _visible(run) == 0)
    run.check("the group's offset is not committed", _committed(run, group) is None)


@story(
    name="fenced",
    title="Two instances of one application: the older is fenced",
    text=(
        "A second producer starts with the same transactional id, for example because the first "
        "application is believed to be dead. The coordinator aborts the open transaction of the first "
        "producer and raises the epoch. From then on every call of the first producer is refused, and "
        "read_committed consumers return none of its records."
    ),
)
def fenced(environment: StoryEnvironment) -> None:
    name, _ = _names()
    with environment.run("A second instance starts during a transaction of the first", partitions=2) as run:
        with _producer(run, name) as first:
            first.init_transactions()
            first.begin_transaction()
            _send_both(run, first)
            first.flush(PATIENCE_SECONDS)
            run.proxy.note("a second instance starts with the same transactional id")
            with _producer(run, name) as second:
                second.init_transactions()
                run.proxy.note("the first instance does not know this, and tries to commit")
                run.check("the first instance cannot commit", _is_refused(first.commit_transaction))
                second.begin_transaction()
                _send_both(run, second)
                second.commit_transaction()
        _describe_logs(run, name)
    run.check(
        "a read_committed consumer returns the records of the second instance, and none of the first",
        run.counts.stored == 6,
    )


@story(
    name="restarts",
    title="Epochs over restarts of one transactional id",
    text=(
        "An application starts three times with the same transactional id, and its earlier processes are "
        "still running. Each start keeps the producer id and raises the epoch, which fences the processes "
        "before it. With transaction version 0 the epochs are 0, 1 and 2. With version 2 (KIP-890) each "
        "commit raises the epoch too, so they are 0, 2 and 4. A producer without a transactional id gets "
        "a new id instead."
    ),
)
def restarts(environment: StoryEnvironment) -> None:
    with (
        Broker(config={"oncelog.transaction.version": 0}) as classic,
        environment.run("Three starts, transaction version 0", upstream=classic.bootstrap_servers) as run,
    ):
        epochs = _start_three_times(run)
        run.check("the epochs of the starts are 0, 1 and 2", epochs == [0, 1, 2])
    run.check("the log has the records of the three starts, in order", run.log == list(range(1, 10)))
    with environment.run("Three starts, with the cluster's transaction version") as run:
        epochs = _start_three_times(run)
        run.check("each start has a higher epoch than the one before", epochs == sorted(set(epochs)))
    run.check("the log has the records of the three starts, in order", run.log == list(range(1, 10)))
    with environment.run("Three starts without a transactional id") as run:
        for start in range(3):
            with run.producer({"linger.ms": 20}) as producer:
                run.send(producer, _of_start(start))
        batches = run.batches_at_broker()
        run.check("each start has a new producer id", len({batch.producer_id for batch in batches}) == 3)
        run.check("every epoch is 0", [batch.producer_epoch for batch in batches] == [0, 0, 0])


def _start_three_times(run: StoryRun) -> list[int]:
    """Start three producers, one after another, with one transactional id. Each commits once. Then the first
    two, which are fenced, try another transaction.

    Return the epochs of the committed batches.
    """
    name, _ = _names()
    # The first start waits for the creation of the coordinators' topic. If it repeated its request meanwhile,
    # as after the short time-out of other stories, that would raise the epoch once more.
    settings = {"transactional.id": name, "linger.ms": 20, "request.timeout.ms": 20_000}
    with ExitStack() as running:
        producers: list[Producer] = []
        for start in range(3):
            if producers:
                run.proxy.note("the application starts again with the same transactional id")
            producers.append(running.enter_context(run.producer(settings)))
            producers[-1].init_transactions()
            producers[-1].begin_transaction()
            run.send(producers[-1], _of_start(start))
            producers[-1].commit_transaction()
        batches = run.batches_at_broker()
        run.check("every start keeps the producer id", len({batch.producer_id for batch in batches}) == 1)
        for producer, word in zip(producers[:2], ("first", "second"), strict=True):
            run.proxy.note(f"the {word} process, which still runs, tries a transaction")
            producer.begin_transaction()
            run.send(producer, range(10, 13))
            is_fenced = _is_refused(producer.commit_transaction) and _is_refused(producer.abort_transaction)
            run.check(f"the {word} process is fenced: it can neither commit nor abort", is_fenced)
    _describe_logs(run, name)
    return [batch.producer_epoch for batch in batches if batch.producer_epoch is not None]


def _of_start(start: int) -> range:
    return range(3 * start + 1, 3 * start + 4)


@story(
    name="lost-commit",
    title="The response to a commit is lost",
    text=(
        "The coordinator commits a transaction, but its response is lost. The producer cannot know "
        "the outcome, so it must not abort. It repeats the request, and the coordinator confirms the "
        "commit."
    ),
)
def lost_commit(environment: StoryEnvironment) -> None:
    rule = Rule(action=Action.CUT, api="EndTxn", direction="response", nth=1)
    name, _ = _names()
    with environment.run("EndTxn is carried out, and its response is lost", [rule], partitions=2) as run:
        with _producer(run, name) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            _send_both(run, producer)
            producer.commit_transaction()
        ends = [event for event in run.proxy.events if event.api == "EndTxn" and not event.error_code]
        run.check("EndTxn was sent twice, and both responses report success", len(ends) >= 4)
        states = _describe_logs(run, name)
        run.check("the transaction was committed once", states.count("CompleteCommit") == 1)
    run.check(
        "a read_committed consumer returns every record once",
        (run.counts.stored, run.counts.doubled) == (6, 0),
    )


def _names() -> tuple[str, str]:
    """Return an unused transactional id and an unused group id."""
    number = uuid.uuid4().hex[:8]
    return f"transfers-{number}", f"readers-{number}"


def _producer(run: StoryRun, name: str) -> Producer:
    return run.producer({"transactional.id": name, "linger.ms": 20})


def _work(run: StoryRun, producer: Producer, group: str) -> None:
    """Initialise the producer and begin a transaction. Send records to both partitions, and a group's offset.
    Leave the transaction open.
    """
    producer.init_transactions()
    producer.begin_transaction()
    _send_both(run, producer)
    producer.flush(PATIENCE_SECONDS)
    offsets = {TopicPartition(run.topic, 0): OffsetAndMetadata(3)}
    producer.send_offsets_to_transaction(offsets, ConsumerGroupMetadata(group))


def _send_both(run: StoryRun, producer: Producer) -> None:
    for partition in (0, 1):
        run.send(producer, range(3 * partition + 1, 3 * partition + 4), partition)


def _is_refused(call: Callable[[], object]) -> bool:
    """Return True if the call raises an error of the cluster."""
    try:
        call()
    except OncelogError:
        return True
    return False


def _ends_with(states: list[str], end: str) -> bool:
    return states[-2:] == [f"Prepare{end}", f"Complete{end}"]


def _committed(run: StoryRun, group: str) -> int | None:
    tp = TopicPartition(run.topic, 0)
    with Consumer({"bootstrap.servers": run.upstream, "group.id": group}) as consumer:
        committed = consumer.committed([tp])[tp]
    return committed.offset if committed else None


def _visible(run: StoryRun) -> int:
    with Consumer({"bootstrap.servers": run.upstream}) as consumer:
        partitions = [TopicPartition(run.topic, index) for index in range(run.partitions)]
        return sum(len(committed_values(consumer, tp)) for tp in partitions)


def _describe_logs(run: StoryRun, name: str) -> list[str]:
    """Wait until the transaction of `name` is complete. Add its stored records to `run.written`, as text.

    Return the states of the transaction in the coordinator's log, oldest first.
    """
    states: list[str] = []
    with Consumer({"bootstrap.servers": run.upstream}) as consumer:
        producer_ids, rows = _states_of(consumer, name)
        for tp, offset, state, producer in rows:
            states.append(state)
            run.written.append(f"{tp}  offset {offset}  {state}  {producer}")
        for tp in _partitions(consumer, [run.topic, OFFSETS_LOG]):
            run.written += _written(consumer, tp, producer_ids)
    return states


def _partitions(consumer: Consumer, topics: list[str]) -> Iterator[TopicPartition]:
    for topic in topics:
        try:
            for info in consumer.partitions_for(topic):
                yield TopicPartition(topic, info.partition)
        except BrokerError:
            continue  # __consumer_offsets may not exist yet


def _states_of(consumer: Consumer, name: str) -> tuple[set[int], list[tuple[TopicPartition, int, str, str]]]:
    """Wait until the transaction of `name` is complete.

    Return the producer ids, and (partition, offset, state, producer) of each record of `name` in the
    coordinator's log. Raises OncelogError after PATIENCE_SECONDS.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        rows: list[tuple[TopicPartition, int, str, str]] = []
        producer_ids: set[int] = set()
        for tp in _partitions(consumer, [TRANSACTION_LOG]):
            stop = consumer.end_offsets([tp])[tp]
            for chunk in consumer.fetch_batches(tp, consumer.beginning_offsets([tp])[tp], stop):
                for position, _ in iter_batches(chunk):
                    for record in decode_records(chunk, position):
                        key = TransactionLogKey.from_bytes(record.key or b"")
                        if key.transactional_id != name or record.value is None:
                            continue
                        value = TransactionLogValue.from_bytes(record.value)
                        producer_ids.add(value.producer_id)
                        identity = f"pid {value.producer_id} epoch {value.producer_epoch}"
                        state = _STATES.get(value.transaction_status, str(value.transaction_status))
                        rows.append((tp, record.offset, state, identity))
        if rows and rows[-1][2].startswith("Complete"):
            return producer_ids, rows
    raise OncelogError(f"the transaction of {name} is not complete after {PATIENCE_SECONDS:g} s")


def _written(consumer: Consumer, tp: TopicPartition, producer_ids: set[int]) -> Iterator[str]:
    """Yield a line of text for each transactional batch and marker that the producers have in a partition."""
    stop = consumer.end_offsets([tp])[tp]
    for chunk in consumer.fetch_batches(tp, consumer.beginning_offsets([tp])[tp], stop):
        for position, header in iter_batches(chunk):
            if header.producer_id not in producer_ids or not header.is_transactional:
                continue
            identity = f"pid {header.producer_id} epoch {header.producer_epoch}"
            if header.is_control:
                control = decode_control(chunk[position : position + header.size_bytes])
                kind = control.type.name if control is not None and control.type is not None else "other"
                yield f"{tp}  offset {header.base_offset}  {kind} marker  {identity}"
            else:
                count = header.records_count
                span = (
                    f"offset {header.base_offset}"
                    if count == 1
                    else f"offsets {header.base_offset}–{header.last_offset}"
                )
                yield f"{tp}  {span}  {count} record{'s' if count > 1 else ''}  {identity}"
