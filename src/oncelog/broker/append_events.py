"""The event that the broker emits for each produced batch, for `oncelog explain`, the web page and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["stored", "duplicate", "refused"]


@dataclass(frozen=True, slots=True)
class AppendEvent:
    """The broker's verdict on one batch of a Produce request.

    `time_ms` is the broker's clock. The producer fields are None for a batch without a producer id. If the
    verdict is "refused", `base_offset` is None. Otherwise `error_code` is 0 and `reason` is empty.
    """

    time_ms: int
    connection_id: int
    client_id: str | None
    topic: str
    partition: int
    verdict: Verdict
    producer_id: int | None
    producer_epoch: int | None
    base_sequence: int | None
    last_sequence: int | None
    record_count: int
    base_offset: int | None
    error_code: int
    reason: str
