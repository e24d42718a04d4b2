"""Replace references in the bodies of requests by the values that one broker assigned in one run."""

from __future__ import annotations

import struct
from typing import Any

from differential.sequence import SALT
from oncelog.conform.values import UNKNOWN_ID, batch_of
from oncelog.rules.security.scram import Mechanism, salt_password
from oncelog.wire.message import Part

AGE_MS = 600_000
MAX_INT = {"epoch": 2**15, "generation": 2**31}


class Names:
    """The values for the references of one run: its prefix of names, topic ids, variables and time."""

    def __init__(self, prefix: str, topic_ids: dict[str, bytes], now_ms: int) -> None:
        self.prefix = prefix
        self.now_ms = now_ms - AGE_MS
        """The timestamp of records.

        It lies far in the past, so the timestamps of markers, which the brokers set, are much later.
        """
        self.topic_ids = topic_ids
        """The id of each topic by the topic's name in the sequence."""
        self.variables: dict[str, Any] = {}

    def topic(self, text: str) -> str:
        return f"{self.prefix}-{text}"

    def resolve(self, value: Any) -> Any:
        """Return the value with its references replaced."""
        if isinstance(value, list):
            return [self.resolve(element) for element in value]
        if not isinstance(value, dict):
            return value
        if "$" in value:
            return self._variable(value)
        for key, build in _BUILDERS.items():
            if key in value:
                return build(self, value[key])
        return {key: self.resolve(element) for key, element in value.items()}

    def _variable(self, reference: dict[str, Any]) -> Any:
        if reference["$"] not in self.variables:
            return self.resolve(reference["else"])
        value = self.variables[reference["$"]]
        if not (plus := reference.get("plus", 0)):
            return value
        # A sum that is too large for the field wraps around to a value that fits.
        limit = MAX_INT.get(reference["$"].rpartition(".")[2], 2**63)
        return max((value + plus + limit) % (2 * limit) - limit, reference.get("floor", -limit))

    def batch(self, options: dict[str, Any]) -> bytes:
        return batch_of(self.resolve(options), {"now": self.now_ms})

    def subscription(self, topics: list[str]) -> bytes:
        """Return the metadata, in version 0, with which a classic consumer joins a group: its subscribed
        topics.
        """
        texts = [self.topic(text).encode() for text in topics]
        parts = [struct.pack(">h", len(text)) + text for text in texts]
        return struct.pack(">hi", 0, len(parts)) + b"".join(parts) + struct.pack(">i", -1)


_BUILDERS: dict[str, Any] = {
    "$name": lambda names, text: f"{names.prefix}-{text}",
    "$topic": lambda names, text: names.topic(text),
    "$topic_id": lambda names, text: names.topic_ids.get(text, UNKNOWN_ID),
    "$batch": lambda names, options: names.batch(options),
    "$batches": lambda names, many: b"".join(names.batch(options) for options in many),
    "$hex": lambda _, text: bytes.fromhex(text),
    "$text": lambda _, text: text.encode(),
    "$principal": lambda names, text: f"User:{names.prefix}-{text}",
    "$subscription": lambda names, topics: names.subscription(topics),
    "$salted": lambda _, text: salt_password(Mechanism.SCRAM_SHA_256, text, SALT, 4096),
}


def value_at(message: Any, path: str) -> Any:
    """Return the value at a path of field names and indexes, or None if the path does not exist."""
    for part in path.split("."):
        if isinstance(message, list):
            if not part.isdigit() or int(part) >= len(message):
                return None
            message = message[int(part)]
        else:
            message = getattr(message, part, None)
    return message


def as_body(value: Any) -> Any:
    """Convert a part of a response, such as an assignment, to the form that request bodies have."""
    if isinstance(value, list):
        return [as_body(element) for element in value]
    if isinstance(value, Part):
        return {field.name: as_body(getattr(value, field.name)) for field in value._struct.fields}
    return value
