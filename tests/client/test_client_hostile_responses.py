"""From hostile fetch responses, a consumer in C and one in Python get the same records, positions and
errors.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.consumer_core import T0, answer, batch, marker, started
from support.row_loops import c_module

from oncelog.errors import OncelogError
from oncelog.types import Compression
from oncelog.wire import columns, fetched_records, records
from oncelog.wire.batch import iter_batches
from oncelog.wire.header import write_crc

BYTES = st.sampled_from([0, 1, 2, 3, 7, 16, 32, 126, 127, 128, 129, 254, 255])
PRODUCER = {"producer_id": 7, "producer_epoch": 0, "is_transactional": True}


def stored() -> bytes:
    """Return plain, transactional, aborted and compressed batches with markers. One range of offsets is
    missing.
    """
    return b"".join(
        [
            batch(0, b"a", b"b" * 200),
            batch(2, b"aborted", base_sequence=0, **PRODUCER),
            batch(3, b"c", b"d", b"e", compression=Compression.GZIP),
            marker(6, 7, commit=False),
            batch(7, b"f", base_sequence=1, **PRODUCER),
            marker(8, 7, commit=True),
            batch(9, *[b"%d" % number for number in range(20)]),
            batch(40, b"g" * 500, b"h"),
        ]
    )


@pytest.fixture(scope="module")
def c() -> dict[Any, ModuleType]:
    fetched = c_module("oncelog.wire._fetched_records")
    return {fetched_records: fetched, columns: fetched, records: c_module("oncelog.wire._records")}


def in_both_forms(c: dict[Any, ModuleType], call: Any) -> tuple[Any, Any]:
    results = []
    for is_c in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            for module, form in c.items():
                patch.setattr(module, "_c", form if is_c else None)
            results.append(call())
    return results[0], results[1]


def delivered(data: bytes, aborted: bool, settings: dict[str, object], start: int, most: int) -> list[Any]:
    """Poll until nothing is left or an error comes.

    Return the result of each poll, and the position after it.
    """
    consumer, call = started(start, **settings)
    consumer.on_response(call, answer((T0, data), aborted=[(7, 2)] if aborted else None), 1.0, 0)
    polls: list[Any] = []
    while True:
        try:
            consumer.raise_error()
            rows = consumer.take(most, 0)
        except OncelogError as error:
            return [*polls, (type(error), str(error)), consumer.position(T0)]
        if not rows:
            return [*polls, consumer.position(T0), consumer.metric_values(0)["bytes-consumed-total"]]
        polls.append((rows, consumer.position(T0)))


def tables(data: bytes, aborted: bool, settings: dict[str, object], start: int) -> list[Any]:
    """Do the same as `delivered`, with Arrow tables."""
    consumer, call = started(start, **settings)
    consumer.on_response(call, answer((T0, data), aborted=[(7, 2)] if aborted else None), 1.0, 0)
    try:
        consumer.raise_error()
        table = consumer.take_arrow(0, include_headers=True)
        return [table, consumer.position(T0)]
    except OncelogError as error:
        return [(type(error), str(error)), consumer.position(T0)]


SETTINGS = st.fixed_dictionaries(
    {
        "isolation.level": st.sampled_from(["read_uncommitted", "read_committed"]),
        "check.crcs": st.booleans(),
    }
)


@given(
    settings=SETTINGS,
    aborted=st.booleans(),
    start=st.sampled_from([0, 1, 4, 12, 41]),
    most=st.sampled_from([1, 3, 7, 500]),
)
def test_a_sound_response_gives_the_same_polls(
    c: dict[Any, ModuleType], settings: dict[str, object], aborted: bool, start: int, most: int
) -> None:
    data = stored()
    fast, slow = in_both_forms(c, lambda: delivered(data, aborted, settings, start, most))
    assert fast == slow
    fast, slow = in_both_forms(c, lambda: tables(data, aborted, settings, start))
    assert fast == slow


@given(
    settings=SETTINGS,
    aborted=st.booleans(),
    start=st.sampled_from([0, 1, 4, 12]),
    most=st.sampled_from([1, 7, 500]),
    damages=st.lists(st.tuples(st.integers(0, 10**6), BYTES), min_size=1, max_size=3),
    reseal=st.booleans(),
    cut=st.integers(0, 70),
)
def test_a_damaged_response_gives_the_same_records_positions_and_errors(
    c: dict[Any, ModuleType],
    settings: dict[str, object],
    aborted: bool,
    start: int,
    most: int,
    damages: list[tuple[int, int]],
    reseal: bool,
    cut: int,
) -> None:
    data = bytearray(stored())
    whole = list(iter_batches(bytes(data)))
    for place, byte in damages:
        data[place % len(data)] = byte
    if reseal:
        for position, header in whole:
            write_crc(data, position, header.size_bytes)
    damaged = bytes(data[: len(data) - cut])
    fast, slow = in_both_forms(c, lambda: delivered(damaged, aborted, settings, start, most))
    assert fast == slow
    fast, slow = in_both_forms(c, lambda: tables(damaged, aborted, settings, start))
    assert fast == slow
