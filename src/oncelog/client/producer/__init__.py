"""The producer: `core` decides without I/O, `driver` does the I/O, `blocking` and `aio` are the clients."""
