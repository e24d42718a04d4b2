"""`oncelog consume`: print the records of a topic."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from oncelog.cli.common import bootstrap_options, one_line, only_settings_of, padded, printable, time_text
from oncelog.errors import OncelogError

_POLL_SECONDS = 0.5
_HEAD = ["PARTITION", "OFFSET", "TIME", "KEY", "HEADERS", "VALUE"]
_FORMATS = ["value", "table", "wide", "json", "jsonl", "yaml"]


@dataclass(frozen=True, slots=True)
class _Limits:
    """The conditions that stop the command: a number of records, a time in ms without a record, or end
    offsets.

    `until_end` means the end offsets as of startup.
    """

    max_messages: int | None
    timeout_ms: int | None
    until_end: bool


@click.command("consume")
@click.argument("topic")
@click.option("--from-beginning", is_flag=True, help="Start at the first record (default: only new records).")
@click.option("--offset", type=click.IntRange(min=0), help="Start at this offset. Needs --partition.")
@click.option(
    "-p", "--partition", type=click.IntRange(min=0), help="Read only this partition (default: all)."
)
@click.option("-g", "--group", help="Join this consumer group, and start at its committed offsets.")
@click.option("-n", "--max-messages", type=click.IntRange(min=1), help="Stop after this many records.")
@click.option("--timeout-ms", type=click.IntRange(min=1), help="Stop after this time without a record.")
@click.option("--until-end", is_flag=True, help="Stop at the end offsets as of startup.")
@click.option(
    "--isolation-level",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    help="read_uncommitted also prints records of open and aborted transactions.  [default: read_committed]",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(_FORMATS),
    default="value",
    show_default=True,
    help="value prints only the values, one per line. wide adds key, time and headers to the table.",
)
@bootstrap_options
def command(
    topic: str,
    from_beginning: bool,
    offset: int | None,
    partition: int | None,
    group: str | None,
    max_messages: int | None,
    timeout_ms: int | None,
    until_end: bool,
    isolation_level: str | None,
    output: str,
    client_config: dict[str, Any],
) -> None:
    """Print the records of a topic until interrupted, or until one of the limits.

    \b
    Examples:
      oncelog consume flights --from-beginning --max-messages 10
      oncelog consume flights -p 0 --offset 42 -o jsonl --until-end
      oncelog consume flights --group dashboards --from-beginning
    With --group, --from-beginning applies to partitions for which the group has no committed offset.
    Exit code 4: --timeout-ms passed before --max-messages records arrived.
    """
    if offset is not None and partition is None:
        raise click.UsageError("--offset needs --partition")
    if offset is not None and from_beginning:
        raise click.UsageError("--offset and --from-beginning exclude each other")
    if group is not None and (offset is not None or partition is not None or until_end):
        raise click.UsageError(
            "--group assigns partitions and offsets: leave out --partition, --offset and --until-end"
        )
    limits = _Limits(max_messages, timeout_ms, until_end)
    with _consumer(client_config, isolation_level, group, from_beginning) as consumer:
        if group is not None:
            consumer.subscribe([topic])
        else:
            _place(consumer, topic, partition, offset, from_beginning)
        count = _print(_records(consumer, limits), output)
    click.echo(f"{count} records", err=True)
    if max_messages is not None and count < max_messages and not until_end:
        from oncelog.cli.main import EXIT_TIMEOUT

        sys.exit(EXIT_TIMEOUT)


def _consumer(
    client_config: dict[str, Any], isolation_level: str | None, group: str | None, from_beginning: bool
) -> Any:
    from oncelog.client.consumer.blocking import Consumer
    from oncelog.config import CONSUMER

    config = only_settings_of(CONSUMER, client_config)
    if isolation_level:
        config["isolation.level"] = isolation_level
    if group is not None:
        config["group.id"] = group
        config.setdefault("auto.offset.reset", "earliest" if from_beginning else "latest")
    return Consumer(config)


def _place(
    consumer: Any, topic: str, partition: int | None, offset: int | None, from_beginning: bool
) -> None:
    from oncelog.types import TopicPartition

    if partition is not None:
        tps = [TopicPartition(topic, partition)]
    else:
        tps = [TopicPartition(topic, part.partition) for part in consumer.partitions_for(topic)]
    consumer.assign(tps)
    if offset is not None:
        consumer.seek(tps[0], offset)
    elif from_beginning:
        consumer.seek_to_beginning()


def _records(consumer: Any, limits: _Limits) -> Iterator[list[Any]]:
    """Yield the records of each poll until a limit is reached."""
    ends = consumer.end_offsets(consumer.assignment()) if limits.until_end else {}
    count = 0
    quiet_seconds = 0.0
    while limits.max_messages is None or count < limits.max_messages:
        if ends and all(consumer.position(tp) >= end for tp, end in ends.items()):
            return
        wait = _POLL_SECONDS
        if limits.timeout_ms is not None:
            wait = min(wait, limits.timeout_ms / 1000 - quiet_seconds)
        room = None if limits.max_messages is None else limits.max_messages - count
        rows = consumer.poll(wait, max_records=room)
        rows = [row for row in rows if not ends or row.offset < ends[row.topic, row.partition]]
        quiet_seconds = 0.0 if rows else quiet_seconds + wait
        if limits.timeout_ms is not None and quiet_seconds >= limits.timeout_ms / 1000:
            return
        count += len(rows)
        yield rows


def _print(polls: Iterator[list[Any]], output: str) -> int:
    """Print records as they arrive; return their number.

    Ctrl-C and a closed pipe end the output without an error.
    """
    count, has_head = 0, False
    try:
        try:
            for rows in polls:
                # Print the header only with the first records: the topic may not exist.
                if rows and output in ("table", "wide") and not has_head:
                    click.echo(_table_line(_HEAD, output == "wide"))
                    has_head = True
                # All records of a poll are one write, so that an interrupt leaves only whole,
                # counted records.
                text = "".join(_text_of(record, output, index) for index, record in enumerate(rows, count))
                count += len(rows)
                sys.stdout.write(text)
                sys.stdout.flush()
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
        # Python flushes standard output at exit. If it still were the closed pipe, the flush would raise
        # BrokenPipeError again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return count


def _text_of(record: Any, output: str, index: int) -> str:
    if output == "value":
        value = _plain(record.value)
        # A pipe gets the raw value. A terminal would execute control sequences in the value.
        return (printable(value) if sys.stdout.isatty() else value) + "\n"
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
