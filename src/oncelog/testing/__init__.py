"""For tests: the pytest plugin, the fault proxy, brokers as processes, a disk in memory."""
