"""Stories of epochs and of state that is gone: the cache miss, the late message, the forgotten producer."""

from __future__ import annotations

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import ConfigError, OncelogError
from oncelog.explain.stories.flows import numbers, offsets_told, send_and_wait
from oncelog.explain.stories.scene import (
    PATIENCE_SECONDS,
    RECORDS_PER_BATCH,
    Scene,
    fate_seen,
    requests_at_broker,
)
from oncelog.explain.stories.stage import Stage, create_topic, delete_topic
from oncelog.explain.stories.story import story
from oncelog.testing.proxy.events import Direction, Fate, WireEvent
from oncelog.testing.proxy.rules import Action, Rule
from oncelog.types import TopicPartition

REMEMBERED_BATCHES = 5
"""How many batches a broker remembers of a producer and partition."""


@story(
    name="cache-miss",
    title="Six in flight: the cache miss",
    text=(
        "A broker remembers five batches of a producer. With six in flight and the first acknowledgement "
        "lost, the retry of the first is no longer remembered and is refused as out of order; a producer "
        "that then raises its epoch stores everything twice. That is why idempotence allows five in "
        "flight at most."
    ),
)
def cache_miss(stage: Stage) -> None:
    _six_in_flight(stage)
    _five_in_flight(stage)


def _six_in_flight(stage: Stage) -> None:
    heading = "The limit of five forced off: six in flight, the first acknowledgement lost"
    with stage.scene(heading, [_hold_answer(2)]) as scene:
        _lose_first_of(scene, 6, {"oncelog.unsafe.max.in.flight": 6})
        epochs = [batch.producer_epoch for batch in scene.batches_at_broker()]
        scene.check("the retry of the first is refused: only five are remembered", bool(scene.errors()))
        scene.check("the producer takes that for a loss, raises its epoch and sends on from 0", 1 in epochs)
    scene.check("records are stored a second time", scene.counts.doubled >= RECORDS_PER_BATCH)
    scene.check("nothing is lost", scene.counts.lost == 0)


def _five_in_flight(stage: Stage) -> None:
    heading = "The limit in force: five in flight, the first acknowledgement lost"
    with stage.scene(heading, [_hold_answer(2)]) as scene:
        refusal = _refusal_of_six(scene)
        scene.check("asking for six is refused, naming both settings", _names_both(refusal))
        _lose_first_of(scene, REMEMBERED_BATCHES, {})
        retried = scene.offsets()[1 + REMEMBERED_BATCHES]
        scene.check("the retry of the first is recognised", retried == RECORDS_PER_BATCH)
        scene.check("nothing is refused", scene.errors() == [])
        scene.check("the epoch stays", {batch.producer_epoch for batch in scene.batches_at_broker()} == {0})
    in_order = list(numbers(1 + REMEMBERED_BATCHES))
    scene.check("the log holds every record once, in order", scene.log == in_order)


def _hold_answer(nth: int) -> Rule:
    return Rule(action=Action.HOLD, api="Produce", direction="response", nth=nth)


def _lose_first_of(scene: Scene, batches: int, settings: dict[str, object]) -> None:
    """After one acknowledged batch, store so many with the first answer held, then lose all those."""
    with scene.producer(settings) as producer:
        futures = scene.send(producer, numbers(1 + batches))
        scene.wait_until("all batches to arrive", requests_at_broker(1 + batches))
        queued = fate_seen(Fate.QUEUED, Direction.RESPONSE, batches - 1)
        scene.wait_until("all batches to be answered", queued)
        scene.proxy.release(lose=True)
        producer.flush(PATIENCE_SECONDS)
        offsets_told(futures)


def _refusal_of_six(scene: Scene) -> str:
    settings = {"enable.idempotence": "true", "max.in.flight.requests.per.connection": 6}
    try:
        scene.producer(settings).close()
    except ConfigError as error:
        return str(error)
    return ""


def _names_both(text: str) -> bool:
    return "enable.idempotence" in text and "max.in.flight.requests.per.connection" in text


@story(
    name="stale-epoch",
    title="A late message of an older epoch",
    text=(
        "A batch is delayed until its records have failed to the caller (delivery.timeout.ms). Its "
        "outcome is unknown, so the producer raises its epoch. When the batch arrives after all, it is "
        "refused."
    ),
)
def stale_epoch(stage: Stage) -> None:
    rules = [
        Rule(action=Action.HOLD, api="Produce", direction="request", match=_is_second_batch, nth=1),
        Rule(
            action=Action.DROP, api="Produce", direction="request", match=_is_second_batch, nth=2, count=1000
        ),
    ]
    impatient = {"linger.ms": 100, "request.timeout.ms": 400, "delivery.timeout.ms": 900}
    with stage.scene("A batch arrives after its producer has raised the epoch", rules) as scene:
        with scene.producer(impatient) as producer:
            _send_batch(scene, producer, 1)
            late = scene.send(producer, range(4, 7))
            producer.flush(PATIENCE_SECONDS)
            failures = [future.exception(PATIENCE_SECONDS) for future in late]
            scene.check("the delayed records fail to the caller", all(failures))
            _send_batch(scene, producer, 3)
            before = _producers(scene)
            scene.proxy.note("the delayed batch arrives")
            scene.proxy.release()
            scene.wait_until("the late answer", fate_seen(Fate.UNEXPECTED, Direction.RESPONSE))
        sent = scene.batches_at_broker()
        scene.check(
            "the next batch went out under the next epoch, from sequence 0",
            (sent[1].producer_epoch, sent[1].base_sequence) == (1, 0),
        )
        scene.check("the late batch is refused", scene.errors() == ["INVALID_PRODUCER_EPOCH"])
        scene.check("the broker's state of the producer did not change", before == _producers(scene))
    scene.check("the log holds the first and the third batch, once", scene.log == [1, 2, 3, 7, 8, 9])


def _is_second_batch(event: WireEvent) -> bool:
    return any((b.producer_epoch, b.base_sequence) == (0, RECORDS_PER_BATCH) for b in event.batches)


def _send_batch(scene: Scene, producer: Producer, batch: int) -> None:
    last = batch * RECORDS_PER_BATCH
    futures = scene.send(producer, range(last - RECORDS_PER_BATCH + 1, last + 1))
    producer.flush(PATIENCE_SECONDS)
    offsets_told(futures)


def _producers(scene: Scene) -> list[tuple[int, int, int | None]]:
    """What the broker remembers of partition 0: producer id, epoch, last sequence."""
    tp = TopicPartition(scene.topic, 0)
    with Admin({"bootstrap.servers": scene.upstream}) as admin:
        described = admin.describe_producers([tp])[tp]
    return [(each.producer_id, each.producer_epoch, each.last_sequence) for each in described.producers]


@story(
    name="unknown-producer",
    title="A producer the broker does not know",
    text=(
        "A topic that is deleted and created again forgets its producers. The first batch of an unknown "
        "producer is accepted whatever its sequence; from there on sequences are checked again."
    ),
)
def unknown_producer(stage: Stage) -> None:
    with stage.scene("The topic is deleted and created again while a producer goes on") as scene:
        with scene.producer() as producer:
            _send_batch(scene, producer, 1)
            scene.check("before, the broker knows the producer", len(_producers(scene)) == 1)
            _recreate_topic(scene)
            scene.check("after, it knows none", _producers(scene) == [])
            _send_batch(scene, producer, 2)
        second = scene.batches_at_broker()[-1]
        scene.check("the producer goes on with sequence 3", second.base_sequence == RECORDS_PER_BATCH)
        scene.check("any first sequence of an unknown producer is accepted", scene.errors() == [])
        scene.check("from there on its sequences are watched again", _producers(scene)[0][2] == 5)
    scene.check("the new log holds the second batch alone", scene.log == [4, 5, 6])


def _recreate_topic(scene: Scene) -> None:
    scene.proxy.note("the topic is deleted and created again")
    delete_topic(scene.upstream, scene.topic)
    create_topic(scene.upstream, scene.topic)


@story(
    name="two-sessions",
    title="What idempotence does not cover",
    text=(
        "Producer ids live as long as a producer object, and sequences count per partition: the same "
        "records sent by a new session, or to another partition, are new records."
    ),
)
def two_sessions(stage: Stage) -> None:
    _second_session(stage)
    _second_partition(stage)


def _second_session(stage: Stage) -> None:
    with stage.scene(
        "The application dies before the acknowledgement and sends again", [_hold_answer(1)]
    ) as scene:
        first = scene.producer()
        scene.send(first, numbers(1))
        scene.wait_until("the first batch to be stored", fate_seen(Fate.HELD, Direction.RESPONSE))
        scene.proxy.note("the application dies; a new one starts and sends the same records")
        _kill(first)
        scene.proxy.release(lose=True)
        send_and_wait(scene, 1)
        ids = {batch.producer_id for batch in scene.batches_at_broker()}
        scene.check("the new session has a new producer id", len(ids) == 2)
    scene.check("the records are in the log twice", scene.counts.doubled == RECORDS_PER_BATCH)


def _kill(producer: Producer) -> None:
    """End a producer without waiting for what is in flight, as a crash would."""
    try:
        producer.close(0)
    except OncelogError:
        pass  # it says that records were not delivered, which is the point


def _second_partition(stage: Stage) -> None:
    with stage.scene("One producer sends the same records to two partitions", partitions=2) as scene:
        with scene.producer() as producer:
            futures = [f for partition in (0, 1) for f in scene.send(producer, numbers(1), partition)]
            producer.flush(PATIENCE_SECONDS)
            offsets_told(futures)
        sent = scene.batches_at_broker()
        scene.check("both partitions count sequences from 0", [b.base_sequence for b in sent] == [0, 0])
        scene.check("both batches are stored", scene.errors() == [])
    scene.check("the records are in the topic twice", scene.log == [*numbers(1), *numbers(1)])
