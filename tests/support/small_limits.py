"""Limits that are so small that a few records reach them. With a broker's limits, it would take millions."""

from __future__ import annotations

from hypothesis import strategies as st

from oncelog.limits import Limits

# Number of records in the largest batch that these tests write. A segment must have room for that many
# offsets.
MAX_BATCH_RECORDS = 4


def small_limits() -> st.SearchStrategy[Limits]:
    """Return a strategy for limits with which each operation takes several steps, runs, rounds or files."""
    few = st.integers(1, 3)
    return st.builds(
        Limits,
        max_compaction_keys=st.integers(1, 6),
        compaction_step_items=st.integers(1, 5),
        index_run_entries=few,
        max_relative_offset=st.sampled_from((MAX_BATCH_RECORDS, 9, 2**31 - 1)),
        max_drops_per_step=few,
        max_read_cursors=few,
        scan_chunk_bytes=st.sampled_from((61, 100, 1 << 20)),
        scan_first_chunk_bytes=st.sampled_from((61, 100, 1 << 12)),
        scan_block_headers=few,
        search_step_cost=few,
        max_producers_at_work=few,
        producer_shard_entries=few,
        expire_step_producers=few,
        snapshot_every_bytes=st.sampled_from((1, 300, 5_000)),
        snapshot_step_shards=few,
        producer_id_block=few,
        first_producer_epoch=st.sampled_from((0, 32_764, 32_766)),
        coordinator_roll_bytes=st.sampled_from((1, 500, 2_000)),
        coordinator_read_bytes=st.sampled_from((1, 300)),
        max_tombstones_per_batch=few,
        pattern_step_cost=st.integers(1, 1_000),
        max_catalogued_topics=few,
        request_step_elements=few,
        partitions_per_step=few,
        large_answer_partitions=few,
        max_answers_kept=few,
        max_session_partitions=st.integers(0, 6),
        session_eviction_ms=st.sampled_from((0, 1_000, 120_000)),
        session_expiry_ms=st.sampled_from((1_000, 600_000)),
        max_quota_shares=few,
    )
