"""Connections to brokers: `core` has the protocol state without I/O, and the other modules add asyncio."""
