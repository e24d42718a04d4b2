"""The serializers and deserializers of a consume-transform-produce loop.

They run directly before and after the transform, and the loop's clients carry bytes. So an error in a
converter counts as a failed attempt of the record, and a dead letter contains the bytes that were consumed.
"""

from __future__ import annotations

from typing import NamedTuple

from oncelog.client.serialization import RecordDeserializer, RecordSerializer
from oncelog.types import ProducerRecord, Record


class Converters(NamedTuple):
    """The converters before and after a transform; None if no conversion is needed."""

    deserializer: RecordDeserializer | None
    serializer: RecordSerializer | None

    def input(self, record: Record) -> Record:
        """Return a record with its key and value deserialized, for the transform. Raises
        DeserializationError.
        """
        return record if self.deserializer is None else self.deserializer(record)

    def outputs(self, outputs: list[ProducerRecord]) -> list[ProducerRecord]:
        """Return a transform's output with keys and values as bytes. Raises SerializationError."""
        return outputs if self.serializer is None else [self.serializer.output(output) for output in outputs]

    async def prepare_input(self, record: Record) -> None:
        """Wait for the data that the deserializers need, such as schemas. Raises DeserializationError."""
        deserializer = self.deserializer
        if deserializer is not None and deserializer.may_wait and not deserializer.is_ready(record):
            await deserializer.prepare(record)

    async def prepare_outputs(self, outputs: list[ProducerRecord]) -> None:
        """Wait for the data that the serializers need, such as schemas. Raises SerializationError."""
        serializer = self.serializer
        if serializer is None or not serializer.may_wait:
            return
        for output in outputs:
            if not serializer.is_ready(output.topic, output.value, output.key):
                await serializer.prepare(output.topic, output.value, output.key, output.partition)


BYTES = Converters(None, None)
"""No conversions: transforms get and return bytes."""
