"""Transactions: producers, their epochs, partitions, offsets and ends, and the actions of operators on them.

Two or three instances share one or two transactional ids, each with the request versions of one kind of
client. It is either classic (Produce 11, EndTxn 4) or has an epoch per transaction (Produce 12, EndTxn 5).
Most steps are the next ones of a correct client. Some have a stale epoch or a gap in the sequence, or come
too early.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from differential.operations.observing import (
    fetch_body,
    list_offsets_body,
    observe_offsets,
    observe_partitions,
    observe_transactions,
)
from differential.sequence import (
    Body,
    Rule,
    Sequence,
    Step,
    Subject,
    answers,
    batch,
    name,
    ref,
    topic,
    topic_id,
)

WRONG_ID = 7_777_777_777_777
TOPICS: dict[str, dict[str, Any]] = {"T": {"partitions": 2}, "U": {"partitions": 1}}
PLACES = [("T", 0), ("T", 1), ("U", 0)]
MISSING_PLACES = [("T", 2), ("missing", 0), ("T", -1)]
GROUPS = ["G", "H"]
CLASSIC = {"Produce": (3, 11), "EndTxn": (0, 4), "TxnOffsetCommit": (0, 4)}
EPOCH = {"Produce": (12, 13), "EndTxn": (5, 5), "TxnOffsetCommit": (5, 5)}


class Producer:
    """The state of a producer instance, on the assumption that all its requests succeed."""

    def __init__(self, label: str, transactional_id: str, versions: dict[str, tuple[int, int]]) -> None:
        self.label, self.transactional_id, self.versions = label, transactional_id, versions
        self.sequences: dict[tuple[str, int], int] = {}
        self.added: set[tuple[str, int]] = set()
        self.is_started = False

    @property
    def raises_epoch(self) -> bool:
        return self.versions is EPOCH

    def begin_epoch(self) -> None:
        self.sequences.clear()
        self.added.clear()


class Drawing:
    """The steps drawn so far for one sequence."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ids = ["x", "y"][: random.choice((1, 1, 2))]
        self.producers = [
            Producer(label, random.choice(self.ids), random.choice((CLASSIC, EPOCH)))
            for label in "ABC"[: random.choice((1, 2, 2, 3))]
        ]
        self.steps: list[Step] = []

    def add(self, api: str, version: int, body: Body, **more: Any) -> None:
        self.steps.append(Step(api, version, body, **more))

    def is_odd(self, percent: float = 6) -> bool:
        """Return True with this probability in percent. The caller then draws an invalid step."""
        return self.random.random() * 100 < percent

    def version(self, producer: Producer, api: str, limits: tuple[int, int] | None = None) -> int:
        if limits is None:
            versions = producer.versions
            if self.is_odd(4):
                versions = CLASSIC if producer.raises_epoch else EPOCH
            limits = versions[api]
        return self.random.choice((limits[1], self.random.randint(*limits)))

    def producer_id(self, producer: Producer) -> Any:
        if self.is_odd(3):
            other = self.random.choice(self.producers)
            return self.random.choice((ref(f"{other.label}.pid", WRONG_ID), WRONG_ID, -1, 0))
        return ref(f"{producer.label}.pid", WRONG_ID)

    def epoch(self, producer: Producer) -> Any:
        variable = f"{producer.label}.epoch"
        if self.is_odd(7):
            return self.random.choice(
                (ref(variable, 0, -1), ref(variable, 0, 1), ref(variable, 0, 2), -1, 0, 32766, 32767)
            )
        return ref(variable, 0)

    def batch_epoch(self, producer: Producer) -> Any:
        """Return a reference to the epoch for a batch. It is never -1: see `producer-without-epoch` in
        docs/differences.md.
        """
        epoch = self.epoch(producer)
        return (
            3
            if epoch == -1
            else epoch
            if isinstance(epoch, int) or epoch["plus"] >= 0
            else epoch | {"floor": 0}
        )

    def batch_producer_id(self, producer: Producer) -> Any:
        """Return a reference to the producer id for a batch. It is never -1, which means a batch without a
        producer.
        """
        value = self.producer_id(producer)
        return WRONG_ID if value == -1 else value

    def identity(self, producer: Producer) -> Body:
        transactional_id = name(producer.transactional_id)
        if self.is_odd(3):
            transactional_id = self.random.choice((name("x"), name("y"), name("unknown"), ""))
        return {
            "transactional_id": transactional_id,
            "producer_id": self.producer_id(producer),
            "producer_epoch": self.epoch(producer),
        }

    def place(self) -> tuple[str, int]:
        return self.random.choice(MISSING_PLACES if self.is_odd(3) else PLACES)

    def binds(self, producer: Producer) -> dict[str, str]:
        return {f"{producer.label}.pid": "producer_id", f"{producer.label}.epoch": "producer_epoch"}


def init(d: Drawing, producer: Producer) -> None:
    version = d.version(producer, "InitProducerId", (0, 5))
    body: Body = {
        "transactional_id": name(producer.transactional_id),
        "transaction_timeout_ms": d.random.choice((0, -1, 900_001, 2**31 - 1, 900_000))
        if d.is_odd(3)
        else 60_000,
    }
    if d.is_odd(3):
        body["transactional_id"] = d.random.choice((None, "", name("x")))
    if version >= 3 and producer.is_started and d.random.random() < 0.5:
        identity = d.identity(producer)
        body |= {"producer_id": identity["producer_id"], "producer_epoch": identity["producer_epoch"]}
    elif version >= 3 and d.is_odd(4):
        body |= {
            "producer_id": d.random.choice((-1, WRONG_ID, 0)),
            "producer_epoch": d.random.choice((-1, 0, 5)),
        }
    d.add("InitProducerId", version, body, binds=d.binds(producer))
    producer.is_started = True
    producer.begin_epoch()


def add_partitions(d: Drawing, producer: Producer) -> None:
    places = sorted({d.place() for _ in range(d.random.choice((1, 1, 2, 3)))})
    topics = [
        {"name": topic(text), "partitions": [index for other, index in places if other == text]}
        for text in dict(places)
    ]
    identity = d.identity(producer)
    if d.random.random() < 0.75:
        body = {f"v3_and_below_{key}": value for key, value in identity.items()}
        d.add("AddPartitionsToTxn", d.version(producer, "", (0, 3)), body | {"v3_and_below_topics": topics})
        producer.added.update(places)
        return
    rows = [identity | {"verify_only": d.random.random() < 0.6, "topics": topics}]
    if d.random.random() < 0.3:
        other = d.random.choice(d.producers)
        rows.append(d.identity(other) | {"verify_only": d.random.random() < 0.5, "topics": topics})
    d.add("AddPartitionsToTxn", d.version(producer, "", (4, 5)), {"transactions": rows})


def add_offsets(d: Drawing, producer: Producer) -> None:
    group = "" if d.is_odd(3) else name(d.random.choice(GROUPS))
    d.add("AddOffsetsToTxn", d.version(producer, "", (0, 4)), d.identity(producer) | {"group_id": group})


def commit_offsets(d: Drawing, producer: Producer) -> None:
    places = sorted({d.place() for _ in range(d.random.choice((1, 1, 2)))})
    topics = [
        {
            "name": topic(text),
            "partitions": [
                {
                    "partition_index": index,
                    "committed_offset": d.random.choice((0, 1, 5, 1 << 40, -1) if d.is_odd(9) else (1, 5, 9)),
                    "committed_leader_epoch": d.random.choice((-1, 0)),
                    "committed_metadata": d.random.choice(("", "note", None, "m" * 4097))
                    if d.is_odd(10)
                    else "",
                }
                for other, index in places
                if other == text
            ],
        }
        for text in dict(places)
    ]
    body = d.identity(producer) | {
        "group_id": "" if d.is_odd(3) else name(d.random.choice(GROUPS)),
        "generation_id": d.random.choice((0, 1, -2)) if d.is_odd(5) else -1,
        "member_id": "stranger" if d.is_odd(5) else "",
        "group_instance_id": "instance" if d.is_odd(3) else None,
        "topics": topics,
    }
    d.add("TxnOffsetCommit", d.version(producer, "TxnOffsetCommit"), body)


def produce(d: Drawing, producer: Producer) -> None:
    places = sorted({d.place() for _ in range(d.random.choice((1, 1, 1, 2, 3)))})
    is_transactional = not d.is_odd(6)
    rows: dict[str, list[Body]] = {}
    for place in places:
        rows.setdefault(place[0], []).append(
            {"index": place[1], "records": _records(d, producer, place, is_transactional)}
        )
    body = {
        "transactional_id": name(producer.transactional_id) if is_transactional else None,
        "acks": -1,
        "timeout_ms": 10_000,
        "topic_data": [
            {"name": topic(text), "topic_id": topic_id(text), "partition_data": parts}
            for text, parts in rows.items()
        ],
    }
    if d.is_odd(4):
        body["transactional_id"] = d.random.choice((None, name("x"), name("y"), name("unknown")))
    passing = ("CONCURRENT_TRANSACTIONS", "NOT_ENOUGH_REPLICAS", "NOT_LEADER_OR_FOLLOWER", "NOT_COORDINATOR")
    d.add("Produce", d.version(producer, "Produce"), body, passing=passing)


def _records(d: Drawing, producer: Producer, place: tuple[str, int], is_transactional: bool) -> Body:
    count = d.random.choice((1, 1, 2, 3))
    sequence = producer.sequences.get(place, 0)
    if d.is_odd(8):
        sequence = d.random.choice((0, sequence + 1, max(0, sequence - count), 5, 2**31 - 1))
    else:
        producer.sequences[place] = sequence + count
    # Outside transactions, a broker accepts any epoch. An epoch above the coordinator's would make the
    # partition refuse the coordinator's markers. So use the producer's own epoch.
    epoch = d.batch_epoch(producer) if is_transactional else ref(f"{producer.label}.epoch", 0)
    return batch(
        values=[f"{producer.label}{sequence}-{i}" for i in range(count)],
        pid=d.batch_producer_id(producer),
        epoch=epoch,
        seq=sequence,
        transactional=is_transactional,
        codec="gzip" if d.is_odd(5) else "none",
    )


def end(d: Drawing, producer: Producer) -> None:
    body = d.identity(producer) | {"committed": d.random.random() < 0.6}
    version = d.version(producer, "EndTxn")
    d.add("EndTxn", version, body, binds=d.binds(producer) if version >= 5 else {})
    if d.is_odd(12):
        d.add("EndTxn", version, body, binds=d.binds(producer) if version >= 5 else {})
    if version >= 5:
        producer.begin_epoch()
    producer.added.clear()


def write_markers(d: Drawing, producer: Producer) -> None:
    text, index = d.random.choice(PLACES)
    # Draw no epoch above the coordinator's. On Kafka, the partition would then refuse the coordinator's own
    # markers forever.
    marker = {
        "producer_id": d.producer_id(producer),
        "producer_epoch": ref(f"{producer.label}.epoch", 0, -1 if d.is_odd(10) else 0),
        "transaction_result": d.is_odd(20),
        "topics": [{"name": topic(text), "partition_indexes": [index]}],
        "coordinator_epoch": d.random.choice((-1, 0, 0, 0)),
        "transaction_version": d.random.choice((0, 1, 2, 2)),
    }
    d.add("WriteTxnMarkers", d.version(producer, "", (1, 2)), {"markers": [marker]})


def describe(d: Drawing, producer: Producer) -> None:
    choice = d.random.randrange(6)
    if choice == 0:
        ids = [name(text) for text in (*d.ids, *(["unknown"] if d.is_odd(30) else []))]
        d.add("DescribeTransactions", 0, {"transactional_ids": [*ids, *([""] if d.is_odd(10) else [])]})
    elif choice == 1:
        states = ["Ongoing", "Empty", "CompleteCommit", "CompleteAbort", "PrepareCommit", "Dead", "Nonsense"]
        body = {
            "state_filters": d.random.sample(states, d.random.choice((0, 0, 1, 2))),
            "producer_id_filters": [ref(f"{other.label}.pid", WRONG_ID) for other in d.producers],
            "duration_filter": d.random.choice((-1, -1, 3_600_000)),
        }
        d.add("ListTransactions", d.version(producer, "", (0, 2)), body)
    elif choice == 2:
        places = [d.place() for _ in range(2)]
        topics = [{"name": topic(text), "partition_indexes": [index]} for text, index in dict(places).items()]
        d.add("DescribeProducers", 0, {"topics": topics})
    elif choice == 3:
        isolation = d.random.choice((0, 1, 1))
        body = list_offsets_body(TOPICS, d.random.choice((-1, -1, -2, -3)), isolation)
        d.add("ListOffsets", d.version(producer, "", (7, 11)), body)
    elif choice == 4:
        text, index = d.place()
        body = fetch_body(
            [(text, index, d.random.choice((0, 0, 0, 1, 2, 5)))], isolation=d.random.choice((0, 1))
        )
        d.add("Fetch", d.version(producer, "", (4, 18)), body)
    else:
        group = {"group_id": name(d.random.choice(GROUPS)), "topics": None}
        d.add("OffsetFetch", 8, {"groups": [group], "require_stable": d.random.random() < 0.5})


OPERATIONS: list[tuple[int, Callable[[Drawing, Producer], None]]] = [
    (8, init), (10, add_partitions), (6, add_offsets), (8, commit_offsets), (26, produce), (18, end),
    (5, write_markers), (12, describe),
]  # fmt: skip


def draw(random: Random) -> Sequence:
    """Draw the steps of up to three producer instances."""
    d = Drawing(random)
    weights = [weight for weight, _ in OPERATIONS]
    for _ in range(random.randint(6, 18)):
        producer = random.choice(d.producers)
        if not producer.is_started and not d.is_odd(4):
            init(d, producer)
            continue
        (operation,) = random.choices([operation for _, operation in OPERATIONS], weights)
        if operation is produce and not producer.raises_epoch and not producer.added and not d.is_odd(10):
            operation = add_partitions
        operation(d, producer)
    observations = [*observe_transactions(d.ids), *observe_partitions(TOPICS), *observe_offsets(GROUPS)]
    return Sequence("transactions", 0, TOPICS, tuple(d.steps), tuple(observations))


WRONG_IN_TWO_WAYS = [
    {"INVALID_PRODUCER_EPOCH", other}
    for other in ("INVALID_TXN_STATE", "TRANSACTION_ABORTABLE", "INVALID_PRODUCER_ID_MAPPING")
]


def _is_fenced_end(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    if (step.api, step.version) != ("EndTxn", 5):
        return False
    is_code = path.endswith("error_code") and ours == "PRODUCER_FENCED"
    return (is_code and theirs in ("NONE", "INVALID_TXN_STATE", "CONCURRENT_TRANSACTIONS")) or (
        path.endswith(("producer_id", "producer_epoch")) and ours == -1
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "the end of a producer that a newer instance fenced",
        "it would share the newer instance's epoch",
        _is_fenced_end,
        key="An EndTxn of version 5 by a producer that a newer instance fenced",
        ends=True,
    ),
    Rule(
        "a transactional batch that is wrong in two ways",
        "either error is true",
        lambda step, ours, theirs, path: (
            step.api == "Produce" and path.endswith("error_code") and {ours, theirs} in WRONG_IN_TWO_WAYS
        ),
        key="A transactional batch that is wrong in two ways",
    ),
    Rule(
        "a group whose only offsets were aborted",
        "no such group is kept",
        answers("TxnOffsetCommit", ours="ILLEGAL_GENERATION", theirs="UNKNOWN_MEMBER_ID"),
        key="A group whose only offsets were of an aborted transaction",
    ),
    Rule(
        "a marker without a producer",
        "the code says whose fault it is",
        answers("WriteTxnMarkers", ours="CORRUPT_MESSAGE", theirs="UNKNOWN_SERVER_ERROR"),
        key="WriteTxnMarkers for producer id -1",
    ),
)
SUBJECTS = (Subject("transactions", draw, RULES, weight=4),)
