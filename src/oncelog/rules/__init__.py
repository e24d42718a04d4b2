"""The decisions of brokers and clients: pure functions that map state and a request to a verdict."""
