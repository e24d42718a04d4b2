"""The worst request of a given size for each API: its work, its memory and its response are bounded.

The catalogue is `oncelog_devtools.worst_requests`. Work is counted in elements and bytes, never in seconds.
In these tests the limits are a fiftieth of the real ones, and so is the permitted cost of a request.
"""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest
from oncelog_devtools.worst_requests import WorstRequest, by_hand, from_tables, worst_requests
from support.broker import RawClient
from support.fuzz.targets import NOW_MS, open_node

from oncelog.broker import encoded_response, request_limits
from oncelog.broker.dispatch import handle
from oncelog.broker.encoded_response import encoding_of
from oncelog.broker.handlers import describe_configs, produce
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.request_limits import MAX_BYTES, MAX_NAMES, MAX_PARTITIONS, MAX_TOPICS, max_elements
from oncelog.broker.state import OFFERED, BrokerState
from oncelog.config import BROKER
from oncelog.errors import OncelogError, PeerError
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.manager import LogManager
from oncelog.server.connection import Connection
from oncelog.server.embedded import Broker
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.wire.frames import decode_request_header, encode_response
from oncelog.wire.message import Api, Part
from oncelog.wire.messages import API_BY_NAME, DescribeConfigsRequest, DescribeGroupsRequest
from oncelog.wire.primitives import UNBOUNDED

SIZE = 20_000
SCALE = 50
ELEMENT_BYTES = 8_000
"""Permitted bytes of memory for each element of a request, including the response and the state that the
broker keeps.
"""
ONCE_BYTES = 4_000_000
"""Permitted memory in bytes that does not depend on the request's size, for example that of a broker's
settings with their descriptions.
"""
STEP = 10
"""Elements of a step in the tests that count the lines of each step."""
MAX_LINES = 2_000_000
"""Maximum number of lines of Python in one step of the largest request. They take 0.1 s."""
APIS = [api for api in API_BY_NAME.values() if api.key in OFFERED]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {name: limit // SCALE for name, limit in request_limits._MAX_ELEMENTS.items()}
    monkeypatch.setattr(request_limits, "_MAX_ELEMENTS", limits)
    monkeypatch.setattr(request_limits, "MAX_NAMES", MAX_NAMES // SCALE)


def elements(value: Any) -> Iterator[Any]:
    """Yield the elements of all arrays of a message, also nested ones."""
    if isinstance(value, list):
        yield from value
        for each in value:
            yield from elements(each)
    elif isinstance(value, Part):
        for field in value._struct.fields:
            yield from elements(getattr(value, field.name))


def carry_out(node: BrokerState, worst: WorstRequest) -> tuple[int, int]:
    """Handle the request as a connection does. Return the number of elements read, and the bytes of the
    response.
    """
    frame = memoryview(bytearray(worst.frame()))
    try:
        header = decode_request_header(frame)
        limit = max_elements(worst.api.name, len(frame))
        message = worst.api.request.decode(
            header.api_version, frame, header.body_position, max_elements=limit
        )
    except PeerError:
        return 0, 0
    count = sum(1 for _ in elements(message))
    assert count <= limit
    answer = handle(node, Request(1, header, message, "/127.0.0.1"), NOW_MS)
    if isinstance(answer, PendingResponse) or not hasattr(answer, "api"):
        return count, 0
    try:
        return count, len(encode_response(answer, header.api_version, 1))
    except OncelogError:
        return count, 0


def assert_bounded(worst: WorstRequest) -> None:
    node = open_node(MemoryDisk())
    node.topics.create("t", 1, {}, NOW_MS)
    carry_out(node, worst)  # compiles the decoder, which the measurement must not include
    tracemalloc.start()
    try:
        _, answer_bytes = carry_out(node, worst)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    limit = max_elements(worst.api.name, 0)
    assert peak_bytes <= ONCE_BYTES + ELEMENT_BYTES * limit, worst.name
    assert answer_bytes <= ONCE_BYTES + ELEMENT_BYTES * limit, worst.name


@pytest.mark.behaviour("I29")
@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_the_worst_requests_of_an_api_take_bounded_memory(api: Api) -> None:
    for worst in from_tables(api, SIZE):
        assert_bounded(worst)


@pytest.mark.behaviour("I29")
@pytest.mark.usefixtures("small_limits")
def test_the_worst_requests_that_were_made_by_hand_take_bounded_memory() -> None:
    for size in (1_500, SIZE):
        for worst in by_hand(size, "t", "g"):
            assert_bounded(worst)


def lines_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many lines of Python `work` executes, and its result."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return count, result


def longest_step(worst: WorstRequest) -> tuple[int, int]:
    """Return the number of elements of a request, and the lines of its longest step after the decoding."""
    limits = dataclasses.replace(DEFAULT_LIMITS, request_step_elements=STEP, partitions_per_step=STEP)
    log = LogManager.open(MemoryDisk(), node_id=1, new_uuid=lambda: bytes(16), now_ms=NOW_MS, limits=limits)
    numbers = count(1)
    settings = BROKER.parse({})
    node = BrokerState(log, settings, new_uuid=lambda: next(numbers).to_bytes(16), now_ms=NOW_MS)
    node.topics.create("t", 1, {}, NOW_MS)
    log.background.on_added = lambda: None
    frame = memoryview(bytearray(worst.frame()))
    header = decode_request_header(frame)
    message = worst.api.request.decode(header.api_version, frame, header.body_position)
    longest, answer = lines_of(lambda: handle(node, Request(1, header, message, "/127.0.0.1"), NOW_MS))
    if isinstance(answer, PendingResponse):
        answer.encode = partial(encoding_of, version=header.api_version)
        while not answer.is_done and log.background:
            lines, call = lines_of(log.background.step)
            longest = max(longest, lines)
            if call is not None:
                call()
    return sum(1 for _ in elements(message)), longest


@pytest.mark.behaviour("I29")
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_no_step_of_a_worst_request_takes_long(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1567: each element of a Produce request cost 72 lines in one step, and a request may have 100,000."""
    monkeypatch.setattr(encoded_response, "ENCODED_PER_STEP", STEP)
    monkeypatch.setattr(produce, "STEP_COST", STEP * produce.PARTITION_COST)
    small = {worst.name: worst for worst in from_tables(api, 1_000)}
    for large in from_tables(api, 3_000):
        if "tagged" in large.name or "long" in large.name:
            continue
        (few, lines_for_few), (many, lines_for_many) = longest_step(small[large.name]), longest_step(large)
        if many > few:
            lines_per_element = (lines_for_many - lines_for_few) / (many - few)
            assert lines_per_element * max_elements(api.name, 0) <= MAX_LINES, large.name


@pytest.mark.behaviour("I29")
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_request_above_its_limit_is_refused_before_its_elements_are_made(api: Api) -> None:
    for worst in from_tables(api, SIZE):
        if len(worst.body) < SIZE // 2 or "long" in worst.name:
            continue
        body = memoryview(worst.body)
        with pytest.raises(PeerError, match="exceeds the message's limit"):
            # Build the decoder, which the measurement must not include.
            api.request.decode(worst.version, body, max_elements=10)
        tracemalloc.start()
        try:
            with pytest.raises(PeerError, match="exceeds the message's limit"):
                api.request.decode(worst.version, body, max_elements=10)
            assert tracemalloc.get_traced_memory()[1] < 20_000, worst.name
        finally:
            tracemalloc.stop()


@pytest.mark.behaviour("I29")
def test_every_api_has_a_limit_that_real_clients_do_not_reach() -> None:
    for api in APIS:
        assert max_elements(api.name, 1000) in (MAX_NAMES, MAX_TOPICS, MAX_PARTITIONS)
        assert max_elements(api.name, 1000) < UNBOUNDED
    for api_name in ("Produce", "JoinGroup", "SyncGroup"):
        assert max_elements(api_name, 100 << 20)
    with pytest.raises(PeerError, match="use several smaller requests"):
        max_elements("Metadata", MAX_BYTES + 1)


@pytest.mark.behaviour("I29")
def test_a_request_with_too_many_elements_ends_its_connection_and_no_other() -> None:
    with Broker() as broker, RawClient(broker.bootstrap_servers) as greedy:
        greedy.send(DescribeGroupsRequest(groups=[""] * (MAX_NAMES + 1)), 5)
        assert greedy.is_closed()
        with RawClient(broker.bootstrap_servers) as other:
            answer = other.ask(DescribeGroupsRequest(groups=["g"] * 100), 5)
            assert len(answer.groups) == 1


@pytest.mark.behaviour("I29")
def test_a_resource_that_is_named_again_and_again_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []
    entries = describe_configs._entries
    monkeypatch.setattr(
        describe_configs, "_entries", lambda n, r, a: described.append(a.resource_name) or entries(n, r, a)
    )
    resource = DescribeConfigsRequest.DescribeConfigsResource

    def named(*keys: str | None) -> Any:
        asked = [
            resource(resource_type=4, resource_name="1", configuration_keys=None if key is None else [key])
            for key in keys
        ]
        (result,) = client.ask(DescribeConfigsRequest(resources=asked), 4).results
        return sorted(config.name for config in result.configs)

    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        assert len(named("log.segment.bytes", None)) > 50
        assert named("log.segment.bytes", "log.roll.ms", "log.segment.bytes") == named(
            "log.roll.ms", "log.segment.bytes"
        )
    assert len(described) == 3


@pytest.mark.behaviour("I29")
def test_large_requests_take_turns_with_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection's round of requests ends after a number of bytes, and not only after a number of
    requests.
    """
    rounds: list[int] = []
    start_requests, start_request = Connection._start_requests, Connection._start_request

    def counted_round(self: Any, *args: Any) -> Any:
        rounds.append(0)
        return start_requests(self, *args)

    def counted(self: Any, *args: Any) -> Any:
        rounds[-1] += 1
        return start_request(self, *args)

    monkeypatch.setattr(Connection, "_start_requests", counted_round)
    monkeypatch.setattr(Connection, "_start_request", counted)
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        for _ in range(20):
            client.send(DescribeGroupsRequest(groups=["x" * 20_000]), 5)
        for _ in range(20):
            assert client.read_frame() is not None
    assert max(rounds) == 1


def test_the_catalogue_names_every_api_that_is_offered() -> None:
    assert {worst.api for worst in worst_requests(1_000)} >= set(APIS)
