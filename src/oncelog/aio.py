"""The asyncio faces: `oncelog.aio.Producer`, `oncelog.aio.Consumer`, `oncelog.aio.Admin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncelog.edge.async_admin import AsyncAdmin as Admin
    from oncelog.edge.async_consumer import AsyncConsumer as Consumer
    from oncelog.edge.producer import AsyncProducer as Producer

__all__ = ["Admin", "Consumer", "Producer"]

_HOMES = {
    "Admin": ("oncelog.edge.async_admin", "AsyncAdmin"),
    "Consumer": ("oncelog.edge.async_consumer", "AsyncConsumer"),
    "Producer": ("oncelog.edge.producer", "AsyncProducer"),
}


def __getattr__(name: str) -> Any:
    """Each face is loaded when it is first named."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'oncelog.aio' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
