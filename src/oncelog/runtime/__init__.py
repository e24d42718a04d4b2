"""Shared by all code that does I/O: clocks, random numbers, threads with event loops, TLS and log events."""
