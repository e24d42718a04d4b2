"""The wire format, subjects and retries of the schema registry's client: decisions without I/O."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.errors import ConfigError, SchemaDataError
from oncelog.schema_registry.cache import Cache
from oncelog.schema_registry.subjects import retry_pause_ms, strategy_name, subject_name
from oncelog.schema_registry.wire_format import (
    MAX_INDEXES,
    decode_indexes,
    decode_schema_id,
    encode_header,
    is_framed,
)

TABLE = Path(__file__).parents[1] / "tables" / "schema_retries.txt"


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_pause_before_the_next_attempt(row: list[str]) -> None:
    _, urls, attempt, status, pause = row
    found = retry_pause_ms(
        int(attempt),
        None if status == "none" else int(status),
        int(urls),
        max_retries=2,
        wait_ms=100,
        max_wait_ms=150,
    )
    assert found == (None if pause == "none" else int(pause))


@pytest.mark.parametrize(
    ("schema_id", "indexes", "header"),
    [
        (1, None, "0000000001"),
        (0x7FFFFFFF, None, "007fffffff"),
        (258, [0], "000000010200"),
        (258, [1], "00000001020202"),
        (258, [1, 0], "0000000102040200"),
        (258, [64], "0000000102028001"),
    ],
)
def test_headers_are_those_of_confluents_serializers(
    schema_id: int, indexes: list[int] | None, header: str
) -> None:
    assert encode_header(schema_id, indexes).hex() == header


@given(
    schema_id=st.integers(0, 2**32 - 1),
    indexes=st.lists(st.integers(0, 2**30), min_size=1, max_size=MAX_INDEXES),
    data=st.binary(max_size=20),
)
def test_a_header_is_decoded_to_what_was_encoded(schema_id: int, indexes: list[int], data: bytes) -> None:
    framed = encode_header(schema_id, indexes) + data
    assert decode_schema_id(framed) == schema_id
    found, position = decode_indexes(framed)
    assert (list(found), framed[position:]) == (indexes, data)


@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    if not is_framed(data):
        with pytest.raises(SchemaDataError, match="not in the wire format"):
            decode_schema_id(data)
        return
    try:
        indexes, position = decode_indexes(data)
    except SchemaDataError:
        return
    assert 0 < len(indexes) <= MAX_INDEXES
    assert 5 < position <= len(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes that begin with nothing"),
        (b"\0\0\0\0", "4 bytes that begin with 00 00 00 00"),
        (b"\x01\0\0\0\x01x", "6 bytes that begin with 01 00 00 00 01"),
    ],
)
def test_bytes_in_another_format_are_named(data: bytes, text: str) -> None:
    with pytest.raises(SchemaDataError, match=text):
        decode_schema_id(data)


@pytest.mark.parametrize("indexes", ["", "02", "80", "8080808080", "0201", "8202"])
def test_malformed_message_indexes_are_refused(indexes: str) -> None:
    with pytest.raises(SchemaDataError, match="index"):
        decode_indexes(bytes.fromhex("0000000001" + indexes))


@pytest.mark.parametrize(
    ("strategy", "is_key", "subject"),
    [
        ("TopicNameStrategy", True, "orders-key"),
        ("TopicNameStrategy", False, "orders-value"),
        ("RecordNameStrategy", False, "shop.Order"),
        ("TopicRecordNameStrategy", True, "orders-shop.Order"),
        ("io.confluent.kafka.serializers.subject.RecordNameStrategy", True, "shop.Order"),
    ],
)
def test_subjects_are_those_of_confluents_strategies(strategy: str, is_key: bool, subject: str) -> None:
    assert subject_name(strategy_name(strategy), "orders", is_key, "shop.Order") == subject


def test_an_unknown_strategy_and_a_missing_name_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"subject\.name\.strategy='Mine': expected one of TopicNameStrategy"
    ):
        strategy_name("Mine")
    with pytest.raises(ConfigError, match="needs a schema with a name"):
        subject_name("RecordNameStrategy", "orders", False, None)


def test_a_cache_keeps_the_entries_that_were_used_last() -> None:
    cache: Cache[int, str] = Cache(2)
    cache.put(1, "a")
    cache.put(2, "b")
    assert cache.get(1) == "a"
    cache.put(3, "c")
    assert (cache.get(1), cache.get(2), cache.get(3), len(cache)) == ("a", None, "c", 2)
