"""The producer: batches, sequences and transactions without I/O in `core`, sync and asyncio clients."""
