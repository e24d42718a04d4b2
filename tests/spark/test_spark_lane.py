"""A lane on a real broker, without Spark: zombies, repetitions and refusals at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers_producer import wait_for_markers
from helpers_spark import create_topic

import oncelog
from oncelog.edge.admin import Admin
from oncelog.errors import ConfigError
from oncelog.rules.lane import RowRefused, RowSum, SinkError
from oncelog.spark.lane import LaneReport, Sink, finish, write_lane
from oncelog.spark.row_hash import hash_rows
from oncelog.spark.sink_options import SINK_OPTIONS, parse_sink_options
from oncelog.spark.sink_rows import check_columns
from oncelog.types import OffsetAndMetadata, TopicPartition

FAST = {"kafka.max.block.ms": "1500", "kafka.request.timeout.ms": "1500"}


def sink_of(bootstrap: str, name: str, **options: str) -> Sink:
    given = {"kafka.bootstrap.servers": bootstrap}
    if "topic" not in options and "markerTopic" not in options:
        given["topic"] = name
    return Sink(name, parse_sink_options({**given, **options}, "stream"))


def batch(*values: str | None, **columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string()), **columns})


def committed(bootstrap: str, topic: str) -> list[str]:
    """Values as a read_committed reader gets them, sorted."""
    found: list[str] = []
    with oncelog.Consumer({"bootstrap.servers": bootstrap}) as consumer:
        partitions = [TopicPartition(topic, n) for n in range(len(consumer.partitions_for(topic)))]
        wait_for_markers(bootstrap, partitions, consumer)
        for at, end in consumer.end_offsets(partitions).items():
            for piece in consumer.fetch_range(at, 0, end):
                found += [value.decode() for value in piece.column("value").to_pylist()]
    return sorted(found)


@pytest.fixture(params=["shared_broker", "apache_kafka"])
def bootstrap(request: pytest.FixtureRequest, topic: str) -> str:
    """Our broker, and Apache Kafka."""
    found: str = request.getfixturevalue(request.param).bootstrap_servers
    create_topic(found, topic, partitions=3)
    return found


@pytest.mark.behaviour("P2")
def test_a_batch_that_comes_again_is_compared_and_not_written(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    first = write_lane(sink, 0, 0, [batch("a", "b"), batch(), batch("c")])
    again = write_lane(sink, 0, 0, [batch("c", "a"), batch("b")])  # another order, other Arrow batches
    assert (first.sum, again.sum, first.was_there, again.was_there) == (first.sum, first.sum, False, True)
    for other in (["a", "b"], ["a", "b", "x"], ["a", "b", "c", "c"]):
        with pytest.raises(
            SinkError, match=r"lane 0 of batch 0.*committed with 3 rows in this lane, and now"
        ):
            write_lane(sink, 0, 0, [batch(*other)])
    with pytest.raises(SinkError, match="and now it has 0"):
        write_lane(sink, 0, 0, [])
    finish(sink, 0, [first])
    finish(sink, 0, [again])
    write_lane(sink, 1, 0, [batch("d")])
    assert committed(bootstrap, topic) == ["a", "b", "c", "d"]


def interrupted(*parts: pa.RecordBatch, by: Callable[[], object]) -> Iterator[pa.RecordBatch]:
    """The parts, with something that happens before the last."""
    yield from parts[:-1]
    by()
    yield parts[-1]


@pytest.mark.behaviour("P2")
def test_a_zombie_that_wakes_is_fenced_and_nothing_of_it_is_seen(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    reports: list[LaneReport] = []
    wakes = interrupted(
        batch("a"), batch("b"), by=lambda: reports.append(write_lane(sink, 0, 0, [batch("a", "b")]))
    )
    with pytest.raises(SinkError, match=r"another attempt took over.*kafka.transaction.timeout.ms=300000"):
        write_lane(sink, 0, 0, wakes)
    assert not reports[0].was_there and write_lane(sink, 0, 0, [batch("b", "a")]).was_there
    assert committed(bootstrap, topic) == ["a", "b"]


@pytest.mark.behaviour("P2")
def test_an_attempt_that_failed_half_way_leaves_nothing(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_lane(sink, 0, 0, interrupted(batch("a"), batch("b"), by=fail))
    assert not write_lane(sink, 0, 0, [batch("a", "b")]).was_there
    assert committed(bootstrap, topic) == ["a", "b"]


@pytest.mark.behaviour("P2")
def test_a_zombie_of_an_older_batch_writes_nothing(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    for number in range(2):
        finish(sink, number, [write_lane(sink, number, 0, [batch(f"v{number}")])])
    for late in (0, 1):  # its own rows, or the lane's part of a checkpoint taken back
        with pytest.raises(SinkError, match=r"committed since|committed with 1 rows"):
            write_lane(sink, late, 0, [batch("late")])
    with pytest.raises(SinkError, match="batch 0 was asked for, and batch 1 has been committed since"):
        finish(sink, 0, [LaneReport(0, RowSum(), False)])
    assert committed(bootstrap, topic) == ["v0", "v1"]


@pytest.mark.behaviour("P2")
def test_a_lost_marker_is_an_error_and_not_a_second_write(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    finish(sink, 0, [write_lane(sink, 0, n, [batch(f"v{n}")]) for n in range(2)])
    finish(sink, 1, [write_lane(sink, 1, n, [batch(f"w{n}")]) for n in range(2)])
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_group(sink.lane_id(1))
        with pytest.raises(SinkError, match=r"the marker of lane 1 is not there \(none\)"):
            write_lane(sink, 1, 1, [batch("w1")])
        with pytest.raises(SinkError, match="batch 1 was committed as 2 lanes, and now it has more"):
            write_lane(sink, 1, 2, [batch("w2")])
        admin.delete_group(sink.lane_id(0))
        admin.delete_group(sink.group)
    with pytest.raises(SinkError, match="set the option firstBatchId=2"):
        write_lane(sink, 2, 0, [batch("x")])
    late = sink_of(bootstrap, topic, firstBatchId="2")
    write_lane(late, 2, 0, [batch("x")])
    assert committed(bootstrap, topic) == ["v0", "v1", "w0", "w1", "x"]


def test_fewer_lanes_than_before_are_told_by_the_driver(bootstrap: str, topic: str) -> None:
    for last, before in ((2, 3), (7, 3), (7, 0)):  # also more than a batch ever had, and the very first one
        sink = sink_of(bootstrap, topic, transactionalIdPrefix=f"{last}of{before}")
        if before:
            finish(sink, 0, [write_lane(sink, 0, n, [batch(f"v{n}")]) for n in range(before)], "first run")
        at = min(before, 1)
        write_lane(sink, at, last, [batch(f"w{last}")])  # and the driver died
        repeated = [write_lane(sink, at, n, [batch("w")]) for n in range(2)]
        with pytest.raises(SinkError, match=f"had committed lane {last} as well"):
            finish(sink, at, repeated, "second run")


def test_a_group_of_somebody_else_is_left_alone(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.alter_group_offsets(sink.lane_id(0), {sink.marker_at: OffsetAndMetadata(9)})
    with pytest.raises(SinkError, match="holds an offset that this sink did not write"):
        write_lane(sink, 0, 0, [batch("a")])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"value": ["a", "b"], "topic": ["t", None]}, "row 3 has a null topic"),
        ({"value": ["a", "b"], "topic": ["t"] * 2, "partition": [None, 3]}, r"row 3.*partitions 0 to 2"),
        (
            {"value": ["a", "b"], "topic": ["t"] * 2, "partition": [0, -1]},
            r"row 3.*'t' asks for partition -1",
        ),
        ({"value": ["a", "b" * 2_000_000], "topic": ["t"] * 2}, r"row 3 for topic 't' has 2000000 bytes"),
    ],
    ids=["topic", "partition", "negative", "large"],
)
def test_a_row_that_cannot_be_written_is_named(
    bootstrap: str, topic: str, rows: dict[str, list[Any]], said: str
) -> None:
    create_topic(bootstrap, f"{topic}.t", partitions=3)
    sink = sink_of(bootstrap, topic, markerTopic=topic)
    types = {"value": pa.string(), "topic": pa.string(), "partition": pa.int32()}
    types = {name: types[name] for name in rows}
    good = {"value": ["x", "y"], "topic": ["t", "t"], "partition": [None, None]}
    pieces = [
        pa.RecordBatch.from_pydict({n: pa.array(c[n], k) for n, k in types.items()}) for c in (good, rows)
    ]
    renamed = [_prefixed(piece, topic) for piece in pieces]
    with pytest.raises(RowRefused, match=said.replace("'t'", f"'{topic}.t'")) as raised:
        write_lane(sink, 0, 0, renamed)
    assert "lane 0 of batch 0, topics of the column topic" in str(raised.value)
    assert committed(bootstrap, f"{topic}.t") == []


def _prefixed(piece: pa.RecordBatch, topic: str) -> pa.RecordBatch:
    names = [None if each is None else f"{topic}.t" for each in piece.column("topic").to_pylist()]
    at = piece.schema.get_field_index("topic")
    return piece.set_column(at, "topic", pa.array(names, pa.string()))


def test_rows_go_where_their_columns_say(bootstrap: str, topic: str) -> None:
    create_topic(bootstrap, f"{topic}.b", partitions=2)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows = pa.RecordBatch.from_pydict(
        {
            "ignored": [1, 2, 3, 4],
            "key": pa.array([b"k", None, b"", b"k"], pa.binary()),
            "value": pa.array([b"0", None, b"2", b"3"], pa.binary()),
            "topic": [topic, f"{topic}.b", topic, f"{topic}.b"],
            "partition": pa.array([2, 1, 0, None], pa.int32()),
            "headers": pa.array([[{"key": "h", "value": b"1"}], None, [], None], headers),
        }
    )
    write_lane(sink_of(bootstrap, topic, markerTopic=topic), 0, 0, [rows])
    found = {}
    with oncelog.Consumer({"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([TopicPartition(topic, n) for n in range(3)])
        consumer.assign([*consumer.assignment(), *(TopicPartition(f"{topic}.b", n) for n in range(2))])
        while len(found) < 4:
            for record in consumer.poll(timeout=2):
                found[record.topic, record.partition, record.value] = (record.key, record.headers)
    assert found.pop((topic, 2, b"0")) == (b"k", (("h", b"1"),))
    assert found.pop((f"{topic}.b", 1, None)) == (None, ())
    assert found.pop((topic, 0, b"2")) == (b"", ())
    ((name, _, value),) = found
    assert (name, value) == (f"{topic}.b", b"3")


def test_small_messages_only(shared_broker: oncelog.Broker, topic: str) -> None:
    """Batches are cut to what the topic takes; a row that is larger is told with its number."""
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, max_message_bytes=10_000)
    sink = sink_of(bootstrap, topic)
    write_lane(sink, 0, 0, [batch(*(f"{n:04d}".ljust(500, ".") for n in range(200)))])
    assert len(committed(bootstrap, topic)) == 200
    with pytest.raises(
        SinkError, match="the largest row up to there is row 1 with 20000 bytes: raise the topic"
    ):
        write_lane(sink, 0, 1, [batch("a", "b" * 20_000)])
    assert len(committed(bootstrap, topic)) == 200


def test_a_topic_that_is_not_there_and_a_timeout_too_long() -> None:
    strict = {"auto.create.topics.enable": False, "transaction.max.timeout.ms": 60_000}
    with oncelog.Broker(config=strict) as broker:
        with pytest.raises(
            SinkError, match=r"lane 0 of batch 0, topic 'nowhere'.*transaction.max.timeout.ms is"
        ):
            write_lane(sink_of(broker.bootstrap_servers, "nowhere"), 0, 0, [batch("a")])
        shorter = {**FAST, "kafka.transaction.timeout.ms": "50000"}
        sink = sink_of(broker.bootstrap_servers, "nowhere", **shorter)
        with pytest.raises(SinkError, match=r"topic 'nowhere'.*create the topic|does the topic exist"):
            write_lane(sink, 0, 0, [batch("a")])


def test_a_task_slower_than_the_transaction_timeout_is_told_so() -> None:
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 50}
    with oncelog.Broker(config=quick) as broker:
        create_topic(broker.bootstrap_servers, "slow")
        sink = sink_of(broker.bootstrap_servers, "slow", **{"kafka.transaction.timeout.ms": "100"})

        def until_aborted() -> None:
            with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
                while True:
                    told = admin.describe_transactions([sink.lane_id(0)])[sink.lane_id(0)]
                    if told.state == "CompleteAbort":
                        return

        with pytest.raises(SinkError, match=r"kafka.transaction.timeout.ms=100 and was aborted"):
            write_lane(sink, 0, 0, interrupted(batch("a"), batch("b"), by=until_aborted))
        assert committed(broker.bootstrap_servers, "slow") == []


def test_the_hash_sees_rows_and_not_their_order() -> None:
    key, value = pa.array([b"a", b"b", None]), pa.array(["x", "", None])
    assert hash_rows(key, value) == hash_rows(key.take([2, 0, 1]), value.take([2, 0, 1]))
    others = [
        (pa.array([b"b", b"a", None]), value),
        (pa.array([b"a", b"b", b""]), value),
        (key, pa.array(["x", None, ""])),
        (value.cast(pa.binary()), key.cast(pa.binary())),
    ]
    assert len({hash_rows(key, value), *(hash_rows(*each) for each in others)}) == 5
    assert hash_rows(pa.array([1, None], pa.int32())) != hash_rows(pa.array([None, 2], pa.int32()))
    assert hash_rows(pa.array([], pa.binary())) == 0


def test_a_row_is_hashed_alike_wherever_it_stands() -> None:
    long, short = [b"%03d" % n * 200 for n in range(50)], [b"%d" % n for n in range(50)]
    rows: list[bytes | None] = [*long, None, b"", *short]
    one_by_one = sum(hash_rows(pa.array([row], pa.binary())) for row in rows) % 2**64
    column = pa.array([b"before", *rows, b"behind"], pa.binary())[1:-1]
    assert hash_rows(column) == one_by_one
    assert (hash_rows(column[:51]) + hash_rows(column[51:])) % 2**64 == one_by_one
    assert hash_rows(pa.array(["ä" * 300, "b"])) == hash_rows(pa.array(["ä".encode() * 300, b"b"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "t"}, "kafka.bootstrap.servers is not set"),
        ({"kafka.bootstrap.servers": "h:1"}, "set the option markerTopic"),
        ({"kafka.bootstrap.servers": "h:1", "topik": "t"}, "did you mean topic"),
        ({"kafka.bootstrap.servers": "h:1", "topic": "t", "writeId": "w"}, "writeId is for batch writes"),
        (
            {"kafka.bootstrap.servers": "h:1", "topic": "t", "kafka.transactional.id": "x"},
            "transactionalIdPrefix",
        ),
        ({"kafka.bootstrap.servers": "h:1", "topic": "t", "kafka.linger": "x"}, "did you mean linger.ms"),
        ({"kafka.bootstrap.servers": "h:1", "topic": "t", "firstBatchId": "-1"}, "firstBatchId='-1'"),
    ],
)
def test_wrong_options(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_sink_options(options, "stream")


def test_columns_of_sparks_own_sink() -> None:
    check_columns([("value", "string"), ("key", "binary"), ("offset", "bigint")], "t")
    for types, topic, said in (
        ([("key", "string")], "t", "a column named value is needed"),
        ([("value", "string")], None, "add a column named topic"),
        ([("value", "bigint")], "t", "column value is bigint, and must be string or binary"),
        ([("value", "string"), ("partition", "bigint")], "t", "partition is bigint, and must be int"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_columns(types, topic)


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    told = {option.name: f"| `{option.name}` |" in page and option.meaning in page for option in SINK_OPTIONS}
    assert all(told.values()), told
