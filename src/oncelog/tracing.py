"""OpenTelemetry spans for sent and processed records (`pip install 'oncelog[tracing]'`).

The context of a trace travels in the headers of a record, as W3C Trace Context by default. The names of spans
and attributes are those of OpenTelemetry's semantic conventions for Kafka, version 1.45, which are still in
development. Keys and values of records are not put into spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oncelog.client.producer.blocking import Producer
from oncelog.client.producer.delivery import RecordFuture
from oncelog.errors import MissingDependency
from oncelog.types import Record, RecordMetadata

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as error:
    raise MissingDependency(f"{error.name} is missing: pip install 'oncelog[tracing]'") from None


__all__ = ["TracedProducer", "process_span"]


class TracedProducer:
    """Sends records through a producer, each in a span of kind PRODUCER that ends with the delivery.

    Only `send` is traced. Use `producer` itself for everything else, such as transactions.
    """

    def __init__(self, producer: Producer, tracer_provider: TracerProvider | None = None) -> None:
        self.producer = producer
        self._tracer = trace.get_tracer("oncelog", tracer_provider=tracer_provider)

    def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        headers: Any = (),
        on_delivery: Any = None,
        **options: Any,
    ) -> RecordFuture:
        """Send a record with the trace context in its headers. The arguments and errors are those of
        `Producer.send`.
        """
        span = self._tracer.start_span(
            f"send {topic}", kind=SpanKind.PRODUCER, attributes=_attributes("send", topic)
        )
        if value is None:
            span.set_attribute("kafka.message.tombstone", True)
        context: dict[str, str] = {}
        propagate.inject(context, trace.set_span_in_context(span))
        added = [(name, text.encode()) for name, text in context.items()]
        given = headers.items() if isinstance(headers, Mapping) else headers or ()

        def end(metadata: RecordMetadata | None, failure: BaseException | None) -> None:
            _end(span, metadata, failure)
            if on_delivery is not None:
                on_delivery(metadata, failure)

        try:
            return self.producer.send(topic, value, key, headers=[*given, *added], on_delivery=end, **options)
        except BaseException as failure:
            _end(span, None, failure)
            raise


@contextmanager
def process_span(
    record: Record, group_id: str | None = None, tracer_provider: TracerProvider | None = None
) -> Iterator[Span]:
    """Yield a span of kind CONSUMER for the work on one record.

    The span is linked with the span that sent the record. If no other span is current, that span is also its
    parent, so that both are in one trace. An exception of the `with` block is recorded in the span, and
    raised again.
    """
    texts = {name: (value or b"").decode("ascii", "replace") for name, value in record.headers}
    sent = propagate.extract(texts)
    sender = trace.get_current_span(sent).get_span_context()
    is_alone = not trace.get_current_span().get_span_context().is_valid
    attributes = _attributes("process", record.topic) | {
        "messaging.destination.partition.id": str(record.partition),
        "kafka.offset": record.offset,
    }
    if group_id is not None:
        attributes["messaging.consumer.group.name"] = group_id
    tracer = trace.get_tracer("oncelog", tracer_provider=tracer_provider)
    with tracer.start_as_current_span(
        f"process {record.topic}",
        sent if is_alone else None,
        kind=SpanKind.CONSUMER,
        attributes=attributes,
        links=[Link(sender)] if sender.is_valid else [],
    ) as span:
        yield span


def _attributes(operation: str, topic: str) -> dict[str, str | int]:
    return {
        "messaging.system.name": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _end(span: Span, metadata: RecordMetadata | None, failure: BaseException | None) -> None:
    if metadata is not None:
        span.set_attribute("messaging.destination.partition.id", str(metadata.partition))
        if metadata.offset is not None:
            span.set_attribute("kafka.offset", metadata.offset)
    if failure is not None:
        span.set_attribute("error.type", type(failure).__qualname__)
        span.set_status(Status(StatusCode.ERROR, str(failure)))
    span.end()
