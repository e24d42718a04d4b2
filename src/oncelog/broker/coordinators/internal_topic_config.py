"""Names and required settings of the internal topics.

The settings apply even if a client or an earlier release created the topics. The topics are always compacted:
deleting old segments would lose committed offsets and transactional ids.
"""

from __future__ import annotations

from collections.abc import Mapping

from oncelog.errors import InvalidConfig
from oncelog.settings import Settings

CONSUMER_OFFSETS, TRANSACTION_STATE = "__consumer_offsets", "__transaction_state"
INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE})
METADATA_LOG = "__cluster_metadata"
"""Name of the metadata log in data directories of Apache Kafka. This broker has no topic with this name."""

_POLICY = "cleanup.policy"
# The delete.retention.ms of internal topics. Kafka's default is a day. This value is shorter, because every
# transaction leaves a marker in the log, and a start of the broker reads the whole log.
_MARKERS_STAY_MS = "600000"


def with_internal_settings(name: str, own: Mapping[str, str], broker: Settings) -> dict[str, str]:
    """Return a topic's own settings.

    For an internal topic, add the coordinator's defaults, and set cleanup.policy to compact.
    """
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
    """Raise InvalidConfig if the cleanup.policy of an internal topic is not compact."""
    policy = own.get(_POLICY, "compact")
    if name in INTERNAL_TOPICS and policy != "compact":
        raise InvalidConfig(
            f"cleanup.policy={policy}: {name} must be compacted, because retention would "
            "delete committed offsets and transactional ids"
        )
