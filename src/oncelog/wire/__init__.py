"""Bytes to values and back: frames, messages, record batches, compression. No sockets, no clocks."""
