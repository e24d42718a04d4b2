"""The exactly-once sink: tasks, transactions, and `write_atomic`."""
