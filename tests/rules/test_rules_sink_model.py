"""A model of the sink: runs of one batch whose tasks, zombies and drivers take steps in any order.

The model's cluster has transactional ids, epochs and offsets. `oncelog.spark.sink.decisions` decides each
step. At the end, stored rows are counted against the source.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.spark.sink.decisions import (
    AlreadyCommitted,
    BatchCommit,
    Compare,
    PlanNote,
    Refuse,
    RowSum,
    TaskMarker,
    Write,
    decide_finish,
    decide_plan,
    decide_repeated,
    decide_still_mine,
    decide_task,
)

SOURCE = frozenset(range(6))
Rows = frozenset[int]
Steps = Generator[None, None, None]


class Refused(Exception):
    """Raised if a rule rejects the step of a process, or if its epoch is fenced."""


def sum_of(rows: Rows) -> RowSum:
    return RowSum(len(rows), sum(1 << 7 * row for row in rows))


@dataclass
class Transaction:
    """The state of a transactional id. `rows` is None without an open transaction."""

    epoch: int = 0
    rows: Rows | None = None


@dataclass
class Cluster:
    """The cluster's offsets and transactions. Every method is one atomic step."""

    plan: PlanNote | None = None
    finished: BatchCommit | None = None
    markers: dict[int, TaskMarker] = field(default_factory=dict)
    transactions: dict[int | str, Transaction] = field(default_factory=dict)
    committed: Counter[int] = field(default_factory=Counter)
    last_writer: Run | None = None

    def init(self, name: int | str) -> int:
        """Fence the transactional id's earlier producers, and abort their transaction."""
        transaction = self.transactions.setdefault(name, Transaction())
        transaction.epoch, transaction.rows = transaction.epoch + 1, None
        return transaction.epoch

    def write(self, task: int | str, epoch: int, rows: Rows) -> None:
        transaction = self.transactions[task]
        if transaction.epoch != epoch:
            raise Refused("fenced")
        transaction.rows = rows

    def commit(self, task: int, epoch: int, run: Run) -> None:
        transaction = self.transactions[task]
        if transaction.epoch != epoch or transaction.rows is None:
            raise Refused("fenced")
        self.committed.update(transaction.rows)
        self.markers[task] = TaskMarker(0, sum_of(transaction.rows))
        transaction.rows, self.last_writer = None, run

    def note_plan(self, epoch: int, plan: PlanNote) -> bool:
        if self.transactions["plan"].epoch != epoch:
            return False
        self.plan = plan
        return True


@dataclass
class Report:
    sum: RowSum
    plan: PlanNote | None = None
    epoch: int | None = None
    """The producer epoch of the transaction that the task prepared."""


@dataclass(eq=False)
class Run:
    """One attempt of a driver to write the batch. `placement` has the rows of each task."""

    name: str
    placement: list[Rows]
    reports: dict[int, Report] = field(default_factory=dict)
    is_done: bool = False

    def task(self, cluster: Cluster, task: int) -> Steps:
        rows = self.placement[task]
        finished = cluster.finished
        yield
        verdict = decide_task(0, task, None, finished)
        if isinstance(verdict, AlreadyCommitted):
            self.reports.setdefault(task, Report(sum_of(rows)))
            return
        plan = yield from self._agree(cluster)
        if not rows and not plan.is_repeat:
            yield from self._without_rows(cluster, task)
            return
        epoch = cluster.init(task)
        yield
        if decide_still_mine(plan, cluster.plan):
            raise Refused("overtaken")
        yield
        marker = cluster.markers.get(task)
        yield
        if not rows and marker is None:
            self.reports.setdefault(task, Report(RowSum(), plan))
            return
        match decide_task(0, task, marker, finished):
            case Compare(expected):
                if decide_repeated(expected, sum_of(rows)):
                    raise Refused("changed")
                self.reports.setdefault(task, Report(sum_of(rows), plan if plan.is_repeat else None))
            case Write():
                cluster.write(task, epoch, rows)
                yield
                if plan.is_repeat:
                    self.reports.setdefault(task, Report(sum_of(rows), plan, epoch))
                else:
                    cluster.commit(task, epoch, self)
                    yield
                    self.reports.setdefault(task, Report(sum_of(rows)))
            case refused:
                raise Refused(str(refused))

    def _agree(self, cluster: Cluster) -> Generator[None, None, PlanNote]:
        while True:
            for is_fenced in (False, True):
                epoch = cluster.init("plan") if is_fenced else 0
                yield
                found = cluster.plan
                plan = decide_plan(0, self.name, found)
                if isinstance(plan, Refuse):
                    raise Refused("overtaken")
                if plan == found:
                    return plan
            yield
            if cluster.note_plan(epoch, plan):
                return plan

    def _without_rows(self, cluster: Cluster, task: int) -> Steps:
        yield
        marker = cluster.markers.get(task)
        if marker is not None and decide_repeated(marker.sum, RowSum()):
            raise Refused("changed")
        self.reports.setdefault(task, Report(RowSum()))

    def finish(self, cluster: Cluster) -> Steps:
        before, total, beyond = cluster.finished, RowSum(), {}
        yield
        for report in self.reports.values():
            total = total.plus(*report.sum)
        plan = next((report.plan for report in self.reports.values() if report.plan), None)
        if plan is not None:
            if decide_still_mine(plan, cluster.plan):
                raise Refused("overtaken")
            for task in [name for name in cluster.transactions if isinstance(name, int)]:
                if task >= len(self.placement):
                    cluster.init(task)
                    yield
                    beyond[task] = cluster.markers.get(task)
        decided = decide_finish(0, list(self.reports), before, beyond, total)
        if isinstance(decided, Refuse):
            raise Refused(decided.reason.name)
        if decided != before:
            failures = 0
            for task, report in self.reports.items():
                if report.epoch is not None:
                    yield
                    try:
                        cluster.commit(task, report.epoch, self)
                    except Refused:
                        failures += 1
            if failures:
                raise Refused("fenced")
            yield
            cluster.finished = decided
        self.is_done = True


def placed(chance: Random) -> list[Rows]:
    """Distribute the source's rows randomly to one to four tasks."""
    count = chance.randint(1, 4)
    tasks: list[set[int]] = [set() for _ in range(count)]
    for row in SOURCE:
        tasks[chance.randrange(count)].add(row)
    return [frozenset(task) for task in tasks]


class Live:
    """Processes that take steps. Some are slower, so that others overtake them."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._weights: dict[Steps, float] = {}

    def add(self, process: Steps) -> None:
        self._weights[process] = self._chance.choice((1.0, 0.1, 0.001))

    def kill_some(self) -> None:
        for process in list(self._weights):
            if self._chance.random() < 0.5:
                del self._weights[process]

    def step(self) -> bool:
        """Let one process take a step. Return False when no process is left."""
        if not self._weights:
            return False
        (process,) = self._chance.choices(list(self._weights), list(self._weights.values()))
        if self._chance.random() < 0.1:
            self.add(process)  # draws another speed for the process
        try:
            next(process)
        except (StopIteration, Refused):
            del self._weights[process]
        return True


def play(chance: Random, *, moves_rows: bool = True) -> Cluster:
    """Run the batch up to six times, with some runs at the same time.

    Tasks are retried, and old attempts continue as zombies.
    """
    cluster, live = Cluster(), Live(chance)
    first = placed(chance)
    for number in range(chance.randint(1, 6)):
        moved = moves_rows and chance.random() < 0.7
        run = Run(f"run-{number}", placed(chance) if moved else first)
        for task in range(len(run.placement)):
            for _ in range(chance.choice((1, 1, 2))):
                live.add(run.task(cluster, task))
        has_driver = False
        for _ in range(chance.choice((10, 20, 40, 80, 160))):
            if not has_driver and len(run.reports) == len(run.placement):
                live.add(run.finish(cluster))
                has_driver = True
            if not live.step():
                break
        if chance.random() < 0.3:
            live.kill_some()
    while live.step() and chance.random() < 0.995:
        pass
    return cluster


def run_alone(cluster: Cluster, name: str, placement: list[Rows]) -> Run:
    run = Run(name, placement)
    for task in range(len(placement)):
        for _ in run.task(cluster, task):
            pass
    for _ in run.finish(cluster):
        pass
    return run


@pytest.mark.behaviour("P6")
@settings(max_examples=2000, deadline=None)
@given(st.integers(0, 2**64))
def test_no_row_is_doubled_whatever_runs_and_wherever_rows_move(seed: int) -> None:
    chance = Random(seed)
    cluster = play(chance)
    assert max(cluster.committed.values(), default=0) <= 1
    # If the plan of the run that committed last is run again, each row is stored exactly once.
    writer = cluster.last_writer
    placement = writer.placement if writer else placed(chance)
    assert run_alone(cluster, "last", placement).is_done
    assert cluster.committed == Counter(SOURCE)
    # A finished batch is recognized even if its rows have moved to other tasks.
    assert run_alone(cluster, "again", placed(chance)).is_done
    assert cluster.committed == Counter(SOURCE)


@pytest.mark.behaviour("P6")
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**64))
def test_a_plan_that_gives_the_same_rows_is_never_stuck(seed: int) -> None:
    cluster = play(Random(seed), moves_rows=False)
    writer = cluster.last_writer
    assert run_alone(cluster, "last", writer.placement if writer else [SOURCE]).is_done
    assert cluster.committed == Counter(SOURCE)


@pytest.mark.behaviour("P6")
@pytest.mark.parametrize("head_start", range(12))
def test_a_task_that_pauses_anywhere_commits_nothing_of_another_plan(head_start: int) -> None:
    """A zombie continues between two steps of a later run that has prepared its task.

    Random runs rarely reach this state.
    """
    cluster = Cluster()
    first = Run("first", [frozenset({0, 1, 2}), frozenset({3, 4, 5})])
    zombie = first.task(cluster, 0)
    for _ in range(head_start):
        next(zombie, None)
    later = Run("later", [frozenset({1, 2, 3}), frozenset({4, 5, 0})])
    for task in range(2):
        with suppress(Refused):
            deque(later.task(cluster, task), 0)
    with suppress(Refused):
        deque(zombie, 0)
    if len(later.reports) == 2:
        with suppress(Refused):
            deque(later.finish(cluster), 0)
    assert max(cluster.committed.values(), default=0) <= 1
