"""Support for tests: the pytest plugin, the fault-injecting proxy, broker processes and an in-memory disk."""
