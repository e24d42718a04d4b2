"""Spans of sent and processed records, with OpenTelemetry's own SDK."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.topics import new_topic, producer_of

from oncelog import Consumer, Record, RecordMetadata
from oncelog.errors import MessageTooLarge, OncelogError
from oncelog.testing.proxy import Proxy
from oncelog.tracing import TracedProducer, process_span
from oncelog.types import TimestampType, TopicPartition

Ended = InMemorySpanExporter


@pytest.fixture
def ended() -> Ended:
    return InMemorySpanExporter()


@pytest.fixture
def provider(ended: Ended) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ended))
    return provider


def read(servers: str, topic: str) -> Record:
    with Consumer({"bootstrap.servers": servers}) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek(TopicPartition(topic, 0), 0)
        return consumer.poll(60)[0]


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def span_id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def test_the_work_on_a_record_is_in_the_trace_of_its_sender(
    ours: str, ended: Ended, provider: TracerProvider
) -> None:
    topic = new_topic(ours)
    delivered: list[RecordMetadata | None] = []
    with producer_of(ours) as producer:
        TracedProducer(producer, provider).send(
            topic,
            b"42",
            b"k",
            headers=[("n", b"1")],
            on_delivery=lambda metadata, _: delivered.append(metadata),
        ).result(60)
    record = read(ours, topic)
    assert record.headers[0] == ("n", b"1") and record.headers[1][0] == "traceparent"
    with process_span(record, "billing", provider) as span:
        assert trace.get_current_span() is span
    sent, processed = ended.get_finished_spans()
    assert sent.name == f"send {topic}" and sent.kind is SpanKind.PRODUCER
    assert attributes_of(sent) == {
        "messaging.system.name": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "kafka.offset": 0,
    }
    assert processed.name == f"process {topic}" and processed.kind is SpanKind.CONSUMER
    assert processed.parent is not None and processed.parent.span_id == span_id_of(sent)
    assert [link.context.span_id for link in processed.links] == [span_id_of(sent)]
    assert attributes_of(processed)["messaging.consumer.group.name"] == "billing"
    assert [metadata.offset for metadata in delivered if metadata] == [0]


def test_within_another_span_the_sender_is_only_linked(
    ours: str, ended: Ended, provider: TracerProvider
) -> None:
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        TracedProducer(producer, provider).send(topic, None, headers={"n": b"1"}).result(60)
    record, tracer = read(ours, topic), provider.get_tracer("test")
    with tracer.start_as_current_span("nightly") as outer, process_span(record, tracer_provider=provider):
        pass
    sent, processed, _ = ended.get_finished_spans()
    assert attributes_of(sent)["kafka.message.tombstone"] is True
    assert processed.parent == outer.get_span_context()
    assert [link.context.span_id for link in processed.links] == [span_id_of(sent)]


def test_a_record_without_a_trace_begins_one(ours: str, ended: Ended, provider: TracerProvider) -> None:
    record = Record(
        "t", 0, 7, 0, TimestampType.CREATE_TIME, None, b"x", (("traceparent", b"\xff\x00"), ("empty", None))
    )
    with pytest.raises(RuntimeError), process_span(record, tracer_provider=provider):
        raise RuntimeError("the work failed")
    (span,) = ended.get_finished_spans()
    assert span.parent is None and not span.links
    assert span.status.status_code is StatusCode.ERROR and span.events[0].name == "exception"


def test_a_refused_record_and_a_failed_delivery_end_their_spans_with_the_error(
    ours: str, ended: Ended, provider: TracerProvider
) -> None:
    topic = new_topic(ours)
    with Proxy(ours) as proxy, producer_of(proxy.bootstrap_servers, max_request_size=1_000_000) as producer:
        traced = TracedProducer(producer, provider)
        with pytest.raises(MessageTooLarge):
            traced.send(topic, bytes(2_000_000))
        proxy.refuse("INVALID_RECORD", topic)
        with pytest.raises(OncelogError):
            traced.send(topic, b"x").result(60)
    refused, failed = ended.get_finished_spans()
    assert attributes_of(refused)["error.type"] == "MessageTooLarge"
    assert attributes_of(failed)["error.type"] == "InvalidRecord"
    assert {refused.status.status_code, failed.status.status_code} == {StatusCode.ERROR}
