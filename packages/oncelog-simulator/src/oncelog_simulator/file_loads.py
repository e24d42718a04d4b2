"""A workload that runs `oncelog load` on real files with a broker and a network that fail.

The loader is killed and started again at any moment. Between its runs the list of files changes: a file is
added at the front or at the end, grows, or changes its position. If the loader refuses the list, the change
is undone. Otherwise every record of the files must be in the topic exactly once. In some seeds executors run
the tasks of a load (load/on_spark.py).
"""

from __future__ import annotations

import gzip
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.errors import LoadRefused, OncelogError
from oncelog.load.loader import Load, run_load
from oncelog.load.on_spark import run_load_on_spark
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.runtime import EPOCH_NS
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.sink_tasks import KILL_CHANCE, Executor
from oncelog_simulator.threads import in_thread, wait
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import World
from oncelog_simulator.write_atomic import Cluster, JobFailed

TOPIC = "loaded"
LOAD_ID = "a-load"
DIRECTORY_DESCRIPTOR = 730
"""File descriptor of the temporary directory.

The load stores file names in the topic. As /proc/self/fd/730/NAME they are the same in every run of a seed.
"""
KINDS = ("txt", "txt", "jsonl", "csv", "txt.gz", "csv.gz")
CHANGES = ("late", "late", "first", "first", "grown", "swapped", "none")
_TOKEN = re.compile(rb"t[0-9]+-[0-9]+-")


class FileList:
    """Files on the real disk whose contents a seed draws. `names` has them in the order of loading."""

    def __init__(self, kind: str, records: Iterable[int]) -> None:
        self.kind = kind
        self.names: list[str] = []
        self.contents: dict[str, list[bytes]] = {}
        self.file_count = 0
        self._directory = tempfile.TemporaryDirectory(prefix="oncelog-simulator-")
        self.root = Path(self._directory.name)
        if sys.platform == "linux":
            opened = os.open(self._directory.name, os.O_RDONLY)
            os.dup2(opened, DIRECTORY_DESCRIPTOR)
            os.close(opened)
            self.root = Path(f"/proc/self/fd/{DIRECTORY_DESCRIPTOR}")
        for count in records:
            self.add(count)

    @property
    def paths(self) -> list[Path]:
        return [self.root / name for name in self.names]

    def add(self, count: int, *, is_first: bool = False) -> None:
        """Add a file with `count` records.

        All records have the same length, and all files the same modification time, as in an archive.
        """
        self.file_count += 1
        number = self.file_count
        name = f"{'0' if is_first else '1'}{number:03}.{self.kind}"
        self.names.insert(0 if is_first else len(self.names), name)
        self.contents[name] = [b"t%03d-%03d-" % (number, n) for n in range(count)]
        self.write(name)

    def grow(self, name: str) -> None:
        """Append a record to a file."""
        tokens = self.contents[name]
        tokens.append(tokens[0][:5] + b"%03d-" % len(tokens) if tokens else b"t%03d-000-" % self.file_count)
        self.write(name)

    def write(self, name: str) -> None:
        """Write the contents of a file."""
        path = self.root / name
        lines = [self._line(number, token) for number, token in enumerate(self.contents[name])]
        head = b"id,note\n" if "csv" in self.kind else b""
        data = head + b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(data, mtime=0) if self.kind.endswith(".gz") else data)
        os.utime(path, ns=(EPOCH_NS, EPOCH_NS))

    def _line(self, number: int, token: bytes) -> bytes:
        if "csv" in self.kind:
            # Cover both kinds of quotes in CSV: a quote within a field is plain text, and a quote at the
            # beginning of a field lets the field contain line ends.
            return token + (b',5" pipe' if number % 3 == 0 else b',"two\nlines"')
        return b'{"id":"%s"}' % token if self.kind == "jsonl" else token

    def tokens(self) -> list[bytes]:
        """Return one token for each record of the listed files."""
        return [token for name in self.names for token in self.contents[name]]

    def remove(self) -> None:
        """Close and remove the temporary directory with the files."""
        if sys.platform == "linux":
            os.close(DIRECTORY_DESCRIPTOR)
        self._directory.cleanup()


class Session:
    """The part of a SparkSession that a load uses: it runs a function on executors, once for each item."""

    def __init__(self, cluster: Cluster) -> None:
        self.sparkContext = self
        self._cluster = cluster
        self._items: list[Any] = []
        self._function: Callable[[Any], Any] = lambda item: item

    def parallelize(self, items: Iterable[Any], count: int) -> Session:
        session = Session(self._cluster)
        session._items = list(items)
        return session

    def map(self, function: Callable[[Any], Any]) -> Session:
        self._function = function
        return self

    def collect(self) -> list[Any]:
        work: Any = [partial(_in_list, self._function, item) for item in self._items]
        results: Any = wait(self._cluster.run_stage(work))
        return [result for (result,) in results]


def _in_list(function: Callable[[Any], Any], item: Any, _: Any) -> list[Any]:
    return [function(item)]


class Loader(Application):
    """A loader that starts again whenever it fails or is killed. Its files change between runs."""

    def __init__(self, world: World, name: str, partitions: int, cluster: Cluster | None) -> None:
        super().__init__(world, name)
        self.partition_count, self.cluster = partitions, cluster
        rng = self.rng
        # Often draw equal counts: files of an archive may have the same size and modification time.
        counts = [rng.choice((1, 4))] * 3 if rng.random() < 0.6 else [0, rng.choice((1, 9)), 4]
        self.files = FileList(rng.choice(KINDS), counts)
        self.runs_left = 4
        self.undo: Callable[[], object] | None = None
        """A function that undoes the change of the file list before the current run; None without a change.
        """
        self.has_loaded = False
        self.max_records = rng.choice((1, 3, 100))
        self.max_bytes = rng.choice((1, 40, 8 << 20))
        self.config = {
            **SHORT_TIMEOUTS,
            "client.id": name,
            "max.block.ms": 8_000,
            "delivery.timeout.ms": 10_000,
            "transaction.timeout.ms": 15_000,
        }

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, NewTopic(TOPIC, num_partitions=self.partition_count))
        while self.runs_left:
            if self.undo is None and self.has_loaded:
                self._change()
            self._kill_soon_by_chance()
            try:
                await in_thread(self._load)
            except LoadRefused as error:
                self.world.note(self.name, f"is refused: {error}")
                if self.undo is None:
                    self.world.violate("a load refused what was the same", str(error))
                    return
                self.undo()
            self.undo, self.has_loaded = None, True
            self.runs_left -= 1
            self.world.note(self.name, f"has loaded {self.files.names}")
            await self.sleep_up_to(3.0)

    def _load(self) -> None:
        paths, topic = self.files.paths, TOPIC
        load = Load(paths, topic, LOAD_ID, max_records=self.max_records, max_bytes=self.max_bytes)
        if self.cluster is None:
            run_load(load, self.config)
            return
        session: Any = Session(self.cluster)
        try:
            run_load_on_spark(session, load, self.config)
        except JobFailed as error:
            raise OncelogError(str(error)) from error

    def _kill_soon_by_chance(self) -> None:
        if self.rng.random() < 3 * KILL_CHANCE:
            process = self.process
            self.world.call_later(self.rng.uniform(0.0, 1.0), self._die, process)

    def _die(self, process: Any) -> None:
        if process is not None and self.process is process and self.is_up and not self.is_done:
            self.kill()
            self.world.call_later(self.rng.uniform(0.5, 3.0), self.start_if_down)

    def _change(self) -> None:
        """Change the list of files for the next run, which must either refuse the change or load it
        correctly.
        """
        files, change = self.files, self.rng.choice(CHANGES)
        names = list(files.names)
        contents = {name: list(tokens) for name, tokens in files.contents.items()}

        def undo() -> None:
            files.names, files.contents = names, contents
            for name in names:
                files.write(name)

        self.undo = undo
        self.world.note(self.name, f"files change: {change}")
        match change:
            case "late":
                files.add(self.rng.choice((0, 1, 4)))
            case "first":
                files.add(len(contents[names[0]]), is_first=True)
            case "grown":
                files.grow(self.rng.choice(names))
            case "swapped":
                self.rng.shuffle(files.names)
            case _:
                self.undo = None


class Loading(Workload):
    """Checks that every record of the files is in the topic exactly once, and nothing else."""

    topic: ClassVar[str] = TOPIC
    clients: ClassVar[tuple[str, ...]] = ("loader", "load-executor-0", "load-executor-1")

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        executors = [Executor(world, name) for name in self.clients[1:]]
        is_on_spark = world.rng("loading").random() < 0.4
        cluster = Cluster(world, executors) if is_on_spark else None
        self.loader = Loader(world, self.clients[0], scenario.partitions, cluster)
        self.applications.append(self.loader)

    def close(self) -> None:
        self.loader.files.remove()

    def check(self, node: BrokerState) -> None:
        actual: Counter[bytes] = Counter()
        for call in self.last.calls:
            for item in call.items:
                value: Any = item.value
                tokens = _TOKEN.findall(value)
                if len(tokens) != 1:
                    self.world.violate("a record is not as in its file", f"{value!r}")
                actual.update(tokens)
        expected = Counter(self.loader.files.tokens())
        for token in sorted(actual.keys() | expected.keys()):
            if actual[token] != expected[token]:
                text = f"{token!r} is there {actual[token]} times, in the files {expected[token]} times"
                self.world.violate("a record of a file is there once", text)
