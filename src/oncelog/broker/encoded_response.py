"""Responses that are encoded in steps, because encoding them at once would delay other clients.

Encoding 100,000 groups takes 0.2 s. The server sets `PendingResponse.encode`. Every response that took more
than one step is then also encoded in steps. See test_every_large_response_is_encoded_in_steps.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from oncelog.broker.purgatory import Disconnect
from oncelog.broker.stepwise import StepBudget, Work
from oncelog.errors import OncelogError
from oncelog.wire.message import Api, EncodedResponse, Message
from oncelog.wire.messages import FetchResponse
from oncelog.wire.primitives import Buffer
from oncelog.wire.schema import FIXED, Field

ENCODED_PER_STEP = 1_000
"""Elements of a response that one step encodes."""
MAX_RESPONSE_BYTES = 64 << 20
"""Largest response that is encoded in steps, except for Metadata and DescribeConfigs. Above it, the
connection is closed.

A response may be far larger than what the broker keeps: hundreds of members of a consumer group share the
same thousands of names, and ConsumerGroupDescribe repeats them. See
test_a_response_that_repeats_many_names_is_bounded.
"""
_FIELD = "throttle_time_ms"
_THROTTLE_TIME = struct.Struct(">i")


class EncodedInSteps(EncodedResponse):
    """An encoded response of an API. Its throttle time may still be set, if it has one at this version."""

    __slots__ = ("api", "throttle_position", "throttle_time_ms")

    def __init__(self, api: Api, parts: Sequence[Buffer], throttle_position: int | None) -> None:
        super().__init__(parts)
        self.api = api  # type: ignore[misc]
        self.throttle_position = throttle_position
        """The position of the throttle time in the first part. A negative one counts from the end of the
        last part.
        """
        self.throttle_time_ms = 0

    def copy(self) -> EncodedInSteps:
        """Return a response with the same parts, whose throttle time can be set."""
        return EncodedInSteps(self.api, self._parts, self.throttle_position)

    def encode_into(self, version: int, append: Callable[[Any], None]) -> None:
        parts, position = list(self._parts), self.throttle_position
        if position is not None and self.throttle_time_ms:
            index = 0 if position >= 0 else -1
            parts[index] = changed = bytearray(parts[index])
            _THROTTLE_TIME.pack_into(changed, position, self.throttle_time_ms)
        for part in parts:
            append(part)


def encoding_of(response: Any, version: int) -> Work[EncodedInSteps | Disconnect] | None:
    """Return the work that encodes a response in steps; None if the response must be encoded at once. The
    work returns Disconnect for a response above MAX_RESPONSE_BYTES.

    A Fetch response contains records that must not be copied.
    """
    if not isinstance(response, Message) or isinstance(response, EncodedResponse | FetchResponse):
        return None
    fields = [field for field in response._struct.fields if field.is_in(version)]
    if any(field.name == _FIELD for field in fields) and _throttle_position(response, version) is None:
        return None
    return _encode_bounded(response, version)


def _encode_bounded(response: Message, version: int) -> Work[EncodedInSteps | Disconnect]:
    try:
        return (yield from encode_in_steps(response, version, max_bytes=MAX_RESPONSE_BYTES))
    except ResponseTooLarge as error:
        return Disconnect(str(error))


class ResponseTooLarge(OncelogError):
    """A response exceeds the limit that the caller of `encode_in_steps` has set."""


def encode_in_steps(
    response: Message,
    version: int,
    budget: StepBudget | None = None,
    cost: Callable[[], int] = lambda: 1,
    max_bytes: int = sys.maxsize,
) -> Work[EncodedInSteps]:
    """Encode a response, a few elements at once. `cost()` is the cost of the last encoded element.

    Raises ResponseTooLarge as soon as more than `max_bytes` are encoded.
    """
    budget = budget or StepBudget(ENCODED_PER_STEP)
    encoded_bytes = 0
    parts: list[Buffer] = []
    encoded: list[Buffer] = []
    for _ in response.encode_in_steps(version, parts.append):
        if budget.spend(cost()):
            encoded.append(b"".join(parts))
            parts.clear()
            encoded_bytes += len(encoded[-1])
            if encoded_bytes > max_bytes:
                raise ResponseTooLarge(
                    f"a {response.api.name} response of more than {max_bytes} bytes; use smaller requests"
                )
            yield None
    if parts or not encoded:
        encoded.append(b"".join(parts))
    return EncodedInSteps(response.api, encoded, _throttle_position(response, version))


def _throttle_position(response: Message, version: int) -> int | None:
    """Return the position of the throttle time in the encoded response; None if it has none, or if its
    position is not known before the encoding.

    The result is negative if only fields of fixed size follow the throttle time, as in Produce: it counts
    from the end.
    """
    fields = [field for field in response._struct.fields if field.is_in(version)]
    plain = [field for field in fields if field.tag is None]
    index = next((index for index, field in enumerate(plain) if field.name == _FIELD), None)
    if index is None:
        return None
    before = _fixed_bytes(plain[:index])
    if before is not None:
        return before
    after = _fixed_bytes(plain[index:])
    if after is None or any(getattr(response, field.name) for field in fields if field.tag is not None):
        return None
    tags_bytes = int(response.api.is_flexible(version))
    return -after - tags_bytes


def _fixed_bytes(fields: Sequence[Field]) -> int | None:
    """Return the encoded size of fields; None if one of them has a variable size."""
    if any(field.is_array or field.kind not in FIXED for field in fields):
        return None
    return sum(struct.calcsize(f">{FIXED[field.kind]}") for field in fields)
