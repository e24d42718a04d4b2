"""The consumer: `core` has positions and fetched records without I/O, and `blocking` and `aio` are the
clients.
"""
