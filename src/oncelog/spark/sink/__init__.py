"""The exactly-once sink: `format("oncelog")` for writing, and `write_atomic`."""
