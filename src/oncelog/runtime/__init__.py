"""The runtime that clients and the server share: clocks, random numbers, event loop threads, TLS and log
events.
"""
