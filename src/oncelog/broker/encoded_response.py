"""Responses that are encoded in steps, because encoding them at once would delay other clients.

Encoding 100,000 groups takes 0.2 s. See
test_lists_of_many_groups_and_transactional_ids_let_others_have_their_turn.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from oncelog.broker.stepwise import StepBudget, Work
from oncelog.wire.message import Api, EncodedResponse, Message
from oncelog.wire.primitives import Buffer

_THROTTLE_TIME = struct.Struct(">i")


class EncodedInSteps(EncodedResponse):
    """An encoded response of an API. `throttle_time_ms` is its first field, and set after the encoding."""

    __slots__ = ("api", "throttle_time_ms")

    def __init__(self, api: Api, parts: Sequence[Buffer]) -> None:
        super().__init__([memoryview(parts[0])[_THROTTLE_TIME.size :], *parts[1:]])
        self.api = api  # type: ignore[misc]
        self.throttle_time_ms = 0

    def encode_into(self, version: int, append: Callable[[Any], None]) -> None:
        append(_THROTTLE_TIME.pack(self.throttle_time_ms))
        super().encode_into(version, append)


def encode_in_steps(
    response: Message, version: int, cost: Callable[[], int], budget: StepBudget
) -> Work[EncodedInSteps]:
    """Encode a response whose first field is its throttle time, a few elements of its arrays at once.

    `cost()` is the cost of the element that was encoded last.
    """
    parts: list[Buffer] = []
    encoded: list[Buffer] = []
    for _ in response.encode_in_steps(version, parts.append):
        if budget.spend(cost()):
            encoded.append(b"".join(parts))
            parts.clear()
            yield None
    encoded.append(b"".join(parts))
    return EncodedInSteps(response.api, encoded)
