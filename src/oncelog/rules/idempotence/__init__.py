"""Decisions about idempotence: sequences of producers, and what a partition accepts."""
