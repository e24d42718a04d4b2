"""Numbered batches outside transactions: repetitions, gaps, epochs, sequences that wrap, damaged batches.

The drawn batches are kept, so that an earlier one can be repeated unchanged: one of the last five, or an
older one. Sequences begin at 0 or near 2^31. The topics have different settings, such as compaction.
"""

from __future__ import annotations

from random import Random
from typing import Any

from differential.operations.observing import observe_partitions
from differential.sequence import Body, Rule, Sequence, Step, Subject, answers, ref, topic, topic_id

WRONG_ID = 7_777_777_777_777
TOPICS: dict[str, dict[str, Any]] = {
    "T": {"partitions": 2, "retention.ms": -1},
    "stamped": {"partitions": 1, "message.timestamp.type": "LogAppendTime"},
    "small": {"partitions": 1, "max.message.bytes": 200, "retention.ms": -1},
}
PLACES = [("T", 0), ("T", 0), ("T", 1), ("stamped", 0), ("small", 0)]
LARGEST = 2**31


class Numbers:
    """The batches drawn so far for one producer and one partition."""

    def __init__(self, first: int) -> None:
        self.next, self.epoch_plus = first, 0
        self.sent: list[Body] = []


class Drawing:
    """The steps drawn so far for one sequence."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.producers = ["A", "B"][: random.choice((1, 1, 2))]
        self.numbers: dict[tuple[str, str, int], Numbers] = {}
        self.steps: list[Step] = []

    def is_odd(self, percent: float) -> bool:
        return self.random.random() * 100 < percent

    def init(self, label: str) -> None:
        body = {"transactional_id": None, "transaction_timeout_ms": 60_000}
        binds = {f"{label}.pid": "producer_id", f"{label}.epoch": "producer_epoch"}
        version = self.random.randint(0, 5)
        if version >= 3 and self.is_odd(20):
            body |= {"producer_id": ref(f"{label}.pid", -1), "producer_epoch": ref(f"{label}.epoch", -1)}
        self.steps.append(Step("InitProducerId", version, body, binds=binds))
        self.numbers = {key: value for key, value in self.numbers.items() if key[0] != label}

    def records(self, label: str, place: tuple[str, int]) -> Body:
        """Draw one batch: mostly the next one, otherwise an earlier or an invalid one."""
        first = self.random.choice((0, 0, 0, LARGEST - 4, LARGEST - 1, 7))
        numbers = self.numbers.setdefault((label, *place), Numbers(first))
        if numbers.sent and self.is_odd(25):
            return self.random.choice(numbers.sent[-7:])
        if self.is_odd(6):
            # Change the epoch. The first batch of the new epoch mostly has sequence 0, as it should.
            numbers.epoch_plus += self.random.choice((1, 1, 2, -1))
            numbers.next = 0 if not self.is_odd(20) else numbers.next
        count = self.random.choice((1, 1, 2, 3, 8))
        sequence = numbers.next
        if self.is_odd(10):
            sequence = (sequence + self.random.choice((-2, -1, 1, 2, 5))) % LARGEST
        else:
            numbers.next = (sequence + count) % LARGEST
        options = {
            "values": [f"{label}{sequence}-{i}" for i in range(count)],
            "pid": ref(f"{label}.pid", WRONG_ID),
            "epoch": self.epoch(label, numbers.epoch_plus),
            "seq": sequence,
            "codec": self.random.choice(("none", "none", "gzip", "zstd", "lz4", "snappy")),
        }
        batch = {"$batch": options}
        numbers.sent.append(batch)
        return self.broken(options) if self.is_odd(7) else batch

    def epoch(self, label: str, plus: int) -> Any:
        if self.is_odd(3):
            return self.random.choice((32767, 32766))
        return ref(f"{label}.epoch", 0, plus) | {"floor": 0}

    def broken(self, options: Body) -> Body:
        """Draw a batch with a header that both brokers refuse, or several batches in one request."""
        wrong = self.random.choice(
            (
                {"crc": "bad"},
                {"cut": 1},
                {"cut": 30},
                {"header": {"magic": 1}},
                {"header": {"base_sequence": -1}},
                {"header": {"records_count": len(options["values"]) + 1}},
                {"header": {"last_offset_delta": len(options["values"])}},
                {"control": True},
                {"time": 1},
                None,
            )
        )
        if wrong is None:
            return {"$batches": [options, options]}
        return {"$batch": options | wrong}

    def produce(self) -> None:
        label = self.random.choice(self.producers)
        places = sorted({self.random.choice(PLACES) for _ in range(self.random.choice((1, 1, 1, 2, 3)))})
        if self.is_odd(3):
            places.append(("missing", 0))
        data = [
            {
                "name": topic(text),
                "topic_id": topic_id(text),
                "partition_data": [
                    {"index": index, "records": self.records(label, (text, index))}
                    for other, index in places
                    if other == text
                ],
            }
            for text in dict(places)
        ]
        acks = self.random.choice((-1, -1, -1, -1, 1, 0)) if not self.is_odd(2) else 2
        body = {"transactional_id": None, "acks": acks, "timeout_ms": 10_000, "topic_data": data}
        self.steps.append(Step("Produce", self.random.choice((13, self.random.randint(3, 13))), body))


def draw(random: Random) -> Sequence:
    """Draw the batches of up to two producers, which sometimes get a new producer id."""
    d = Drawing(random)
    for label in d.producers:
        d.init(label)
    for _ in range(random.randint(8, 22)):
        if d.is_odd(4):
            d.init(random.choice(d.producers))
        else:
            d.produce()
    return Sequence("idempotence", 0, TOPICS, tuple(d.steps), tuple(observe_partitions(TOPICS)))


RULES = (
    Rule(
        "a batch that is wrong in two ways",
        "either error is true: two batches in one, with a codec that the request may not use",
        answers("Produce", ours="INVALID_RECORD", theirs="UNSUPPORTED_COMPRESSION_TYPE"),
        key="A batch that is wrong in two ways",
    ),
)
SUBJECTS = (Subject("idempotence", draw, RULES, weight=2),)
