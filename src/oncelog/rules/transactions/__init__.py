"""Decisions about transactions, for the transaction coordinator and for a producer's session."""
