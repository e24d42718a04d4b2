# ruff: noqa: E501 (the table keeps one option per line)
"""The options of writing with `format("oncelog")`: their table, and their parsed values.

Options of Spark's own Kafka sink have the same names and meanings here. The other options are Oncelog's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from oncelog.config import ADMIN, PRODUCER
from oncelog.errors import ConfigError
from oncelog.spark.option_docs import Option, client_settings, refuse_unknown

# fmt: off
SINK_OPTIONS = (
    Option("kafka.bootstrap.servers", None, "both", "HOST:PORT of one or more brokers. Required."),
    Option("topic", None, "both", "The topic of all rows; takes precedence over the column topic."),
    Option("writeId", None, "batch", "A name for this write. A write that is repeated with the same name and rows adds nothing twice, whether it had finished or not."),
    Option("markerTopic", None, "both", "An existing topic under whose name the markers are stored; nothing is written to it. Default: the option topic; required without it."),
    Option("transactionalIdPrefix", "oncelog", "both", "Transactional ids and consumer groups of the sink begin with this and a hyphen."),
    Option("firstBatchId", "0", "stream", "The first batch that this sink writes; set it for a query that wrote elsewhere before."),
    Option("includeHeaders", "false", "both", "Accepted without effect: a column named headers is always written."),
    Option("checkpointLocation", None, "stream", "Spark's own."),
    Option("path", None, "both", "Refused: set the option topic."),
    Option("kafka.*", None, "both", "Any producer setting by its Kafka name. kafka.transaction.timeout.ms is 300000 by default and must exceed the duration of a task."),
)
# fmt: on

_NAMES = {option.name.lower(): option for option in SINK_OPTIONS}
_TRANSACTION_TIMEOUT_MS = 300_000
_CHECKSUM = "spark.sql.shuffle.orderIndependentChecksum"
_ON_MISMATCH = ("enableFullRetryOnMismatch", "enableQueryLevelRollbackOnMismatch")
FULL_RETRY = f"{_CHECKSUM}.{_ON_MISMATCH[0]}"
REQUEST_OVERHEAD_BYTES = 200
"""Upper bound of the size in bytes of a Produce request with one row, without the row's key and value."""
_INSTEAD_OF = {
    "transactional.id": "each task sets its own; use transactionalIdPrefix",
    "enable.idempotence": "the sink writes in transactions, which imply it",
    "key.serializer": "keys are binary or string columns",
    "value.serializer": "values are binary or string columns",
}


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """The parsed options. `producer` and `admin` are settings of Oncelog's clients."""

    topic: str | None
    marker_topic: str
    write_id: str | None
    prefix: str
    first_batch_id: int
    max_row_bytes: int
    producer: dict[str, object] = field(repr=False)
    admin: dict[str, object] = field(repr=False)
    vouched_batch_id: int | None = None
    """The option firstBatchId if the user set it, otherwise None. By setting it, the user asserts that
    nothing of this batch was written before.
    """


def parse_sink_options(given: Mapping[str, str], mode: Literal["batch", "stream"]) -> SinkSettings:
    """Return the parsed options. Raises ConfigError for an unknown, invalid or missing option."""
    options = {name.lower(): value for name, value in given.items()}
    refuse_unknown(options, _NAMES, "writing with format('oncelog')")
    if "path" in options:
        raise ConfigError("save() and start() must have no path: set the option topic")
    if mode == "stream" and "writeid" in options:
        raise ConfigError("writeId is for batch writes; a stream is identified by its checkpoint")
    if mode == "batch" and "firstbatchid" in options:
        # The option asserts that nothing of batch 0 was written before. A batch write has only batch 0, so the
        # notes of an unfinished write would not be compared. Guard:
        # test_a_batch_write_cannot_say_that_its_notes_do_not_count.
        raise ConfigError(
            "firstBatchId is for streams: a batch write that begins again needs another writeId"
        )
    topic = options.get("topic") or None
    marker_topic = options.get("markertopic") or topic
    if marker_topic is None:
        raise ConfigError(
            "without the option topic, set markerTopic to an existing topic: the sink stores its markers as "
            "consumer group offsets of that topic"
        )
    defaults = {"transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS}
    producer = client_settings(options, PRODUCER, defaults, _INSTEAD_OF)
    return SinkSettings(
        topic=topic,
        marker_topic=marker_topic,
        write_id=options.get("writeid") or None,
        prefix=options.get("transactionalidprefix") or "oncelog",
        first_batch_id=_whole(options.get("firstbatchid", "0")),
        max_row_bytes=int(PRODUCER.parse(producer)["max.request.size"]) - REQUEST_OVERHEAD_BYTES,
        producer=producer,
        admin={key: value for key, value in producer.items() if ADMIN.get(key)},
        vouched_batch_id=_whole(options["firstbatchid"]) if "firstbatchid" in options else None,
    )


def repeats_whole_stages(setting: Callable[[str], str | None]) -> bool:
    """Return True if Spark repeats all tasks of a stage after a shuffle file was lost and its new contents
    differ.

    If Spark repeated only some of these tasks, rows would be doubled and lost, unless the plan is
    deterministic. `setting` returns the value of a Spark setting, or None if it is not set.
    """
    retries, rolls_back = (setting(f"{_CHECKSUM}.{name}") for name in _ON_MISMATCH)
    return (retries or "true").lower() == "true" or (rolls_back or "false").lower() == "true"


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"firstBatchId={text!r}: expected a whole number of 0 or more")
    return int(text)
