"""The sequence flows: what the wire carries when acknowledgements or batches are lost or overtaken."""

from __future__ import annotations

from concurrent.futures import Future

from oncelog.explain.stories.scene import PATIENCE_SECONDS, RECORDS_PER_BATCH, Scene
from oncelog.explain.stories.stage import Stage
from oncelog.explain.stories.story import story
from oncelog.testing.proxy.rules import Action, Rule
from oncelog.types import RecordMetadata

NOT_IDEMPOTENT: dict[str, object] = {"enable.idempotence": "false", "acks": "all"}
OUT_OF_ORDER = "OUT_OF_ORDER_SEQUENCE_NUMBER"


def in_flight_together(later: int) -> Rule:
    """Hold the second acknowledgement until so many later batches went by: so they are in flight together.

    The first passes: a producer may wait for it, since a broker that does not know the producer
    yet would accept any batch as its first.
    """
    return Rule(action=Action.HOLD, api="Produce", direction="response", nth=2, release_after=later)


def numbers(batches: int) -> range:
    """The record numbers of so many batches."""
    return range(1, batches * RECORDS_PER_BATCH + 1)


def offsets_told(futures: list[Future[RecordMetadata]]) -> list[int | None]:
    """The offsets the application was told."""
    return [future.result(PATIENCE_SECONDS).offset for future in futures]


def send_and_wait(scene: Scene, batches: int, settings: dict[str, object] | None = None) -> list[int | None]:
    """Send so many batches with one producer and wait for all; the offsets it was told."""
    with scene.producer(settings) as producer:
        futures = scene.send(producer, numbers(batches))
        producer.flush(PATIENCE_SECONDS)
        return offsets_told(futures)


@story(
    name="all-acked",
    title="Every batch acknowledged",
    text="Several batches are in flight at once. Their sequence numbers count records: 0, 3, 6, 9, 12.",
)
def all_acked(stage: Stage) -> None:
    with stage.scene("Five batches, five acknowledgements", [in_flight_together(3)]) as scene:
        told = send_and_wait(scene, 5)
        scene.check(
            "five batches crossed, once each, in order", scene.sequences_at_broker() == [0, 3, 6, 9, 12]
        )
        scene.check("every record was told its offset", told == list(range(15)))
    _exactly_once(scene)


@story(
    name="lost-ack",
    title="The lost acknowledgement",
    text=(
        "The broker stores a batch and its acknowledgement is lost. The producer cannot know, so it sends "
        "the batch again under the same producer id, epoch and sequences. The broker remembers those and "
        "answers with the original offset instead of storing it twice."
    ),
)
def lost_ack(stage: Stage) -> None:
    rule = Rule(action=Action.CUT, api="Produce", direction="response", nth=1)
    with stage.scene("The acknowledgement is lost, idempotence on", [rule]) as scene:
        told = send_and_wait(scene, 1)
        first, second = scene.batches_at_broker()
        scene.check("the retry carries the same producer id, epoch and sequences", first == second)
        scene.check("it is acknowledged with the original offset", scene.offsets() == [0, 0])
        scene.check("the application is told that offset", told == [0, 1, 2])
    _exactly_once(scene)


@story(
    name="lost-ack-without-idempotence",
    title="The lost acknowledgement without idempotence",
    text="The same loss, and nothing in the batch by which the broker could recognise the retry.",
)
def lost_ack_without_idempotence(stage: Stage) -> None:
    rule = Rule(action=Action.CUT, api="Produce", direction="response", nth=1)
    with stage.scene("The acknowledgement is lost, idempotence off", [rule]) as scene:
        told = send_and_wait(scene, 1, NOT_IDEMPOTENT)
        scene.check(
            "no batch carries a producer id", {b.producer_id for b in scene.batches_at_broker()} == {None}
        )
        scene.check("the retry is stored again, at new offsets", scene.offsets() == [0, 3])
        scene.check("the application is told only the second place", told == [3, 4, 5])
    scene.check("the log holds every record twice", scene.counts.doubled == RECORDS_PER_BATCH)
    scene.check("nothing is lost", scene.counts.lost == 0)


@story(
    name="lost-acks",
    title="The acknowledgements of the last two of five batches lost",
    text="Five batches are stored, three are acknowledged. The other two are sent again and recognised.",
)
def lost_acks(stage: Stage) -> None:
    cut = Rule(action=Action.CUT, api="Produce", direction="response", nth=4)
    heading = "Five batches, the acknowledgements of the fourth and fifth lost"
    with stage.scene(heading, [in_flight_together(3), cut]) as scene:
        told = send_and_wait(scene, 5)
        sequences = scene.sequences_at_broker()
        scene.check("only the fourth and fifth are sent again", sequences == [0, 3, 6, 9, 12, 9, 12])
        scene.check(
            "both are acknowledged with their original offsets", scene.offsets() == [0, 3, 6, 9, 12, 9, 12]
        )
        scene.check("every record was told its offset", told == list(range(15)))
    _exactly_once(scene)


@story(
    name="lost-batch",
    title="The third of five batches lost",
    text=(
        "The fourth and fifth arrive and leave a gap, so the broker refuses them. After "
        "request.timeout.ms the producer sends the third, fourth and fifth again with the sequences they "
        "had."
    ),
)
def lost_batch(stage: Stage) -> None:
    rules = [
        Rule(action=Action.DROP, api="Produce", direction="request", nth=3),
        in_flight_together(2),
    ]
    with stage.scene("Five batches, the third lost on its way", rules) as scene:
        told = send_and_wait(scene, 5)
        sequences = scene.sequences_at_broker()
        scene.check("the fourth and fifth arrive without the third", sequences[:4] == [0, 3, 9, 12])
        scene.check("the broker refuses them: a gap", scene.errors() == [OUT_OF_ORDER] * 2)
        scene.check("after the time-out all three are sent again in order", sequences[4:] == [6, 9, 12])
        epochs = {batch.producer_epoch for batch in scene.batches_at_broker()}
        scene.check("with the sequences they had, under the same epoch", epochs == {0})
        scene.check("every record was told its offset", told == list(range(15)))
    _exactly_once(scene)


@story(
    name="reorder",
    title="A batch overtakes another",
    text=(
        "Records 1-3, 7-9, 4-6 arrive in this order. 7-9 is refused while 4-6 is missing; the producer "
        "puts it back in its queue in sequence order, and the partition ends as 1 to 9."
    ),
)
def reorder(stage: Stage) -> None:
    rule = Rule(action=Action.HOLD, api="Produce", direction="request", nth=2, release_after=1)
    with stage.scene("The third batch overtakes the second", [rule]) as scene:
        told = send_and_wait(scene, 3)
        sequences = scene.sequences_at_broker()
        scene.check("the broker is given 1-3, 7-9, 4-6, and 7-9 again", sequences == [0, 6, 3, 6])
        scene.check("7-9 is refused while 4-6 is missing", scene.errors() == [OUT_OF_ORDER])
        scene.check("every record was told its offset", told == list(range(9)))
    _exactly_once(scene)


def _exactly_once(scene: Scene) -> None:
    """After a scene: the log holds every record once, in the order of sending."""
    counts = scene.counts
    scene.check("the log holds every record once, in order", scene.log == list(range(1, counts.sent + 1)))
    scene.check("every record was acknowledged", counts.acknowledged == counts.sent)
