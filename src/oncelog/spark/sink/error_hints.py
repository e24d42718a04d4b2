"""Hints that tell the user what to do about an error of the sink."""

from __future__ import annotations

from oncelog.errors import (
    GroupAuthorizationFailed,
    InvalidTransactionTimeout,
    MessageTooLarge,
    OncelogError,
    RecordListTooLarge,
    TimedOut,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartition,
)
from oncelog.rules.transactions.client_session import FENCED_ERRORS
from oncelog.spark.sink.decisions import SinkError
from oncelog.spark.sink.sink_options import SinkSettings

_FENCED = (
    "another attempt took over, or the transaction was open for longer than "
    "kafka.transaction.timeout.ms={timeout} and was aborted. In the second case raise the "
    "option (at most to the broker's transaction.max.timeout.ms), or give each task fewer "
    "rows (repartition). If the batch is a repeat, a prepared transaction stays open until "
    "all tasks have succeeded"
)
_HINTS: tuple[tuple[type[OncelogError], str], ...] = (
    *((kind, _FENCED) for kind in FENCED_ERRORS),
    (
        InvalidTransactionTimeout,
        "the broker's transaction.max.timeout.ms is lower than "
        "kafka.transaction.timeout.ms={timeout}: lower the option, but keep it longer than a "
        "task takes",
    ),
    (MessageTooLarge, "the largest row so far is {row}: raise the topic's max.message.bytes"),
    (RecordListTooLarge, "the largest row so far is {row}: raise the broker's log.segment.bytes"),
    (UnknownTopicOrPartition, "create the topic first"),
    (TopicAuthorizationFailed, "allow WRITE on the topic, and READ on {marker_topic!r} for the markers"),
    (GroupAuthorizationFailed, "allow READ on groups that begin with {prefix!r}"),
    (TransactionalIdAuthorizationFailed, "allow WRITE on transactional ids that begin with {prefix!r}"),
    (TimedOut, "check that the executors can reach the cluster and that the topic exists"),
)


def explain_error(
    error: OncelogError, where: str, settings: SinkSettings, largest: tuple[int, int] | None
) -> str:
    """Return the error's text, preceded by `where` and the topic, and followed by a hint if there is one.

    `largest` is (bytes, row number) of the task's largest row, or None if it is unknown.
    """
    topic = f"topic {settings.topic!r}" if settings.topic else "topics of the column topic"
    text = f"{where}, {topic}: {error}"
    if isinstance(error, SinkError):
        return text
    hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), None)
    if hint is None:
        return text
    size, row = largest or (0, 0)
    return f"{text} -- " + hint.format(
        timeout=settings.producer["transaction.timeout.ms"],
        row=f"row {row} with {size} bytes",
        marker_topic=settings.marker_topic,
        prefix=settings.prefix + "-",
    )
