# ruff: noqa: E501 (the table keeps one option per line)
"""The options of writing with `format("oncelog")`: one table, and what they say as values.

Names and meanings are those of Spark's own Kafka sink; what is more is ours.
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
    Option("topic", None, "both", "The topic of all rows; goes before the column topic."),
    Option("writeId", None, "batch", "A name for this write: repeated with the same name and rows, a finished or half-finished write adds nothing twice."),
    Option("markerTopic", None, "both", "An existing topic under whose name the markers are kept (nothing is written to it). Default: topic; required without it."),
    Option("transactionalIdPrefix", "oncelog", "both", "Transactional ids and consumer groups of the sink begin with this and a hyphen."),
    Option("firstBatchId", "0", "stream", "The first batch that this sink writes, for a query that wrote elsewhere before."),
    Option("includeHeaders", "false", "both", "Accepted without effect: a column headers is written when it is there."),
    Option("checkpointLocation", None, "stream", "Spark's own."),
    Option("path", None, "both", "Refused: set the option topic."),
    Option("kafka.*", None, "both", "Any producer setting by its Kafka name; kafka.transaction.timeout.ms is 300000 by default, and must be longer than a task takes."),
)
# fmt: on

_NAMES = {option.name.lower(): option for option in SINK_OPTIONS}
_TRANSACTION_TIMEOUT_MS = 300_000
_CHECKSUM = "spark.sql.shuffle.orderIndependentChecksum"
_ON_MISMATCH = ("enableFullRetryOnMismatch", "enableQueryLevelRollbackOnMismatch")
FULL_RETRY = f"{_CHECKSUM}.{_ON_MISMATCH[0]}"
REQUEST_OVERHEAD_BYTES = 200
"""What a request with one row has besides key and value, at most."""
_INSTEAD_OF = {
    "transactional.id": "each task has one of its own; use transactionalIdPrefix",
    "enable.idempotence": "the sink writes in transactions, which imply it",
    "key.serializer": "keys are binary or string columns",
    "value.serializer": "values are binary or string columns",
}


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """The options, checked. `producer` and `admin` are settings for our own clients."""

    topic: str | None
    marker_topic: str
    write_id: str | None
    prefix: str
    first_batch_id: int
    max_row_bytes: int
    producer: dict[str, object] = field(repr=False)
    admin: dict[str, object] = field(repr=False)
    vouched_batch_id: int | None = None
    """firstBatchId as the user set it: nothing of this batch was written before."""


def parse_sink_options(given: Mapping[str, str], mode: Literal["batch", "stream"]) -> SinkSettings:
    """Check what the user gave. Raises ConfigError."""
    options = {name.lower(): value for name, value in given.items()}
    refuse_unknown(options, _NAMES, "writing with format('oncelog')")
    if "path" in options:
        raise ConfigError("save() and start() take no path here: set the option topic")
    if mode == "stream" and "writeid" in options:
        raise ConfigError("writeId is for batch writes; a stream is known by its checkpoint")
    topic = options.get("topic") or None
    marker_topic = options.get("markertopic") or topic
    if marker_topic is None:
        raise ConfigError(
            "with the column topic alone, set the option markerTopic to an existing topic: markers of what was "
            "written are consumer group offsets, which are kept under a topic's name"
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
    """Return whether Spark repeats all that read a shuffle file which came out otherwise a second time.

    Without that a lost shuffle file gives rows twice, and others not at all, where the plan is not
    deterministic. `setting`: returns one of Spark's settings, None for its default.
    """
    retries, rolls_back = (setting(f"{_CHECKSUM}.{name}") for name in _ON_MISMATCH)
    return (retries or "true").lower() == "true" or (rolls_back or "false").lower() == "true"


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"firstBatchId={text!r}: expected a whole number from 0")
    return int(text)
