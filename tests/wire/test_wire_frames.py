"""Frames and headers, and how a stream is divided into frames, whatever the chunks in which it arrives."""

from __future__ import annotations

import io
import random
import struct
from itertools import cycle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kafka.protocol.metadata import ApiVersionsResponse as TheirApiVersionsResponse
from kafka.protocol.metadata import MetadataRequest as TheirMetadataRequest

from oncelog.errors import PeerError
from oncelog.wire.frames import (
    LARGE_BYTES,
    FrameReader,
    decode_request,
    decode_request_header,
    decode_response,
    encode_large_response,
    encode_request,
    encode_response,
)
from oncelog.wire.messages import ApiVersionsResponse, FetchResponse, MetadataRequest, MetadataResponse


@pytest.mark.parametrize("version", [0, 8, 9, 13])
@pytest.mark.parametrize("client_id", ["", "oncelog", "größe"])
def test_requests_agree_with_kafka_python(version: int, client_id: str) -> None:
    theirs = TheirMetadataRequest(topics=[], version=version, allow_auto_topic_creation=True)
    theirs.with_header(correlation_id=77, client_id=client_id)
    expected = bytes(theirs.encode(header=True, framed=True))
    assert encode_request(MetadataRequest(topics=[]), version, 77, client_id) == expected
    header, message = decode_request(expected[4:])
    assert header[:4] == (3, version, 77, client_id)
    assert message == MetadataRequest(topics=[])


def test_a_client_id_may_be_null() -> None:
    frame = encode_request(MetadataRequest(), 12, 1, None)
    assert decode_request_header(frame[4:]).client_id is None


@pytest.mark.parametrize("version", [0, 3, 4])
def test_api_versions_answers_never_have_a_tagged_header(version: int) -> None:
    frame = encode_response(ApiVersionsResponse(), version, 5)
    read = TheirApiVersionsResponse.decode(frame, version=version, header=True, framed=True)
    assert read.error_code == 0
    assert decode_response(ApiVersionsResponse, version, frame[4:]) == (5, ApiVersionsResponse())


@pytest.mark.parametrize("version", [8, 9])
def test_decoded_responses_equal_the_encoded_ones(version: int) -> None:
    response = MetadataResponse(cluster_id="c")
    frame = encode_response(response, version, 2**31 - 1)
    assert struct.unpack(">i", frame[:4]) == (len(frame) - 4,)
    assert decode_response(MetadataResponse, version, frame[4:]) == (2**31 - 1, response)


def test_unknown_apis_and_versions_have_readable_headers() -> None:
    header = decode_request_header(struct.pack(">hhih", 999, 7, 42, 2) + b"me" + b"body")
    assert header == (999, 7, 42, "me", 12)
    assert decode_request_header(struct.pack(">hhih", 18, 99, 42, 2) + b"me\0body").body_position == 13
    with pytest.raises(PeerError, match="999"):
        decode_request(struct.pack(">hhih", 999, 7, 42, -1))


def test_a_client_id_that_is_not_utf_8_gets_replacement_characters() -> None:
    header = decode_request_header(struct.pack(">hhih", 3, 1, 42, 3) + b"m\xfce")
    assert header.client_id == "m\ufffde"


def test_tags_in_a_header_are_skipped() -> None:
    tags = b"\x02" + b"\x00\x03abc" + b"\x81\x01\x00"
    header = decode_request_header(struct.pack(">hhih", 3, 9, 42, 0) + tags + b"body")
    assert header.body_position == 10 + len(tags)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\3\0\x09\0\0\0\1\0",
        struct.pack(">hhih", 3, 9, 1, 5) + b"me",
        struct.pack(">hhih", 3, 9, 1, -2) + b"me",
        struct.pack(">hhih", 3, 9, 1, 0),
        struct.pack(">hhih", 3, 9, 1, 0) + b"\x01\x00\x7f",
        struct.pack(">hhih", 3, 9, 1, 0) + b"\xe9\x07" + b"\1\0" * 1001,
        struct.pack(">hhih", 3, 9, 1, 0) + b"\xff\xff\xff\xff\xff\xff",
    ],
)
def test_broken_headers_are_peer_errors(frame: bytes) -> None:
    with pytest.raises(PeerError):
        decode_request_header(frame)


def test_a_short_response_is_a_peer_error() -> None:
    with pytest.raises(PeerError, match="too short"):
        decode_response(MetadataResponse, 9, b"abc")


def test_frames_come_out_however_the_bytes_arrive() -> None:
    rng = random.Random(7)
    frames = [rng.randbytes(rng.choice([0, 1, 3, 4, 100, 5000])) for _ in range(60)]
    stream = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
    for steps in ([1], [2, 3], [5, 1, 9000], [10**6]):
        reader, read, position = FrameReader(5000), [], 0
        while position < len(stream):
            step = rng.choice(steps)
            read += reader.feed(stream[position : position + step])
            position += step
        assert [bytes(frame) for frame in read] == frames
        assert reader.pending_bytes == 0


def test_whole_frames_are_views_and_partial_ones_are_buffered() -> None:
    reader = FrameReader(100)
    data = bytearray(struct.pack(">i", 2) + b"ab" + struct.pack(">i", 3) + b"c")
    (whole,) = reader.feed(memoryview(data))
    data[4:6] = b"AB"
    assert bytes(whole) == b"AB"
    data[:] = bytes(len(data))
    assert reader.pending_bytes == 5
    assert [bytes(frame) for frame in reader.feed(b"de")] == [b"cde"]


def test_a_reader_that_keeps_the_size_has_room_for_a_frame_as_large_as_an_earlier_one_at_once() -> None:
    sizes = {}
    for keeps_size in (False, True):
        reader = FrameReader(10**6, keeps_size=keeps_size)
        held = []
        # The buffer of a new connection grows with the bytes that arrive, and not with the size that a frame
        # claims.
        for size in (100_000, 100_000, 50_000, 900_000):
            reader.feed(struct.pack(">i", size) + b"x")
            held.append(reader.held_bytes)
            (frame,) = reader.feed(bytes(size - 1))
            assert len(frame) == size
        sizes[keeps_size] = held
    assert sizes == {False: [4096] * 4, True: [4096, 100_004, 50_004, 100_004]}


def test_a_buffer_is_used_again_only_when_no_view_of_its_frame_is_left() -> None:
    reader = FrameReader(10**6, keeps_size=True)

    def receive(byte: bytes) -> memoryview:
        reader.feed(struct.pack(">i", 100_000) + byte)
        (frame,) = reader.feed(byte * 99_999)
        return frame

    first, second = receive(b"a"), receive(b"b")
    part = first[10:20]
    del first
    third = receive(b"c")
    assert (bytes(part), bytes(second), bytes(third)) == (b"a" * 10, b"b" * 100_000, b"c" * 100_000)
    buffers = {id(frame.obj) for frame in (second, third)}
    del second, third
    again = [receive(b"d"), receive(b"e")]
    assert {id(frame.obj) for frame in again} == buffers
    assert [bytes(frame[:2]) for frame in again] == [b"dd", b"ee"]


@given(
    sizes=st.lists(st.sampled_from([0, 10, 70_000, 100_000, 200_000, 300_000]), max_size=12),
    read_bytes=st.lists(st.sampled_from([30_000, 65_536, 10**6]), min_size=1, max_size=3),
    keeps_views=st.booleans(),
)
@example(sizes=[300_000, 200_000, 10], read_bytes=[10**6], keeps_views=False)
def test_a_larger_buffer_that_is_used_again_ends_with_its_frame(
    sizes: list[int], read_bytes: list[int], keeps_views: bool
) -> None:
    """The test reads as a client does: it receives large frames in place, and copies small ones."""
    reader = FrameReader(10**6, keeps_size=True)
    frames = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    stream = io.BytesIO(b"".join(struct.pack(">i", len(frame)) + frame for frame in frames))
    received: list[bytes | memoryview] = []
    for size in cycle([3, *read_bytes]):
        space = reader.room(65_536)
        if space is None:
            data = stream.read(min(size, 65_536))
            if not data:
                break
            complete = reader.feed(data)
        else:
            count = stream.readinto(space[:size])
            del space
            frame = reader.filled(count)
            complete = [] if frame is None else [frame]
            del frame
        received += complete if keeps_views else [bytes(view) for view in complete]
        del complete
    assert [bytes(view) for view in received] == frames


def test_a_very_large_buffer_is_not_kept() -> None:
    reader = FrameReader(10**8, keeps_size=True)
    size = 9 << 20
    reader.feed(struct.pack(">i", size) + b"x")
    (frame,) = reader.feed(bytes(size - 1))
    assert len(frame) == size
    assert reader.spare_bytes == 0


def test_a_prefix_that_arrives_in_parts_reserves_nothing_for_an_earlier_frame() -> None:
    reader = FrameReader(10**6, keeps_size=True)
    reader.feed(struct.pack(">i", 10**6) + b"x")
    reader.feed(bytes(10**6 - 1))
    reader.feed(b"\0\0")
    assert reader.held_bytes == 4096
    assert [bytes(frame) for frame in reader.feed(b"\0\1a")] == [b"a"]


@pytest.mark.parametrize("size", [-1, 101, 2**31 - 1])
def test_a_size_out_of_range_ends_the_stream(size: int) -> None:
    with pytest.raises(PeerError, match=str(size)):
        FrameReader(100).feed(struct.pack(">i", size))
    reader = FrameReader(100)
    prefix = struct.pack(">i", size)
    assert reader.feed(prefix[:2]) == []
    with pytest.raises(PeerError):
        reader.feed(prefix[2:])


@pytest.mark.parametrize(
    "sizes", [[], [0], [10, LARGE_BYTES - 1], [LARGE_BYTES], [5, LARGE_BYTES, 7, LARGE_BYTES + 1]]
)
def test_a_large_response_is_the_same_bytes_and_keeps_its_records(sizes: list[int]) -> None:
    records = [memoryview(bytes([index]) * size) for index, size in enumerate(sizes)]
    partitions = [
        FetchResponse.PartitionData(partition_index=index, high_watermark=1, records=view)
        for index, view in enumerate(records)
    ]
    topic = FetchResponse.FetchableTopicResponse(topic="t", partitions=partitions)
    response = FetchResponse(responses=[topic])
    pieces = encode_large_response(response, 12, 9)
    assert b"".join(pieces) == encode_response(response, 12, 9)
    large = [view for view in records if len(view) >= LARGE_BYTES]
    assert [piece for piece in pieces if any(piece is view for view in large)] == large
