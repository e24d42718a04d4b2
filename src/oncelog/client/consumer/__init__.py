"""The consumer: positions and fetched records without I/O in `core`, sync and asyncio clients."""
