"""The coordinators' topics and the settings they have however they came about.

They are always compacted: deleting old segments would forget groups' offsets and transactional ids.
"""

from __future__ import annotations

from collections.abc import Mapping

from oncelog.errors import InvalidConfig
from oncelog.settings import Settings

CONSUMER_OFFSETS, TRANSACTION_STATE = "__consumer_offsets", "__transaction_state"
INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE})
METADATA_LOG = "__cluster_metadata"
"""Apache Kafka's own log in its directories; never a topic of ours."""

_POLICY = "cleanup.policy"
# Not Kafka's day: every transaction leaves a marker in the offsets' log, and a start reads them all.
_MARKERS_STAY_MS = "600000"


def with_internal_settings(name: str, own: Mapping[str, str], broker: Settings) -> dict[str, str]:
    """A topic's own settings; an internal topic's with what its coordinator needs."""
    if name not in INTERNAL_TOPICS:
        return dict(own)
    defaults = {"delete.retention.ms": _MARKERS_STAY_MS}
    if name == TRANSACTION_STATE:
        defaults["compression.type"] = "uncompressed"
        defaults["segment.bytes"] = str(broker["transaction.state.log.segment.bytes"])
    else:
        defaults["segment.bytes"] = str(broker["offsets.topic.segment.bytes"])
    return {**defaults, **own, _POLICY: "compact"}


def check_internal_settings(name: str, own: Mapping[str, str]) -> None:
    """Raises InvalidConfig where an internal topic would no longer be compacted."""
    policy = own.get(_POLICY, "compact")
    if name in INTERNAL_TOPICS and policy != "compact":
        raise InvalidConfig(
            f"cleanup.policy={policy}: {name} stays compacted; else groups' offsets and transactional ids"
            " would be deleted by age"
        )
