"""`oncelog produce`: send lines or files as records."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import IO, Any

import click

from oncelog.cli.common import (
    ClientConfig,
    bootstrap_options,
    can_move_cursor,
    emit,
    only_settings_of,
    output_option,
    say,
    say_in_place,
)
from oncelog.cli.interrupt import Interrupt
from oncelog.cli.record_filter import parse_header
from oncelog.cli.record_format import unescape
from oncelog.cli.registry_options import registry_option, take_registry, text_encoder
from oncelog.cli.times import TimeType
from oncelog.errors import DisconnectedError, MessageTooLarge, OncelogError, TimedOut, UnknownTopicOrPartition
from oncelog.settings import Settings
from oncelog.types import Header, RecordMetadata, TopicPartition

_PROGRESS_SECONDS = 0.1
_CHUNK_BYTES = 65_536
_FIELDS = {"topic", "offset", "partition", "timestamp", "timestamp_ms", "headers"} | {
    "key", "key_base64", "value", "value_base64",
}  # fmt: skip

Arguments = dict[str, Any]
"""Keyword arguments of Producer.send."""


@dataclass(frozen=True, slots=True)
class _Input:
    """The options that define how lines of input become records."""

    jsonl: bool
    key_separator: str | None
    delimiter: str | None
    key: str | None
    headers: tuple[str, ...]
    null_value: bool
    timestamp_ms: int | None


@click.command("produce")
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.File("rb", lazy=True))
@click.option("-k", "--key-separator", metavar="SEP", help=r"Read each line as KEY SEP VALUE; \t is a tab.")
@click.option(
    "-D", "--delimiter", metavar="DELIM",
    help=r"End records with this text instead of a line end; \n, \t, \r, \0 and \xHH are escapes.",
)  # fmt: skip
@click.option(
    "--jsonl", is_flag=True, help="Read each line as a JSON object, as `consume -o jsonl` prints it."
)
@click.option("--key", help="The key of all records.")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME[=VALUE]",
    help="A header of all records; its value is null without `=`. Repeatable.",
)  # fmt: skip
@click.option(
    "-Z", "--null-value", "--tombstone", "null_value", is_flag=True,
    help="Send an empty value as null, which deletes the key from a compacted topic.",
)  # fmt: skip
@click.option(
    "--timestamp", "timestamp_ms", type=TimeType(), metavar="TIME",
    help="The timestamp of all records: 1h (an hour ago), 2026-11-28T10:00, or ms since 1970.  "
    "[default: now]",
)  # fmt: skip
@click.option(
    "-p", "--partition", type=click.IntRange(min=0), help="Send to this partition (default: by key)."
)
@click.option(
    "-z", "--compression", type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    help="The codec, as -X compression.type.",
)  # fmt: skip
@click.option(
    "--value-schema", metavar="FILE|ID",
    help="Write values, which must be JSON text, with this schema: a file *.avsc (Avro) or *.json (JSON "
    "Schema), or an id in the schema registry. Needs --schema-registry.",
)  # fmt: skip
@click.option("--key-schema", metavar="FILE|ID", help="The same for keys.")
@registry_option
@output_option
@bootstrap_options
def command(
    topic: str,
    files: tuple[IO[bytes], ...],
    partition: int | None,
    compression: str | None,
    output: str,
    client_config: ClientConfig,
    registry_url: str | None,
    value_schema: str | None,
    key_schema: str | None,
    **given: Any,
) -> None:
    """Send each line of FILES or of standard input as a record, and print the offsets at the end.

    \b
    Examples:
      oncelog produce flights flights.csv
      printf 'a=1\\nb=2\\n' | oncelog produce numbers --key-separator =
      echo | oncelog produce users --key u17 --null-value
      oncelog produce logs big.log -z zstd -H source=web1 --timestamp 2026-11-28T10:00
      oncelog consume old --until-end --from-beginning -o jsonl | oncelog produce new --jsonl
      oncelog produce orders orders.jsonl --schema-registry http://127.0.0.1:8081 --value-schema order.avsc
    With --jsonl an object has the field value, and optionally key, headers (an object, or a list of objects
    with key and value), partition and timestamp (ms). key_base64 and value_base64 replace key and value for
    bytes that are not text. topic and offset are ignored.
    Ctrl-C sends the records read so far; a second Ctrl-C ends at once. Exit code 1: a record failed.
    """
    source = _Input(**given)
    from oncelog.config import PRODUCER

    registry = take_registry(client_config, registry_url, PRODUCER)
    parse, delimiter = _parser(source), _delimiter(source.delimiter)
    if value_schema is not None or key_schema is not None:
        parse = _with_schemas(parse, registry, topic, value_schema, key_schema)
    if compression is not None:
        client_config["compression.type"] = compression
    tally = _Tally()
    stopped = _send_all(client_config, topic, partition, _parsed(_lines(files, delimiter), parse), tally)
    emit(tally.rows(), output, columns=["topic", "partition", "first_offset", "last_offset", "records"])
    if tally.failed:
        error = tally.first_error
        say(f"oncelog: {tally.failed} records failed: {type(error).__name__}: {error}", err=True)
    if stopped is not None:
        raise stopped
    if tally.failed:
        sys.exit(1)


@dataclass(slots=True)
class _Stretch:
    """The stored records of one partition. Offsets are None if the broker returned none (acks=0)."""

    first_offset: int | None
    last_offset: int | None
    records: int


@dataclass(slots=True)
class _Tally:
    """The numbers of sent and failed records, and the stored records of each partition.

    The producer calls `on_delivery` in its own thread, and `_send` calls it in the main thread.
    """

    partitions: dict[tuple[str, int], _Stretch] = field(default_factory=dict)
    sent: int = 0
    failed: int = 0
    first_error: Exception | None = None

    def on_delivery(self, metadata: RecordMetadata | None, error: Exception | None) -> None:
        if metadata is None:
            self.failed += 1
            self.first_error = self.first_error or error
            return
        offset = metadata.offset
        at = (metadata.topic, metadata.partition)
        known = self.partitions.get(at)
        if known is None:
            self.partitions[at] = _Stretch(offset, offset, 1)
            return
        known.records += 1
        if offset is not None:
            known.first_offset = offset if known.first_offset is None else min(known.first_offset, offset)
            known.last_offset = offset if known.last_offset is None else max(known.last_offset, offset)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "topic": topic,
                "partition": partition,
                "first_offset": part.first_offset,
                "last_offset": part.last_offset,
                "records": part.records,
            }
            for (topic, partition), part in sorted(self.partitions.items())
        ]


def _send_all(
    client_config: dict[str, Any],
    topic: str,
    partition: int | None,
    records: Iterable[Arguments],
    tally: _Tally,
) -> Exception | None:
    """Send all records and wait for their outcomes.

    Return the error that stopped the reading of records, or None. Records before the error are still sent.
    """
    from oncelog.client.producer.blocking import Producer
    from oncelog.config import PRODUCER

    config = only_settings_of(PRODUCER, client_config)
    try:
        asyncio.run(_check_topic(PRODUCER.parse(config), topic))
    except OncelogError as error:
        return error
    producer = Producer(config)
    stopped: Exception | None = None
    try:
        with Interrupt() as interrupt, _progress(tally) as show:
            try:
                for record in interrupt.until(records):
                    if partition is not None:
                        record["partition"] = partition
                    _send(producer, topic, record, tally)
                    show()
            except (OncelogError, click.ClickException) as error:
                stopped = error
            producer.close()
    except KeyboardInterrupt:
        with suppress(TimedOut):
            producer.close(0)
        raise
    return stopped


async def _check_topic(settings: Settings, topic: str) -> None:
    """Raise UnknownTopicOrPartition after a short wait if the topic does not exist.

    `Producer.send` waits up to max.block.ms, because an application may start before its topic exists. For a
    command that would be too long: a mistyped name is more likely.
    """
    from oncelog.client.connection.cluster import UNKNOWN_TOPIC_PATIENCE_MS, ClusterConnection

    cluster = ClusterConnection(settings)
    try:
        deadline_ms = cluster.now_ms() + min(UNKNOWN_TOPIC_PATIENCE_MS, settings["max.block.ms"])
        while True:
            try:
                await cluster.refresh_metadata([topic])
            except (DisconnectedError, TimedOut):
                # Without a connection, leave the topic unchecked: the producer itself waits for a broker.
                return
            error = cluster.why_no_leader(TopicPartition(topic, 0))
            if not isinstance(error, UnknownTopicOrPartition):
                return
            if cluster.now_ms() >= deadline_ms:
                raise error
            await asyncio.sleep(settings["retry.backoff.ms"] / 1000)
    finally:
        await cluster.close()


def _send(producer: Any, topic: str, record: Arguments, tally: _Tally) -> None:
    tally.sent += 1
    try:
        producer.send(topic, on_delivery=tally.on_delivery, **record)
    # MessageTooLarge concerns only this record, so the command continues with the next one.
    except MessageTooLarge as error:
        tally.on_delivery(None, error)


def _progress(tally: _Tally) -> AbstractContextManager[Callable[[], object]]:
    """Return a context that shows progress if standard error is a terminal and standard input is not."""
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if is_typed or not sys.stderr.isatty() or not can_move_cursor():
        return nullcontext(lambda: None)
    return _Status(tally)


class _Status(AbstractContextManager[Callable[[], object]]):
    """A line of progress on standard error. It changes at most every `_PROGRESS_SECONDS`, and is erased at
    the end.
    """

    def __init__(self, tally: _Tally) -> None:
        self._tally = tally
        self._next_s = 0.0

    def __enter__(self) -> Callable[[], object]:
        say_in_place("sending")
        return self._show

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _PROGRESS_SECONDS
        delivered = sum(part.records for part in self._tally.partitions.copy().values())
        say_in_place(f"{self._tally.sent} records sent, {delivered} stored")

    def __exit__(self, *raised: object) -> None:
        say_in_place("")


def _delimiter(text: str | None) -> bytes | None:
    """Return the bytes that separate records, or None if records are lines. Raises click.UsageError for an
    invalid option.
    """
    if text is None:
        return None
    try:
        delimiter = unescape(text)
    except ValueError as error:
        raise click.UsageError(f"--delimiter: {error}") from None
    if not delimiter:
        raise click.UsageError("--delimiter must not be empty")
    return delimiter


def _lines(files: tuple[IO[bytes], ...], delimiter: bytes | None) -> Iterator[tuple[str, bytes]]:
    """Yield pairs: the place of a line (file name and line number), and the line without its line end. If
    standard input is closed, it has no lines.
    """
    if not files and sys.stdin is None:
        return
    for file in files or (sys.stdin.buffer,):
        name = getattr(file, "name", "standard input")
        if _is_parquet(file):
            raise click.ClickException(
                f"{name} is a Parquet file, which has no lines: `oncelog load` sends a JSON object for each "
                "row, and `oncelog consume -o jsonl` writes records that --jsonl reads back"
            )
        lines = _by_line(file) if delimiter is None else _by_delimiter(file, delimiter)
        try:
            for number, line in enumerate(lines, 1):
                yield f"{name}:{number}", line
        except OSError as error:
            raise click.ClickException(f"cannot read {name}: {error.strerror or error}") from error


def _is_parquet(file: Any) -> bool:
    """Return True if a regular file begins and ends with Parquet's magic bytes. Its position is kept."""
    if not file.seekable() or file.tell() != 0:
        return False
    ends = [file.read(4)]
    if ends[0] == b"PAR1":
        file.seek(-4, os.SEEK_END)
        ends.append(file.read(4))
    file.seek(0)
    return ends == [b"PAR1", b"PAR1"]


def _by_line(file: Any) -> Iterator[bytes]:
    for line in file:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def _by_delimiter(file: Any, delimiter: bytes) -> Iterator[bytes]:
    """Yield the parts of a file between delimiters. There is no empty part at the end of the file."""
    pending, searched = bytearray(), 0
    # Do not use `read`, which waits for a full chunk: a terminal or pipe may have a record now.
    while chunk := file.read1(_CHUNK_BYTES):
        pending += chunk
        start = 0
        while (end := pending.find(delimiter, max(start, searched))) >= 0:
            yield bytes(pending[start:end])
            start = end + len(delimiter)
        del pending[:start]
        searched = max(len(pending) - len(delimiter) + 1, 0)
    if pending:
        yield bytes(pending)


def _parsed(lines: Iterable[tuple[str, bytes]], parse: Callable[[bytes], Arguments]) -> Iterator[Arguments]:
    for where, line in lines:
        try:
            yield parse(line)
        except (ValueError, RecursionError) as error:
            # Python raises RecursionError for JSON that is nested too deeply.
            raise click.ClickException(f"{where}: {error}") from error


def _parser(source: _Input) -> Callable[[bytes], Arguments]:
    """Return the function that converts a line to arguments of `Producer.send`. Raises click.UsageError for
    invalid options.
    """
    if source.jsonl and (
        source.key_separator is not None
        or source.key is not None
        or source.null_value
        or source.timestamp_ms is not None
    ):
        raise click.UsageError(
            "--jsonl excludes --key-separator, --key, --null-value and --timestamp: "
            "an object has them as fields"
        )
    if source.key is not None and source.key_separator is not None:
        raise click.UsageError("--key and --key-separator exclude each other")
    if source.key_separator == "":
        raise click.UsageError("--key-separator must not be empty")
    try:
        headers = [parse_header(text) for text in source.headers]
    except ValueError as error:
        raise click.UsageError(f"--header: {error}") from None
    parse = parse_json if source.jsonl else _line_parser(source.key_separator)
    key = None if source.key is None else os.fsencode(source.key)

    def parse_line(line: bytes) -> Arguments:
        record = parse(line)
        if key is not None:
            record["key"] = key
        if source.null_value and not record["value"]:
            record["value"] = None
        if headers:
            record["headers"] = [*record.get("headers", ()), *headers]
        if source.timestamp_ms is not None:
            record["timestamp_ms"] = source.timestamp_ms
        return record

    return parse_line


def _with_schemas(
    parse: Callable[[bytes], Arguments],
    registry: Any | None,
    topic: str,
    value_schema: str | None,
    key_schema: str | None,
) -> Callable[[bytes], Arguments]:
    """Return a parser whose keys and values are in the schema registry's wire format.

    Raises click.UsageError for invalid options.
    """
    if registry is None:
        raise click.UsageError("--value-schema and --key-schema need --schema-registry")
    encoders = {
        part: text_encoder(registry, topic, schema, is_key=part == "key")
        for part, schema in (("value", value_schema), ("key", key_schema))
        if schema is not None
    }

    def parse_and_encode(line: bytes) -> Arguments:
        record = parse(line)
        for part, encode in encoders.items():
            if record.get(part) is not None:
                record[part] = encode(record[part])
        return record

    return parse_and_encode


def _line_parser(key_separator: str | None) -> Callable[[bytes], Arguments]:
    if key_separator is None:
        return lambda line: {"value": line}
    # The separator may be bytes that are not UTF-8, for example $'\xff'.
    separator = os.fsencode(key_separator.replace("\\t", "\t"))

    def with_key(line: bytes) -> Arguments:
        key, found, value = line.partition(separator)
        if not found:
            raise ValueError(f"no {key_separator!r} between key and value")
        return {"key": key, "value": value}

    return with_key


def parse_json(line: bytes) -> Arguments:
    """Convert the text of a JSON object to keyword arguments of `Producer.send`. Raises ValueError for
    invalid text or fields.
    """
    row = json.loads(line)
    if not isinstance(row, dict) or row.keys() - _FIELDS:
        raise ValueError(f"expected a JSON object with some of {', '.join(sorted(_FIELDS))}")
    timestamp = row.get("timestamp", row.get("timestamp_ms"))
    for name, number in (("partition", row.get("partition")), ("timestamp", timestamp)):
        if number is not None and type(number) is not int:
            raise ValueError(f"{name} must be a whole number, not {number!r}")
    return {
        "key": _bytes_of(row, "key"),
        "value": _bytes_of(row, "value"),
        "headers": _headers_of(row.get("headers") or []),
        "partition": row.get("partition"),
        "timestamp_ms": timestamp,
    }


def _bytes_of(row: dict[str, Any], name: str) -> bytes | None:
    """Return the field `name` as bytes, or None if it is missing or null.

    The field `<name>_base64` takes precedence. Text becomes UTF-8, and any other value JSON.
    """
    encoded = row.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"{name}_base64: {error}") from None
    data = row.get(name)
    if data is None:
        return None
    return data.encode() if isinstance(data, str) else json.dumps(data, separators=(",", ":")).encode()


def _headers_of(headers: Any) -> list[Header]:
    if isinstance(headers, dict):
        headers = [{"key": key, "value": value} for key, value in headers.items()]
    if not isinstance(headers, list):
        raise ValueError("headers must be an object, or a list of objects with key and value")
    pairs: list[Header] = []
    for header in headers:
        if not isinstance(header, dict) or not isinstance(header.get("key"), str):
            raise ValueError(f"a header must be an object with key and value, not {header!r}")
        pairs.append((header["key"], _bytes_of(header, "value")))
    return pairs
