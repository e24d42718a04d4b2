"""Exactly-once Kafka messaging for Python: a broker, clients, a Spark source and sink, and a log audit.

    with oncelog.Broker() as broker, oncelog.Producer({"bootstrap.servers": broker.bootstrap_servers}) as p:
        p.send("flights", b"EWR-IAH").result()

The clients and the broker are imported on first use. So a program that only uses a producer does not load the
broker, and `oncelog serve` loads no client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oncelog import compiled

compiled.select()  # must precede the first import of a module that may be compiled

from oncelog import config, errors  # noqa: E402
from oncelog.types import (  # noqa: E402
    ConsumerGroupMetadata,
    Header,
    Isolation,
    OffsetAndMetadata,
    ProducerRecord,
    Record,
    RecordMetadata,
    TopicPartition,
)

if TYPE_CHECKING:
    from oncelog.client.admin.blocking import Admin, NewTopic
    from oncelog.client.consumer.blocking import Consumer
    from oncelog.client.consumer.provenance_filter import ProvenanceFilter
    from oncelog.client.consumer.read_table import read_table
    from oncelog.client.process.blocking import Processor, process
    from oncelog.client.producer.blocking import Producer
    from oncelog.server.embedded import Broker
    from oncelog.typed_settings import (
        AdminSettings,
        BrokerSettings,
        ConsumerSettings,
        ProducerSettings,
        TopicSettings,
    )

__all__ = [
    "Admin",
    "AdminSettings",
    "Broker",
    "BrokerSettings",
    "Consumer",
    "ConsumerGroupMetadata",
    "ConsumerSettings",
    "Header",
    "Isolation",
    "NewTopic",
    "OffsetAndMetadata",
    "Processor",
    "Producer",
    "ProducerRecord",
    "ProducerSettings",
    "ProvenanceFilter",
    "Record",
    "RecordMetadata",
    "TopicPartition",
    "TopicSettings",
    "config",
    "errors",
    "process",
    "read_table",
]

_TYPED_SETTINGS = (
    "AdminSettings",
    "BrokerSettings",
    "ConsumerSettings",
    "ProducerSettings",
    "TopicSettings",
)
_MODULE_OF = dict.fromkeys(_TYPED_SETTINGS, "oncelog.typed_settings") | {
    "Admin": "oncelog.client.admin.blocking",
    "NewTopic": "oncelog.client.admin.blocking",
    "Broker": "oncelog.server.embedded",
    "Consumer": "oncelog.client.consumer.blocking",
    "Processor": "oncelog.client.process.blocking",
    "Producer": "oncelog.client.producer.blocking",
    "ProvenanceFilter": "oncelog.client.consumer.provenance_filter",
    "process": "oncelog.client.process.blocking",
    "read_table": "oncelog.client.consumer.read_table",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        globals()[name] = value = version("oncelog")
        return value
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'oncelog' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
