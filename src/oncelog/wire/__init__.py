"""The wire format: frames, messages, record batches and compression. No sockets and no clocks."""
