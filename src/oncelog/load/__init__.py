"""Loads files into a topic exactly once, over any number of runs (behaviour P4, docs/behaviours.md)."""
