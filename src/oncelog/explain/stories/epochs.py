"""Stories about producer ids, producer epochs and the producer state that a broker remembers."""

from __future__ import annotations

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import ConfigError, OncelogError
from oncelog.explain.stories.environment import StoryEnvironment, create_topic, delete_topic
from oncelog.explain.stories.flows import numbers, reported_offsets, send_and_wait
from oncelog.explain.stories.story import story
from oncelog.explain.stories.story_run import (
    PATIENCE_SECONDS,
    RECORDS_PER_BATCH,
    StoryRun,
    has_fate,
    has_requests_at_broker,
)
from oncelog.testing.proxy.events import Direction, Fate, WireEvent
from oncelog.testing.proxy.rules import Action, Rule
from oncelog.types import TopicPartition

REMEMBERED_BATCHES = 5
"""Number of batches that a broker remembers per producer and partition, to recognise retries. Source: Kafka's
ProducerStateEntry.
"""

_AT_ONCE: dict[str, object] = {"linger.ms": 0}


@story(
    name="cache-miss",
    title="Six in flight: the cache miss",
    text=(
        "A broker remembers the last five batches of a producer on a partition. If six are in flight "
        "and the first acknowledgement is lost, the broker no longer remembers the first batch and "
        "refuses its retry as out of order. A producer that then raises its epoch stores everything "
        "twice. Therefore idempotence allows at most five batches in flight."
    ),
)
def cache_miss(environment: StoryEnvironment) -> None:
    _six_in_flight(environment)
    _five_in_flight(environment)


def _six_in_flight(environment: StoryEnvironment) -> None:
    heading = "Without the limit of five: six in flight, the first acknowledgement lost"
    with environment.run(heading, [_hold_response(2)]) as run:
        _lose_first_of(run, 6, {"oncelog.unsafe.max.in.flight": 6})
        epochs = [batch.producer_epoch for batch in run.batches_at_broker()]
        run.check("the retry of the first is refused: only five are remembered", bool(run.errors()))
        run.check(
            "the producer treats this as a loss, raises its epoch and restarts at sequence 0", 1 in epochs
        )
    run.check("records are stored a second time", run.counts.doubled >= RECORDS_PER_BATCH)
    run.check("nothing is lost", run.counts.lost == 0)


def _five_in_flight(environment: StoryEnvironment) -> None:
    heading = "With the limit of five: five in flight, the first acknowledgement lost"
    with environment.run(heading, [_hold_response(2)]) as run:
        refusal = _refusal_of_six(run)
        run.check("a setting of six is refused, and the error names both settings", _names_both(refusal))
        _lose_first_of(run, REMEMBERED_BATCHES, {})
        retried = run.offsets()[1 + REMEMBERED_BATCHES]
        run.check("the retry of the first is recognised", retried == RECORDS_PER_BATCH)
        run.check("nothing is refused", run.errors() == [])
        run.check(
            "the epoch does not change", {batch.producer_epoch for batch in run.batches_at_broker()} == {0}
        )
    in_order = list(numbers(1 + REMEMBERED_BATCHES))
    run.check("the log has every record once, in order", run.log == in_order)


def _hold_response(nth: int) -> Rule:
    return Rule(action=Action.HOLD, api="Produce", direction="response", nth=nth)


def _lose_first_of(run: StoryRun, batches: int, settings: dict[str, object]) -> None:
    """Send `1 + batches` batches with one producer. The first is acknowledged; the responses to the others
    are held and then lost.
    """
    with run.producer(settings) as producer:
        futures = run.send(producer, numbers(1 + batches))
        run.wait_until("all batches to arrive", has_requests_at_broker(1 + batches))
        queued = has_fate(Fate.QUEUED, Direction.RESPONSE, batches - 1)
        run.wait_until("all batches to be answered", queued)
        run.proxy.release(lose=True)
        producer.flush(PATIENCE_SECONDS)
        reported_offsets(futures)


def _refusal_of_six(run: StoryRun) -> str:
    settings = {"enable.idempotence": "true", "max.in.flight.requests.per.connection": 6}
    try:
        run.producer(settings).close()
    except ConfigError as error:
        return str(error)
    return ""


def _names_both(text: str) -> bool:
    return "enable.idempotence" in text and "max.in.flight.requests.per.connection" in text


@story(
    name="stale-epoch",
    title="A late message of an older epoch",
    text=(
        "A batch is delayed until its records have failed (delivery.timeout.ms). The producer does "
        "not know if the batch is stored, so it raises its epoch. When the delayed batch arrives, the "
        "broker refuses it."
    ),
)
def stale_epoch(environment: StoryEnvironment) -> None:
    rules = [
        Rule(action=Action.HOLD, api="Produce", direction="request", match=_is_second_batch, nth=1),
        Rule(
            action=Action.DROP, api="Produce", direction="request", match=_is_second_batch, nth=2, count=1000
        ),
    ]
    impatient = {"linger.ms": 100, "request.timeout.ms": 400, "delivery.timeout.ms": 900}
    with environment.run("A batch arrives after its producer has raised the epoch", rules) as run:
        with run.producer(impatient) as producer:
            _send_batch(run, producer, 1)
            late = run.send(producer, range(4, 7))
            producer.flush(PATIENCE_SECONDS)
            failures = [future.exception(PATIENCE_SECONDS) for future in late]
            run.check("the futures of the delayed records fail", all(failures))
            _send_batch(run, producer, 3)
            before = _producers(run)
            run.proxy.note("the delayed batch arrives")
            run.proxy.release()
            run.wait_until("the late answer", has_fate(Fate.UNEXPECTED, Direction.RESPONSE))
        sent = run.batches_at_broker()
        run.check(
            "the next batch has the next epoch and sequence 0",
            (sent[1].producer_epoch, sent[1].base_sequence) == (1, 0),
        )
        run.check("the late batch is refused", run.errors() == ["INVALID_PRODUCER_EPOCH"])
        run.check("the broker's state of the producer did not change", before == _producers(run))
    run.check("the log has the first and the third batch, once", run.log == [1, 2, 3, 7, 8, 9])


def _is_second_batch(event: WireEvent) -> bool:
    return any((b.producer_epoch, b.base_sequence) == (0, RECORDS_PER_BATCH) for b in event.batches)


def _send_batch(run: StoryRun, producer: Producer, batch: int) -> None:
    last = batch * RECORDS_PER_BATCH
    futures = run.send(producer, range(last - RECORDS_PER_BATCH + 1, last + 1))
    producer.flush(PATIENCE_SECONDS)
    reported_offsets(futures)


def _producers(run: StoryRun) -> list[tuple[int, int, int | None]]:
    """Return (producer id, epoch, last sequence) of each producer that the broker knows in partition 0."""
    tp = TopicPartition(run.topic, 0)
    with Admin({"bootstrap.servers": run.upstream}) as admin:
        described = admin.describe_producers([tp])[tp]
    return [
        (producer.producer_id, producer.producer_epoch, producer.last_sequence)
        for producer in described.producers
    ]


@story(
    name="unknown-producer",
    title="A producer that the broker does not know",
    text=(
        "When a topic is deleted and created again, the broker forgets the topic's producers. It "
        "accepts the first batch of an unknown producer with any sequence, and checks the sequences "
        "of later batches."
    ),
)
def unknown_producer(environment: StoryEnvironment) -> None:
    with environment.run("The topic is deleted and created again while a producer is running") as run:
        with run.producer() as producer:
            _send_batch(run, producer, 1)
            run.check("at first, the broker knows the producer", len(_producers(run)) == 1)
            _recreate_topic(run)
            run.check("afterwards, the broker knows no producer", _producers(run) == [])
            _send_batch(run, producer, 2)
        second = run.batches_at_broker()[-1]
        run.check("the producer continues with sequence 3", second.base_sequence == RECORDS_PER_BATCH)
        run.check("any first sequence of an unknown producer is accepted", run.errors() == [])
        run.check("the broker remembers the producer's sequences again", _producers(run)[0][2] == 5)
    run.check("the new log has only the second batch", run.log == [4, 5, 6])


def _recreate_topic(run: StoryRun) -> None:
    run.proxy.note("the topic is deleted and created again")
    delete_topic(run.upstream, run.topic)
    create_topic(run.upstream, run.topic)


@story(
    name="two-sessions",
    title="What idempotence does not cover",
    text=(
        "A producer id lasts as long as a producer object, and each partition has its own sequences. "
        "Therefore the same records are new records if a new session sends them, or if they go to "
        "another partition."
    ),
)
def two_sessions(environment: StoryEnvironment) -> None:
    _second_session(environment)
    _second_partition(environment)


def _second_session(environment: StoryEnvironment) -> None:
    with environment.run(
        "The application dies before the acknowledgement and sends again", [_hold_response(1)]
    ) as run:
        first = run.producer()
        run.send(first, numbers(1))
        run.wait_until("the first batch to be stored", has_fate(Fate.HELD, Direction.RESPONSE))
        run.proxy.note("the application dies; a new one starts and sends the same records")
        _kill(first)
        run.proxy.release(lose=True)
        send_and_wait(run, 1)
        ids = {batch.producer_id for batch in run.batches_at_broker()}
        run.check("the new session has a new producer id", len(ids) == 2)
    run.check("the records are in the log twice", run.counts.doubled == RECORDS_PER_BATCH)


def _kill(producer: Producer) -> None:
    """Stop a producer without waiting for requests in flight, as in a crash."""
    try:
        producer.close(0)
    except OncelogError:
        # Expected: the error says that records were not delivered.
        pass


def _second_partition(environment: StoryEnvironment) -> None:
    with environment.run("One producer sends the same records to two partitions", partitions=2) as run:
        with run.producer() as producer:
            futures = [f for partition in (0, 1) for f in run.send(producer, numbers(1), partition)]
            producer.flush(PATIENCE_SECONDS)
            reported_offsets(futures)
        sent = run.batches_at_broker()
        run.check("the sequences of both partitions start at 0", [b.base_sequence for b in sent] == [0, 0])
        run.check("both batches are stored", run.errors() == [])
    run.check("the records are in the topic twice", run.log == [*numbers(1), *numbers(1)])


@story(
    name="producer-per-record",
    title="A new producer for each record",
    text=(
        "Each record is sent by a producer of its own. Every producer gets a new id and begins at "
        "sequence 0, so the broker has nothing to compare. When an acknowledgement is lost and the next "
        "producer sends the record again, it is stored twice. One producer for all records needs one "
        "id, and the same loss doubles nothing."
    ),
)
def producer_per_record(environment: StoryEnvironment) -> None:
    _a_producer_for_each(environment)
    _one_producer_for_all(environment)


def _a_producer_for_each(environment: StoryEnvironment) -> None:
    heading = "Three records, a new producer for each; the second acknowledgement is lost"
    with environment.run(heading, [_hold_response(2)]) as run:
        _send_alone(run, 1)
        second = run.producer(_AT_ONCE)
        run.send(second, [2])
        run.wait_until("the second record to be stored", has_fate(Fate.HELD, Direction.RESPONSE))
        run.proxy.note("the acknowledgement is lost; a new producer sends record 2 again")
        _kill(second)
        run.proxy.release(lose=True)
        _send_alone(run, 2)
        _send_alone(run, 3)
        batches = run.batches_at_broker()
        run.check("every producer has its own id", len({batch.producer_id for batch in batches}) == 4)
        run.check("every batch has sequence 0", [batch.base_sequence for batch in batches] == [0, 0, 0, 0])
        run.check("each producer asks for its id first", _requests(run, "InitProducerId") == 4)
    run.check("record 2 is in the log twice", run.log == [1, 2, 2, 3])


def _send_alone(run: StoryRun, number: int) -> None:
    """Send one record with a new producer."""
    with run.producer(_AT_ONCE) as producer:
        run.send(producer, [number])


def _one_producer_for_all(environment: StoryEnvironment) -> None:
    rule = Rule(action=Action.CUT, api="Produce", direction="response", nth=2)
    heading = "Three records, one producer; the second acknowledgement is lost"
    with environment.run(heading, [rule]) as run:
        with run.producer(_AT_ONCE) as producer:
            for number in (1, 2, 3):
                run.send(producer, [number])
                producer.flush(PATIENCE_SECONDS)
        run.check(
            "the retry has the sequence of the first attempt", run.sequences_at_broker() == [0, 1, 1, 2]
        )
        run.check("the broker recognises it", run.offsets() == [0, 1, 1, 2])
        run.check("one id is enough", _requests(run, "InitProducerId") == 1)
    run.check("the log has every record once, in order", run.log == [1, 2, 3])


def _requests(run: StoryRun, api: str) -> int:
    """Return the number of requests of one API that the proxy received."""
    return sum(1 for e in run.proxy.events if e.api == api and e.direction is Direction.REQUEST)
