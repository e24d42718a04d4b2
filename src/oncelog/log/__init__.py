"""Partitions on disk: segments, indexes, snapshots, recovery. All I/O goes through the Disk port."""
