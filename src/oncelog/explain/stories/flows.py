"""Stories of sequence numbers: lost acknowledgements, lost batches, and batches out of order."""

from __future__ import annotations

from concurrent.futures import Future

from oncelog.explain.stories.environment import StoryEnvironment
from oncelog.explain.stories.story import story
from oncelog.explain.stories.story_run import PATIENCE_SECONDS, RECORDS_PER_BATCH, StoryRun
from oncelog.testing.proxy.rules import Action, Rule
from oncelog.types import RecordMetadata

NOT_IDEMPOTENT: dict[str, object] = {"enable.idempotence": "false", "acks": "all"}
OUT_OF_ORDER = "OUT_OF_ORDER_SEQUENCE_NUMBER"


def in_flight_together(later: int) -> Rule:
    """Return a rule that holds the second acknowledgement until `later` more Produce requests have passed the
    proxy.

    The batches of all these requests are in flight together. The first acknowledgement is not held, because
    the producer may wait for it: a broker that does not know the producer accepts any batch as its first.
    """
    return Rule(action=Action.HOLD, api="Produce", direction="response", nth=2, release_after=later)


def numbers(batches: int) -> range:
    """Return the record numbers 1, 2, ... of `batches` full batches."""
    return range(1, batches * RECORDS_PER_BATCH + 1)


def reported_offsets(futures: list[Future[RecordMetadata]]) -> list[int | None]:
    """Wait for the futures of sent records, and return the offsets that the producer reported to the
    application.
    """
    return [future.result(PATIENCE_SECONDS).offset for future in futures]


def send_and_wait(run: StoryRun, batches: int, settings: dict[str, object] | None = None) -> list[int | None]:
    """Send batches with one producer and wait for all acknowledgements. Return the offsets that the producer
    reported.
    """
    with run.producer(settings) as producer:
        futures = run.send(producer, numbers(batches))
        producer.flush(PATIENCE_SECONDS)
        return reported_offsets(futures)


@story(
    name="all-acked",
    title="Every batch acknowledged",
    text=(
        "Several batches are in flight at once. Each batch carries the sequence number of its first "
        "record: 0, 3, 6, 9, 12."
    ),
)
def all_acked(environment: StoryEnvironment) -> None:
    with environment.run("Five batches, five acknowledgements", [in_flight_together(3)]) as run:
        reported = send_and_wait(run, 5)
        run.check("five batches arrive, once each, in order", run.sequences_at_broker() == [0, 3, 6, 9, 12])
        run.check("the producer reports the offset of every record", reported == list(range(15)))
    _exactly_once(run)


@story(
    name="lost-ack",
    title="The lost acknowledgement",
    text=(
        "The broker stores a batch, and the acknowledgement is lost. The producer cannot know that "
        "the batch is stored, so it sends the batch again with the same producer id, epoch and "
        "sequences. The broker recognises them and answers with the original offset instead of "
        "storing the batch twice."
    ),
)
def lost_ack(environment: StoryEnvironment) -> None:
    rule = Rule(action=Action.CUT, api="Produce", direction="response", nth=1)
    with environment.run("The acknowledgement is lost, idempotence on", [rule]) as run:
        reported = send_and_wait(run, 1)
        first, second = run.batches_at_broker()
        run.check("the retry carries the same producer id, epoch and sequences", first == second)
        run.check("the retry is acknowledged with the original offset", run.offsets() == [0, 0])
        run.check("the application gets that offset", reported == [0, 1, 2])
    _exactly_once(run)


@story(
    name="lost-ack-without-idempotence",
    title="The lost acknowledgement without idempotence",
    text=(
        "The acknowledgement is lost in the same way, but nothing in the batch lets the broker "
        "recognise the retry."
    ),
)
def lost_ack_without_idempotence(environment: StoryEnvironment) -> None:
    rule = Rule(action=Action.CUT, api="Produce", direction="response", nth=1)
    with environment.run("The acknowledgement is lost, idempotence off", [rule]) as run:
        reported = send_and_wait(run, 1, NOT_IDEMPOTENT)
        run.check(
            "no batch carries a producer id", {b.producer_id for b in run.batches_at_broker()} == {None}
        )
        run.check("the retry is stored again, at new offsets", run.offsets() == [0, 3])
        run.check("the application gets only the offsets of the second copy", reported == [3, 4, 5])
    run.check("the log has every record twice", run.counts.doubled == RECORDS_PER_BATCH)
    run.check("nothing is lost", run.counts.lost == 0)


@story(
    name="lost-acks",
    title="The acknowledgements of the last two of five batches lost",
    text=(
        "Five batches are stored, and three are acknowledged. The other two are sent again, and the "
        "broker recognises them."
    ),
)
def lost_acks(environment: StoryEnvironment) -> None:
    cut = Rule(action=Action.CUT, api="Produce", direction="response", nth=4)
    heading = "Five batches, the acknowledgements of the fourth and fifth lost"
    with environment.run(heading, [in_flight_together(3), cut]) as run:
        reported = send_and_wait(run, 5)
        sequences = run.sequences_at_broker()
        run.check("only the fourth and fifth are sent again", sequences == [0, 3, 6, 9, 12, 9, 12])
        run.check(
            "both are acknowledged with their original offsets", run.offsets() == [0, 3, 6, 9, 12, 9, 12]
        )
        run.check("the producer reports the offset of every record", reported == list(range(15)))
    _exactly_once(run)


@story(
    name="lost-batch",
    title="The third of five batches lost",
    text=(
        "The third batch is lost. The fourth and fifth arrive and leave a gap, so the broker refuses "
        "them. After request.timeout.ms the producer sends the third, fourth and fifth again with "
        "their original sequences."
    ),
)
def lost_batch(environment: StoryEnvironment) -> None:
    rules = [
        Rule(action=Action.DROP, api="Produce", direction="request", nth=3),
        in_flight_together(2),
    ]
    with environment.run("Five batches, the third lost on its way", rules) as run:
        reported = send_and_wait(run, 5)
        sequences = run.sequences_at_broker()
        run.check("the fourth and fifth arrive without the third", sequences[:4] == [0, 3, 9, 12])
        run.check("the broker refuses both, because of the gap", run.errors() == [OUT_OF_ORDER] * 2)
        run.check("after the time-out all three are sent again in order", sequences[4:] == [6, 9, 12])
        epochs = {batch.producer_epoch for batch in run.batches_at_broker()}
        run.check("all batches have the same epoch", epochs == {0})
        run.check("the producer reports the offset of every record", reported == list(range(15)))
    _exactly_once(run)


@story(
    name="reorder",
    title="A batch overtakes another",
    text=(
        "Records 1-3, 7-9 and 4-6 arrive in this order. The broker refuses 7-9 while 4-6 is missing. "
        "The producer puts 7-9 back in its queue in sequence order, and in the end the partition has "
        "records 1 to 9 in order."
    ),
)
def reorder(environment: StoryEnvironment) -> None:
    rule = Rule(action=Action.HOLD, api="Produce", direction="request", nth=2, release_after=1)
    with environment.run("The third batch overtakes the second", [rule]) as run:
        reported = send_and_wait(run, 3)
        sequences = run.sequences_at_broker()
        run.check("the broker receives 1-3, 7-9, 4-6, and 7-9 again", sequences == [0, 6, 3, 6])
        run.check("7-9 is refused while 4-6 is missing", run.errors() == [OUT_OF_ORDER])
        run.check("the producer reports the offset of every record", reported == list(range(9)))
    _exactly_once(run)


@story(
    name="unordered",
    title="A batch overtakes another, without idempotence",
    text=(
        "Three batches, A, B and C, are in flight together, and B overtakes A. No batch has a sequence, "
        "so the broker stores them as they arrive: B, A, C. Nothing is lost or doubled, and every record "
        "is acknowledged, but the order is wrong. In the story `reorder` the same fault meets a producer "
        "with idempotence, and the order stays."
    ),
)
def unordered(environment: StoryEnvironment) -> None:
    rule = Rule(action=Action.HOLD, api="Produce", direction="request", nth=1, release_after=1)
    with environment.run("The second batch overtakes the first, idempotence off", [rule]) as run:
        reported = send_and_wait(run, 3, NOT_IDEMPOTENT)
        run.check("no batch has a sequence", set(run.sequences_at_broker()) == {None})
        run.check("the broker refuses nothing", run.errors() == [])
        run.check(
            "the application gets the offsets of the wrong order", reported == [3, 4, 5, 0, 1, 2, 6, 7, 8]
        )
    run.check("the log has B before A", run.log == [4, 5, 6, 1, 2, 3, 7, 8, 9])
    run.check("nothing is lost or doubled", (run.counts.lost, run.counts.doubled) == (0, 0))


def _exactly_once(run: StoryRun) -> None:
    """Add the checks that the log of a completed run has every record once in the order of sending, and that
    all were acknowledged.
    """
    counts = run.counts
    run.check("the log has every record once, in order", run.log == list(range(1, counts.sent + 1)))
    run.check("every record was acknowledged", counts.acknowledged == counts.sent)
