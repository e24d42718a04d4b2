"""Connections, producer, consumer, groups and admin: cores without I/O, and sync and asyncio classes."""
