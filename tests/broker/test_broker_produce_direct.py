"""Repeated Produce requests take the direct way: the same bytes as the general way, or left to it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_broker import batch, produce_request

from oncelog.broker.apis.produce_direct import FIRST_VERSION, DirectProduce
from oncelog.broker.node import Node, Request
from oncelog.config import BROKER
from oncelog.edge.broker import open_node
from oncelog.edge.clock import Clock
from oncelog.errors import UnknownTopicOrPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import decode_request, encode_request, encode_response
from oncelog.wire.messages import ProduceResponse
from oncelog.wire.records import NewRecord

NOW_MS = 1_700_000_000_000
VERSIONS = range(FIRST_VERSION, 13)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    yield from new_node(tmp_path / "data")


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[Node]:
    """A second broker, to be asked the same the general way."""
    yield from new_node(tmp_path / "twin")


def new_node(data_dir: Path) -> Iterator[Node]:
    opened = open_node(data_dir, BROKER.parse({}), Clock())
    opened.topics.create("t", 3, {}, NOW_MS)
    yield opened
    opened.close(NOW_MS)


def frame(
    records: bytes | bytearray | None,
    version: int = 9,
    *,
    topic: str = "t",
    number: int = 1,
    **fields: object,
) -> memoryview:
    request = produce_request(topic, records, **fields)  # type: ignore[arg-type]
    return memoryview(bytearray(encode_request(request, version, number, "client")))[4:]


def numbered(sequence: int, pid: int = 5, **more: object) -> bytearray:
    return batch(b"v", b"w", pid=pid, sequence=sequence, timestamp_ms=NOW_MS, **more)


def general(node: Node, data: memoryview) -> ProduceResponse:
    header, message = decode_request(data)
    answer = node.handle(Request(1, header, message), NOW_MS)
    assert isinstance(answer, ProduceResponse)
    return answer


def learned(node: Node, data: memoryview) -> DirectProduce:
    """After one request was answered the general way."""
    direct = DirectProduce(node)
    header, message = decode_request(data)
    assert direct.answer(data, NOW_MS) is None
    general(node, data)
    direct.learn(data, header, message)  # type: ignore[arg-type]
    return direct


def end_offset(node: Node, partition: int = 0) -> int:
    topic = node.topics.get("t")
    assert topic is not None
    return topic.partitions[partition].log_end_offset


@pytest.mark.behaviour("I1", "I7")
@pytest.mark.parametrize("version", VERSIONS)
def test_the_answer_is_what_the_general_way_gives(node: Node, twin: Node, version: int) -> None:
    direct = learned(node, frame(numbered(0), version))
    general(twin, frame(numbered(0), version))
    for number, sequence in enumerate([2, 4, 2, 6]):  # the third is a duplicate
        told = general(twin, frame(numbered(sequence), version))
        payload = direct.answer(frame(numbered(sequence), version, number=number), NOW_MS)
        assert payload == encode_response(told, version, number)
    assert end_offset(node) == end_offset(twin) == 8
    assert (node.metrics.batches_stored, node.metrics.duplicates_acknowledged) == (4, 1)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [0, 60, 120, 130, 16_000, 17_000, 300_000])
def test_every_length_of_the_batch_is_found(node: Node, version: int, size: int) -> None:
    def sized(sequence: int) -> bytearray:
        records = [NewRecord(NOW_MS, None, bytes(size))]
        return build_batch(records, producer_id=9, producer_epoch=0, base_sequence=sequence)

    direct = learned(node, frame(numbered(0), version))
    for sequence in range(3):
        assert direct.answer(frame(sized(sequence), version), NOW_MS) is not None
    assert end_offset(node) == 5


def test_partitions_and_clients_are_kept_apart(node: Node) -> None:
    direct = learned(node, frame(numbered(0)))
    assert direct.answer(frame(numbered(0), partition=1), NOW_MS) is None
    header, message = decode_request(frame(numbered(0), partition=1))
    general(node, frame(numbered(0), partition=1))
    direct.learn(frame(numbered(0), partition=1), header, message)  # type: ignore[arg-type]
    assert direct.answer(frame(numbered(2), partition=1), NOW_MS) is not None
    assert direct.answer(frame(numbered(2)), NOW_MS) is not None
    assert [end_offset(node, index) for index in range(3)] == [4, 4, 0]
    assert direct.answer(frame(numbered(4), 8), NOW_MS) is None  # another version was not seen yet


def damaged(records: bytearray) -> bytearray:
    records[-1] ^= 1
    return records


@pytest.mark.parametrize(
    "records",
    [
        numbered(9),
        damaged(numbered(2)),
        numbered(2) + numbered(4),
        numbered(2) + b"\0" * 70,
        numbered(2)[:70],
        numbered(2, is_transactional=True),
        bytearray(),
        None,
    ],
    ids=["gap", "crc", "two", "garbage", "cut", "transactional", "empty", "null"],
)
def test_what_is_not_plain_is_left_untouched(node: Node, records: bytearray | None) -> None:
    direct = learned(node, frame(numbered(0)))
    assert direct.answer(frame(records), NOW_MS) is None
    assert end_offset(node) == 2
    assert (node.metrics.batches_stored, node.metrics.append_errors) == (1, {})


def test_other_requests_are_not_learned(node: Node) -> None:
    direct = DirectProduce(node)
    for data in (frame(numbered(0), acks=0), frame(numbered(0), 6)):
        header, message = decode_request(data)
        direct.learn(data, header, message)  # type: ignore[arg-type]
        assert direct.answer(data, NOW_MS) is None
    assert end_offset(node) == 0


def test_bytes_cut_anywhere_never_fail(node: Node) -> None:
    whole = frame(numbered(2))
    direct = learned(node, frame(numbered(0)))
    for end in range(len(whole)):
        assert direct.answer(whole[:end], NOW_MS) is None
    assert end_offset(node) == 2


def test_the_topic_is_looked_up_each_time(node: Node) -> None:
    direct = learned(node, frame(numbered(0)))
    topic = node.topics.get("t")
    assert topic is not None
    for overrides in ({"flush.messages": "1"}, {"min.insync.replicas": "2"}):
        node.topics.alter(topic, overrides)
        assert direct.answer(frame(numbered(2)), NOW_MS) is None
    node.topics.alter(topic, {"message.timestamp.type": "LogAppendTime"})
    payload = direct.answer(frame(numbered(2)), NOW_MS + 5)
    assert payload is not None and struct.pack(">q", NOW_MS + 5) in payload
    node.topics.delete(topic, NOW_MS)
    assert direct.answer(frame(numbered(4)), NOW_MS) is None
    (answer,) = general(node, frame(numbered(4))).responses[0].partition_responses
    assert answer.error_code == UnknownTopicOrPartition.code


def test_an_observer_sees_every_append(node: Node) -> None:
    direct = learned(node, frame(numbered(0)))
    node.on_append = lambda event: None
    assert direct.answer(frame(numbered(2)), NOW_MS) is None


def test_shapes_are_bounded(node: Node) -> None:
    direct = DirectProduce(node)
    names = [f"topic{'x' * index}" for index in range(9)]
    for name in names:
        node.topics.create(name, 1, {}, NOW_MS)
    answered = 0
    for sequence, name in enumerate(names * 3):
        data = frame(numbered(2 * (sequence // 9)), topic=name)
        if direct.answer(data, NOW_MS) is not None:
            answered += 1
            continue
        header, message = decode_request(data)
        general(node, data)
        direct.learn(data, header, message)  # type: ignore[arg-type]
    assert answered < 27
    assert sum(topic.partitions[0].log_end_offset for topic in node.topics.all()) == 54
