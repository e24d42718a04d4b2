"""The forms in which an application may give headers and tables."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from support.topics import new_topic, producer_of, read

from oncelog.client.arguments import headers_of
from oncelog.errors import MisuseError

VALUES, KEYS = [b"one", b"two"], [b"k1", b"k2"]


class Frame:
    """A table of another library, such as Polars, that offers only an Arrow stream."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_headers_are_taken_from_a_mapping(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        producer.send(topic, b"x", headers={"trace": b"1", "ab": None})
        producer.send_many(topic, [b"y"], headers={"trace": b"2"})
        producer.send(topic, b"z", headers=[("twice", b"1"), ("twice", b"2")])
    assert [record.headers for record in read(ours, topic)] == [
        (("trace", b"1"), ("ab", None)),
        (("trace", b"2"),),
        (("twice", b"1"), ("twice", b"2")),
    ]


@pytest.mark.parametrize(
    "headers",
    [["ab"], [("a",)], [("a", b"1", 2)], "ab", b"ab", 7, {"a": "text"}, {b"a": b"1"}, ["\ud800"]],
    ids=repr,
)
def test_headers_of_no_form_are_refused(ours: str, headers: Any) -> None:
    with pytest.raises(MisuseError, match="header"):
        headers_of(headers)
    with producer_of(ours) as producer, pytest.raises(MisuseError, match="header"):
        producer.send("never", b"x", headers=headers)


TABLE = pa.table({"key": pa.array(KEYS, pa.binary()), "value": pa.array(VALUES, pa.binary())})
TEXT = {"key": [key.decode() for key in KEYS], "value": [value.decode() for value in VALUES]}
TABLES = {
    "table": TABLE,
    "record batch": TABLE.to_batches()[0],
    "reader": TABLE.to_reader(),
    "pandas, bytes": pd.DataFrame({"key": KEYS, "value": VALUES}),
    "pandas, text": pd.DataFrame(TEXT),
    "stream": Frame(TABLE),
    "stream of text views": Frame(
        pa.table({name: pa.array(column, pa.string_view()) for name, column in TEXT.items()})
    ),
    "binary views": pa.table(
        {"key": pa.array(KEYS, pa.binary_view()), "value": pa.array(VALUES, pa.binary_view())}
    ),
    "large text": pa.table({name: pa.array(column, pa.large_string()) for name, column in TEXT.items()}),
}


@pytest.mark.parametrize("form", TABLES)
def test_send_table_takes_whatever_has_an_arrow_stream(ours: str, form: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        producer.send_table(topic, TABLES[form], partition=0)
    assert [(record.key, record.value) for record in read(ours, topic)] == list(
        zip(KEYS, VALUES, strict=True)
    )


@pytest.mark.parametrize(
    "table",
    [[b"x"], {"value": [b"x"]}, b"x", None, pa.table({"value": [1]}), pd.DataFrame({"value": [1.5]})],
    ids=lambda table: type(table).__name__,
)
def test_send_table_refuses_what_is_no_table_of_bytes(ours: str, table: object) -> None:
    with (
        producer_of(ours) as producer,
        pytest.raises(MisuseError, match=r"send_table needs|must contain bytes"),
    ):
        producer.send_table(new_topic(ours), table)
