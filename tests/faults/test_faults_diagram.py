"""Sequence diagrams: the arrows of events, and both drawings of them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace

from oncelog.explain.diagram import Arrow, Column, Note, Tone, hidden_apis, plan
from oncelog.explain.svg import draw_svg
from oncelog.explain.text import draw_text
from oncelog.testing.proxy import BatchSummary, Direction, Fate, Outcome, WireEvent
from oncelog.testing.proxy.event_format import format_line


def request(correlation: int, sequence: int, fate: Fate = Fate.PASSED, connection: int = 1) -> WireEvent:
    batch = BatchSummary("t", 0, 7, 0, sequence, sequence + 2, 3, 200)
    return WireEvent(
        Direction.REQUEST, "Produce", 9, correlation, connection, batches=(batch,), acks=-1, fate=fate
    )


def answer(
    correlation: int, offset: int | None, fate: Fate = Fate.PASSED, *, error: int = 0, connection: int = 1
) -> WireEvent:
    return WireEvent(
        Direction.RESPONSE, "Produce", 9, correlation, connection,
        outcomes=(Outcome("t", 0, error, offset),), fate=fate,
    )  # fmt: skip


LOST_ACK = [
    request(1, 0),
    answer(1, 0, Fate.CUT),
    WireEvent(Direction.NOTE, "", detail="the producer connects again"),
    request(2, 0, connection=2),
    answer(2, 0, connection=2),
]


def test_a_retry_and_a_recognised_batch_are_named() -> None:
    sent, lost, note, again, recognised = plan(LOST_ACK)
    assert isinstance(sent, Arrow) and isinstance(lost, Arrow)
    assert isinstance(again, Arrow) and isinstance(recognised, Arrow)
    assert (sent.start, sent.end, sent.tone) == (Column.PRODUCER, Column.BROKER, Tone.PLAIN)
    assert sent.text == "Produce  pid 7 epoch 0  seq 0–2"
    assert (lost.end, lost.tone) == (Column.NETWORK, Tone.LOST)
    assert lost.remark == "stored at 0–2; answer lost, connection cut"
    assert note == Note("the producer connects again")
    assert (again.tone, again.text[-7:]) == (Tone.REPEAT, "(again)")
    assert (recognised.tone, recognised.remark) == (Tone.REPEAT, "duplicate: already stored at 0")


def test_a_refusal_and_a_queued_response_are_drawn() -> None:
    events = [
        request(1, 3, Fate.HELD),
        request(2, 6),
        answer(2, None, Fate.QUEUED, error=45),
        request(1, 3, Fate.RELEASED),
        answer(1, 3),
        answer(2, None, Fate.RELEASED, error=45),
    ]
    arrows = [step for step in plan(events) if isinstance(step, Arrow)]
    assert [(a.start.value, a.end.value) for a in arrows] == [(0, 1), (0, 2), (2, 1), (1, 2), (2, 0), (1, 0)]
    assert arrows[2].remark == "refused, not stored; answer waits its turn"
    assert arrows[4].remark == "stored at 3–5"
    assert (arrows[5].tone, arrows[5].remark) == (Tone.REFUSED, "")
    assert "OUT_OF_ORDER_SEQUENCE_NUMBER" in arrows[5].text


def test_a_queued_response_can_be_lost_in_the_network() -> None:
    steps = plan([request(1, 0), answer(1, 0, Fate.QUEUED), answer(1, 0, Fate.LOST)])
    waiting, lost = (step for step in steps[1:] if isinstance(step, Arrow))
    assert (waiting.tone, waiting.start) == (Tone.HELD, Column.BROKER)
    assert (lost.start, lost.end, lost.tone) == (Column.NETWORK, Column.NETWORK, Tone.LOST)
    assert draw_text([lost]).count("✗") == 1


def test_a_note_that_repeats_is_counted() -> None:
    note = WireEvent(Direction.NOTE, "", detail="no broker")
    (step,) = plan([note, note, note])
    assert str(step) == "no broker (×3)"
    assert "┄ no broker (×3) ┄" in draw_text([step])


def test_partitions_are_named_only_where_there_are_several() -> None:
    other = replace(request(2, 0), batches=(BatchSummary("t", 1, 7, 0, 0, 0, 1, 90),))
    one, two = (step.text for step in plan([request(1, 0), other]) if isinstance(step, Arrow))
    assert ("partition 0  pid" in one, "partition 1  pid" in two) == (True, True)
    elsewhere = replace(request(2, 0), batches=(BatchSummary("u", 1, 7, 0, 0, 0, 1, 90),))
    one, two = (step.text for step in plan([request(1, 0), elsewhere]) if isinstance(step, Arrow))
    assert ("t-0  pid" in one, "u-1  pid" in two) == (True, True)


class CountedBatches(tuple[BatchSummary, ...]):
    """The batches of a request. The class counts how many of them were read."""

    read_count = 0

    def __iter__(self) -> Iterator[BatchSummary]:
        for batch in super().__iter__():
            CountedBatches.read_count += 1
            yield batch


def test_a_request_of_many_partitions_is_drawn_in_linear_time() -> None:
    count = 300
    batches = CountedBatches(BatchSummary("t", number, 7, 0, 0, 0, 1, 70) for number in range(count))
    outcomes = tuple(Outcome("t", number, 0, 5) for number in range(count))
    sent, answered = plan([replace(request(1, 0), batches=batches), replace(answer(1, 0), outcomes=outcomes)])
    assert isinstance(sent, Arrow) and isinstance(answered, Arrow)
    assert answered.decisions == (Tone.GOOD,) * count
    assert CountedBatches.read_count < 10 * count


def test_other_apis_are_counted_and_not_drawn() -> None:
    metadata = WireEvent(Direction.REQUEST, "Metadata")
    assert plan([metadata]) == []
    assert hidden_apis([metadata, metadata, request(1, 0)]) == {"Metadata": 2}


def test_the_text_shows_every_message_in_three_columns() -> None:
    drawn = draw_text(plan(LOST_ACK))
    lines = drawn.splitlines()
    assert [word for word in lines[0].split()] == ["producer", "network", "broker"]
    assert drawn.count("►") == 2
    assert drawn.count("◄") == 2
    assert drawn.count("✗") == 1
    assert "stored at 0–2; answer lost, connection cut" in drawn
    assert "┄ the producer connects again ┄" in drawn


def test_the_svg_is_well_formed_and_holds_every_message() -> None:
    steps = plan(LOST_ACK)
    root = ElementTree.fromstring(draw_svg(steps, "A story <told>", ["stored once"]))
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for step in steps:
        assert step.text in texts
    assert {"A story <told>", "stored once", "producer", "network", "broker"} <= set(texts)


def test_a_line_of_the_proxy_shows_message_and_fate() -> None:
    line = " ".join(format_line(replace(LOST_ACK[1], number=2, time_ms=1.5)).split())
    assert line == "2 1.5 1 1 ← Produce answer t-0 ok offset 0 [LOST, connection cut]"
    assert "# the producer connects again" in format_line(LOST_ACK[2])
