"""Serializers and deserializers of applications: they convert keys and values to bytes and back.

A serializer is a function with one argument, such as `str.encode`, or an object with the method
`serialize(topic, data)`. A deserializer is a function, such as `json.loads`, or an object with
`deserialize(topic, data)`. None is a tombstone or a missing key. It stays None, and no function is called.

An object that may wait, for example for a schema, can also have the methods of `WaitingConverter`. The
clients of oncelog.aio await its `prepare`, so the conversion itself does not block the event loop.

Without a serializer or deserializer, the clients run none of this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from oncelog.errors import ConfigError, DeserializationError, SerializationError, text_of
from oncelog.types import ProducerRecord, Record

T = TypeVar("T")
U = TypeVar("U")
OfTopic = Callable[[str, Any], Any]
"""A serializer or deserializer as the clients call it: a function of a topic's name and the data."""


class TopicSerializer(Protocol):
    """A serializer that depends on the topic, for example because it looks up the topic's schema."""

    def serialize(self, topic: str, data: Any, /) -> bytes | None: ...


class TopicDeserializer(Protocol):
    """A deserializer that depends on the topic."""

    def deserialize(self, topic: str, data: bytes, /) -> Any: ...


class WaitingConverter(Protocol):
    """A serializer or deserializer that may wait before it can convert some data.

    The clients of oncelog.aio call `is_ready` before each conversion, and await `prepare` if it returns
    False. All other clients only convert, and wait in the conversion. `data` is never None.
    """

    def is_ready(self, topic: str, data: Any, /) -> bool:
        """Return True if the conversion of `data` would not wait."""
        ...

    async def prepare(self, topic: str, data: Any, /) -> None:
        """Wait for the data that the conversion needs, such as a schema. An error counts as an error of the
        conversion.
        """
        ...


Serializer = Callable[[Any], bytes | None] | TopicSerializer
Deserializer = Callable[[bytes], Any] | TopicDeserializer


class _Converters:
    """The converters of keys and of values. `waiting_key` and `waiting_value` are those that may wait."""

    def __init__(
        self,
        key: OfTopic | None,
        value: OfTopic | None,
        waiting_key: WaitingConverter | None = None,
        waiting_value: WaitingConverter | None = None,
    ) -> None:
        self._key, self._value = key, value
        self._waiting_key, self._waiting_value = waiting_key, waiting_value
        self.may_wait = waiting_key is not None or waiting_value is not None


class RecordSerializer(_Converters):
    """The serializers of a producer."""

    def is_ready(self, topic: str, value: Any, key: Any) -> bool:
        """Return True if neither serializer would wait."""
        return _is_ready(self._waiting_value, topic, value) and _is_ready(self._waiting_key, topic, key)

    async def prepare(self, topic: str, value: Any, key: Any, partition: int | None = None) -> None:
        """Let the serializers wait for data that they need, such as schemas. Raises SerializationError."""
        part = "value"
        try:
            if not _is_ready(self._waiting_value, topic, value):
                await _waiting(self._waiting_value).prepare(topic, value)
            part = "key"
            if not _is_ready(self._waiting_key, topic, key):
                await _waiting(self._waiting_key).prepare(topic, key)
        except Exception as error:
            raise _not_serialized(part, topic, partition, error) from error

    def value(self, topic: str, value: Any, partition: int | None = None) -> Any:
        """Return the serialized value.

        None, and any value if there is no value serializer, is returned unchanged. Raises SerializationError.
        """
        return _serialize(self._value, "value", topic, partition, value)

    def key(self, topic: str, key: Any, partition: int | None = None) -> Any:
        """Return the serialized key.

        None, and any key if there is no key serializer, is returned unchanged. Raises SerializationError.
        """
        return _serialize(self._key, "key", topic, partition, key)

    def values(self, topic: str, values: Iterable[Any], partition: int | None) -> Iterable[Any]:
        """Return the serialized values.

        A list or tuple is converted completely before this returns, any other iterable item by item as it is
        read. Raises SerializationError.
        """
        return _converted(values, lambda value: self.value(topic, value, partition))

    def keys(self, topic: str, keys: Iterable[Any] | None, partition: int | None) -> Iterable[Any] | None:
        """Return the serialized keys, or None if `keys` is None.

        A list or tuple is converted completely before this returns, any other iterable item by item as it is
        read. Raises SerializationError.
        """
        return None if keys is None else _converted(keys, lambda key: self.key(topic, key, partition))

    def output(self, output: ProducerRecord) -> ProducerRecord:
        """Return the output record of a transform with its key and value serialized. Raises
        SerializationError.
        """
        key = self.key(output.topic, output.key, output.partition)
        return output._replace(key=key, value=self.value(output.topic, output.value, output.partition))


class RecordDeserializer(_Converters):
    """The deserializers of a consumer. An instance is called with a Record, and returns it with converted key
    and value.
    """

    def is_ready(self, record: Record) -> bool:
        """Return True if neither deserializer would wait."""
        return _is_ready(self._waiting_key, record.topic, record.key) and _is_ready(
            self._waiting_value, record.topic, record.value
        )

    async def prepare(self, record: Record) -> None:
        """Let the deserializers wait for the data that they need, such as schemas. Raises
        DeserializationError.
        """
        part = "key"
        try:
            if not _is_ready(self._waiting_key, record.topic, record.key):
                await _waiting(self._waiting_key).prepare(record.topic, record.key)
            part = "value"
            if not _is_ready(self._waiting_value, record.topic, record.value):
                await _waiting(self._waiting_value).prepare(record.topic, record.value)
        except Exception as error:
            raise _not_deserialized(part, record, error) from error

    def __call__(self, record: Record) -> Record:
        """Return the record with converted key and value. None stays None. Raises DeserializationError."""
        key, value, part = record.key, record.value, "key"
        try:
            if self._key is not None and key is not None:
                key = self._key(record.topic, key)
            part = "value"
            if self._value is not None and value is not None:
                value = self._value(record.topic, value)
        except Exception as error:
            raise _not_deserialized(part, record, error) from error
        return record._replace(key=key, value=value)


def record_serializer(key: Serializer | None, value: Serializer | None) -> RecordSerializer | None:
    """Return a producer's serializers, or None if neither is set. Raises ConfigError if one cannot be
    called.
    """
    if key is None and value is None:
        return None
    return RecordSerializer(
        _of_topic(key, "key_serializer", "serialize"),
        _of_topic(value, "value_serializer", "serialize"),
        _waiting_converter(key),
        _waiting_converter(value),
    )


def record_deserializer(key: Deserializer | None, value: Deserializer | None) -> RecordDeserializer | None:
    """Return a consumer's deserializers, or None if neither is set. Raises ConfigError if one cannot be
    called.
    """
    if key is None and value is None:
        return None
    return RecordDeserializer(
        _of_topic(key, "key_deserializer", "deserialize"),
        _of_topic(value, "value_deserializer", "deserialize"),
        _waiting_converter(key),
        _waiting_converter(value),
    )


def _of_topic(converter: Any, argument: str, method: str) -> OfTopic | None:
    if converter is None:
        return None
    of_topic = getattr(converter, method, None)
    if callable(of_topic):
        bound: OfTopic = of_topic
        return bound
    if not callable(converter):
        raise ConfigError(
            f"{argument} must be a function of the data, or an object with {method}(topic, data), not "
            f"{converter!r}"
        )
    function: Callable[[Any], Any] = converter
    return lambda topic, data: function(data)


def _waiting_converter(converter: Any) -> WaitingConverter | None:
    """Return the converter if it has both methods of WaitingConverter."""
    if callable(getattr(converter, "is_ready", None)) and callable(getattr(converter, "prepare", None)):
        waiting: WaitingConverter = converter
        return waiting
    return None


def _is_ready(converter: WaitingConverter | None, topic: str, data: Any) -> bool:
    return converter is None or data is None or converter.is_ready(topic, data)


def _waiting(converter: WaitingConverter | None) -> WaitingConverter:
    assert converter is not None
    return converter


def _not_serialized(part: str, topic: str, partition: int | None, error: Exception) -> SerializationError:
    where = topic if partition is None else f"{topic}-{partition}"
    return SerializationError(
        f"the {part} of a record for {where} cannot be serialized: {type(error).__name__}: {text_of(error)}",
        topic=topic,
        partition=partition,
        part=part,
    )


def _not_deserialized(part: str, record: Record, error: Exception) -> DeserializationError:
    return DeserializationError(
        f"the {part} of {record.topic}-{record.partition} at offset {record.offset} cannot be deserialized: "
        f"{type(error).__name__}: {text_of(error)}",
        part=part,
        record=record,
    )


def _serialize(function: OfTopic | None, part: str, topic: str, partition: int | None, data: Any) -> Any:
    if function is None or data is None:
        return data
    try:
        result = function(topic, data)
    except Exception as error:
        raise _not_serialized(part, topic, partition, error) from error
    where = topic if partition is None else f"{topic}-{partition}"
    if result is not None and not isinstance(result, (bytes, bytearray, memoryview)):
        raise SerializationError(
            f"the {part}_serializer returned {type(result).__name__} for a record of {where}; it must return "
            "bytes or None",
            topic=topic,
            partition=partition,
            part=part,
        )
    return result


def _converted(items: Iterable[T], convert: Callable[[T], U]) -> Iterable[U]:
    """Return converted items.

    A list or tuple is converted completely before anything is sent, so that nothing is sent if an item fails.
    Any other iterable is converted item by item.
    """
    if isinstance(items, (list, tuple)):
        return [convert(item) for item in items]
    return _lazily(items, convert)


def _lazily(items: Iterable[T], convert: Callable[[T], U]) -> Iterator[U]:
    for item in items:
        yield convert(item)
