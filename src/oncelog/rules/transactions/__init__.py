"""Decisions about transactions, of the coordinator and of the client's session."""
