"""The admin client: requests without I/O in `core` and beside it, sync and asyncio clients."""
