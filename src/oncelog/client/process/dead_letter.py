"""The record that goes to the dead-letter topic in place of a record that cannot be processed."""

from __future__ import annotations

from oncelog.errors import MAX_MESSAGE_CHARACTERS, text_of
from oncelog.types import ProducerRecord, Record

PREFIX = "__oncelog.errors."
"""Prefix of the headers' names. Kafka Connect uses `__connect.errors.`, Kafka Streams `__streams.errors.`."""


def dead_letter(topic: str, record: Record, error: Exception, attempts: int, group_id: str) -> ProducerRecord:
    """Return the record for the dead-letter topic: key, value and headers of `record`, and our own headers.

        __oncelog.errors.topic, .partition, .offset, .timestamp   the record's place and time (ms since 1970)
        __oncelog.errors.exception, .message                      class and text of the last exception
        __oncelog.errors.attempts                                 how often the record was tried
        __oncelog.errors.group                                    the loop's group.id

    All values are UTF-8 text. Headers of an earlier dead letter are replaced.
    """
    kind = type(error)
    texts = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp": str(record.timestamp_ms),
        "exception": f"{kind.__module__}.{kind.__qualname__}",
        "message": text_of(error)[:MAX_MESSAGE_CHARACTERS],
        "attempts": str(attempts),
        "group": group_id,
    }
    kept = tuple(header for header in record.headers if not header[0].startswith(PREFIX))
    ours = tuple((PREFIX + name, text.encode(errors="backslashreplace")) for name, text in texts.items())
    return ProducerRecord(topic, record.value, record.key, kept + ours)
