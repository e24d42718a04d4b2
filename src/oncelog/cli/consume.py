"""`oncelog consume`: print the records of topics, or write them into a Parquet file."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from oncelog.cli.common import (
    ClientConfig,
    bootstrap_options,
    new_admin,
    one_line,
    only_settings_of,
    printable,
    time_text,
)
from oncelog.cli.interrupt import Interrupt
from oncelog.cli.record_filter import RecordFilter, parse_filter
from oncelog.cli.record_format import Part, parse_format, render
from oncelog.cli.registry_options import RecordDecoder, registry_option, take_registry
from oncelog.cli.tables import padded
from oncelog.cli.times import TimeType
from oncelog.errors import MisuseError, OncelogError
from oncelog.runtime.optional import check_pyarrow

_POLL_SECONDS = 0.5
_HEAD = ["PARTITION", "OFFSET", "TIME", "KEY", "HEADERS", "VALUE"]
_FORMATS = ["value", "table", "wide", "json", "jsonl", "yaml"]


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of the command, except those of the connection."""

    from_beginning: bool
    offset: int | None
    tail: int | None
    since_ms: int | None
    until_ms: int | None
    until_end: bool
    partition: int | None
    regex: bool
    group: str | None
    max_messages: int | None
    timeout_ms: int | None
    isolation_level: str | None
    key: str | None
    headers: tuple[str, ...]
    fields: tuple[str, ...]
    output: str | None
    record_format: str | None
    parquet: Path | None

    @property
    def has_end(self) -> bool:
        """Return True if the command stops at offsets that it looks up at startup."""
        return self.until_end or self.until_ms is not None


@dataclass(slots=True)
class _Counts:
    """The number of records read, and the number of those that matched the filter.

    `pending` has the records of the last poll until they are printed or written to the file. `surplus` has
    the polled records after the last one that --max-messages allows.
    """

    read: int = 0
    matched: int = 0
    pending: Sequence[Any] = ()
    surplus: Sequence[Any] = ()


class _Selection(NamedTuple):
    """The treatment of each record: the conversion by a schema registry, if there is one, and the filter."""

    record_filter: RecordFilter
    decode: RecordDecoder | None

    def of(self, rows: list[Any], limit: int | None) -> tuple[list[Any], int]:
        """Return at most `limit` converted records that match the filter, and the number of rows examined.

        Raises DeserializationError.
        """
        decode, record_filter = self.decode, self.record_filter
        if not record_filter:
            rows = rows if limit is None else rows[:limit]
            return rows if decode is None else [decode(row) for row in rows], len(rows)
        matching: list[Any] = []
        for count, row in enumerate(rows):
            if len(matching) == limit:
                return matching, count
            record = row if decode is None else decode(row)
            if record_filter.matches(record):
                matching.append(record)
        return matching, len(rows)


@click.command("consume")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--from-beginning", is_flag=True, help="Start at the first record (default: only new records).")
@click.option("--offset", type=click.IntRange(min=0), help="Start at this offset. Needs --partition.")
@click.option(
    "--tail", "--last", type=click.IntRange(min=0), metavar="N",
    help="Start N offsets before the end of each partition.",
)  # fmt: skip
@click.option(
    "--since", "since_ms", type=TimeType(), metavar="TIME",
    help="Start at the first record of this time or later: 1h (an hour ago), 2026-11-28T10:00, "
    "or ms since 1970.",
)  # fmt: skip
@click.option(
    "--until", "until_ms", type=TimeType(), metavar="TIME",
    help="Stop before the first record of this time or later, and in any case at the end offsets as of "
    "startup.",
)  # fmt: skip
@click.option("-e", "--until-end", is_flag=True, help="Stop at the end offsets as of startup.")
@click.option(
    "-p", "--partition", type=click.IntRange(min=0), help="Read only this partition (default: all)."
)
@click.option(
    "--regex",
    is_flag=True,
    help="Read all topics whose whole name matches a TOPIC, a regular expression (RE2).",
)
@click.option("-g", "--group", help="Join this consumer group, and start at its committed offsets.")
@click.option("-n", "--max-messages", type=click.IntRange(min=1), help="Stop after this many records.")
@click.option("--timeout-ms", type=click.IntRange(min=1), help="Stop after this time without a record.")
@click.option(
    "--isolation-level",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    help="read_uncommitted also prints records of open and aborted transactions.  [default: read_committed]",
)
@click.option("--key", help="Only records with this key.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME[=VALUE]",
    help="Only records with this header. Repeatable: all must match.",
)  # fmt: skip
@click.option(
    "--json-field", "fields", multiple=True, metavar="FIELD=VALUE",
    help="Only records whose value is JSON with this field, for example user.country=NL. Repeatable.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Choice(_FORMATS),
    help="value prints only the values, one per line. wide adds key, time and headers to the table.  "
    "[default: value]",
)  # fmt: skip
@click.option(
    "-f", "--format", "record_format", metavar="FORMAT",
    help=r"Print each record by a format: %t topic, %p partition, %o offset, %k key, %s value, %h headers, "
    r"%T timestamp in ms, %K and %S lengths of key and value, \n, \t, \xHH, %%.",
)  # fmt: skip
@click.option(
    "--to-parquet", "parquet", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the records into this Parquet file. It is replaced when the command ends.",
)  # fmt: skip
@registry_option
@bootstrap_options
def command(
    topics: tuple[str, ...], client_config: ClientConfig, registry_url: str | None, **given: Any
) -> None:
    """Print the records of topics until interrupted, or until one of the limits.

    \b
    Examples:
      oncelog consume flights --from-beginning --max-messages 10
      oncelog consume flights -p 0 --offset 42 -o jsonl --until-end
      oncelog consume flights --tail 10 -e -f '%t/%p@%o %k %h: %s\\n'
      oncelog consume 'flights.*' --regex --since 1h --json-field origin=EWR
      oncelog consume flights --from-beginning --until-end --to-parquet flights.parquet
      oncelog consume flights --group dashboards --from-beginning
      oncelog consume orders --from-beginning --schema-registry http://127.0.0.1:8081
    With --group, --from-beginning applies to partitions for which the group has no committed offset.
    With --schema-registry, keys and values in the registry's wire format are printed and filtered as JSON.
    Exit code 4: --timeout-ms passed before --max-messages records arrived.
    """
    options = _Options(**given)
    _check(options, topics)
    try:
        record_filter = parse_filter(options.key, options.headers, options.fields)
        parts = None if options.record_format is None else parse_format(options.record_format)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    from oncelog.config import CONSUMER

    registry = take_registry(client_config, registry_url, CONSUMER)
    decode = None if registry is None else RecordDecoder(registry)
    counts = _Counts()
    with _consumer(client_config, options) as consumer:
        ends = _start(consumer, client_config, topics, options)
        polls = _records(consumer, options, ends, _Selection(record_filter, decode), counts)
        try:
            if options.parquet is not None:
                _save(polls, options.parquet, counts)
            else:
                _print(polls, options.output or "value", parts, counts)
        finally:
            if options.group is not None:
                _give_back(consumer, [*counts.pending, *counts.surplus])
        if options.group is not None and options.parquet is not None:
            consumer.commit()
    of_read = f" of {counts.read}" if record_filter else ""
    click.echo(f"{counts.matched}{of_read} records", err=True)
    if options.max_messages is not None and counts.matched < options.max_messages and not options.has_end:
        from oncelog.cli.main import EXIT_TIMEOUT

        sys.exit(EXIT_TIMEOUT)


def _check(options: _Options, topics: Sequence[str]) -> None:
    """Raise click.UsageError for options that exclude each other, and MissingDependency without PyArrow."""
    if options.offset is not None and (options.partition is None or len(topics) > 1 or options.regex):
        raise click.UsageError("--offset needs --partition and one topic")
    starts = {
        "--offset": options.offset is not None,
        "--from-beginning": options.from_beginning,
        "--tail": options.tail is not None,
        "--since": options.since_ms is not None,
    }
    chosen = [name for name, is_chosen in starts.items() if is_chosen]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} exclude each other")
    if options.group is not None and (
        options.partition is not None or options.has_end or set(chosen) - {"--from-beginning"}
    ):
        raise click.UsageError(
            "--group assigns partitions and offsets: leave out --partition, --offset, --tail, --since, "
            "--until and --until-end (--max-messages and --timeout-ms stop a member of a group)"
        )
    outputs = {"--output": options.output, "--format": options.record_format, "--to-parquet": options.parquet}
    given = [name for name, value in outputs.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other")
    if options.parquet is not None:
        check_pyarrow("--to-parquet")


def _consumer(client_config: dict[str, Any], options: _Options) -> Any:
    from oncelog.client.consumer.blocking import Consumer
    from oncelog.config import CONSUMER

    config = only_settings_of(CONSUMER, client_config)
    if options.isolation_level:
        config["isolation.level"] = options.isolation_level
    if options.group is not None:
        config["group.id"] = options.group
        config.setdefault("auto.offset.reset", "earliest" if options.from_beginning else "latest")
        if options.parquet is not None:
            # Do not commit before the file is complete. Otherwise a full disk, for example, would lose
            # records. Guard: test_a_group_commits_only_what_is_in_the_file.
            config["enable.auto.commit"] = False
    elif options.offset is not None:
        config.setdefault("auto.offset.reset", "none")
    elif options.from_beginning or options.tail is not None or options.since_ms is not None:
        # If retention deletes the next records before they are read, continue at the first remaining record.
        # The default (latest) would skip to the end of the partition. Guard:
        # test_records_that_are_left_after_a_deletion_are_read.
        config.setdefault("auto.offset.reset", "earliest")
    return Consumer(config)


def _start(
    consumer: Any, client_config: dict[str, Any], topics: Sequence[str], options: _Options
) -> Mapping[Any, int]:
    """Subscribe with --group; otherwise assign partitions and seek to the offsets at which reading starts.

    Return the offsets at which reading stops; an empty mapping if no option sets such a limit.
    """
    patterns = [_pattern(topic) for topic in topics] if options.regex else []
    if options.group is not None:
        if patterns:
            consumer.subscribe(pattern="|".join(f"(?:{topic})" for topic in topics))
        else:
            consumer.subscribe(topics)
        return {}
    from oncelog.types import TopicPartition

    names = _matching(client_config, patterns, topics) if patterns else list(dict.fromkeys(topics))
    if options.partition is not None:
        tps = [TopicPartition(name, options.partition) for name in names]
    else:
        tps = [
            TopicPartition(name, part.partition) for name in names for part in consumer.partitions_for(name)
        ]
    consumer.assign(tps)
    ends = _ends(consumer, tps, options)
    _place(consumer, tps, options, ends)
    return ends if options.has_end else {}


def _pattern(text: str) -> Any:
    """Return a compiled RE2 pattern. Raises click.UsageError for an invalid one."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    # ValueError: re2 raises it for text that is not UTF-8.
    except (re2.error, ValueError) as error:
        reason = error.args[0] if error.args else error
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
        raise click.UsageError(f"{text!r} is not a regular expression of RE2: {reason}") from None


def _matching(client_config: dict[str, Any], patterns: Sequence[Any], texts: Sequence[str]) -> list[str]:
    """Return the names of all topics that match any of the patterns. Raises click.ClickException if no topic
    matches.
    """
    from oncelog.config import ADMIN

    # Keep only the settings that an Admin has. -X may have settings of consumers, and the Consumer has
    # already refused unknown ones.
    with new_admin({key: value for key, value in client_config.items() if ADMIN.get(key)}) as admin:
        names = [topic.name for topic in admin.list_topics()]
    matching = [name for name in names if any(pattern.fullmatch(name) for pattern in patterns)]
    if not matching:
        raise click.ClickException(f"no topic matches {' or '.join(map(repr, texts))}")
    return matching


def _ends(consumer: Any, tps: Sequence[Any], options: _Options) -> Mapping[Any, int]:
    """Return for each partition the offset at which --until or --until-end stops, or from which --tail counts
    back. Return an empty mapping without these options.
    """
    if not options.has_end and options.tail is None:
        return {}
    ends: dict[Any, int] = consumer.end_offsets(tps)
    if options.until_ms is None:
        return ends
    found = consumer.offsets_for_times(dict.fromkeys(tps, options.until_ms))
    return {tp: end if found[tp] is None else min(end, found[tp].offset) for tp, end in ends.items()}


def _place(consumer: Any, tps: Sequence[Any], options: _Options, ends: Mapping[Any, int]) -> None:
    if options.offset is not None:
        consumer.seek(tps[0], options.offset)
    elif options.from_beginning:
        consumer.seek_to_beginning()
    elif options.tail is not None:
        for tp, start in consumer.beginning_offsets(tps).items():
            consumer.seek(tp, max(start, ends[tp] - options.tail))
    elif options.since_ms is not None:
        found = consumer.offsets_for_times(dict.fromkeys(tps, options.since_ms))
        # If a partition has no record at or after --since, start at its end.
        at_end = consumer.end_offsets([tp for tp in tps if found[tp] is None])
        for tp in tps:
            consumer.seek(tp, at_end[tp] if found[tp] is None else found[tp].offset)


def _records(
    consumer: Any, options: _Options, ends: Mapping[Any, int], selection: _Selection, counts: _Counts
) -> Iterator[list[Any]]:
    """Yield the matching records of each poll until --max-messages, --timeout-ms or the end offsets are
    reached.
    """
    max_messages, timeout_ms = options.max_messages, options.timeout_ms
    quiet_seconds = 0.0
    while max_messages is None or counts.matched < max_messages:
        if ends and all(consumer.position(tp) >= end for tp, end in ends.items()):
            return
        wait = _POLL_SECONDS
        if timeout_ms is not None:
            wait = min(wait, timeout_ms / 1000 - quiet_seconds)
        room = None if max_messages is None else max_messages - counts.matched
        # With a filter, `room` says nothing about the records to read: to find one record in a million, polls
        # of one record would take minutes. Guard: test_a_filter_with_max_messages_reads_many_records_a_poll.
        at_most = None if selection.record_filter else room
        # Keep this in one statement, so that no signal handler runs between the poll and the assignment.
        counts.pending = rows = consumer.poll(wait, max_records=at_most)
        rows = [row for row in rows if not ends or row.offset < ends[row.topic, row.partition]]
        quiet_seconds = 0.0 if rows else quiet_seconds + wait
        if timeout_ms is not None and quiet_seconds >= timeout_ms / 1000:
            return
        matching, examined = selection.of(rows, room)
        counts.surplus = rows[examined:]
        counts.read += examined
        counts.matched += len(matching)
        yield matching


def _give_back(consumer: Any, rows: Sequence[Any]) -> None:
    """Move a group member's positions back to the first records that it polled but did not write.

    Otherwise the commit at the end would cover these records. Guard:
    test_a_group_does_not_commit_what_was_polled_and_not_written.
    """
    from oncelog.types import TopicPartition

    first: dict[Any, int] = {}
    for row in rows:
        first.setdefault(TopicPartition(row.topic, row.partition), row.offset)
    with Interrupt():
        for tp, offset in first.items():
            # Ignore MisuseError: another member may own the partition by now.
            with suppress(MisuseError):
                consumer.seek(tp, offset)


def _save(polls: Iterator[list[Any]], path: Path, counts: _Counts) -> None:
    """Write records into a Parquet file. The first Ctrl-C completes the file; a second one removes it."""
    from oncelog.cli.parquet_file import ParquetFile

    with ParquetFile(path) as file, Interrupt() as interrupt:
        for rows in interrupt.until(polls):
            file.add(rows)
            counts.pending = ()


def _print(polls: Iterator[list[Any]], output: str, parts: list[Part] | None, counts: _Counts) -> None:
    """Print records as they arrive. Ctrl-C and a closed pipe end the output without an error."""
    count, has_head = 0, False
    try:
        try:
            for rows in polls:
                # Print the header only together with the first records: the poll may show that the topic does
                # not exist.
                if rows and output in ("table", "wide") and not has_head:
                    click.echo(_table_line(_HEAD, output == "wide"))
                    has_head = True
                # Write all records of a poll in one call, so that an interrupt cannot leave a partial or
                # uncounted record.
                text = _text_of_all(rows, output, parts, count)
                count += len(rows)
                _write(text)
                sys.stdout.flush()
                counts.pending = ()
        except KeyboardInterrupt:
            pass
        except OncelogError:
            # Close the JSON document even if the connection to the broker is lost.
            sys.stdout.write("\n]\n" if output == "json" and count else "")
            sys.stdout.flush()
            raise
        if output == "json":
            sys.stdout.write("\n]\n" if count else "[]\n")
        elif output == "yaml" and not count:
            sys.stdout.write("[]\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Replace the closed pipe by the null device. Otherwise Python's flush at exit would raise
        # BrokenPipeError again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text_of_all(rows: Sequence[Any], output: str, parts: list[Part] | None, index: int) -> str | bytes:
    """Return the text to print for `rows`. `index` is the number of records that were printed before."""
    if parts is not None:
        return b"".join(render(parts, record) for record in rows)
    if output == "value":
        return b"".join((b"-" if row.value is None else row.value) + b"\n" for row in rows)
    return "".join(_text_of(record, output, at) for at, record in enumerate(rows, index))


def _write(data: str | bytes) -> None:
    """Write text or the bytes of records to standard output. Bytes go to a pipe or file unchanged; on a
    terminal, control characters are escaped.
    """
    if isinstance(data, str):
        sys.stdout.write(data)
        return
    binary = getattr(sys.stdout, "buffer", None)
    if sys.stdout.isatty() or binary is None:
        text = data.decode(errors="replace")
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    else:
        binary.write(data)


def _text_of(record: Any, output: str, index: int) -> str:
    row = record_row(record)
    if output == "json":
        return ("[\n  " if index == 0 else ",\n  ") + json.dumps(row)
    if output == "jsonl":
        return json.dumps(row) + "\n"
    if output == "yaml":
        lines = [f"{key}: {json.dumps(value)}" for key, value in row.items()]
        return "- " + "\n  ".join(lines) + "\n"
    headers = " ".join(f"{name}={_plain(value)}" for name, value in record.headers)
    cells = [str(record.partition), str(record.offset), time_text(record.timestamp_ms) or "-"]
    cells += [_plain(record.key), headers or "-", _plain(record.value)]
    return _table_line([one_line(cell) for cell in cells], output == "wide") + "\n"


def _table_line(cells: Sequence[str], wide: bool) -> str:
    partition, offset, time, key, headers, value = cells
    middle = f"{padded(time, 24)}  {padded(key, 12)}  {padded(headers, 20)}  " if wide else ""
    return f"{partition:>9}  {offset:>10}  {middle}{value}"


def record_row(record: Any) -> dict[str, Any]:
    """Return a record as a row. Bytes become text, or the field `..._base64` if they are not UTF-8."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        **_bytes_field("key", record.key),
        **_bytes_field("value", record.value),
        "headers": [{"key": name, **_bytes_field("value", value)} for name, value in record.headers],
    }


def _bytes_field(name: str, data: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def _plain(data: bytes | None) -> str:
    return "-" if data is None else data.decode(errors="replace")
