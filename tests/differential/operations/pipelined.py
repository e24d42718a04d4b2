"""Sequences of other subjects, in which requests are sent before earlier responses are read.

Two to six requests are in flight on one connection. Produce requests keep the gaps and repetitions of their
subject. After a request that begins or ends a transaction, the run waits for the response, because the time
until the transaction is complete in the background varies.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

from differential.operations import idempotence, offsets, records
from differential.sequence import Body, Sequence, Step, Subject, batch, ref, topic, topic_id

WAITED_FOR = ("InitProducerId", "EndTxn", "AddOffsetsToTxn")
BASES = (*idempotence.SUBJECTS, *records.SUBJECTS, *offsets.SUBJECTS)


def draw(random: Random) -> Sequence:
    """Draw a sequence of another subject with pipelined requests, or one with five batches in flight, of
    which some are lost.
    """
    if random.random() < 0.3:
        return _five_in_flight(random)
    (base,) = random.choices(BASES, (3, 1, 1))
    sequence = base.draw(random)
    steps: list[Step] = []
    in_flight = 0
    for step, following in itertools.pairwise((*sequence.steps, Step(connection="none"))):
        if in_flight == 0:
            in_flight = random.choice((0, 2, 3, 4, 5, 6))
        # Do not pipeline across connections: another connection's request must be sent after these have been
        # answered.
        is_alone = step.parks or following.parks or following.connection != step.connection
        is_last = in_flight <= 1 or is_alone or step.api in WAITED_FOR
        in_flight = 0 if is_last else in_flight - 1
        # Replace acks=0: if such a request is refused, the connection ends at an unpredictable time.
        body = step.body | {"acks": 1} if step.body.get("acks") == 0 else step.body
        steps.append(step._replace(is_awaited=is_last, body=body))
    return sequence._replace(steps=tuple(steps))


def _five_in_flight(random: Random) -> Sequence:
    """Draw the requests of a producer with five batches in flight.

    Up to two of them are lost, and then all five are sent again.
    """
    first = random.choice((0, 0, 2**31 - 3))
    count = random.choice((1, 2))
    place = random.choice((("T", 0), ("T", 0), ("small", 0)))
    version = random.choice((3, 7, 9, 12, 13))
    flight = [_produce(place, version, first + i * count, count) for i in range(5)]
    init = {"transactional_id": None, "transaction_timeout_ms": 60_000}
    binds = {"A.pid": "producer_id", "A.epoch": "producer_epoch"}
    steps = [Step("InitProducerId", 4, init, binds=binds)]
    if random.random() < 0.5:
        # Make the producer known to the partition.
        steps.append(_produce(place, version, first - count, count))
    lost = random.sample(range(5), random.choice((0, 1, 1, 2)))
    steps += [step._replace(is_awaited=False) for number, step in enumerate(flight) if number not in lost]
    repeated = list(range(5)) if random.random() < 0.7 else random.sample(range(5), 5)
    steps += [flight[number]._replace(is_awaited=random.random() < 0.3) for number in repeated]
    steps += [_produce(place, version, first + 5 * count, count)]
    observations = idempotence.observe_partitions(idempotence.TOPICS)
    return Sequence("pipelined", 0, idempotence.TOPICS, tuple(steps), tuple(observations))


def _produce(place: tuple[str, int], version: int, sequence: int, count: int) -> Step:
    """Return a Produce request with one batch of `count` records. Sequences above 2^31-1 continue at 0."""
    text, index = place
    options: dict[str, Any] = {"pid": ref("A.pid", idempotence.WRONG_ID), "epoch": ref("A.epoch", 0)}
    options |= {"seq": sequence % 2**31, "values": [f"{sequence}-{i}" for i in range(count)]}
    data: Body = {"name": topic(text), "topic_id": topic_id(text)}
    data["partition_data"] = [{"index": index, "records": batch(**options)}]
    return Step("Produce", version, {"acks": -1, "timeout_ms": 10_000, "topic_data": [data]})


RULES = tuple(rule for base in BASES for rule in base.rules)
SUBJECTS = (Subject("pipelined", draw, RULES),)
