"""A workload whose oldest records are deleted while clients use the topic: DeleteRecords and retention by
size.

A log start never moves up unless a request or retention allows it. A restart may only undo its latest moves.
All records above the log start are there, and the broker remembers producers whose records are deleted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.types import TopicPartition
from oncelog_simulator.checks import check_history
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application, Reader, Sender
from oncelog_simulator.faults import REFUSED_WRITES
from oncelog_simulator.history.check import Item, Operation
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.txn_clients import Writer
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import World

BURSTS = 6
KEPT_SECONDS = 25.0
"""Seconds after the response to DeleteRecords within which the new log start must be on the disk, even after
long pauses.
"""


class LogStart(NamedTuple):
    """The log start in the response to a DeleteRecords request."""

    at_us: int
    partition: TopicPartition
    offset: int


class RecordDeleter(Application):
    """Deletes records up to drawn offsets."""

    def __init__(self, world: World, name: str, topic: NewTopic, partitions: list[TopicPartition]) -> None:
        super().__init__(world, name)
        self.topic, self.partitions = topic, partitions
        self.requested: dict[TopicPartition, int] = {}
        """The highest offset up to which a deletion was requested, by partition."""
        self.log_starts: list[LogStart] = []
        """Acknowledged log starts that every later start of the broker must still have."""
        self.count = self.rng.randint(3, 8)

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, self.topic)
            while self.count > 0:
                await self.sleep_up_to(12.0)
                self.count -= 1
                await self._trim(admin, self.rng.choice(self.partitions))

    async def _trim(self, admin: AsyncAdmin, tp: TopicPartition) -> None:
        end = (await admin.list_offsets({tp: "latest"}))[tp].offset or 0
        offset = self.rng.randint(0, end)
        self.requested[tp] = max(self.requested.get(tp, 0), offset)
        outcome = (await admin.delete_records({tp: offset}))[tp]
        self.log_starts.append(LogStart(self.world.now_us, tp, outcome.low_watermark or 0))
        self.world.note(self.name, f"{tp} starts at {outcome.low_watermark}")


class RecordDeletion(Workload):
    """Checks that records above the log start are there, and that deleted records stay deleted."""

    topic: ClassVar[str] = "trimmed"
    clients: ClassVar[tuple[str, ...]] = ("sender-trimmed", "writer-trimmed", "reader-trimmed", "trimmer")

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        partitions = scenario.partitions
        sender, writer, reader, trimmer = self.clients
        rng = world.rng("trimming")
        self.kept_bytes = rng.choice((None, None, 2_000))
        configs = {} if self.kept_bytes is None else {"retention.bytes": self.kept_bytes}
        topic = NewTopic(self.topic, num_partitions=partitions, configs=configs)
        self.trimmer = RecordDeleter(world, trimmer, topic, self.partitions)
        self.applications = [
            Sender(world, sender, self.topic, partitions, BURSTS),
            Writer(world, writer, self.topic, partitions, BURSTS),
            self.trimmer,
        ]
        self.reader = Reader(world, reader, self.partitions, "read_committed")
        self.readers = [self.reader]
        self._kept_until_us = 0

    def ending(self) -> None:
        """Note the time up to which acknowledged log starts must survive the coming restart.

        A restart may forget later log starts, as on Apache Kafka. If the disk may have refused writes, it may
        forget all of them.
        """
        self._kept_until_us = self.world.now_us - int(KEPT_SECONDS * 1e6)

    def recovered(self, node: BrokerState) -> None:
        # Filter here and not in `ending`: a response that is in flight when the broker ends adds a log start
        # afterwards (seed 618).
        is_broken = any(fault.kind in REFUSED_WRITES for fault in self.scenario.faults)
        self.trimmer.log_starts = [
            start for start in self.trimmer.log_starts if start.at_us < self._kept_until_us and not is_broken
        ]
        for log_start in self.trimmer.log_starts:
            partition = node.log_manager.partitions.get(log_start.partition)
            if partition is None or partition.log_start_offset < log_start.offset:
                text = f"{log_start}, and after a restart {partition and partition.log_start_offset}"
                self.world.violate("a log start is forgotten", text)

    def check(self, node: BrokerState) -> None:
        starts = {tp: node.log_manager.partitions[tp].log_start_offset for tp in self.partitions}
        for tp, start in starts.items():
            requested = self.trimmer.requested.get(tp, 0)
            if self.kept_bytes is None and start > requested:
                self.world.violate("deleted unasked", f"{tp} starts at {start}, asked for was {requested}")
        for poll in self.operations():
            for item in poll.items if poll.process == self.last.name else ():
                if (item.offset or 0) < starts[TopicPartition(item.topic, item.partition)]:
                    self.world.violate("a deleted record is read", f"{item}")
        check_history(self.world, above(self.operations(), starts), self.last.name)


def above(operations: list[Operation], starts: dict[TopicPartition, int]) -> list[Operation]:
    """Return the operations without records below the log starts.

    A record with an unknown offset is left out if a later record of its session is below the log start.
    """
    is_below: set[tuple[object, ...]] = set()
    kept: list[Operation] = []

    def is_kept(operation: Operation, item: Item) -> bool:
        start = starts[TopicPartition(item.topic, item.partition)]
        sender = (operation.process, operation.session, item.topic, item.partition)
        if item.offset is not None and item.offset < start:
            is_below.add(sender)
        return sender not in is_below if item.offset is None else item.offset >= start

    for operation in reversed(operations):
        items = tuple(item for item in operation.items if is_kept(operation, item))
        if items or not operation.items:
            kept.append(replace(operation, items=items))
    return kept[::-1]
