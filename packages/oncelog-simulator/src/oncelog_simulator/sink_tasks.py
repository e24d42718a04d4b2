"""A workload that runs the Spark sink without Spark.

A driver plans micro-batches, and executors run the tasks that write them. Both run the sink's own code
(`write_task` and `finish` of spark/sink/task.py). The driver keeps what Spark keeps in a checkpoint: the rows
of each batch, and which batches are committed. A failed task is tried again, and a slow task gets a second
attempt. The losing attempt may continue as a zombie.

Some queries are reset to an older checkpoint. Others lose their checkpoint and start with a new one. Some are
idle for longer than the broker keeps offsets. Some are followed by batch writes, with and without a writeId.
The expected contents of the log are counted from the rows of `Source`, which the sink cannot read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pyarrow as pa

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.errors import OncelogError
from oncelog.spark.sink.decisions import SinkError, SinkRefused
from oncelog.spark.sink.kept_clients import KeptClients
from oncelog.spark.sink.sink_options import parse_sink_options
from oncelog.spark.sink.task import Sink, TaskReport, finish, write_task
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.threads import in_thread, sleep
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import SERVERS, Host, World

EXIT_CHANCE = 0.3
"""Probability that an executor's process ends with its task, instead of waiting for another one."""
KILL_CHANCE = 0.15
"""Probability that a task is killed while it runs, and that the driver is killed between two steps of a
batch.
"""
MOVE_CHANCE = 0.3
"""Probability that a run assigns rows to other tasks than the previous run did."""
MAX_FAILURES = 4
"""Attempts of a task before its batch fails, as in spark.task.maxFailures."""
IDLE_SECONDS = 150.0
"""Pause of an idle query in seconds, longer than its broker keeps offsets."""
SHORT_RETENTION: dict[str, object] = {
    "offsets.retention.minutes": 2,
    "offsets.retention.check.interval.ms": 5_000,
}
NEW_CHECKPOINT_CHANCE = REWIND_CHANCE = IDLE_CHANCE = WRITE_ID_CHANCE = PLAIN_CHANCE = 0.3
DIE_IN_BATCH_CHANCE = 0.2
"""Probability that the driver is killed while the tasks of a batch write."""
QUERIES = ("query", "query-2")
"""Names of the driver's query before and after its checkpoint is lost; a new checkpoint has a new query id.
"""
WRITE_ID = "a-write"
_POLL_SECONDS = 0.2


class Attempt:
    """One attempt of a task to write its rows."""

    def __init__(self, sink: Sink, batch_id: int, task: int, rows: list[bytes], rng: Random) -> None:
        self.sink, self.batch_id, self.task = sink, batch_id, task
        self.report: TaskReport | None = None
        self.error: OncelogError | None = None
        self.kept: KeptClients
        """The clients of the process that runs the attempt."""
        self.rng, self._rows = rng, rows

    def write(self) -> TaskReport:
        return write_task(self.sink, self.batch_id, self.task, self._arrow(), self.kept)

    def _arrow(self) -> Iterator[pa.RecordBatch]:
        """Yield the task's rows in a drawn order and in record batches of drawn sizes."""
        rows = self.rng.sample(self._rows, len(self._rows))
        while rows:
            size = self.rng.randint(1, len(rows))
            yield pa.RecordBatch.from_pydict({"value": pa.array(rows[:size], pa.binary())})
            rows = rows[size:]
            sleep(self.rng.choice((0.0, 0.0, 0.1, 2.0)))


class Executor(Host):
    """Runs one task at a time. Its process may run several tasks, as Spark's Python workers do."""

    attempt: Attempt | None = None
    next_task: asyncio.Event | None = None
    """The event that starts the process's next task; None while the process runs a task."""

    def start(self) -> None:
        """Do nothing: `run_task` starts the executor's process."""

    @property
    def is_free(self) -> bool:
        return not self.is_up or self.next_task is not None

    def run_task(self, attempt: Attempt) -> None:
        self.attempt = attempt
        next_task, self.next_task = self.next_task, None
        if self.is_up and next_task is not None:
            next_task.set()
        else:
            self.run(self._tasks)
        if attempt.rng.random() < KILL_CHANCE:
            self.world.call_later(attempt.rng.uniform(0.0, 3.0), self._end_task, attempt)

    def _end_task(self, attempt: Attempt) -> None:
        if self.attempt is attempt:
            self.kill()

    async def _tasks(self) -> None:
        process, kept = self.process, KeptClients()
        assert process is not None
        while True:
            attempt = self.attempt
            assert attempt is not None
            attempt.kept = kept
            await self._task(attempt)
            if attempt.rng.random() < EXIT_CHANCE:
                break
            self.next_task = next_task = asyncio.Event()
            await next_task.wait()
        process.kill()
        self.world.network.process_died(process)

    async def _task(self, attempt: Attempt) -> None:
        try:
            report = await in_thread(attempt.write)
            # During this pause the task is done, but the driver does not know its report yet.
            await asyncio.sleep(attempt.rng.choice((0.0, 0.0, 1.0)))
            attempt.report = report
        except OncelogError as error:
            attempt.error = error
        except Exception as error:
            self.world.violate("a client fails with an error that has no type", f"{self.name}: {error!r}")


class Source:
    """An independent record of the rows given to queries and batch writes, and of the commits."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], list[bytes]] = {}
        self.committed: set[tuple[str, int]] = set()

    def add(self, name: str, batch_id: int, rows_by_task: list[list[bytes]]) -> None:
        """Note the rows of a batch. The same batch always has the same rows."""
        self.rows[name, batch_id] = [row for task in rows_by_task for row in task]

    def commit(self, name: str, batch_id: int) -> None:
        """Note that the sink has reported the batch as committed."""
        self.committed.add((name, batch_id))

    def check(self, actual: Counter[bytes]) -> Iterator[str]:
        """Yield a text for each row that is missing, foreign, or stored more than once.

        Rows of a batch that was not committed may be missing.
        """
        expected = set()
        for batch, rows in self.rows.items():
            expected.update(rows)
            for row in rows:
                if actual[row] > 1 or (batch in self.committed and not actual[row]):
                    yield f"{row!r} is there {actual[row]} times"
        for row in sorted(actual.keys() - expected):
            yield f"{row!r} was never given"


def is_idle_query(seed: int) -> bool:
    """Return True if the seed's query is idle for longer than its broker keeps offsets."""
    return Random(f"{seed}/idle query").random() < IDLE_CHANCE


class Driver(Application):
    """A streaming query that starts again whenever it fails or is killed."""

    def __init__(self, world: World, name: str, topic: str, partitions: int, executors: list[Executor]):
        super().__init__(world, name)
        self.topic, self.partition_count, self.executors = topic, partitions, executors
        rng = self.rng
        self.planned = [
            [
                [b"row-%d-%d-%d" % (batch, task, n) for n in range(rng.choice((0, 1, 3, 10)))]
                for task in range(2)
            ]
            for batch in range(rng.randint(2, 4))
        ]
        """Rows by batch and task. They stand for the checkpoint's offset log and for a replayable source."""
        self.placements = [[rows_by_task] for rows_by_task in self.planned]
        """For each batch, all assignments of rows to tasks so far. A new deployment may add another one."""
        self.committed_count = 0
        """Number of committed batches. It stands for the checkpoint's commit log."""
        self.attempt_count = self.run_count = 0
        self.more = world.rng("lanes, more")
        """A generator for draws that were added later, so that `rng` draws the same as before."""
        self.is_idle = is_idle_query(world.seed)
        """True until the query has been idle once, in seeds with an idle query."""
        self.lost_at = self.more.choice((0, 1, 2)) if self.more.random() < NEW_CHECKPOINT_CHANCE else None
        """Number of committed batches at which the checkpoint is lost; None if it is never lost."""
        self.source = Source()
        self.kept: KeptClients
        """The clients of the driver's process."""
        self.after = [
            write
            for chance, write in (
                (WRITE_ID_CHANCE, self._write_with_id),
                (PLAIN_CHANCE, self._write_without_id),
            )
            if self.more.random() < chance
        ]
        """Batch writes that follow the query."""
        options = {f"kafka.{key}": str(value) for key, value in SHORT_TIMEOUTS.items()} | {
            "kafka.client.id": name,
            "kafka.max.block.ms": "8000",
            "kafka.delivery.timeout.ms": "10000",
            "kafka.transaction.timeout.ms": "15000",
            "kafka.bootstrap.servers": SERVERS,
            "topic": topic,
        }
        self.sink = Sink(QUERIES[0], parse_sink_options(options, "stream"))

    async def work(self) -> None:
        self.kept = KeptClients()
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, NewTopic(self.topic, num_partitions=self.partition_count))
        await self._run_query()
        while self.after:
            await self.after[0]()
            self.after.pop(0)

    async def _run_query(self) -> None:
        while self.committed_count < len(self.planned):
            batch_id = self.committed_count
            if self.lost_at == batch_id:
                self._lose_checkpoint()
                continue
            self.source.add(self.sink.name, batch_id, self.planned[batch_id])
            if self.more.random() < DIE_IN_BATCH_CHANCE:
                self.world.call_later(self.more.uniform(0.0, 2.0), self._die_in_batch, self.process)
            try:
                await self._write_batch(batch_id)
            except SinkRefused as error:
                if len(self.placements[batch_id]) == 1:
                    self.world.violate("the sink refused what was the same", f"batch {batch_id}: {error}")
                    raise
                self.world.note(self.name, f"batch {batch_id} is tried again with another plan: {error}")
                await asyncio.sleep(1.0)
                continue
            await self._kill_by_chance()
            self.committed_count += 1
            self.source.commit(self.sink.name, batch_id)
            self.world.note(self.name, f"batch {batch_id} is committed")
            await self.sleep_up_to(8.0)
            if self.more.random() < 0.5:
                await self._be_idle()
            if self.more.random() < REWIND_CHANCE:
                await self._rewind(batch_id)

    def _die_in_batch(self, process: Any) -> None:
        """Kill the driver while tasks write, unless `process` is dead already."""
        if process.is_alive:
            self.world.call_later(self.more.uniform(0.5, 3.0), self.start_if_down)
            self.kill()

    def _lose_checkpoint(self) -> None:
        """Start with a new checkpoint: a new query that reads the source from its beginning."""
        self.lost_at, self.committed_count = None, 0
        self.planned = [
            [[b"new-" + row for row in task] for task in rows_by_task] for rows_by_task in self.planned
        ]
        self.placements = [[rows_by_task] for rows_by_task in self.planned]
        self.sink = replace(self.sink, name=QUERIES[1])
        self.world.note(self.name, "begins with a new checkpoint")

    async def _rewind(self, batch_id: int) -> None:
        """Run a committed batch again, as with an older checkpoint. The sink may refuse it."""
        batch_id = max(batch_id - self.more.choice((0, 1)), 0)
        try:
            await self._write_batch(batch_id)
        except SinkError as error:
            self.world.note(self.name, f"batch {batch_id} is refused again: {error}")

    async def _be_idle(self) -> None:
        """Sleep for IDLE_SECONDS, once in a seed with an idle query. Otherwise do nothing."""
        if self.is_idle:
            self.is_idle = False
            await asyncio.sleep(IDLE_SECONDS)

    async def _write_with_id(self) -> None:
        """Write a batch with a writeId twice. In between, the query may be idle until its markers expire."""
        rows_by_task = [[b"id-%d-%d" % (task, n) for n in range(3)] for task in range(2)]
        sink = self.sink
        self.sink = replace(sink, name=WRITE_ID, is_named=True)
        self.source.add(WRITE_ID, 0, rows_by_task)
        try:
            for number in range(2):
                while True:
                    self.run_count += 1
                    self.sink = replace(self.sink, run_id=f"run-{self.run_count}")
                    try:
                        reports = await self._run_batch(0, rows_by_task)
                        await in_thread(finish, self.sink, 0, reports, self.kept)
                        break
                    except SinkRefused as error:
                        self.world.violate("the sink refused what was the same", f"{WRITE_ID}: {error}")
                        return
                    except OncelogError as error:
                        self.world.note(self.name, f"{WRITE_ID} fails: {error!r}")
                        await self.sleep_up_to(2.0)
                self.source.commit(WRITE_ID, 0)
                if not number:
                    await self._be_idle()
        finally:
            self.sink = sink

    async def _write_without_id(self) -> None:
        """Write a batch without a writeId once. Then start a late second attempt of one of its tasks."""
        rows_by_task = [[b"plain-%d-%d" % (task, n) for n in range(3)] for task in range(2)]
        sink = self.sink
        name = f"plain-{self.run_count}"
        self.sink = replace(sink, name=name, is_named=False)
        self.source.add(name, 0, rows_by_task)
        # A write without a writeId cannot be repeated, so remove it before it begins.
        self.after.pop(0)
        try:
            reports = await self._run_batch(0, rows_by_task)
            await in_thread(finish, self.sink, 0, reports, self.kept)
            self.source.commit(name, 0)
            if free := [executor for executor in self.executors if executor.is_free]:
                self._begin(0, 0, rows_by_task[0], free[0])
                while not free[0].is_free:
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            self.sink = sink
            self.after.insert(0, self._nothing)

    async def _nothing(self) -> None:
        """Do nothing. It replaces `_write_without_id`, which must not run again after a restart."""

    async def _write_batch(self, batch_id: int) -> None:
        """Run the tasks of a batch once, and finish it.

        The assignment of rows to tasks is drawn: an earlier run's or a new one.
        """
        placements = self.placements[batch_id]
        if self.rng.random() < MOVE_CHANCE:
            rows = [row for task in self.planned[batch_id] for row in task]
            rows_by_task: list[list[bytes]] = [[] for _ in range(self.rng.randint(1, 3))]
            for row in rows:
                self.rng.choice(rows_by_task).append(row)
            placements.append(rows_by_task)
        self.run_count += 1
        self.sink = replace(self.sink, run_id=f"run-{self.run_count}")
        reports = await self._run_batch(batch_id, self.rng.choice(placements))
        await self._kill_by_chance()
        await in_thread(finish, self.sink, batch_id, reports, self.kept)

    async def _kill_by_chance(self) -> None:
        if self.rng.random() < KILL_CHANCE:
            self.world.call_later(self.rng.uniform(0.5, 3.0), self.start_if_down)
            self.kill()
            # Give control to the loop, which ends this killed process, so that the caller does not continue.
            await asyncio.sleep(0)

    async def _run_batch(self, batch_id: int, placement: list[list[bytes]]) -> list[TaskReport]:
        tasks = [
            asyncio.ensure_future(self._run_task(batch_id, task, rows)) for task, rows in enumerate(placement)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                # This cancels only the driver's wait. An attempt that an executor has begun continues.
                task.cancel()

    async def _run_task(self, batch_id: int, task: int, rows: list[bytes]) -> TaskReport:
        """Run attempts of a task, and return the first report."""
        running: list[tuple[Attempt, Executor]] = []
        failures_left, patience = MAX_FAILURES, 0.0
        while True:
            for attempt, executor in list(running):
                if attempt.report is not None:
                    if len(running) > 1 and self.rng.random() < 0.5:
                        self._kill_losers(running, attempt)
                    return attempt.report
                if attempt.error is not None or executor.attempt is not attempt or executor.is_free:
                    running.remove((attempt, executor))
                    failures_left -= 1
                    self.world.note(self.name, f"task {task} failed: {attempt.error!r}")
                    self._judge(attempt, batch_id, failures_left)
                    patience = 0.0
            patience -= _POLL_SECONDS
            if patience <= 0 and (free := [executor for executor in self.executors if executor.is_free]):
                running.append((self._begin(batch_id, task, rows, free[0]), free[0]))
                patience = self.rng.choice((1.0, 5.0, 30.0))
            await asyncio.sleep(_POLL_SECONDS)

    def _begin(self, batch_id: int, task: int, rows: list[bytes], executor: Executor) -> Attempt:
        self.attempt_count += 1
        rng = self.world.rng(f"attempt {self.attempt_count} of {self.name}")
        attempt = Attempt(self.sink, batch_id, task, rows, rng)
        executor.run_task(attempt)
        return attempt

    def _judge(self, attempt: Attempt, batch_id: int, failures_left: int) -> None:
        if isinstance(attempt.error, SinkRefused):
            raise attempt.error
        if not failures_left:
            raise SinkError(f"a task of batch {batch_id} failed {MAX_FAILURES} times: {attempt.error}")

    def _kill_losers(self, running: list[tuple[Attempt, Executor]], winner: Attempt) -> None:
        for attempt, executor in running:
            if attempt is not winner and executor.attempt is attempt:
                executor.kill()


class SinkTasks(Workload):
    """Checks that the rows of each micro-batch are in the log exactly once."""

    topic: ClassVar[str] = "lanes"
    clients: ClassVar[tuple[str, ...]] = ("driver", "executor-0", "executor-1", "executor-2")
    unguarded_groups: ClassVar[tuple[str, ...]] = tuple(
        f"oncelog-{name}/{note}" for name in (*QUERIES, WRITE_ID) for note in ("finished", "begun")
    )
    """The groups in which the driver notes the last begun and the last finished batch.

    These offsets may move back without harm, because the sink relies on the tasks' markers first.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        partitions = scenario.partitions
        executors = [Executor(world, name) for name in self.clients[1:]]
        self.driver = Driver(world, self.clients[0], self.topic, partitions, executors)
        self.applications.append(self.driver)

    def check(self, node: BrokerState) -> None:
        actual: Counter[Any] = Counter(item.value for call in self.last.calls for item in call.items)
        for text in self.driver.source.check(actual):
            self.world.violate("a micro-batch is there once", text)
