"""Consumers, blocking and asyncio, against our broker over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.client import append, batch_of, batch_with_header_name
from support.wait import wait_until

from oncelog import Admin, Broker, Consumer, NewTopic, Producer, TopicPartition
from oncelog.aio import Consumer as AsyncConsumer
from oncelog.client.consumer import aio
from oncelog.errors import (
    ConfigError,
    CorruptMessage,
    DisconnectedError,
    MisuseError,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
)
from oncelog.testing.proxy import Direction, Proxy
from oncelog.types import Compression, Isolation, TimestampType
from oncelog.wire.batch import build_batch, iter_batches
from oncelog.wire.records import NewRecord

T0, T1, T2 = (TopicPartition("t", partition) for partition in range(3))


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as running:
        with Admin({"bootstrap.servers": running.bootstrap_servers}) as admin:
            admin.create_topics([NewTopic("t", 3)])
        yield running


def consumer_of(broker: Broker, **settings: object) -> Consumer:
    return Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "auto.offset.reset": "earliest"}, **settings
    )


def poll_all(consumer: Consumer, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    for _ in range(200):
        values += [record.value for record in consumer.poll(0.1)]
        if len(values) >= count:
            break
    return values


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


def test_records_come_back_whole(broker: Broker) -> None:
    headers = (("h", b"x"), ("null", None))
    record = NewRecord(1_700_000_000_123, b"key", b"value", headers)
    append(broker.bootstrap_servers, T1, build_batch([record, NewRecord(1_700_000_000_124, None, None)]))
    with consumer_of(broker) as consumer:
        consumer.assign([T1])
        first, second = consumer.poll(60)
        assert first == ("t", 1, 0, 1_700_000_000_123, TimestampType.CREATE_TIME, b"key", b"value", headers)
        assert (second.offset, second.key, second.value, second.headers) == (1, None, None, ())
        assert consumer.position(T1) == 2


def test_a_header_name_that_is_not_utf8_is_read_with_replacement_characters(broker: Broker) -> None:
    """Regression: after one such record, a consumer could not read any further."""
    batches = batch_of(b"before"), batch_with_header_name(b"caf\xe9", b"bad"), batch_of(b"after")
    append(broker.bootstrap_servers, T0, *batches)
    with consumer_of(broker) as consumer:
        consumer.assign([T0])
        records = consumer.poll(60)
        records += consumer.poll(60) if len(records) < 3 else []
        assert [record.value for record in records] == [b"before", b"bad", b"after"]
        assert records[1].headers == (("caf\ufffd", b"1"),)
        (table,) = consumer.fetch_range(T0, 0, 3, include_headers=True)
        assert table.column("headers").to_pylist()[1] == [{"key": "caf\ufffd", "value": b"1"}]
        consumer.seek(T0, 0)
        assert consumer.poll_arrow(60, include_headers=True).column("headers").to_pylist()[-1] is None


@pytest.mark.parametrize("name", ["a\udce9", b"caf\xe9"])
def test_a_header_name_that_cannot_be_utf8_is_refused(broker: Broker, name: Any) -> None:
    with Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        with pytest.raises(MisuseError, match="header"):
            producer.send("t", b"v", headers=[(name, b"1")])
        with pytest.raises(MisuseError, match="header"):
            producer.send_many("t", [b"v"], headers=[(name, b"1")])


@pytest.mark.parametrize("codec", list(Compression))
def test_records_of_every_codec_are_read(broker: Broker, codec: Compression) -> None:
    values = numbered(0, 100)
    append(broker.bootstrap_servers, T0, batch_of(*values, compression=codec))
    with consumer_of(broker) as consumer:
        consumer.assign([T0])
        assert poll_all(consumer, 100) == values


def test_partitions_are_read_together_each_in_order(broker: Broker) -> None:
    for tp in (T0, T1, T2):
        batches = [batch_of(*numbered(start, start + 50)) for start in range(0, 500, 50)]
        append(broker.bootstrap_servers, tp, *batches)
    with consumer_of(broker, max_poll_records=70, max_partition_fetch_bytes=1000) as consumer:
        consumer.assign([T0, T1, T2])
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        while sum(map(len, seen.values())) < 1500:
            records = consumer.poll(60)
            assert 0 < len(records) <= 70
            for record in records:
                seen[record.partition].append(record.offset)
        assert all(offsets == list(range(500)) for offsets in seen.values())


def test_a_seek_sets_the_next_record(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(*numbered(0, 10)), batch_of(*numbered(10, 20)))
    with consumer_of(broker) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 7)
        assert poll_all(consumer, 13) == numbered(7, 20)
        consumer.seek_to_beginning(T0)
        assert consumer.position(T0) == 0
        assert consumer.poll(60)[0].offset == 0
        consumer.seek_to_end()
        assert consumer.position(T0) == 20
        assert consumer.poll(0.05) == []


def test_latest_waits_for_new_records(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(b"old"))
    with consumer_of(broker, auto_offset_reset="latest") as consumer:
        consumer.assign([T0])
        assert consumer.position(T0) == 1
        timer = threading.Timer(0.1, append, (broker.bootstrap_servers, T0, batch_of(b"new")))
        timer.start()
        assert [record.value for record in consumer.poll(60)] == [b"new"]
        timer.join()


def test_iteration_ends_after_its_timeout(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(*numbered(0, 5)))
    with consumer_of(broker, consumer_timeout_ms=300) as consumer:
        consumer.assign([T0])
        assert [record.value for record in consumer] == numbered(0, 5)


def test_iteration_without_a_timeout_never_ends(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression (R1111): iteration ended after one hour without a record."""
    monkeypatch.setattr(aio, "_LONG_WAIT_SECONDS", 0.01)
    with consumer_of(broker) as consumer:
        consumer.assign([T0])
        consumer.seek_to_end(T0)
        timer = threading.Timer(0.2, append, (broker.bootstrap_servers, T0, batch_of(b"late")))
        timer.start()
        assert next(iter(consumer)).value == b"late"
        timer.join()


def test_poll_arrow_starts_at_the_position(broker: Broker) -> None:
    append(broker.bootstrap_servers, T2, batch_of(*numbered(0, 1000)))
    with consumer_of(broker) as consumer:
        consumer.assign([T2])
        consumer.seek(T2, 990)
        table = consumer.poll_arrow(5)
        assert table is not None
        assert table.column("value").to_pylist() == numbered(990, 1000)
        assert table.column("partition").to_pylist() == [2] * 10
        assert table.column("offset").to_pylist() == list(range(990, 1000))
        assert consumer.poll_arrow(0.01) is None


def test_paused_partitions_return_nothing_until_resume(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(b"a"))
    append(broker.bootstrap_servers, T1, batch_of(b"b"))
    with consumer_of(broker) as consumer:
        consumer.assign([T0, T1])
        consumer.pause(T0)
        assert poll_all(consumer, 1) == [b"b"]
        assert consumer.poll(0.05) == []
        assert consumer.paused() == [T0]
        consumer.resume(T0)
        assert poll_all(consumer, 1) == [b"a"]


def test_offsets_are_found_at_both_ends_and_for_times(broker: Broker) -> None:
    append(
        broker.bootstrap_servers,
        T0,
        batch_of(*numbered(0, 5), timestamp_ms=1000),
        batch_of(b"x", timestamp_ms=9000),
    )
    with consumer_of(broker) as consumer:
        assert consumer.beginning_offsets([T0, T1]) == {T0: 0, T1: 0}
        assert consumer.end_offsets([T0, T1]) == {T0: 6, T1: 0}
        results = consumer.offsets_for_times({T0: 1003, T1: 5, T2: 0})
        position = results[T0]
        assert position is not None and (position.offset, position.timestamp_ms) == (3, 1003)
        assert results[T1] is None and results[T2] is None
        later = consumer.offsets_for_times({T0: 1006})[T0]
        assert later is not None and later.offset == 5
        assert [part.partition for part in consumer.partitions_for("t")] == [0, 1, 2]


@pytest.mark.behaviour("I22")
def test_lag_and_metrics_follow_the_records_read(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(*numbered(0, 10)))
    with consumer_of(broker) as consumer:
        consumer.assign([T0])
        assert len(consumer.poll(5, max_records=4)) == 4
        assert consumer.lag(T0) == 6
        metrics = consumer.metrics()
        assert metrics["records-consumed-total"] == 4
        assert metrics["records-lag-max"] == 6
        assert metrics["records-consumed-rate"] > 0
        assert metrics["fetch-latency-avg"] > 0 and metrics["fetch-total"] >= 1


@pytest.mark.behaviour("I18")
def test_out_of_range_is_typed_or_resets(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(*numbered(0, 10)))
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        assert admin.delete_records({T0: 4})[T0].low_watermark == 4
    with consumer_of(broker, auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        with pytest.raises(MisuseError, match="call seek"):
            consumer.poll(1)
        consumer.seek(T0, 0)
        with pytest.raises(OffsetOutOfRange, match="t-0 at offset 0"):
            consumer.poll(60)
    with consumer_of(broker) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        assert poll_all(consumer, 6) == numbered(4, 10)


@pytest.mark.behaviour("I18")
def test_a_missing_topic_raises_and_is_not_created(broker: Broker) -> None:
    with consumer_of(broker, request_timeout_ms=200) as consumer:
        consumer.assign([TopicPartition("nowhere", 0)])
        with pytest.raises(UnknownTopicOrPartition, match="'nowhere' does not exist"):
            consumer.poll(60)
        with pytest.raises(UnknownTopicOrPartition, match="nowhere"):
            consumer.partitions_for("nowhere")
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        assert [topic.name for topic in admin.list_topics()] == ["t"]


@pytest.mark.behaviour("I18")
def test_reading_goes_on_over_a_restart_of_the_broker(tmp_path: Path) -> None:
    with Broker(tmp_path) as first:
        with Admin({"bootstrap.servers": first.bootstrap_servers}) as admin:
            admin.create_topics([NewTopic("t", 1)])
        append(first.bootstrap_servers, T0, batch_of(*numbered(0, 5)))
        consumer = consumer_of(first)
        consumer.assign([T0])
        assert poll_all(consumer, 5) == numbered(0, 5)
        port = first.port
    assert consumer.poll(0.2) == []
    with Broker(tmp_path, port=port) as second:
        append(second.bootstrap_servers, T0, batch_of(*numbered(5, 9)))
        assert poll_all(consumer, 4) == numbered(5, 9)
        consumer.close()


@pytest.mark.behaviour("I18")
def test_no_broker_is_an_error_that_names_it() -> None:
    with Consumer({"bootstrap.servers": "127.0.0.1:1", "oncelog.bootstrap.timeout.ms": 0}) as consumer:
        consumer.assign([T0])
        with pytest.raises(DisconnectedError, match=r"127\.0\.0\.1:1"):
            consumer.poll(1)


def test_misuse_raises_errors_that_name_the_mistake(broker: Broker) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers"):
        Consumer({})
    with pytest.raises(ConfigError, match=r"isolation\.level"):
        consumer_of(broker, isolation_level="serializable")
    consumer = consumer_of(broker)
    with pytest.raises(MisuseError, match="assign"):
        consumer.poll(0.1)
    consumer.assign([T0])
    with pytest.raises(MisuseError, match="must lie between 0"):
        consumer.seek(T0, -5)
    consumer.close()
    consumer.close()
    with pytest.raises(MisuseError, match="closed"):
        consumer.poll(0.1)


# Ranges


def test_a_range_is_read_exactly(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, *(batch_of(*numbered(s, s + 10)) for s in range(0, 100, 10)))
    with consumer_of(broker, max_partition_fetch_bytes=300) as consumer:
        for start, end in [(0, 100), (13, 14), (5, 95), (0, 0), (100, 100), (99, 100)]:
            tables = list(consumer.fetch_range(T0, start, end))
            values = [value for table in tables for value in table.column("value").to_pylist()]
            assert values == numbered(start, end)


def test_a_range_carries_headers_when_asked(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, build_batch([NewRecord(1, b"k", b"v", (("h", b"x"),))]))
    with consumer_of(broker) as consumer:
        (table,) = consumer.fetch_range(T0, 0, 1, include_headers=True)
        assert table.column("headers").to_pylist() == [[{"key": "h", "value": b"x"}]]
        (plain,) = consumer.fetch_range(T0, 0, 1)
        assert "headers" not in plain.schema.names


def test_batches_come_as_stored(broker: Broker) -> None:
    batches = [
        batch_of(*numbered(s, s + 10), producer_id=9, producer_epoch=0, base_sequence=s) for s in (0, 10, 20)
    ]
    append(broker.bootstrap_servers, T0, *batches)
    with consumer_of(broker) as consumer:
        views = list(consumer.fetch_batches(T0, 5, 25))
        headers = [header for view in views for _, header in iter_batches(view)]
        assert [(h.base_offset, h.base_sequence, h.producer_id) for h in headers] == [
            (0, 0, 9),
            (10, 10, 9),
            (20, 20, 9),
        ]
        (only,) = consumer.fetch_batches(T0, 10, 20)
        assert bytes(only)[17:] == bytes(batches[1])[17:]


@pytest.mark.behaviour("I18")
def test_a_range_that_is_gone_names_what_is_there(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(*numbered(0, 10)))
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.delete_records({T0: 4})
    with consumer_of(broker) as consumer:
        with pytest.raises(
            OffsetOutOfRange, match=r"t-0 contains offsets 4 to 10 \(exclusive\), but offset 0"
        ):
            list(consumer.fetch_range(T0, 0, 10))
        with pytest.raises(OffsetOutOfRange, match="offset 77"):
            list(consumer.fetch_range(T0, 77, 80))
        with pytest.raises(MisuseError, match="start must not be above end"):
            consumer.fetch_range(T0, 5, 4)


def test_a_range_beyond_the_end_ends_with_a_timeout(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(b"a"))
    with consumer_of(broker, request_timeout_ms=300, fetch_max_wait_ms=50) as consumer:
        reader = consumer.fetch_range(T0, 0, 5)
        assert next(reader).num_rows == 1
        with pytest.raises(TimeoutError, match="t-0: no records at offset 1 of a range that ends at 5"):
            next(reader)


def test_a_damaged_partition_is_asked_once(tmp_path: Path) -> None:
    """Regression: each reader of a range waited for request.timeout.ms, and so did each task of an audit."""
    with Broker(tmp_path) as broker:
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            admin.create_topics([NewTopic("t", 1)])
        append(broker.bootstrap_servers, T0, *(batch_of(*numbered(s, s + 10)) for s in (0, 10, 20)))
        (segment,) = (tmp_path / "t-0").glob("*.log")
        data = bytearray(segment.read_bytes())
        # Set the batch's magic byte to an unknown version.
        data[[position for position, _ in iter_batches(data)][1] + 16] = 9
        with segment.open("r+b") as file:
            file.write(data)
        with Proxy(broker.bootstrap_servers) as proxy:
            with Consumer({"bootstrap.servers": proxy.bootstrap_servers}) as consumer:
                reader = consumer.fetch_range(T0, 0, 30)
                assert next(reader).num_rows == 10
                with pytest.raises(CorruptMessage, match="fetching t-0 at offset 10"):
                    next(reader)
            requests = [event.api for event in proxy.events if event.direction is Direction.REQUEST]
            assert requests.count("Fetch") == 2


SWAPPED, FAR = "the last two batches in wrong order", "the last batch with far offsets"


def change_first_segment(directory: Path, change: str) -> None:
    """In the first of two segments, change the offsets at the end of the file, which no checksum covers.

    Either the last two batches are swapped, or the last one gets a far base offset. Each batch has 10
    records.
    """
    segment = min(directory.glob("*.log"))
    data = segment.read_bytes()
    *sound, last = [data[position : position + header.size_bytes] for position, header in iter_batches(data)]
    if change == SWAPPED:
        sound[-1:] = [last, sound[-1]]
    else:
        sound.append((1_000_000).to_bytes(8, "big") + last[8:])
    segment.write_bytes(b"".join(sound))


@pytest.fixture(params=[SWAPPED, FAR])
def changed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Broker]]:
    """Change the log while the broker is down.

    Yield the kind of change, and the broker after its restart.
    """
    with Broker(tmp_path) as broker:
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            admin.create_topics([NewTopic("t", 1, configs={"segment.bytes": 1 << 20})])
        append(broker.bootstrap_servers, T0, *(batch_of(*[b"x" * 10_000] * 10) for _ in range(20)))
    assert len(list((tmp_path / "t-0").glob("*.log"))) == 2
    change_first_segment(tmp_path / "t-0", request.param)
    with Broker(tmp_path) as broker:
        yield request.param, broker


def test_a_range_ends_although_a_segment_ends_with_changed_offsets(changed: tuple[str, Broker]) -> None:
    """Regression: the reader read the range again and again, or stopped at the changed offsets without an
    error.
    """
    change, broker = changed
    with consumer_of(broker) as consumer:
        pieces = islice(consumer.fetch_range(T0, 0, 200), 20)
        if change == SWAPPED:
            offsets = [offset for table in pieces for offset in table.column("offset").to_pylist()]
            assert sorted(offsets) == list(range(200)) != offsets
        else:
            with pytest.raises(CorruptMessage, match=r"t-0: .* has offsets up to 1000009, but .* before 200"):
                list(pieces)


def test_the_old_name_of_fetch_chunks_warns(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(*numbered(0, 10)))
    with consumer_of(broker) as consumer:
        with pytest.warns(DeprecationWarning, match="use fetch_chunks"):
            (chunk,) = consumer.fetch_pieces(T0, 0, 10, Isolation.READ_UNCOMMITTED)
        assert chunk.next_offset == 10


def test_a_range_left_early_leaves_nothing_behind(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, *(batch_of(*numbered(s, s + 10)) for s in range(0, 100, 10)))
    with consumer_of(broker, max_partition_fetch_bytes=200) as consumer:
        reader = consumer.fetch_range(T0, 0, 100)
        next(reader)
        reader.close()  # type: ignore[attr-defined]
        assert sum(table.num_rows for table in consumer.fetch_range(T0, 0, 100)) == 100


# asyncio


def test_the_asyncio_consumer_reads_records_and_ranges(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(*numbered(0, 30)))

    async def story() -> None:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "auto.offset.reset": "earliest"}
        async with AsyncConsumer(settings, consumer_timeout_ms=300) as consumer:
            consumer.assign([T0])
            assert await consumer.position(T0) == 0
            assert [record.value async for record in consumer] == numbered(0, 30)
            tables = [table async for table in consumer.fetch_range(T0, 10, 20)]
            assert [v for t in tables for v in t.column("value").to_pylist()] == numbered(10, 20)
            views = [view async for view in consumer.fetch_batches(T0, 0, 30)]
            assert sum(header.records_count for view in views for _, header in iter_batches(view)) == 30
            assert await consumer.end_offsets([T0]) == {T0: 30}
            assert (await consumer.offsets_for_times({T0: 0}))[T0] is not None
            assert len(await consumer.partitions_for("t")) == 3
            assert consumer.metrics()["records-consumed-total"] == 30

    asyncio.run(story())


def test_position_raises_an_error_that_waits_instead_of_timing_out(broker: Broker) -> None:
    """Regression: the lookup did not begin while the error of another partition waited for a poll."""
    with consumer_of(broker, request_timeout_ms=5000) as consumer:
        consumer.assign([T0, T1])
        assert consumer.position(T0) == consumer.position(T1) == 0
        consumer.pause(T0, T1)
        wait_until(lambda: not consumer._core._in_flight)  # no response wakes the call below
        consumer._core.note_error(CorruptMessage("t-1 is damaged"))
        fetcher = consumer._async._fetcher
        assert fetcher is not None
        fetcher._wake.clear()
        consumer.seek_to_end(T0)
        with pytest.raises(CorruptMessage):
            consumer.position(T0)
        assert consumer.position(T0) == 0


def test_a_poll_for_no_records_returns_none(broker: Broker) -> None:
    append(broker.bootstrap_servers, T0, batch_of(b"a", b"b"))
    with consumer_of(broker) as consumer:
        consumer.assign(T0)
        assert consumer.poll(60, max_records=1)
        assert consumer.poll(0.1, max_records=0) == []
        assert [record.value for record in consumer.poll(60)] == [b"b"]
