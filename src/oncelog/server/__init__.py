"""The asyncio server: listeners, connections, the real disk, background work."""
