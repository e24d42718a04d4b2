"""Files of rows, the expected content of a topic after they are loaded, and a loader process that tests can
kill.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from oncelog.client.producer.partitioner import positive_murmur2
from support.topics import read

PARTITIONS = 3
BATCH_RECORDS = 100

_CHILD = """
import sys
from pathlib import Path
from oncelog.load.loader import Load, run_load
from oncelog.load.parsing import Options
servers, topic, load_id, batch_records, *files = sys.argv[1:]
load = Load([Path(file) for file in files], topic, load_id, Options(key="k"), max_records=int(batch_records))
config = {"bootstrap.servers": servers, "retry.backoff.ms": 10, "retry.backoff.max.ms": 50, "linger.ms": 0,
          "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 50}
run_load(load, config, lambda report: print(report.records, flush=True))
"""

Content = dict[int, list[tuple[bytes | None, bytes | None]]]
"""For each partition, the (key, value) pairs of its records in order."""


def write_csv(path: Path, first: int, count: int) -> Path:
    """Write CSV rows with the columns k and n. Values of k repeat, values of n do not."""
    path.write_text("k,n\n" + "".join(f"key-{n % 17},{n}\n" for n in range(first, first + count)))
    return path


def expected(count: int) -> Content:
    """Return the content that a topic of PARTITIONS partitions must have after the first `count` rows were
    loaded.
    """
    content: Content = {}
    for n in range(count):
        key = f"key-{n % 17}".encode()
        value = json.dumps({"k": key.decode(), "n": n}, separators=(",", ":")).encode()
        content.setdefault(positive_murmur2(key) % PARTITIONS, []).append((key, value))
    return content


def content(servers: str, topic: str) -> Content:
    """Return the records that a read_committed consumer sees, by partition."""
    by_partition: Content = {}
    for record in read(servers, topic):
        by_partition.setdefault(record.partition, []).append((record.key, record.value))
    return by_partition


class Loader:
    """A loader in its own process."""

    def __init__(self, servers: str, topic: str, load_id: str, files: Sequence[Path]) -> None:
        arguments = [servers, topic, load_id, str(BATCH_RECORDS), *map(str, files)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_transaction(self) -> None:
        """Wait until one more transaction is committed."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), self.end()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.end()

    def end(self) -> tuple[int, str]:
        """Wait until the process has ended. Return its exit code and standard error."""
        _, errors = self.process.communicate(timeout=200)
        return self.process.returncode, errors
