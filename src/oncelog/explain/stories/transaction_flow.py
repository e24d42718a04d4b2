"""Stories of transactions: the flow on the wire and in the logs, the fenced instance, the lost commit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from oncelog.client.consumer.blocking import Consumer
from oncelog.client.producer.blocking import Producer
from oncelog.errors import BrokerError, OncelogError
from oncelog.explain.stories.scene import PATIENCE_SECONDS, Scene
from oncelog.explain.stories.stage import Stage
from oncelog.explain.stories.story import story
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
        "Records to two partitions and the offsets of a group, all or nothing. The coordinator is found "
        "and gives a producer id; partitions are added to the transaction (by the broker itself at the "
        "first batch, since transaction version 2; by a request of their own before); EndTxn makes the "
        "decision durable (PrepareCommit), markers go to every partition and to __consumer_offsets, and "
        "it is complete (CompleteCommit). What was written is read back from the logs afterwards."
    ),
)
def transaction(stage: Stage) -> None:
    with stage.scene("Committed, as the cluster does it", partitions=2) as scene:
        _commit(scene)
    with (
        Broker(config={"oncelog.transaction.version": 0}) as classic,
        stage.scene(
            "Committed, as it was before transaction version 2",
            partitions=2,
            upstream=classic.bootstrap_servers,
        ) as scene,
    ):
        _commit(scene)
        apis = [event.api for event in scene.proxy.events]
        scene.check("partitions and offsets are announced first", "AddOffsetsToTxn" in apis)
    with stage.scene("Aborted: the records are in the log, and nobody sees them", partitions=2) as scene:
        _abort(scene)


def _commit(scene: Scene) -> None:
    name, group = _names()
    with _producer(scene, name) as producer:
        _work(scene, producer, group)
        scene.proxy.note("commit")
        producer.commit_transaction()
    states = _tell_logs(scene, name)
    scene.check("the decision is in the log before it is complete", _ends_with(states, "Commit"))
    scene.check("the group's offset is committed", _committed(scene, group) == 3)


def _abort(scene: Scene) -> None:
    name, group = _names()
    scene.is_counted = False
    with _producer(scene, name) as producer:
        _work(scene, producer, group)
        scene.proxy.note("abort")
        producer.abort_transaction()
    states = _tell_logs(scene, name)
    scene.check("the decision is in the log before it is complete", _ends_with(states, "Abort"))
    scene.check("no read_committed reader sees a record", _visible(scene) == 0)
    scene.check("the group's offset is not committed", _committed(scene, group) is None)


@story(
    name="fenced",
    title="Two instances of one application: the older is fenced",
    text=(
        "A second producer starts with the same transactional id, as when an application is taken for "
        "dead and started again elsewhere. The coordinator aborts what the first left open and raises the "
        "epoch; from then on every call of the first is refused, and nothing of it is seen."
    ),
)
def fenced(stage: Stage) -> None:
    name, _ = _names()
    with stage.scene("A second instance starts while the first is in the middle", partitions=2) as scene:
        with _producer(scene, name) as first:
            first.init_transactions()
            first.begin_transaction()
            _send_both(scene, first)
            first.flush(PATIENCE_SECONDS)
            scene.proxy.note("a second instance starts with the same transactional id")
            with _producer(scene, name) as second:
                second.init_transactions()
                scene.proxy.note("the first does not know, and wants to commit")
                scene.check("the first is told that it is fenced", _is_refused(first))
                second.begin_transaction()
                _send_both(scene, second)
                second.commit_transaction()
        _tell_logs(scene, name)
    scene.check("the records of the second are seen, once, and none of the first", scene.counts.stored == 6)


@story(
    name="lost-commit",
    title="The answer to a commit is lost",
    text=(
        "Was it committed? The producer cannot know, and must not abort: it asks the same again, and is "
        "told so as often as it asks."
    ),
)
def lost_commit(stage: Stage) -> None:
    rule = Rule(action=Action.CUT, api="EndTxn", direction="response", nth=1)
    name, _ = _names()
    with stage.scene("EndTxn is carried out, its answer lost", [rule], partitions=2) as scene:
        with _producer(scene, name) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            _send_both(scene, producer)
            producer.commit_transaction()
        ends = [event for event in scene.proxy.events if event.api == "EndTxn" and not event.error_code]
        scene.check("EndTxn crossed twice, and was answered with success", len(ends) >= 4)
        states = _tell_logs(scene, name)
        scene.check("it was committed once", states.count("CompleteCommit") == 1)
    scene.check("every record is seen, once", (scene.counts.stored, scene.counts.doubled) == (6, 0))


def _names() -> tuple[str, str]:
    """A transactional id and a group that nobody else uses."""
    number = uuid.uuid4().hex[:8]
    return f"transfers-{number}", f"readers-{number}"


def _producer(scene: Scene, name: str) -> Producer:
    return scene.producer({"transactional.id": name, "linger.ms": 20})


def _work(scene: Scene, producer: Producer, group: str) -> None:
    """A transaction with records in both partitions and an offset, not ended yet."""
    producer.init_transactions()
    producer.begin_transaction()
    _send_both(scene, producer)
    producer.flush(PATIENCE_SECONDS)
    offsets = {TopicPartition(scene.topic, 0): OffsetAndMetadata(3)}
    producer.send_offsets_to_transaction(offsets, ConsumerGroupMetadata(group))


def _send_both(scene: Scene, producer: Producer) -> None:
    for partition in (0, 1):
        scene.send(producer, range(3 * partition + 1, 3 * partition + 4), partition)


def _is_refused(producer: Producer) -> bool:
    try:
        producer.commit_transaction()
    except OncelogError:
        return True
    return False


def _ends_with(states: list[str], end: str) -> bool:
    return states[-2:] == [f"Prepare{end}", f"Complete{end}"]


def _committed(scene: Scene, group: str) -> int | None:
    tp = TopicPartition(scene.topic, 0)
    with Consumer({"bootstrap.servers": scene.upstream, "group.id": group}) as consumer:
        held = consumer.committed([tp])[tp]
    return held.offset if held else None


def _visible(scene: Scene) -> int:
    with Consumer({"bootstrap.servers": scene.upstream}) as consumer:
        places = [TopicPartition(scene.topic, index) for index in range(scene.partitions)]
        ends = consumer.end_offsets(places)
        return sum(batch.num_rows for tp in places for batch in consumer.fetch_range(tp, 0, ends[tp]))


def _tell_logs(scene: Scene, name: str) -> list[str]:
    """Note what the logs hold of a transactional id; the states in the coordinator's log."""
    states: list[str] = []
    with Consumer({"bootstrap.servers": scene.upstream}) as consumer:
        producer_ids, rows = _states_of(consumer, name)
        for place, offset, state, identity in rows:
            states.append(state)
            scene.written.append(f"{place}  offset {offset}  {state}  {identity}")
        for tp in _places(consumer, [scene.topic, OFFSETS_LOG]):
            scene.written += _written(consumer, tp, producer_ids)
    return states


def _places(consumer: Consumer, topics: list[str]) -> Iterator[TopicPartition]:
    for topic in topics:
        try:
            for part in consumer.partitions_for(topic):
                yield TopicPartition(topic, part.partition)
        except BrokerError:
            continue  # nobody has committed an offset yet


def _states_of(consumer: Consumer, name: str) -> tuple[set[int], list[tuple[TopicPartition, int, str, str]]]:
    """The records of a transactional id; waits until the last is of a transaction that is complete."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        rows: list[tuple[TopicPartition, int, str, str]] = []
        producer_ids: set[int] = set()
        for tp in _places(consumer, [TRANSACTION_LOG]):
            stop = consumer.end_offsets([tp])[tp]
            for piece in consumer.fetch_batches(tp, consumer.beginning_offsets([tp])[tp], stop):
                for position, _ in iter_batches(piece):
                    for record in decode_records(piece, position):
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
    """Batches and markers of these producers in a partition."""
    stop = consumer.end_offsets([tp])[tp]
    for piece in consumer.fetch_batches(tp, consumer.beginning_offsets([tp])[tp], stop):
        for position, header in iter_batches(piece):
            if header.producer_id not in producer_ids or not header.is_transactional:
                continue
            identity = f"pid {header.producer_id} epoch {header.producer_epoch}"
            if header.is_control:
                control = decode_control(piece[position : position + header.size_bytes])
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
