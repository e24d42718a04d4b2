"""Worlds to run the same parts in: time, disk and network under a seed's control."""
