"""The driver's requests to the cluster: which partitions to read, and which offsets exist in them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Literal, Self

from oncelog.client.admin.blocking import Admin, ConfigResource, TopicDescription
from oncelog.client.connection.cluster import UNKNOWN_TOPIC_PATIENCE_MS
from oncelog.client.consumer.list_offsets import OffsetSpec
from oncelog.config import ADMIN, CONSUMER
from oncelog.errors import ConfigError, UnknownTopicOrPartition
from oncelog.spark.source.offset_ranges import Available, Offsets, OffsetsSpec
from oncelog.spark.source.source_options import SourceOptions
from oncelog.types import Isolation, TopicPartition

_PAUSE_S = 0.1


def describe_with_retry(
    admin: Admin, names: Collection[str], expected: Collection[TopicPartition]
) -> dict[str, TopicDescription]:
    """Return the descriptions of topics. For a missing topic, `error` is set. Any other error is raised.

    An unreachable broker must not look like a deleted topic. See
    test_an_unreachable_broker_is_not_taken_for_a_deleted_topic. While an `expected` partition is missing,
    retry for a few seconds: the metadata of a new partition reaches the brokers of a cluster one after
    another.
    """
    deadline = time.monotonic() + UNKNOWN_TOPIC_PATIENCE_MS / 1000
    while True:
        described = admin.describe_topics(names, raise_errors=False)
        for topic in described.values():
            if topic.error is not None and not isinstance(topic.error, UnknownTopicOrPartition):
                raise topic.error
        if set(expected) <= _partitions_of(described) or time.monotonic() > deadline:
            return described
        time.sleep(_PAUSE_S)


def _partitions_of(described: Mapping[str, TopicDescription]) -> set[TopicPartition]:
    return {TopicPartition(name, p.partition) for name, topic in described.items() for p in topic.partitions}


class OffsetResolver:
    """An admin connection with which the driver looks up partitions and offsets for one source. Close it
    after use.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        settings = {key: value for key, value in options.client.items() if ADMIN.get(key)}
        isolation = CONSUMER.parse(options.client)["isolation.level"]
        self._isolation = Isolation[isolation.upper()]
        self._admin = Admin(settings)
        self._seen: set[TopicPartition] = set()

    def close(self) -> None:
        self._admin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def available(self, *, may_miss: bool = False, expected: Collection[TopicPartition] = ()) -> Available:
        """Return the offsets that exist now in the subscribed partitions. No record is read.

        Raises UnknownTopicOrPartition if a topic that the user named does not exist, and ConfigError if a
        partition that the user assigned does not exist. With `may_miss`, leave out missing topics and
        partitions instead: a running stream passes it, because it reports the loss itself. `expected` are the
        partitions of the stream's last position.
        """
        partitions, topic_ids = self._partitions(may_miss, expected)
        latest = self._offsets(partitions, "latest", self._isolation)
        written = latest
        if self._isolation is Isolation.READ_COMMITTED:
            written = self._offsets(partitions, "latest", Isolation.READ_UNCOMMITTED)
        return Available(self._offsets(partitions, "earliest"), latest, written, topic_ids)

    def _partitions(
        self, may_miss: bool, expected: Collection[TopicPartition]
    ) -> tuple[list[TopicPartition], dict[str, str]]:
        subscription = self._options.subscription
        if subscription.pattern is not None:
            names = [topic.name for topic in self._admin.list_topics() if subscription.matches(topic.name)]
        else:
            names = list(subscription.topics or dict.fromkeys(tp.topic for tp in subscription.partitions))
        required = set(subscription.partitions) or {TopicPartition(name, 0) for name in names}
        before = self._seen.union(tp for tp in expected if tp.topic in names)
        described = describe_with_retry(self._admin, names, before if may_miss else required)
        existing = _partitions_of(described)
        if subscription.partitions:
            existing &= set(subscription.partitions)
        if not may_miss and subscription.pattern is None and (missing := required - existing):
            raise described[min(missing).topic].error or ConfigError(
                f"assign: {', '.join(map(str, sorted(missing)))} does not exist"
            )
        self._seen = existing
        return sorted(existing), {name: topic.topic_id for name, topic in described.items() if topic.topic_id}

    def _offsets(
        self,
        partitions: Collection[TopicPartition],
        which: Literal["earliest", "latest"],
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
    ) -> Offsets:
        specs: dict[TopicPartition, OffsetSpec] = dict.fromkeys(partitions, which)
        results = self._admin.list_offsets(specs, isolation)
        return {tp: result.offset for tp, result in results.items() if result.offset is not None}

    def resolve(self, spec: OffsetsSpec, now: Available) -> Offsets:
        """Return the offset per partition that the user's start or end `spec` means.

        Raises ConfigError if `spec` contains a different set of partitions, or if a partition has no record
        at or after its starting time and startingOffsetsByTimestampStrategy is `error`.
        """
        times = spec.times(now.earliest)
        if times is None:
            return spec.resolve(now.earliest, now.latest)
        first = self.first_at(times)
        is_start = spec.option.startswith("starting")
        if is_start and not self._options.latest_without_record and (missing := times.keys() - first.keys()):
            tp = min(missing)
            raise ConfigError(
                f"{spec.option}: {tp} has no record at or after {times[tp]}; set "
                "startingOffsetsByTimestampStrategy to latest to begin at its end"
            )
        # Allow a start above the last stable offset. If it were lowered to that offset, the query would later
        # read the records between the two, although they are older than the starting time. See
        # test_a_starting_timestamp_may_lie_behind_an_open_transaction.
        bound = now.written if is_start else now.latest
        return {tp: min(first.get(tp, now.latest[tp]), bound[tp]) for tp in times}

    def first_at(self, times: Mapping[TopicPartition, int]) -> Offsets:
        """Return the first offset at or after each time (ms since the epoch).

        The result lacks partitions that have no record at or after their time.
        """
        specs: dict[TopicPartition, OffsetSpec] = dict(times)
        results = self._admin.list_offsets(specs)
        return {tp: result.offset for tp, result in results.items() if result.offset is not None}

    def is_compacted(self, topics: Collection[str]) -> dict[str, bool]:
        """Return for each topic whether it is compacted, because compaction leaves gaps in the log."""
        resources = [ConfigResource("topic", name) for name in topics]
        configs = self._admin.describe_configs(resources)
        policies = {
            resource.name: config.entries.get("cleanup.policy") for resource, config in configs.items()
        }
        return {name: "compact" in ((entry and entry.value) or "") for name, entry in policies.items()}
