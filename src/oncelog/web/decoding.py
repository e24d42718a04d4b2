"""Keys and values of the messages page, deserialized with the schemas of a registry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oncelog.errors import OncelogError, SchemaRegistryError, copy_to_raise
from oncelog.runtime import system
from oncelog.web.display import data_text
from oncelog.web.reading import Message

MAX_LOOKUPS = 50
"""The maximum number of schema ids that one page looks up. The other ids are looked up by later pages."""
MAX_LOOKUP_SECONDS = 5.0
"""The time in seconds after which a page looks up no further schema ids. Each look-up also has its own limit.

Guard: test_a_slow_registry_delays_a_page_by_seconds_only.
"""
_NOT_FOUND = 404


class MessageDecoder:
    """The converter of keys and values to the texts on pages. Without a registry, pages show the bytes.

    `deserializer` is an AnyDeserializer, or None.
    """

    def __init__(self, deserializer: Any | None = None) -> None:
        self._deserializer = deserializer

    def shown(self, messages: Iterable[Message]) -> tuple[dict[Any, dict[str, Any]], OncelogError | None]:
        """Return, by partition and offset, how the page shows keys and values (`display.data_text`). Also
        return the registry's error, or None.

        After an error that concerns more than one schema, the registry is not asked again for this page.
        """
        page = _Page(self._deserializer)
        shown = {}
        for message in messages:
            if (record := message.record) is not None:
                shown[message.tp, message.offset] = {
                    "key": page.shown(record.topic, record.key),
                    "value": page.shown(record.topic, record.value),
                }
        return shown, page.outage


class _Page:
    """The look-ups of one page. `outage` is the error after which the registry is not asked again."""

    def __init__(self, deserializer: Any | None) -> None:
        self._deserializer = deserializer
        self._asked: set[int] = set()
        self._began_ns = system.current().monotonic_ns()
        self._unknown: dict[int, OncelogError] = {}
        self.outage: OncelogError | None = None

    def shown(self, topic: str, data: bytes | None) -> dict[str, Any]:
        """Return how the page shows a key or a value: the result of `data_text`, with the deserialized data
        if possible.
        """
        stored = data_text(data)
        if data is None or self._deserializer is None:
            return stored
        from oncelog.schema_registry.any_schema import to_json
        from oncelog.schema_registry.wire_format import decode_schema_id, is_framed

        if not is_framed(data) or not self._may_ask(topic, data, schema_id := decode_schema_id(data)):
            return stored
        try:
            if (unknown := self._unknown.get(schema_id)) is not None:
                raise copy_to_raise(unknown)
            text = to_json(self._deserializer.deserialize(topic, data))
        except OncelogError as error:
            if isinstance(error, SchemaRegistryError) and error.status != _NOT_FOUND:
                self.outage = error
                return stored
            if isinstance(error, SchemaRegistryError):
                self._unknown[schema_id] = copy_to_raise(error)
            return {**stored, "note": f"{stored['note'] or f'schema id {schema_id}'}: {error}"}
        decoded = data_text(text.encode(errors="replace"))
        note = f"schema id {schema_id}; {decoded['note']}" if decoded["note"] else f"schema id {schema_id}"
        return {**decoded, "note": note, "size": len(data)}

    def _may_ask(self, topic: str, data: bytes, schema_id: int) -> bool:
        """Return True if the data can be deserialized without the registry, or the registry may be asked."""
        if (
            schema_id in self._unknown
            or self._deserializer is None
            or self._deserializer.is_ready(topic, data)
        ):
            return True
        if self.outage is not None or (schema_id not in self._asked and len(self._asked) >= MAX_LOOKUPS):
            return False
        if (system.current().monotonic_ns() - self._began_ns) / 1e9 > MAX_LOOKUP_SECONDS:
            return False
        self._asked.add(schema_id)
        return True
