"""One connection without its socket: negotiation, the order of responses, and invalid peers."""

from __future__ import annotations

import pytest
from support.client import api_versions, metadata

from oncelog.client.connection.core import ConnectionCore
from oncelog.errors import PeerError, UnsupportedVersion
from oncelog.wire.frames import decode_request, encode_response
from oncelog.wire.messages import (
    ApiVersionsResponse,
    ListOffsetsRequest,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
)

TOKEN = object()


def negotiated(limits: dict[int, tuple[int, int]] | None = None) -> ConnectionCore:
    core = ConnectionCore("test", "127.0.0.1:9092")
    header, _ = decode_request(core.negotiate(0, 1000)[4:])
    core.receive(encode_response(api_versions(limits), header.api_version, header.correlation_id), 1)
    assert core.is_ready
    return core


def test_the_first_request_is_api_versions_and_names_the_client() -> None:
    core = ConnectionCore("me", "127.0.0.1:9092")
    header, message = decode_request(core.negotiate(0, 1000)[4:])
    assert (header.api_key, header.api_version, header.client_id) == (18, 3, "me")
    assert message.client_software_name == "oncelog"
    assert not core.is_ready


def test_a_broker_that_refuses_the_version_is_asked_in_its_own() -> None:
    core = ConnectionCore("me", "127.0.0.1:9092")
    header, _ = decode_request(core.negotiate(0, 1000)[4:])
    refusal = ApiVersionsResponse(
        error_code=35,
        api_keys=[ApiVersionsResponse.ApiVersion(api_key=18, min_version=0, max_version=2)],
    )
    completed, to_write = core.receive(encode_response(refusal, 0, header.correlation_id), 1)
    assert completed == []
    second, _ = decode_request(to_write[4:])
    assert second.api_version == 2
    core.receive(encode_response(api_versions({18: (0, 2)}), 2, second.correlation_id), 2)
    assert core.is_ready


def test_an_old_refusal_without_ranges_is_answered_with_version_0() -> None:
    core = ConnectionCore("me", "127.0.0.1:9092")
    header, _ = decode_request(core.negotiate(0, 1000)[4:])
    _, to_write = core.receive(
        encode_response(ApiVersionsResponse(error_code=35), 0, header.correlation_id), 1
    )
    second, _ = decode_request(to_write[4:])
    assert second.api_version == 0


def test_requests_use_the_highest_common_version() -> None:
    core = negotiated({3: (0, 7)})
    header, _ = decode_request(
        b"".join(core.send(MetadataRequest(topics=[]), 1, token=TOKEN, timeout_ms=10))[4:]
    )
    assert header.api_version == 7


@pytest.mark.parametrize(
    ("served", "limits", "version"),
    [((0, 13), {"max_version": 4}, 4), ((0, 13), {"min_version": 9}, 13), ((5, 6), {"min_version": 6}, 6)],
)
def test_the_caller_may_limit_the_version(
    served: tuple[int, int], limits: dict[str, int], version: int
) -> None:
    core = negotiated({3: served})
    assert core.version_for(MetadataRequest.api, **limits) == version


@pytest.mark.parametrize(
    ("served", "limits"),
    [((14, 20), {}), ((0, 3), {"min_version": 4}), ((5, 9), {"max_version": 4}), ((0, -1), {})],
)
def test_no_common_version_names_both_sides(served: tuple[int, int], limits: dict[str, int]) -> None:
    core = negotiated({3: served})
    with pytest.raises(
        UnsupportedVersion, match=r"127\.0\.0\.1:9092 supports Metadata .*client needs one of"
    ):
        core.version_for(MetadataRequest.api, **limits)


def test_an_api_that_the_broker_does_not_list_is_unsupported() -> None:
    core = ConnectionCore("me", "127.0.0.1:9092")
    header, _ = decode_request(core.negotiate(0, 1000)[4:])
    few = ApiVersionsResponse(
        api_keys=[ApiVersionsResponse.ApiVersion(api_key=3, min_version=0, max_version=1)]
    )
    core.receive(encode_response(few, 3, header.correlation_id), 1)
    with pytest.raises(UnsupportedVersion, match="ListOffsets not at all"):
        core.send(ListOffsetsRequest(replica_id=-1), 1, token=TOKEN, timeout_ms=1)


def test_responses_belong_to_the_oldest_request() -> None:
    core = negotiated()
    tokens = [object(), object()]
    headers = [
        decode_request(b"".join(core.send(MetadataRequest(topics=[]), 10, token=token, timeout_ms=100))[4:])[
            0
        ]
        for token in tokens
    ]
    answers = b"".join(
        encode_response(MetadataResponse(controller_id=i), h.api_version, h.correlation_id)
        for i, h in enumerate(headers)
    )
    completed = []
    for byte in answers:  # byte by byte: the boundaries between reads must not matter
        completed += core.receive(bytes([byte]), 25)[0]
    assert [(c.token, c.response.controller_id, c.latency_ms) for c in completed] == [
        (tokens[0], 0, 15),
        (tokens[1], 1, 15),
    ]
    assert core.in_flight_count == 0


def test_a_wrong_correlation_id_is_a_peer_error_that_names_both() -> None:
    core = negotiated()
    header, _ = decode_request(
        b"".join(core.send(MetadataRequest(topics=[]), 0, token=TOKEN, timeout_ms=1))[4:]
    )
    wrong = encode_response(MetadataResponse(), header.api_version, header.correlation_id + 5)
    with pytest.raises(PeerError, match=r"correlation id 6; expected 1 \(Metadata\)"):
        core.receive(wrong, 1)


def test_a_response_to_no_request_is_a_peer_error() -> None:
    core = negotiated()
    with pytest.raises(PeerError, match="while no request was in flight"):
        core.receive(encode_response(MetadataResponse(), 13, 1), 1)


def test_responses_before_a_malformed_one_are_abandoned() -> None:
    """Both responses arrive in one read. The request that waits for the first one must fail, and not wait
    forever.
    """
    core = negotiated()
    tokens = [object(), object(), object()]
    for token in tokens:
        core.send(MetadataRequest(topics=[]), 0, token=token, timeout_ms=100)
    good, wrong = (encode_response(MetadataResponse(), 13, number) for number in (1, 77))
    with pytest.raises(PeerError, match="correlation id 77; expected 2"):
        core.receive(good + wrong, 1)
    assert core.abandon() == tokens
    assert core.abandon() == []


def test_a_cut_body_is_a_peer_error_that_names_the_request() -> None:
    core = negotiated()
    header, _ = decode_request(
        b"".join(core.send(MetadataRequest(topics=[]), 0, token=TOKEN, timeout_ms=1))[4:]
    )
    frame = encode_response(metadata(1, {"t": 3}), header.api_version, header.correlation_id)
    cut = (len(frame) - 4 - 20).to_bytes(4, "big") + frame[4:-20]
    with pytest.raises(PeerError, match="malformed Metadata v13 response"):
        core.receive(cut, 1)


@pytest.mark.parametrize(
    "text", [b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\xff\xff\xff\xff"]
)
def test_another_protocol_is_a_peer_error(text: bytes) -> None:
    core = ConnectionCore("me", "127.0.0.1:9092")
    core.negotiate(0, 1000)
    with pytest.raises(PeerError, match=r"127\.0\.0\.1:9092 sent a malformed response.*Kafka broker"):
        core.receive(text, 1)


def test_an_empty_frame_is_a_peer_error() -> None:
    core = negotiated()
    core.send(MetadataRequest(topics=[]), 0, token=TOKEN, timeout_ms=1)
    with pytest.raises(PeerError):
        core.receive(b"\0\0\0\0", 1)


def test_requests_without_a_response_are_not_in_flight() -> None:
    core = negotiated()
    core.send(ProduceRequest(acks=0, timeout_ms=1), 0, token=TOKEN, timeout_ms=10, expects_response=False)
    assert core.in_flight_count == 0
    assert core.next_deadline_ms() is None


def test_expired_and_abandoned_requests_are_returned() -> None:
    core = negotiated()
    first, second = object(), object()
    core.send(MetadataRequest(topics=[]), 0, token=first, timeout_ms=100)
    core.send(MetadataRequest(topics=[]), 10, token=second, timeout_ms=50)
    assert core.next_deadline_ms() == 60
    assert core.expired(59) == []
    assert core.expired(60) == [second]
    assert core.describe(second) == "Metadata"
    assert core.abandon() == [first, second]
    assert core.in_flight_count == 0


def test_a_request_that_cannot_be_written_uses_no_correlation_id() -> None:
    core = negotiated()
    with pytest.raises(Exception, match="MetadataRequest"):
        core.send(MetadataRequest(topics=[3]), 0, token=TOKEN, timeout_ms=1)  # type: ignore[list-item]
    header, _ = decode_request(
        b"".join(core.send(MetadataRequest(topics=[]), 0, token=TOKEN, timeout_ms=1))[4:]
    )
    assert header.correlation_id == 1
    assert core.in_flight_count == 1


def test_a_large_response_is_received_in_its_own_buffer() -> None:
    core = negotiated()
    core.send(MetadataRequest(), 2, token=TOKEN, timeout_ms=1000)
    names = [MetadataResponse.MetadataResponseTopic(name=f"topic-{n:05}") for n in range(20_000)]
    answer = encode_response(MetadataResponse(topics=names), core.version_for(MetadataRequest.api), 1)
    assert core.room(1_000) is None
    assert core.receive(answer[:70_000], 3) == ([], b"")
    taken, completed = 70_000, []
    while not completed:
        room = core.room(1_000)
        if room is None:
            completed, _ = core.receive(answer[taken:], 4)
            break
        part = answer[taken : taken + min(len(room), 50_000)]
        room[: len(part)] = part
        taken += len(part)
        completed, _ = core.filled(len(part), 4)
    assert [topic.name for topic in completed[0].response.topics] == [topic.name for topic in names]
    assert core.in_flight_count == 0
