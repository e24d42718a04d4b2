"""Partitions on disk: segments, indexes, snapshots and recovery. I/O goes through `oncelog.log.disk.Disk`."""
