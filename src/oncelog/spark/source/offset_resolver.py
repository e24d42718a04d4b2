"""What the driver asks the cluster: which partitions are read, and which offsets they hold."""

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


def describe_patiently(
    admin: Admin, names: Collection[str], expected: Collection[TopicPartition]
) -> dict[str, TopicDescription]:
    """The topics; one that does not exist has its error, any other error is raised.

    So a broker that cannot be reached does not look like a topic that is gone. It asks a little longer while
    an `expected` partition is missing: brokers of a cluster hear of new ones one after another.
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


class Lookup:
    """One connection of the driver, for the subscription of one source; close it."""

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
        """What the subscription holds now, by asking for offsets only: no record is read.

        Raises UnknownTopicOrPartition for a topic named by the user that does not exist, unless
        `may_miss`: a running stream tells its loss itself. `expected`: partitions that were there before.
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
            names = [t.name for t in self._admin.list_topics() if subscription.takes(t.name)]
        else:
            names = list(subscription.topics or dict.fromkeys(tp.topic for tp in subscription.partitions))
        must_be = set(subscription.partitions) or {TopicPartition(name, 0) for name in names}
        before = self._seen.union(tp for tp in expected if tp.topic in names)
        described = describe_patiently(self._admin, names, before if may_miss else must_be)
        there = _partitions_of(described)
        if subscription.partitions:
            there &= set(subscription.partitions)
        if not may_miss and subscription.pattern is None and (missing := must_be - there):
            raise described[min(missing).topic].error or ConfigError(
                f"assign: {', '.join(map(str, sorted(missing)))} does not exist"
            )
        self._seen = there
        return sorted(there), {name: t.topic_id for name, t in described.items() if t.topic_id}

    def _offsets(
        self,
        partitions: Collection[TopicPartition],
        which: Literal["earliest", "latest"],
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
    ) -> Offsets:
        specs: dict[TopicPartition, OffsetSpec] = dict.fromkeys(partitions, which)
        found = self._admin.list_offsets(specs, isolation)
        return {tp: at.offset for tp, at in found.items() if at.offset is not None}

    def resolve(self, spec: OffsetsSpec, now: Available) -> Offsets:
        """The offsets `spec` means. Raises ConfigError."""
        times = spec.times(now.earliest)
        if times is None:
            return spec.resolve(now.earliest, now.latest)
        found = self.first_at(times)
        is_start = spec.option.startswith("starting")
        if is_start and not self._options.latest_without_record and (missing := times.keys() - found.keys()):
            tp = min(missing)
            raise ConfigError(
                f"{spec.option}: {tp} has no record at or after {times[tp]}; set "
                "startingOffsetsByTimestampStrategy to latest to begin at its end"
            )
        # A start may be behind the last stable offset: what is there below it is too old, also once it can be
        # read. Guard: test_a_starting_time_behind_an_open_transaction.
        bound = now.written if is_start else now.latest
        return {tp: min(found.get(tp, now.latest[tp]), bound[tp]) for tp in times}

    def first_at(self, times: Mapping[TopicPartition, int]) -> Offsets:
        """The first offset at or after a time (ms since the epoch); partitions without one are left out."""
        specs: dict[TopicPartition, OffsetSpec] = dict(times)
        found = self._admin.list_offsets(specs)
        return {tp: at.offset for tp, at in found.items() if at.offset is not None}

    def is_compacted(self, topics: Collection[str]) -> dict[str, bool]:
        """Whether the cleaner may remove batches from the middle of the log, per topic."""
        resources = [ConfigResource("topic", name) for name in topics]
        found = self._admin.describe_configs(resources)
        policies = {r.name: d.entries.get("cleanup.policy") for r, d in found.items()}
        return {name: "compact" in ((entry and entry.value) or "") for name, entry in policies.items()}
