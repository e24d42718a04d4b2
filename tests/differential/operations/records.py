"""Reads: Fetch with its limits, sessions and isolation levels; ListOffsets, DeleteRecords and leader epochs.

Before and between the reads, one producer writes plain batches and another writes transactions. So the log
has aborted ranges, and an open transaction at which read_committed readers stop.
"""

from __future__ import annotations

from random import Random
from typing import Any

from differential.operations.observing import WHOLE, observe_partitions
from differential.sequence import Body, Rule, Sequence, Step, Subject, batch, name, ref, topic, topic_id

TOPICS: dict[str, dict[str, Any]] = {
    # The timestamps of the records are old, so retention must not delete them during a sequence. Their age
    # must also not begin a new segment, because a Fetch response ends at the end of a segment.
    "T": {"partitions": 2, "retention.ms": -1, "segment.ms": 10**13},
    "U": {"partitions": 1, "retention.ms": -1, "segment.ms": 10**13},
}
PLACES = [("T", 0), ("T", 0), ("T", 1), ("U", 0)]
BINDS = {"A.pid": "producer_id", "A.epoch": "producer_epoch"}
OLD_MS, NEW_MS = 1_000_000, 2_000_000
"""Timestamps of records. They are old, so that look-ups by time do not depend on the time of the run."""


class Drawing:
    """The steps drawn so far for one sequence."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.steps: list[Step] = []
        self.sequences: dict[tuple[str, int], int] = {}
        self.session_epoch: int | None = None
        self.session_version = random.choice((12, 11, 7))
        self.is_open = self.has_deleted = False

    def is_odd(self, percent: float) -> bool:
        return self.random.random() * 100 < percent

    def add(self, api: str, version: int, body: Body, **more: Any) -> None:
        self.steps.append(Step(api, version, body, **more))

    def place(self) -> tuple[str, int]:
        if self.is_odd(3):
            return self.random.choice((("T", 9), ("missing", 0)))
        return self.random.choice(PLACES)

    def offset(self) -> int:
        return self.random.choice((0, 0, 0, 1, 2, 3, 5, 8, 100, -1, -2) if self.is_odd(40) else (0, 1, 2, 3))

    def write(self) -> None:
        text, index = self.random.choice(PLACES)
        count = self.random.choice((1, 2, 3))
        size = self.random.choice((1, 1, 50, 400))
        time_ms = self.random.choice((OLD_MS, NEW_MS, OLD_MS + self.random.randrange(100)))
        records = {
            "values": [f"{len(self.steps)}-{i}" + "x" * size for i in range(count)],
            "time": time_ms,
            "step": self.random.choice((0, 1, -1)),
            "codec": self.random.choice(("none", "none", "none", "lz4")),
        }
        transactional_id = None
        if self.is_odd(50):
            sequence = self.sequences.get((text, index), 0)
            self.sequences[text, index] = sequence + count
            self.is_open = True
            transactional_id = name("x")
            pid, epoch = ref("A.pid", 7_777), ref("A.epoch", 0)
            records |= {"pid": pid, "epoch": epoch, "seq": sequence, "transactional": True}
        data = {
            "name": topic(text),
            "topic_id": topic_id(text),
            "partition_data": [{"index": index, "records": batch(**records)}],
        }
        body = {"transactional_id": transactional_id, "acks": -1, "timeout_ms": 10_000, "topic_data": [data]}
        passing = ("CONCURRENT_TRANSACTIONS", "NOT_LEADER_OR_FOLLOWER", "NOT_COORDINATOR")
        self.add("Produce", 12, body, passing=passing)

    def end(self) -> None:
        body = {
            "transactional_id": name("x"),
            "producer_id": ref("A.pid", 7_777),
            "producer_epoch": ref("A.epoch", 0),
        }
        self.add("EndTxn", 5, body | {"committed": self.is_odd(50)}, binds=BINDS)
        self.sequences.clear()
        self.is_open = False

    def fetch_partition(self, index: int) -> Body:
        return {
            "partition": index,
            "current_leader_epoch": self.random.choice((-1, -1, -1, -1, 0, 1, -2)),
            "fetch_offset": self.offset(),
            "last_fetched_epoch": self.random.choice((-1, -1, -1, -1, -1, 0, 1)),
            "log_start_offset": -1,
            "partition_max_bytes": self.random.choice((1 << 20, 1 << 20, 300, 100, 1, 0)),
        }

    def fetch(self) -> None:
        version = self.random.choice((12, self.random.randint(4, 18)))
        places = sorted({self.place() for _ in range(self.random.choice((1, 1, 2, 3)))})
        topics = [
            {
                "topic": topic(text),
                "topic_id": topic_id(text),
                "partitions": [self.fetch_partition(index) for other, index in places if other == text],
            }
            for text in dict(places)
        ]
        body: Body = {
            "max_wait_ms": 0,
            "min_bytes": self.random.choice((0, 1, 1, 1 << 20)),
            "max_bytes": self.random.choice((2**31 - 1, 2**31 - 1, 1 << 20, 500, 100, 0)),
            "isolation_level": self.random.choice((0, 1)),
            "topics": topics,
        }
        binds = {}
        if version >= 7 and self.is_odd(50):
            version = self.session_version
            body |= self.session(places)
            # Set limits that are large enough for all partitions of the session. In a smaller response, each
            # broker has its own order of partitions.
            body["max_bytes"] = 2**31 - 1
            for row in body["topics"]:
                for part in row["partitions"]:
                    part["partition_max_bytes"] = WHOLE
            binds = {"S.id": "session_id"}
        self.add("Fetch", version, body, binds=binds)

    def session(self, asked: list[tuple[str, int]]) -> Body:
        """Return the fields that begin a new fetch session, or continue the existing one.

        All versions drawn with sessions use topic names and not ids.
        """
        if self.session_epoch is None or self.is_odd(15):
            self.session_epoch = 0
        else:
            self.session_epoch += 1 if not self.is_odd(5) else 2
        fields: Body = {
            "session_id": ref("S.id", 77) if self.session_epoch else 0,
            "session_epoch": self.session_epoch,
        }
        if self.session_epoch and self.is_odd(20):
            text, index = self.random.choice(
                [place for place in PLACES if place not in asked] or [("missing", 1)]
            )
            fields["forgotten_topics_data"] = [
                {"topic": topic(text), "topic_id": topic_id(text), "partitions": [index]}
            ]
        if self.is_odd(5):
            fields["session_epoch"] = -1
            self.session_epoch = None
        if self.session_epoch and self.is_odd(50):
            fields["topics"] = []
        return fields

    def list_offsets(self) -> None:
        rows: dict[str, list[Body]] = {}
        for text, index in sorted({self.place() for _ in range(self.random.choice((1, 2, 3)))}):
            timestamp = self.random.choice(
                (-1, -2, -3, -4, -1, OLD_MS, NEW_MS, OLD_MS + 5, NEW_MS + 5, 0, -5, -6)
            )
            if self.has_deleted and (timestamp >= 0 or timestamp == -3):
                timestamp = -1  # see "Behind deleted records" in docs/differences.md
            epoch = self.random.choice((-1, -1, -1, 0, 1, -2))
            part = {"partition_index": index, "current_leader_epoch": epoch, "timestamp": timestamp}
            rows.setdefault(text, []).append(part)
        topics = [{"name": topic(text), "partitions": parts} for text, parts in rows.items()]
        body = {"replica_id": -1, "isolation_level": self.random.choice((0, 1)), "topics": topics}
        self.add("ListOffsets", self.random.randint(1, 11), body)

    def delete(self) -> None:
        """Draw DeleteRecords. Draw nothing while a transaction is open, because Kafka's last stable offset
        would become too low.
        """
        if self.is_open:
            return
        self.has_deleted = True
        rows: dict[str, list[Body]] = {}
        for text, index in sorted({self.place() for _ in range(self.random.choice((1, 1, 2)))}):
            offset = self.random.choice((0, 1, 2, 3, 5, -1, -1, 100, -2))
            rows.setdefault(text, []).append({"partition_index": index, "offset": offset})
        topics = [{"name": topic(text), "partitions": parts} for text, parts in rows.items()]
        self.add("DeleteRecords", self.random.randint(0, 2), {"topics": topics, "timeout_ms": 10_000})

    def epochs(self) -> None:
        rows: dict[str, list[Body]] = {}
        for text, index in sorted({self.place() for _ in range(self.random.choice((1, 2)))}):
            part = {"partition": index, "current_leader_epoch": self.random.choice((-1, -1, 0, 1))}
            part["leader_epoch"] = self.random.choice((0, 0, 1, -1, 5))
            rows.setdefault(text, []).append(part)
        topics = [{"topic": topic(text), "partitions": parts} for text, parts in rows.items()]
        self.add("OffsetForLeaderEpoch", self.random.randint(2, 4), {"replica_id": -1, "topics": topics})


def draw(random: Random) -> Sequence:
    """Draw writes first, then reads, with writes, ends of transactions and deletions between them."""
    d = Drawing(random)
    d.add("InitProducerId", 5, {"transactional_id": name("x"), "transaction_timeout_ms": 60_000}, binds=BINDS)
    for _ in range(random.randint(3, 6)):
        d.write()
    operations = [d.fetch, d.list_offsets, d.delete, d.epochs, d.write, d.end]
    for _ in range(random.randint(6, 16)):
        random.choices(operations, (10, 5, 2, 2, 5, 3))[0]()
    return Sequence("records", 0, TOPICS, tuple(d.steps), tuple(observe_partitions(TOPICS)))


def _is_kafkas_cut(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    """Return True if Kafka's response has no records for this partition, because an incomplete batch of an
    earlier partition filled the response up to the limit.
    """
    is_limited = step.api == "Fetch" and step.body.get("max_bytes", WHOLE) < WHOLE
    return is_limited and path.endswith(".records") and theirs == [] and bool(ours)


RULES = (
    Rule(
        "a cut batch takes room",
        "Kafka sends the beginning of the batch at the limit, and nothing of later partitions",
        _is_kafkas_cut,
        key="no-cut-batches",
    ),
)
SUBJECTS = (Subject("records", draw, RULES, weight=3),)
