"""`oncelog.read_table`: it returns a bounded range of topics as one Arrow table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from support.topics import new_topic, producer_of

import oncelog
from oncelog import Producer
from oncelog.client.times import Time, time_ms_of
from oncelog.errors import MisuseError, UnknownTopicOrPartition

HOUR_MS = 3_600_000
NOON_MS = 1_700_000_000_000


def fill(servers: str, topic: str, count: int = 4, partition: int = 0) -> None:
    """Write one record per hour, from NOON_MS on."""
    times = [NOON_MS + number * HOUR_MS for number in range(count)]
    with producer_of(servers) as producer:
        values = [b"%d" % number for number in range(count)]
        producer.send_many(topic, values, timestamps_ms=times, partition=partition).result(60)


def read(servers: str, topic: str | list[str], **arguments: object) -> list[bytes]:
    table = oncelog.read_table(topic, {"bootstrap.servers": servers}, **arguments)  # type: ignore[arg-type]
    values: list[bytes] = table.column("value").to_pylist()
    return values


def test_a_table_has_all_records_in_the_order_of_offsets(ours: str) -> None:
    topic = new_topic(ours, 2)
    fill(ours, topic, 3, partition=1)
    fill(ours, topic, 1, partition=0)
    with producer_of(ours) as producer:
        producer.send(topic, b"h", partition=1, headers={"name": b"x"}).result(60)
    table = oncelog.read_table(topic, bootstrap_servers=ours, include_headers=True)
    rows = [tuple(row.values()) for row in table.select(["partition", "offset", "value"]).to_pylist()]
    assert rows == [(0, 0, b"0"), (1, 0, b"0"), (1, 1, b"1"), (1, 2, b"2"), (1, 3, b"h")]
    assert table.column("headers").to_pylist()[-1] == [{"key": "name", "value": b"x"}]
    assert read(ours, topic, partitions=0) == [b"0"]
    assert read(ours, topic, partitions=[0, 1]) == table.column("value").to_pylist()


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [
        (NOON_MS + HOUR_MS, None, [b"1", b"2", b"3"]),
        (NOON_MS + 1, NOON_MS + 3 * HOUR_MS, [b"1", b"2"]),
        (None, NOON_MS, []),
        (datetime.fromtimestamp(NOON_MS / 1000, UTC) + timedelta(hours=2), "now", [b"2", b"3"]),
        (NOON_MS + 9 * HOUR_MS, None, []),
        (timedelta(days=1), None, []),
        ("1h", None, []),
    ],
)
def test_since_and_until_choose_the_range(
    ours: str, since: Time | None, until: Time | None, expected: list[bytes]
) -> None:
    topic = new_topic(ours)
    fill(ours, topic)
    assert read(ours, topic, since=since, until=until) == expected


def test_an_empty_topic_gives_a_table_without_rows(ours: str) -> None:
    table = oncelog.read_table(new_topic(ours), bootstrap_servers=ours)
    assert table.num_rows == 0 and {"key", "value", "offset"} <= set(table.column_names)


def test_open_transactions_are_left_out(ours: str) -> None:
    topic = new_topic(ours)
    with Producer(bootstrap_servers=ours, transactional_id=topic) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b"committed")
        producer.begin_transaction()
        producer.send(topic, b"open")
        producer.flush()
        assert read(ours, topic) == [b"committed"]
        assert read(ours, topic, isolation_level="read_uncommitted") == [b"committed", b"open"]


def test_several_topics_make_one_table_and_a_name_is_one_topic(ours: str) -> None:
    first, second = new_topic(ours), new_topic(ours)
    fill(ours, first, 1)
    fill(ours, second, 2)
    assert read(ours, [first, second]) == [b"0", b"0", b"1"]
    assert read(ours, first) == [b"0"]


@pytest.mark.parametrize(
    "argument", [{"since": "yesterday"}, {"until": True}, {"partitions": "0"}, {"partitions": 5}]
)
def test_other_arguments_are_refused(ours: str, argument: dict[str, object]) -> None:
    topic = new_topic(ours)
    with pytest.raises(MisuseError):
        read(ours, topic, **argument)


def test_a_topic_that_does_not_exist_is_an_error_and_not_created(ours: str) -> None:
    with pytest.raises(UnknownTopicOrPartition):
        read(ours, "no-such-topic", request_timeout_ms=200)


def test_times_have_one_meaning() -> None:
    now_ms = NOON_MS
    assert time_ms_of("1h", now_ms) == time_ms_of(timedelta(hours=1), now_ms) == now_ms - HOUR_MS
    assert time_ms_of(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), now_ms) == time_ms_of(1_000, now_ms) == 1_000
    assert time_ms_of(timedelta(days=40_000), now_ms) == 0
    for wrong in (-1, 1 << 63, True, 1.5):
        with pytest.raises(ValueError, match="is not a time"):
            time_ms_of(wrong, now_ms)  # type: ignore[arg-type]
