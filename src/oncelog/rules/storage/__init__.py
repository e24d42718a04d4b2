"""Decisions about storage: topic states, compaction, and the records that read_committed readers see."""
