"""Internal limits of the broker: sizes of steps, caches and files at which its behaviour changes.

They are not settings, because users have no reason to change them. A step is the part of a long task that
runs before other requests are handled. Tests and the simulator set the limits low: a fault that needs a
million keys then appears with three. `LogManager.open` receives the limits. Other code of the broker reads
them from the LogManager. docs/internals/limits.md explains each limit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one broker. A limit is at least 1 unless its description says otherwise."""

    # Compaction
    max_compaction_keys: int = 1 << 20
    """Maximum number of keys that one compaction pass keeps in memory. A dirty range with more keys needs
    several passes.
    """
    compaction_step_items: int = 500
    """Batches and records that compaction handles in one step. Each 4 KB of a batch count as one more. A
    batch of more records is decoded in a thread.
    """

    # Segments and their indexes
    index_run_entries: int = 256
    """Index entries that are buffered in memory before they are written to the index file."""
    max_relative_offset: int = 2**31 - 1
    """Largest distance of an offset from its segment's base offset. The index file formats allow no more."""
    max_drops_per_step: int = 8
    """Maximum number of segments whose files one step of a deletion renames."""

    # Reading
    max_read_cursors: int = 64
    """Number of recent reads per partition whose end positions in the file are cached."""
    scan_chunk_bytes: int = 1 << 20
    """Bytes that a scan of a log reads at a time. At least 61, the size of a batch header."""
    scan_first_chunk_bytes: int = 1 << 12
    """Bytes that a scan reads first; its next reads grow. Small, because many scans need only one batch. At
    least 61.
    """
    scan_block_headers: int = 4096
    """Number of batch headers that recovery processes together in one block."""
    search_step_cost: int = 4096
    """Maximum work of one step of a look-up by time: the sum of the batches, records and kilobytes that it
    reads.
    """

    # Producers
    max_producers_at_work: int = 2048
    """Maximum number of producer entries of a partition that are kept as Python objects. Further entries are
    packed into bytes.
    """
    producer_shard_entries: int = 680
    """Average number of packed producer entries per shard. With evenly spread ids, no shard has more than
    twice as many.
    """
    expire_step_producers: int = 8192
    """Producer entries that one step of expiry checks."""
    max_verifying_producers: int = 1_000
    """Maximum number of pending transaction verifications of a partition. Above it, the oldest ones are
    dropped.
    """
    snapshot_every_bytes: int = 64 << 20
    """A checkpoint takes a new producer snapshot only if at least this many bytes were appended since the
    last one.
    """
    snapshot_step_shards: int = 256
    """One step of a snapshot writes the producer ids, or the entry sizes, of this many shards."""
    producer_id_block: int = 1000
    """Number of producer ids that are reserved on disk at a time."""
    first_producer_epoch: int = 0
    """First epoch of a new transactional id, at least 0.

    Tests use values near 32,767, the last epoch of a producer id.
    """

    # Coordinators
    coordinator_roll_bytes: int = 256 << 10
    """Minimum size at which a coordinator's active segment is rolled so that it can be compacted."""
    coordinator_read_bytes: int = 4 << 20
    """Bytes that a coordinator reads at a time when it replays its partitions."""
    max_tombstones_per_batch: int = 1000
    """Deleted offsets whose tombstones are written in one batch."""
    expire_step_entries: int = 100
    """Groups or transactional ids that one step of expiry checks."""
    pattern_step_cost: int = 4_000_000
    """Maximum work of matching regular expressions in one heartbeat or step. It takes at most 20 ms.

    The unit is instructions of the expression times matched bytes.
    """
    assignment_burst_cost: int = 20_000
    """While the recent assignments of a consumer group have cost more than this, its next assignment waits.

    An assignment costs its members plus its partitions. The cost decreases by 20 per ms.
    """
    max_immediate_assignment_cost: int = 2_000
    """An assignment of a consumer group with at most this cost is computed in the heartbeat that needs it. A
    more expensive one is computed in another thread.
    """
    max_catalogued_topics: int = 100_000
    """Maximum number of names, or matching topics, in the cached subscriptions of all groups together."""
    step_member_responses: int = 200
    """Responses to JoinGroup and SyncGroup that one step sends."""

    # Requests and fetch sessions
    request_step_elements: int = 1_000
    """Elements of a request that one step handles."""
    partitions_per_step: int = 16
    """Maximum number of partitions that one step creates or removes, or of new topics that it checks."""
    large_answer_partitions: int = 100
    """A Metadata response with at least this many partitions is cached as encoded bytes."""
    max_answers_kept: int = 16
    """Maximum number of encoded Metadata responses in the cache."""
    max_session_partitions: int = 200_000
    """Maximum number of partitions in all fetch sessions together. The default needs about 80 MB of memory.
    At least 0.
    """
    session_eviction_ms: int = 120_000
    """Idle time after which a fetch session may be evicted in favour of a new one. At least 0."""
    session_expiry_ms: int = 600_000
    """Idle time after which a fetch session is removed."""
    max_quota_shares: int = 10_000
    """Number of usage buckets of client quotas above which drained buckets are removed."""


DEFAULT_LIMITS = Limits()
