"""Files and directories that the broker did not write. No start may remove them or fail because of them."""

from __future__ import annotations

from random import Random

from oncelog.broker.state import BrokerState
from oncelog.testing.memory_disk import MemoryDisk
from oncelog_simulator.world import BrokerHost, World

FOREIGN_FILES_CHANCE = 0.1
DIRECTORIES = ("backup-20261122", "old-01", "notes-delete")
"""Names that look like a partition's directory, or like one that is being deleted."""
KEPT, SWEPT = "copy.log", "notes.log.cleaned"
"""Files beside the segments. A start may remove the second one, because compaction uses the suffix
`.cleaned`.
"""


def draw_foreign_files(seed: int) -> bool:
    """Return True if this seed has foreign files in the broker's data directory."""
    return Random(f"{seed}/strangers").random() < FOREIGN_FILES_CHANCE


class ForeignFiles:
    """The foreign files on the broker's disk, checked after each start."""

    def __init__(self, world: World, broker: BrokerHost, topics: list[str]) -> None:
        self.world, self.broker, self.topics = world, broker, topics
        self._paths: set[str] = set()

    def recovered(self, node: BrokerState) -> None:
        """Check after a start that all foreign files remain. Then add files, also to new partitions."""
        disk = self.broker.disk
        # The broker does not do these disk operations, so they must not suspend its background jobs.
        disk.held_count += 1
        try:
            for path in sorted(self._paths):
                if not disk.exists(path):
                    self.world.violate("a start removed what is not the broker's", path)
            self._add(disk, node)
        except OSError as error:
            self.world.note("strangers", f"cannot be written: {error}")
        finally:
            disk.held_count -= 1

    def _add(self, disk: MemoryDisk, node: BrokerState) -> None:
        for name in DIRECTORIES:
            if not disk.is_directory(name):
                disk.mkdir(name)
            self._paths.add(_write(disk, name, "notes.txt"))
        for tp, partition in sorted(node.log_manager.partitions.items()):
            if tp.topic in self.topics:
                self._paths.add(_write(disk, partition.directory, KEPT))
                _write(disk, partition.directory, SWEPT)
        disk.sync_directory()


def _write(disk: MemoryDisk, directory: str, name: str) -> str:
    """Write a file that survives a power loss, and return its path."""
    path = f"{directory}/{name}"
    disk.replace(path, b"of somebody else")
    disk.sync_directory(directory)
    return path
