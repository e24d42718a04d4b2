"""A workload that runs `write_atomic` without Spark, on a DataFrame whose jobs run on simulated executors.

A driver calls foreachBatch for the micro-batches of a source. Each batch has one or two frames for the same
topic. Tasks are killed, retried, and sometimes fail permanently. The driver is killed, and starts again with
the same batch. The expected records are counted from the source's rows, which the sink cannot read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.errors import OncelogError
from oncelog.spark.sink import atomic
from oncelog.spark.sink.atomic_task import choose_partitions, write_share
from oncelog.spark.sink.decisions import SinkRefused
from oncelog.spark.sink.sink_options import SinkSettings
from oncelog.spark.sink.sink_rows import VALUE_BYTES
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.sink_tasks import KILL_CHANCE, MAX_FAILURES, Executor
from oncelog_simulator.threads import in_thread, sleep, wait
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import SERVERS, World

TOPIC = "atomic"
TASKS = 2
QUERY_ID = "a-query"
SECOND = "second"
"""Suffix of the name under which a batch's second frame is written."""
SAME_NAME_CHANCE = 0.2
"""Probability that the application first writes the second frame without a name, which must be refused."""
_POLL_SECONDS = 0.2


Work = Callable[[Random], list[pa.RecordBatch]]
"""The work of a task. Its argument is the random generator of the attempt."""


class JobFailed(Exception):
    """A task failed MAX_FAILURES times. It stands for the error that Spark raises in this case."""


class Attempt:
    """One attempt of a task."""

    def __init__(self, work: Work, rng: Random) -> None:
        self.write = partial(work, rng)
        self.rng = rng
        self.report: list[pa.RecordBatch] | None = None
        self.error: OncelogError | None = None


class Cluster:
    """Executors, and the part of Spark that runs each task of a stage until it succeeds."""

    def __init__(self, world: World, executors: list[Executor]) -> None:
        self.world, self.executors = world, executors
        self._attempt_count = 0

    async def run_stage(self, tasks: Iterable[Work]) -> list[list[pa.RecordBatch]]:
        """Return the result of each task. Raises JobFailed if a task fails too often."""
        running = [asyncio.ensure_future(self._run_task(task)) for task in tasks]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for future in running:
                # This cancels only the driver's wait. An attempt that an executor has begun continues.
                future.cancel()

    async def _run_task(self, work: Work) -> list[pa.RecordBatch]:
        for _ in range(MAX_FAILURES):
            while not (free := [executor for executor in self.executors if executor.is_free]):
                await asyncio.sleep(_POLL_SECONDS)
            self._attempt_count += 1
            attempt: Any = Attempt(work, self.world.rng(f"atomic attempt {self._attempt_count}"))
            free[0].run_task(attempt)
            while free[0].attempt is attempt and not free[0].is_free:
                await asyncio.sleep(_POLL_SECONDS)
            if attempt.report is not None:
                return list(attempt.report)
            self.world.note("cluster", f"a task failed: {attempt.error!r}")
        raise JobFailed(f"{MAX_FAILURES} attempts of a task failed: {attempt.error}")


@dataclass(frozen=True)
class Field:
    """A column of a DataFrame's schema, with its type. It also plays the part of its `dataType`."""

    name: str
    type_name: str = "binary"

    @property
    def dataType(self) -> Field:
        return self

    def simpleString(self) -> str:
        return self.type_name


class Schema(dict[str, Field]):
    """A DataFrame's schema."""

    @property
    def fields(self) -> list[Field]:
        return list(self.values())


class Session:
    """The parts of SparkSession, SparkContext and RuntimeConfig that `write_atomic` uses."""

    def __init__(self, properties: Mapping[str, str | None]) -> None:
        self.sparkContext = self.conf = self
        self._properties = properties

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)

    def get(self, name: str, default: str | None = "") -> str | None:
        return str(TASKS) if name == "spark.sql.shuffle.partitions" else default


Step = Callable[..., Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Frame:
    """A DataFrame of keys and values, with the steps that a job applies to it.

    `shuffled_at` is the number of steps before the rows are distributed to tasks by topic and partition.
    """

    cluster: Cluster
    sparkSession: Session
    rows: tuple[bytes, ...]
    rng: Random
    steps: tuple[Step, ...] = ()
    shuffled_at: int = 0
    task_count: int = TASKS

    schema: ClassVar[Schema] = Schema({name: Field(name) for name in ("key", "value")})
    columns: ClassVar[list[str]] = ["key", "value"]

    def select(self, *columns: str) -> Frame:
        return self

    def mapInArrow(self, step: Step, schema: str) -> Frame:
        return replace(self, steps=(*self.steps, step))

    def transform(self, step: Any) -> Frame:
        """Run the first stage of `write_atomic`. `step` is `shuffle_rows` with its arguments, which only
        Spark can run.
        """
        told = step.keywords
        place: Step = partial(_place, settings=told["settings"], counts=told["counts"])
        steps = (*self.steps, place)
        return replace(self, steps=steps, shuffled_at=len(steps), task_count=told["tasks"])

    def semanticHash(self) -> int:
        return hash(self.rows)

    def collect(self) -> list[Any]:
        """Run the job from the driver's thread. Raises JobFailed."""
        rows: list[Any] = wait(self._run())
        return rows

    async def _run(self) -> list[Any]:
        before, behind = self.steps[: self.shuffled_at], self.steps[self.shuffled_at :]
        # Each run of the job has the rows in another order and in other record batches.
        rows = self.rng.sample(self.rows, len(self.rows))
        pieces = [rows[number::TASKS] for number in range(TASKS)]
        sources = [[_table(piece)] if piece else [] for piece in pieces]
        if before:
            stage = await self.cluster.run_stage(
                partial(_apply, before, source, number) for number, source in enumerate(sources)
            )
            sources = _shuffle([batch for batches in stage for batch in batches], self.task_count)
        stage = await self.cluster.run_stage(
            partial(_apply, behind, source, number) for number, source in enumerate(sources)
        )
        return [_Row(row) for batches in stage for batch in batches for row in batch.to_pylist()]


class _Row(tuple[Any, ...]):
    """A Spark Row, with access to values by position and by name."""

    _names: tuple[str, ...]

    def __new__(cls, values: Mapping[str, Any]) -> _Row:
        row = super().__new__(cls, values.values())
        row._names = tuple(values)
        return row

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._names.index(index) if isinstance(index, str) else index)


def _table(rows: list[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array(rows, pa.binary()) for name in ("key", "value")})


def _place(
    batches: Iterable[pa.RecordBatch], *, settings: SinkSettings, counts: dict[str, int]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with their partitions, as Spark adds the result of an Arrow UDF to its rows."""
    for batch in batches:
        columns = [batch.column("key"), pc.binary_length(batch.column("value"))]
        (partitions,) = choose_partitions(
            [columns], names=("key", VALUE_BYTES), settings=settings, counts=counts
        )
        yield batch.append_column("partition", partitions)


def _apply(
    steps: Iterable[Step], source: list[pa.RecordBatch], task: int, rng: Random
) -> list[pa.RecordBatch]:
    """Run the steps of a task one after the other, with its rows in a drawn order."""
    rows = [batch.slice(number, 1) for batch in source for number in range(batch.num_rows)]
    rng.shuffle(rows)

    def read() -> Iterator[pa.RecordBatch]:
        left = rows
        while left:
            count = rng.randint(1, len(left))
            yield from pa.Table.from_batches(left[:count]).combine_chunks().to_batches()
            left = left[count:]
            sleep(rng.choice((0.0, 0.1, 1.0)))

    batches = read()
    for step in steps:
        is_writing = getattr(step, "func", None) is write_share
        batches = step(batches, task=task) if is_writing else step(batches)
    return list(batches)


def _shuffle(batches: list[pa.RecordBatch], task_count: int) -> list[list[pa.RecordBatch]]:
    """Distribute the rows so that all rows of a topic and partition are in one task."""
    dealt: list[list[pa.RecordBatch]] = [[] for _ in range(task_count)]
    for batch in batches:
        for number in range(task_count):
            mask = pa.array(
                [partition % task_count == number for partition in batch.column("partition").to_pylist()]
            )
            if (part := batch.filter(mask)).num_rows:
                dealt[number].append(part)
    return dealt


class AtomicDriver(Application):
    """A streaming query whose foreachBatch calls `write_atomic`. It starts again whenever it fails."""

    def __init__(self, world: World, name: str, partitions: int, executors: list[Executor]) -> None:
        super().__init__(world, name)
        self.partition_count = partitions
        self.cluster = Cluster(world, executors)
        rng = self.rng
        frame_count = rng.choice((1, 2))
        # write_atomic refuses a name that first appears in a later batch (firstBatchId), so every batch has
        # all frames, some of them empty.
        self.source_rows = [
            [
                [b"b%d-f%d-%d" % (batch, frame, n) for n in range(rng.choice((0, 1, 3, 8)))]
                for frame in range(frame_count)
            ]
            for batch in range(rng.randint(2, 4))
        ]
        """Rows by batch and frame. The source returns the same rows each time it is read."""
        self.committed_count = self.run_count = 0
        self.options = {f"kafka.{key}": str(value) for key, value in SHORT_TIMEOUTS.items()} | {
            "kafka.client.id": name,
            "kafka.max.block.ms": "8000",
            "kafka.delivery.timeout.ms": "10000",
            "kafka.transaction.timeout.ms": "15000",
            "kafka.bootstrap.servers": SERVERS,
            "topic": TOPIC,
        }

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, NewTopic(TOPIC, num_partitions=self.partition_count))
        # Clear the module's memory, as a new process would begin with an empty one.
        atomic._calls.clear()
        self.run_count += 1
        while self.committed_count < len(self.source_rows):
            batch_id = self.committed_count
            for number, rows in enumerate(self.source_rows[batch_id]):
                await self._write(batch_id, number, rows)
                await self._kill_by_chance()
            self.committed_count += 1
            self.world.note(self.name, f"batch {batch_id} is committed")
            await self.sleep_up_to(5.0)

    async def _write(self, batch_id: int, number: int, rows: list[bytes]) -> None:
        """Write one frame as an application's foreachBatch function does, and check the counted rows.

        For the second frame, at times first forget its name. The sink must refuse that.
        """
        properties = {"sql.streaming.queryId": QUERY_ID, "spark.jobGroup.id": f"run-{self.run_count}"}
        rng = self.world.rng(f"frame {self.run_count} {batch_id} {number}")
        frame = Frame(self.cluster, Session(properties), tuple(rows), rng)
        name = f"{QUERY_ID}-{SECOND}" if number else None
        if number and self.rng.random() < SAME_NAME_CHANCE:
            try:
                await self._call(frame, batch_id, None)
            except SinkRefused as error:
                self.world.note(self.name, f"refused, as it must be: {error}")
            else:
                self.world.violate("a second frame was taken for the first", f"batch {batch_id}")
        written = await self._call(frame, batch_id, name)
        if written.rows != len(rows):
            self.world.violate("write_atomic counts other rows", f"batch {batch_id}: {written}")

    async def _call(self, frame: Any, batch_id: int, name: str | None) -> atomic.AtomicWrite:
        """Call `write_atomic` until it returns or raises SinkRefused. Repeat the call after other errors."""
        while True:
            try:
                return await in_thread(partial(atomic.write_atomic, name=name), frame, batch_id, self.options)
            except SinkRefused as error:
                if "second time in this run" not in str(error):
                    self.world.violate("the sink refused what was the same", f"batch {batch_id}: {error}")
                raise
            except (OncelogError, JobFailed) as error:
                self.world.note(self.name, f"batch {batch_id} failed: {error!r}")
                await self.sleep_up_to(2.0)

    async def _kill_by_chance(self) -> None:
        if self.rng.random() < KILL_CHANCE:
            self.world.call_later(self.rng.uniform(0.5, 3.0), self.start_if_down)
            self.kill()
            # Give control to the loop, which ends this killed process, so that the caller does not continue.
            await asyncio.sleep(0)


class AtomicWrites(Workload):
    """Checks that every frame of every micro-batch is in the log completely and exactly once, and that
    nothing else is there.
    """

    topic: ClassVar[str] = TOPIC
    clients: ClassVar[tuple[str, ...]] = ("atomic-driver", "atomic-executor-0", "atomic-executor-1")
    unguarded_groups: ClassVar[tuple[str, ...]] = tuple(
        f"oncelog-{name}/atomic/{note}"
        for name in (QUERY_ID, f"{QUERY_ID}-{SECOND}")
        for note in ("finished", "begun")
    )
    """Groups of offsets that are committed outside transactions. They may move back, because the sink trusts
    the marker in the transaction first.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        executors = [Executor(world, name) for name in self.clients[1:]]
        self.driver = AtomicDriver(world, self.clients[0], scenario.partitions, executors)
        self.applications.append(self.driver)

    def check(self, node: BrokerState) -> None:
        actual: Counter[Any] = Counter(item.value for call in self.last.calls for item in call.items)
        source_rows = {row for batch in self.driver.source_rows for frame in batch for row in frame}
        for row in sorted(source_rows | actual.keys()):
            if actual[row] != (row in source_rows):
                self.world.violate("a frame is there once", f"{row!r} is there {actual[row]} times")
