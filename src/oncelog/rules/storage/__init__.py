"""Decisions about storage: topics' states, compaction, what read_committed readers see."""
