"""AsyncConsumer against a scripted broker: transactions, truncated responses, moving leaders, tampering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.client import CUT, ScriptedBroker, api_versions, batch_of, metadata, scripted_broker
from support.wait import rest, until

from oncelog.aio import Consumer
from oncelog.errors import CorruptMessage, PeerError, UnknownTopicOrPartition
from oncelog.types import TopicPartition
from oncelog.wire.batch import iter_batches, stamp
from oncelog.wire.control import encode_end_marker
from oncelog.wire.frames import encode_response
from oncelog.wire.messages import FetchResponse, ListOffsetsResponse

T0 = TopicPartition("t", 0)
Story = Callable[[ScriptedBroker, Consumer], Coroutine[Any, Any, None]]


def at(offset: int, batch: bytearray) -> bytes:
    stamp(batch, 0, offset, 0)
    return bytes(batch)


def transactional(offset: int, value: bytes, producer_id: int) -> bytes:
    options = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0, "is_transactional": True}
    return at(offset, batch_of(value, **options))


def marker(offset: int, producer_id: int, *, commit: bool) -> bytes:
    return at(offset, encode_end_marker(producer_id, 0, commit, 0, 1000))


class ScriptedLog:
    """Partition t-0 as whole batches.

    A fetch returns batches from the one that contains its offset onwards.
    """

    def __init__(self, *batches: bytes, aborted: list[tuple[int, int, int]] | None = None) -> None:
        self.batches = list(batches)
        self.aborted = aborted or []
        self.fetch_offsets: list[int] = []
        self.max_bytes = 10_000

    def answer(self, header: Any, message: Any) -> Any:
        part = message.topics[0].partitions[0]
        self.fetch_offsets.append(part.fetch_offset)
        data = b"".join(batch for batch in self.batches if last_offset(batch) >= part.fetch_offset)
        shown = data[: self.max_bytes]
        return fetch_answer(
            shown,
            end=last_offset(self.batches[-1]) + 1 if self.batches else 0,
            aborted=[(pid, first) for pid, first, ended in self.aborted if ended >= part.fetch_offset]
            if message.isolation_level
            else None,
        )

    async def slowly(self, header: Any, message: Any) -> Any:
        answer = self.answer(header, message)
        if not answer.responses[0].partitions[0].records:
            await rest(message.max_wait_ms / 1000)
        return answer


def last_offset(batch: bytes) -> int:
    return next(iter_batches(batch))[1].last_offset


def fetch_answer(
    records: bytes, *, error: int = 0, end: int = 100, aborted: list[tuple[int, int]] | None = None
) -> FetchResponse:
    rows = None
    if aborted is not None:
        rows = [FetchResponse.AbortedTransaction(producer_id=p, first_offset=o) for p, o in aborted]
    part = FetchResponse.PartitionData(
        partition_index=0,
        error_code=error,
        high_watermark=end,
        last_stable_offset=end,
        aborted_transactions=rows,
        records=records,
    )
    return FetchResponse(responses=[FetchResponse.FetchableTopicResponse(topic="t", partitions=[part])])


def play(log: ScriptedLog, story: Story, **settings: object) -> None:
    async def run() -> None:
        async with scripted_broker() as broker:
            broker.topics = {"t": 1}
            broker.handlers["Fetch"] = log.slowly
            config = {
                "bootstrap.servers": broker.bootstrap_servers,
                "auto.offset.reset": "earliest",
                "fetch.max.wait.ms": 20,
                "retry.backoff.ms": 2,
                "reconnect.backoff.ms": 2,
            }
            async with Consumer(config, **settings) as consumer:
                consumer.assign([T0])
                consumer.seek(T0, 0)
                await story(broker, consumer)

    asyncio.run(run())


async def values_of(consumer: Consumer, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    async with asyncio.timeout(60):
        while len(values) < count:
            values += [record.value for record in await consumer.poll(1)]
    return values


def plain(count: int) -> list[bytes]:
    return [at(offset, batch_of(b"%d" % offset)) for offset in range(count)]


TRANSACTIONS = ScriptedLog(
    transactional(0, b"kept", 8),
    transactional(1, b"lost", 7),
    at(2, batch_of(b"plain")),
    marker(3, 7, commit=False),
    marker(4, 8, commit=True),
    transactional(5, b"lost too", 7),
    marker(6, 7, commit=False),
    aborted=[(7, 1, 3), (7, 5, 6)],
)


@pytest.mark.parametrize("max_bytes", [10_000, 250, 100])
def test_read_committed_hides_what_was_aborted_however_answers_are_cut(max_bytes: int) -> None:
    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        assert await values_of(consumer, 2) == [b"kept", b"plain"]
        assert await consumer.poll(0.1) == []
        assert await consumer.position(T0) == 7

    TRANSACTIONS.max_bytes = max_bytes
    play(TRANSACTIONS, story)


def test_read_uncommitted_shows_all_but_markers() -> None:
    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        assert await values_of(consumer, 4) == [b"kept", b"lost", b"plain", b"lost too"]
        assert await consumer.poll(0.1) == []
        assert await consumer.position(T0) == 7

    TRANSACTIONS.max_bytes = 10_000
    play(TRANSACTIONS, story, isolation_level="read_uncommitted")


@pytest.mark.parametrize("max_bytes", [10_000, 250, 100])
def test_ranges_end_also_where_only_markers_and_aborted_records_are_left(max_bytes: int) -> None:
    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        for start, end, expected in [(0, 7, [b"kept", b"plain"]), (3, 7, []), (5, 6, []), (1, 3, [b"plain"])]:
            tables = [table async for table in consumer.fetch_range(T0, start, end)]
            assert [value for table in tables for value in table.column("value").to_pylist()] == expected
        raw = [view async for view in consumer.fetch_batches(T0, 0, 7)]
        assert b"".join(map(bytes, raw)) == b"".join(TRANSACTIONS.batches)

    TRANSACTIONS.max_bytes = max_bytes
    play(TRANSACTIONS, story)


def test_a_range_fetches_one_piece_ahead_and_no_more() -> None:
    log = ScriptedLog(*plain(20))
    log.max_bytes = 150

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        consumer.assign([])
        pieces = consumer.fetch_batches(T0, 0, 20)
        sizes = []
        async for view in pieces:
            sizes.append(len(view))
            await asyncio.sleep(0)
            assert len(log.fetch_offsets) <= len(sizes) + 1
        assert log.fetch_offsets == list(range(0, 20, 2))

    play(log, story)


def test_a_cut_tail_is_read_with_the_next_fetch() -> None:
    log = ScriptedLog(*plain(20))
    log.max_bytes = 150  # the response has two batches and a part of the third

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        assert await values_of(consumer, 20) == [b"%d" % number for number in range(20)]
        assert log.fetch_offsets[:3] == [0, 2, 4]

    play(log, story)


def test_an_answer_without_one_whole_batch_is_an_error_that_says_what_to_raise() -> None:
    log = ScriptedLog(*plain(1))
    log.max_bytes = 65

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        with pytest.raises(PeerError, match=r"t-0.*65 bytes .* for offset 0 .*max\.partition\.fetch\.bytes"):
            await consumer.poll(60)
        log.max_bytes = 100
        assert await values_of(consumer, 1) == [b"0"]

    play(log, story)


@pytest.mark.parametrize("code", [3, 6, 74])
def test_a_moved_leader_is_found_again(code: int) -> None:
    log = ScriptedLog(*plain(3))

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        refusals = [code, code]

        def handler(header: Any, message: Any) -> Any:
            return fetch_answer(b"", error=refusals.pop()) if refusals else log.answer(header, message)

        broker.handlers["Fetch"] = handler
        broker.seen.clear()
        assert await values_of(consumer, 3) == [b"0", b"1", b"2"]
        assert [name for name, _ in broker.seen].count("Metadata") >= 2

    play(log, story)


def test_cut_connections_lose_and_double_nothing() -> None:
    log = ScriptedLog(*plain(30))
    log.max_bytes = 75

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        count = iter(range(10_000))

        async def handler(header: Any, message: Any) -> Any:
            return CUT if next(count) % 3 == 1 else await log.slowly(header, message)

        broker.handlers["Fetch"] = handler
        assert await values_of(consumer, 30) == [b"%d" % number for number in range(30)]

    play(log, story)


@pytest.mark.behaviour("I18")
def test_tampered_answers_are_typed_and_reading_goes_on() -> None:
    log = ScriptedLog(*plain(2))

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        whole = log.batches[1]
        log.batches[1] = whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:]
        assert await values_of(consumer, 1) == [b"0"]
        with pytest.raises(CorruptMessage, match=r"t-0, batch of offsets 1 to 1.*seek past it"):
            await values_of(consumer, 1)
        assert await consumer.position(T0) == 1
        log.batches[1] = whole
        assert await values_of(consumer, 1) == [b"1"]

    play(log, story)


def test_a_wrong_correlation_id_is_told_and_the_connection_replaced() -> None:
    log = ScriptedLog(*plain(1))

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        broker.handlers["Fetch"] = lambda header, message: encode_response(
            log.answer(header, message), header.api_version, header.correlation_id + 1
        )
        with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{broker.port}.*correlation id"):
            await consumer.poll(60)
        broker.handlers["Fetch"] = log.slowly
        assert await values_of(consumer, 1) == [b"0"]

    play(log, story)


@pytest.mark.parametrize(("offered", "used"), [((4, 17), 12), ((4, 11), 11), ((4, 4), 4)])
def test_fetch_names_topics_in_every_version(offered: tuple[int, int], used: int) -> None:
    log = ScriptedLog(*plain(2))

    async def run() -> None:
        async with scripted_broker() as broker:
            broker.topics = {"t": 1}
            broker.handlers["Fetch"] = log.slowly
            broker.handlers["ApiVersions"] = lambda header, message: api_versions({1: offered})
            async with Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
                consumer.assign([T0])
                consumer.seek(T0, 0)
                assert await values_of(consumer, 2) == [b"0", b"1"]
            assert ("Fetch", used) in broker.seen

    asyncio.run(run())


def test_positions_that_cannot_be_looked_up_are_an_error_then_tried_again() -> None:
    log = ScriptedLog(*plain(1))

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        codes = [29]

        def handler(header: Any, message: Any) -> ListOffsetsResponse:
            code = codes.pop() if codes else 0
            row = ListOffsetsResponse.ListOffsetsPartitionResponse(error_code=code, offset=-1 if code else 0)
            topic = ListOffsetsResponse.ListOffsetsTopicResponse(name="t", partitions=[row])
            return ListOffsetsResponse(topics=[topic])

        broker.handlers["ListOffsets"] = handler
        consumer.seek_to_beginning(T0)
        with pytest.raises(Exception, match="TOPIC_AUTHORIZATION_FAILED"):
            await consumer.position(T0)
        assert await consumer.position(T0) == 0

    play(log, story)


def test_a_missing_topic_does_not_keep_other_leaders_from_being_found() -> None:
    missing = [TopicPartition("missing", index) for index in range(3)]

    async def story(broker: ScriptedBroker, consumer: Consumer) -> None:
        def only_asked(header: Any, message: Any) -> Any:
            requested = {topic.name for topic in message.topics or ()}
            errors = {"missing": UnknownTopicOrPartition.code} if "missing" in requested else None
            return metadata(broker.port, {"t": 1} if "t" in requested else None, errors=errors)

        broker.handlers["Metadata"] = only_asked
        consumer.pause(T0)  # otherwise a fetch would look up the leader of T0
        cluster = await consumer._connected()
        await cluster.fetch_metadata(["missing"])
        fetcher = consumer._fetcher
        assert fetcher is not None
        await until(lambda: not fetcher._may_be_about_to_exist(missing[0]))
        cluster.metadata.mark_stale([T0])
        assert cluster.metadata.leader_of(T0) is None
        await fetcher._find_leaders([*missing, T0])
        assert cluster.metadata.leader_of(T0) == 1
        with pytest.raises(UnknownTopicOrPartition, match="missing"):
            await consumer.poll(0)
        assert not consumer._core.has_error, "one for the topic, not one for each of its partitions"

    play(ScriptedLog(*plain(1)), story, **{"request.timeout.ms": 1_000})
