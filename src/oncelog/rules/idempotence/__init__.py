"""Decisions about idempotence: which sequences a producer sends, and which batches a partition accepts."""
