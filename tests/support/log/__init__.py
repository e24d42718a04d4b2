"""Partitions, models and random operations for the tests of the log."""
