"""Internal limits of the broker: sizes of steps, caches and rounds at which its behaviour changes.

They are not settings, because users have no reason to change them. Tests and the simulator draw them small,
so that a fault that needs a million keys appears with three. `LogManager.open` takes them, and code above the
log reads them from the manager. docs/internals/limits.md explains each one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one broker. Each is at least 1 unless its description says otherwise."""

    # Compaction
    max_compaction_keys: int = 1 << 20
    """Keys in the map of one compaction round; a dirty range with more takes several rounds."""
    compaction_step_items: int = 500
    """Batches and records that compaction handles in one step; a larger batch is decoded in a thread."""

    # Segments and their indexes
    index_run_entries: int = 256
    """Index entries that are buffered in memory before they are written to their file."""
    max_relative_offset: int = 2**31 - 1
    """Largest offset less base offset in a segment; the formats of its index files allow no more."""
    max_drops_per_step: int = 8
    """Segments that one step of a deletion renames."""

    # Reading
    max_read_cursors: int = 64
    """Ends of recent reads whose file positions a partition caches."""
    scan_chunk_bytes: int = 1 << 20
    """Bytes that a scan of a log reads at a time. At least 61, the size of a batch header."""
    scan_first_chunk_bytes: int = 1 << 12
    """Bytes that a scan for one batch reads first. At least 61."""
    scan_block_headers: int = 4096
    """Batch headers that recovery processes together."""
    search_step_cost: int = 4096
    """Batches, records and kilobytes that a look-up by time reads in one step."""

    # Producers
    max_producers_at_work: int = 2048
    """Producer entries of a partition that are kept as objects; the others are packed."""
    producer_shard_entries: int = 680
    """Packed producer entries per shard, on average; a shard has up to twice that."""
    expire_step_producers: int = 8192
    """Producer entries that one step of expiry looks at."""
    max_verifying_producers: int = 1_000
    """Producers of a partition with a pending transaction verification; above it the oldest are dropped."""
    snapshot_every_bytes: int = 64 << 20
    """Bytes appended since the last producer snapshot at which a checkpoint takes another one."""
    snapshot_step_shards: int = 256
    """Shards whose ids or lengths one step of a snapshot writes."""
    snapshot_vector_entries: int = 16
    """Entries of a shard at which a snapshot encodes columns instead of single entries."""
    producer_id_block: int = 1000
    """Producer ids that are reserved on disk at a time."""
    first_producer_epoch: int = 0
    """First epoch of a new transactional id, at least 0. Near 32,767 a producer id is soon exhausted."""

    # Coordinators
    coordinator_roll_bytes: int = 256 << 10
    """Smallest active segment of a coordinator's partition that is closed so that it can be compacted."""
    coordinator_read_bytes: int = 4 << 20
    """Bytes that a coordinator reads at a time when it replays its partitions."""
    max_tombstones_per_batch: int = 1000
    """Committed offsets whose deletion is written in one batch."""
    expire_step_entries: int = 100
    """Groups or transactional ids that one step looks at when offsets, ids and transactions expire."""
    pattern_step_cost: int = 4_000_000
    """Regular expression instructions times matched bytes per heartbeat or step: at most 20 ms of work."""
    assignment_burst_cost: int = 20_000
    """Members plus partitions that consumer groups assign in one step; further assignments wait."""
    max_catalogued_topics: int = 100_000
    """Topics in all cached subscriptions of consumer groups together."""

    # Requests and fetch sessions
    request_step_elements: int = 1_000
    """Elements of a request that are answered in one step."""
    partitions_per_step: int = 16
    """Partitions that are made or removed, or new topics that are checked, in one step."""
    large_answer_partitions: int = 100
    """Partitions of a Metadata response at which its bytes are cached for the next request."""
    max_answers_kept: int = 16
    """Encoded Metadata responses in the cache."""
    max_session_partitions: int = 200_000
    """Partitions in all fetch sessions together, about 80 MB. At least 0."""
    session_eviction_ms: int = 120_000
    """Idle time after which a new fetch session may evict this one. At least 0."""
    session_expiry_ms: int = 600_000
    """Idle time after which a fetch session is removed."""
    max_quota_shares: int = 10_000
    """Users and clients whose quota usage the broker tracks."""


DEFAULT_LIMITS = Limits()
