"""Samples of a cluster over time, and the rates and trends that the pages draw from them. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from oncelog.client.consumer.partition_ends import PartitionEnds
from oncelog.types import TopicPartition

MAX_SAMPLES = 150
"""The maximum number of kept samples. At one sample every two seconds, they cover five minutes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a cluster at one time. Fields that no broker answered for are empty or None.

    `at_s` is the time in seconds of a monotonic clock. `topic_bytes` is the size of each topic's logs,
    replicas included. `group_lags` is the total lag of each group. `oldest_open_ms` is the age of the oldest
    open transaction in ms.
    """

    at_s: float
    ends: Mapping[TopicPartition, PartitionEnds] = field(default_factory=dict)
    topic_bytes: Mapping[str, int] = field(default_factory=dict)
    group_lags: Mapping[str, int] = field(default_factory=dict)
    open_count: int = 0
    oldest_open_ms: int | None = None
    topic_ends: Mapping[str, int] = field(init=False)
    """The sum of the end offsets of each topic's partitions.

    It is computed once: a page shows it for each topic. Guard: test_a_sample_is_summed_by_topic_once.
    """
    topic_offsets: Mapping[str, int] = field(init=False)
    """The number of offsets of each topic's partitions, from their starts to their ends."""

    def __post_init__(self) -> None:
        known = [(tp, ends.start, ends.end) for tp, ends in self.ends.items() if ends.end is not None]
        object.__setattr__(self, "topic_ends", sum_by_topic((tp, end) for tp, _, end in known))
        counts = ((tp, end - start) for tp, start, end in known if start is not None)
        object.__setattr__(self, "topic_offsets", sum_by_topic(counts))

    def topic_end(self, topic: str) -> int:
        """Return the sum of the end offsets of a topic's partitions."""
        return self.topic_ends.get(topic, 0)

    @property
    def total_end(self) -> int:
        """Return the sum of all end offsets."""
        return sum(self.topic_ends.values())

    @property
    def held_back(self) -> dict[TopicPartition, PartitionEnds]:
        """Return the partitions whose last stable offset is below the high watermark."""
        return {
            tp: ends
            for tp, ends in self.ends.items()
            if ends.end is not None and ends.stable_end is not None and ends.stable_end < ends.end
        }


class History:
    """The newest samples of one cluster, in order of time."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=max_samples)

    def add(self, sample: Sample) -> None:
        """Add a sample. The oldest one is dropped if there are too many."""
        self._samples.append(sample)

    @property
    def latest(self) -> Sample | None:
        """Return the newest sample, or None before the first one."""
        return self._samples[-1] if self._samples else None

    def values(self, value: Callable[[Sample], float | None]) -> list[float | None]:
        """Return `value(sample)` for each sample, in order of time."""
        return [value(sample) for sample in self._samples]

    def rates(self, total: Callable[[Sample], float]) -> list[float]:
        """Return the growth of a total per second between each two successive samples.

        A total that shrinks, because a topic was deleted, gives 0.
        """
        return [
            max(total(after) - total(before), 0.0) / (after.at_s - before.at_s)
            for before, after in pairwise(self._samples)
            if after.at_s > before.at_s
        ]

    def rate(self, total: Callable[[Sample], float], window_s: float = 10.0) -> float | None:
        """Return the growth of a total per second over the last `window_s` seconds; None if unknown."""
        if len(self._samples) < 2:
            return None
        newest = self._samples[-1]
        oldest = next(sample for sample in self._samples if newest.at_s - sample.at_s <= window_s)
        if oldest is newest:
            oldest = self._samples[-2]
        seconds = newest.at_s - oldest.at_s
        return max(total(newest) - total(oldest), 0.0) / seconds if seconds > 0 else None


def lag(positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, PartitionEnds]) -> int:
    """Return the total distance of committed offsets to the end offsets. Unknown ends do not count."""
    return sum(
        max(end - offset, 0)
        for tp, offset in positions.items()
        if tp in ends and (end := ends[tp].end) is not None
    )


def sum_by_topic(sizes: Iterable[tuple[TopicPartition, int]]) -> dict[str, int]:
    """Return the sum of partitions' sizes by topic."""
    totals: dict[str, int] = {}
    for tp, size in sizes:
        totals[tp.topic] = totals.get(tp.topic, 0) + size
    return totals
