"""Decisions about transactions: the coordinator's, and those of a producer's session."""
