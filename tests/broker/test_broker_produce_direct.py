"""The fast path for plain Produce requests returns the same bytes as `produce`, or leaves a request to
`produce`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broker import batch, produce_request

from oncelog.broker.dispatch import handle
from oncelog.broker.handlers.produce_direct import FIRST_ID_VERSION, FIRST_VERSION, LAST_VERSION, answer
from oncelog.broker.metrics import Metrics
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import UnknownTopicId
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.runtime.clock import Clock
from oncelog.server.embedded import open_node
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import decode_request, encode_request, encode_response
from oncelog.wire.messages import ProduceRequest, ProduceResponse
from oncelog.wire.records import NewRecord

NOW_MS = 1_700_000_000_000
VERSIONS = range(FIRST_VERSION, LAST_VERSION + 1)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[BrokerState]:
    yield from new_node(tmp_path / "data")


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[BrokerState]:
    """Open a second broker. It gets the same requests as the first, but handles all of them with
    `produce`.
    """
    yield from new_node(tmp_path / "twin")


class StoppedClock(Clock):
    """A clock that stands still, so that two nodes assign the same producer ids."""

    def now_ms(self) -> int:
        return NOW_MS


def new_node(data_dir: Path) -> Iterator[BrokerState]:
    opened = open_node(data_dir, BROKER.parse({}), StoppedClock())
    create(opened, "t", 3)
    yield opened
    opened.close(NOW_MS)


def create(node: BrokerState, name: str, partition_count: int, **settings: str) -> None:
    """Create a topic whose id follows from its name, so that the topics of both brokers have the same id."""
    new_uuid, node.topics._new_uuid = node.topics._new_uuid, lambda: id_of(name)
    node.topics.create(name, partition_count, settings, NOW_MS)
    node.topics._new_uuid = new_uuid


def id_of(name: str) -> bytes:
    return name.encode().ljust(16, b"\1")


def frame(
    records: bytes | bytearray | None,
    version: int = 9,
    *,
    topic: str = "t",
    number: int = 1,
    **fields: object,
) -> memoryview:
    request = produce_request(topic, records, **fields)  # type: ignore[arg-type]
    return encoded(request, version, number)


def encoded(request: ProduceRequest, version: int, number: int = 1) -> memoryview:
    for each in request.topic_data:
        each.topic_id = id_of(each.name)
    return memoryview(bytearray(encode_request(request, version, number, "client")))[4:]


def numbered(sequence: int, pid: int = 5, **more: object) -> bytearray:
    return batch(b"v", b"w", pid=pid, sequence=sequence, timestamp_ms=NOW_MS, **more)


def general(node: BrokerState, data: memoryview) -> ProduceResponse:
    header, message = decode_request(data)
    answered = handle(node, Request(1, header, message), NOW_MS)
    assert isinstance(answered, ProduceResponse)
    return answered


def end_offset(node: BrokerState, partition: int = 0) -> int:
    topic = node.topics.get("t")
    assert topic is not None
    return topic.partitions[partition].log_end_offset


def damaged(records: bytearray) -> bytearray:
    records[-1] ^= 1
    return records


STREAM = [
    numbered(0),
    numbered(2),
    numbered(0),  # a duplicate
    numbered(9),  # a gap
    numbered(4),
    damaged(numbered(6)),
    numbered(0, epoch=1),
    numbered(6),  # fenced: the batch before has a newer epoch
    numbered(0, pid=6),
    batch(b"not numbered", timestamp_ms=NOW_MS),
    batch(b"too early", timestamp_ms=NOW_MS * 2),
]


@pytest.mark.behaviour("I1", "I7")
@pytest.mark.parametrize("version", VERSIONS)
def test_the_answer_is_what_the_general_way_gives(node: BrokerState, twin: BrokerState, version: int) -> None:
    for number, records in enumerate(STREAM):
        told = general(twin, frame(bytearray(records), version))
        payload = answer(node, frame(bytearray(records), version, number=number), NOW_MS)
        assert payload == encode_response(told, version, number)
    assert end_offset(node) == end_offset(twin) == 11
    assert node.metrics == twin.metrics
    assert (node.metrics.batches_stored, node.metrics.duplicates_acknowledged) == (6, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_several_topics_and_partitions_in_one_request(
    node: BrokerState, twin: BrokerState, version: int
) -> None:
    for each in (node, twin):
        create(each, "another", 2, **{"message.timestamp.type": "LogAppendTime"})
    for sequence in (0, 2, 9):
        batches = [("t", 2, numbered(sequence)), ("t", 0, numbered(0)), ("another", 1, numbered(0, pid=8))]
        told = general(twin, several(batches, version))
        assert answer(node, several(batches, version), NOW_MS) == encode_response(told, version, 1)
    assert [end_offset(node, index) for index in range(3)] == [2, 0, 4]
    assert node.metrics == twin.metrics


def several(batches: list[tuple[str, int, bytearray]], version: int) -> memoryview:
    """Return one request with these batches. Adjacent batches of the same topic share one topic entry."""
    request = produce_request(*batches[0][::2], batches[0][1])
    for topic, index, records in batches[1:]:
        (data,) = produce_request(topic, bytearray(records), index).topic_data
        if request.topic_data[-1].name == topic:
            request.topic_data[-1].partition_data += data.partition_data
        else:
            request.topic_data.append(data)
    return encoded(request, version)


def begun(node: BrokerState) -> ProducerIdAndEpoch:
    """Begin a transaction, store its first batch in partition 0, and return the producer."""
    done = node.transactions.init("id", None, 60_000, NOW_MS)
    who = ProducerIdAndEpoch(done.entry.producer_id, done.entry.producer_epoch)
    node.transactions.add_partitions("id", who, [TopicPartition("t", 0)], NOW_MS)
    general(node, transacted(who, 0))
    return who


def transacted(who: ProducerIdAndEpoch, sequence: int, version: int = 12, **more: Any) -> memoryview:
    """Return a request with one transactional batch. `more` has options of the batch."""
    pid, epoch = more.pop("pid", who.producer_id), more.pop("epoch", who.producer_epoch)
    partition = more.pop("partition", 0)
    records = numbered(sequence, pid, epoch=epoch, is_transactional=True, **more)
    return frame(records, version, partition=partition, transactional_id="id")


@pytest.mark.parametrize("version", VERSIONS)
def test_within_a_transaction_the_answer_is_what_the_general_way_gives(
    node: BrokerState, twin: BrokerState, version: int
) -> None:
    ways = begun(node), begun(twin)
    assert ways[0] == ways[1]
    for sequence in (2, 4, 2, 9, 6):  # a duplicate and a gap among them
        told = general(twin, transacted(ways[1], sequence, version))
        assert answer(node, transacted(ways[0], sequence, version), NOW_MS) == encode_response(
            told, version, 1
        )
    assert end_offset(node) == end_offset(twin) == 8
    assert node.metrics == twin.metrics
    assert (node.metrics.duplicates_acknowledged, node.metrics.out_of_order_refused) == (1, 1)


def test_a_request_that_needs_the_coordinator_is_left_to_the_general_way(node: BrokerState) -> None:
    who = begun(node)
    fenced, other = who.producer_epoch - 1, who.producer_id + 1
    for left in (
        transacted(who, 0, partition=1),  # the request adds this partition to the transaction
        transacted(who, 2, epoch=who.producer_epoch + 1),
        transacted(who, 2, epoch=fenced),
        transacted(who, 2, pid=other),
        frame(numbered(2, who.producer_id, is_transactional=True), 12),  # without a transactional id
        frame(numbered(2, who.producer_id), 12, transactional_id="id"),  # outside of the transaction
    ):
        assert answer(node, left, NOW_MS) is None
    assert answer(node, transacted(who, 2), NOW_MS) is not None
    node.transactions.end("id", who, True, 1, NOW_MS)
    after = end_offset(node)
    assert answer(node, transacted(who, 4), NOW_MS) is None
    assert end_offset(node) == after == 5


@pytest.mark.parametrize("cut", [0, 1, 15])
def test_an_unknown_topic_id_is_left_to_the_general_way(node: BrokerState, cut: int) -> None:
    unknown = frame(numbered(0), FIRST_ID_VERSION, topic="unknown")
    assert answer(node, unknown[: len(unknown) - cut], NOW_MS) is None
    (topic,) = general(node, unknown).responses
    assert topic.topic_id == id_of("unknown")
    assert topic.partition_responses[0].error_code == UnknownTopicId.code
    assert end_offset(node) == 0


@pytest.mark.parametrize("size", [0, 60, 120, 130, 16_000, 17_000, 300_000])
def test_every_length_of_the_batch_is_read(node: BrokerState, size: int) -> None:
    for sequence in range(3):
        records = [NewRecord(NOW_MS, None, bytes(size))]
        sized = build_batch(records, producer_id=9, producer_epoch=0, base_sequence=sequence)
        assert answer(node, frame(sized), NOW_MS) is not None
    assert end_offset(node) == 3


@pytest.mark.parametrize(
    "data",
    [
        frame(numbered(0) + numbered(2)),
        frame(numbered(0) + b"\0" * 70),
        frame(numbered(0)[:70]),
        frame(numbered(0, is_transactional=True)),
        frame(bytearray()),
        frame(None),
        frame(numbered(0), topic="unknown"),
        frame(numbered(0), partition=3),
        frame(numbered(0), partition=-1),
        frame(numbered(0), acks=0),
        frame(numbered(0), acks=2),
        frame(numbered(0), transactional_id="id"),
        frame(numbered(0), VERSIONS[0] - 1),
        memoryview(bytes(frame(numbered(0))) + b"\0"),
    ],
    ids=lambda data: "",
)
def test_a_request_that_is_not_plain_is_left_untouched(node: BrokerState, data: memoryview) -> None:
    assert answer(node, data, NOW_MS) is None
    assert end_offset(node) == 0
    assert node.metrics == Metrics()


def test_bytes_cut_or_flipped_anywhere_never_fail(node: BrokerState) -> None:
    whole = several([("t", 0, numbered(0)), ("t", 1, numbered(0))], 9)
    for end in range(len(whole)):
        assert answer(node, whole[:end], NOW_MS) is None
    assert end_offset(node) == 0
    for position in range(len(whole) - 2 * len(numbered(0))):
        flipped = memoryview(bytearray(whole))
        flipped[position] ^= 0xFF
        answer(node, flipped, NOW_MS)
    assert node.metrics.batches_stored == sum(end_offset(node, index) for index in range(3)) // 2


def test_topic_settings_are_looked_up_each_time(node: BrokerState) -> None:
    topic = node.topics.get("t")
    assert topic is not None
    for overrides in ({"flush.messages": "1"}, {"min.insync.replicas": "2"}):
        node.topics.alter([(topic, overrides)])
        assert answer(node, frame(numbered(0)), NOW_MS) is None
    node.topics.alter([(topic, {})])
    assert answer(node, frame(numbered(0)), NOW_MS) is not None
    node.topics.delete([topic])
    assert answer(node, frame(numbered(2)), NOW_MS) is None


def test_an_observer_sees_every_append(node: BrokerState) -> None:
    node.on_append = lambda event: None
    assert answer(node, frame(numbered(0)), NOW_MS) is None
