"""Connections to brokers: protocol state without I/O in `core`, asyncio around it."""
