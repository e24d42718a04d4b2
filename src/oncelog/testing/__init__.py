"""Support for tests: the pytest plugin, the fault proxy, brokers as processes, an in-memory disk."""
