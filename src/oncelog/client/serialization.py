"""Serializers and deserializers of applications: they convert keys and values to bytes and back.

A serializer is a function with one argument, such as `str.encode`, or an object with the method
`serialize(topic, data)`. A deserializer is a function, such as `json.loads`, or an object with
`deserialize(topic, data)`. None is a tombstone or a missing key. It stays None, and no function is called.

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


Serializer = Callable[[Any], bytes | None] | TopicSerializer
Deserializer = Callable[[bytes], Any] | TopicDeserializer


class RecordSerializer:
    """The serializers of a producer."""

    def __init__(self, key: OfTopic | None, value: OfTopic | None) -> None:
        self._key, self._value = key, value

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


class RecordDeserializer:
    """The deserializers of a consumer. An instance is called with a Record, and returns it with converted key
    and value.
    """

    def __init__(self, key: OfTopic | None, value: OfTopic | None) -> None:
        self._key, self._value = key, value

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
            raise DeserializationError(
                f"the {part} of {record.topic}-{record.partition} at offset {record.offset} cannot be "
                f"deserialized: {type(error).__name__}: {text_of(error)}",
                part=part,
                record=record,
            ) from error
        return record._replace(key=key, value=value)


def record_serializer(key: Serializer | None, value: Serializer | None) -> RecordSerializer | None:
    """Return a producer's serializers, or None if neither is set. Raises ConfigError if one cannot be
    called.
    """
    if key is None and value is None:
        return None
    return RecordSerializer(
        _of_topic(key, "key_serializer", "serialize"), _of_topic(value, "value_serializer", "serialize")
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


def _serialize(function: OfTopic | None, part: str, topic: str, partition: int | None, data: Any) -> Any:
    if function is None or data is None:
        return data
    where = topic if partition is None else f"{topic}-{partition}"
    try:
        result = function(topic, data)
    except Exception as error:
        raise SerializationError(
            f"the {part} of a record for {where} cannot be serialized: {type(error).__name__}: "
            f"{text_of(error)}",
            topic=topic,
            partition=partition,
            part=part,
        ) from error
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
