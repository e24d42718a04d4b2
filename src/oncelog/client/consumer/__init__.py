"""The consumer. `core` keeps the positions and the fetched records, and does no I/O. `blocking` and `aio` are
the clients that use it.
"""
