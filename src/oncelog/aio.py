"""The asyncio clients: `oncelog.aio.Producer`, `Consumer` and `Admin`, and the loop `oncelog.aio.process`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncelog.client.admin.aio import AsyncAdmin as Admin
    from oncelog.client.consumer.aio import AsyncConsumer as Consumer
    from oncelog.client.process.aio import AsyncProcessor as Processor
    from oncelog.client.process.aio import process
    from oncelog.client.producer.aio import AsyncProducer as Producer

__all__ = ["Admin", "Consumer", "Processor", "Producer", "process"]

_HOMES = {
    "Admin": ("oncelog.client.admin.aio", "AsyncAdmin"),
    "Consumer": ("oncelog.client.consumer.aio", "AsyncConsumer"),
    "Processor": ("oncelog.client.process.aio", "AsyncProcessor"),
    "Producer": ("oncelog.client.producer.aio", "AsyncProducer"),
    "process": ("oncelog.client.process.aio", "process"),
}


def __getattr__(name: str) -> Any:
    """Import a client or `process` when the attribute is first read."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'oncelog.aio' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
