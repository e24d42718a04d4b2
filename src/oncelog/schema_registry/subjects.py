"""The subjects of schemas, and the retries of requests: decisions without I/O."""

from __future__ import annotations

from oncelog.errors import ConfigError

_JAVA_PACKAGE = "io.confluent.kafka.serializers.subject."
STRATEGIES = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")
RETRIABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


def strategy_name(text: str) -> str:
    """Return the short name of a strategy. Raises ConfigError for an unknown one."""
    name = text.strip().removeprefix(_JAVA_PACKAGE)
    if name not in STRATEGIES:
        raise ConfigError(f"subject.name.strategy={text!r}: expected one of {', '.join(STRATEGIES)}")
    return name


def subject_name(strategy: str, topic: str, is_key: bool, record_name: str | None) -> str:
    """Return the subject of a topic's keys or values.

    `record_name` is the full name of the Avro record or Protobuf message, or the title of the JSON Schema.
    Raises ConfigError if the strategy needs a name and there is none.
    """
    if strategy == "TopicNameStrategy":
        return f"{topic}-{'key' if is_key else 'value'}"
    if record_name is None:
        raise ConfigError(
            f"subject.name.strategy={strategy} needs a schema with a name: a record in Avro, a title in JSON "
            "Schema"
        )
    return record_name if strategy == "RecordNameStrategy" else f"{topic}-{record_name}"


def retry_pause_ms(
    attempt: int, status: int | None, url_count: int, max_retries: int, wait_ms: int, max_wait_ms: int
) -> int | None:
    """Return the pause before the next attempt of a request, or None if there is none.

    `attempt` counts from 0, and attempt n uses URL n modulo `url_count`. `status` is the HTTP status of the
    response, or None if there was none. There is a pause only after all URLs were tried. A request is not
    repeated if its response would be the same.
    """
    if status is not None and status not in RETRIABLE_STATUSES:
        return None
    done_rounds, position = divmod(attempt + 1, url_count)
    if position:
        return 0
    if done_rounds > max_retries:
        return None
    return int(min(wait_ms * 2 ** min(done_rounds - 1, 40), max_wait_ms))
