"""Check what clients sent and read against the guarantees of transactions."""
