"""Find cycles among the dependencies between the transactions of a history.

    rw   transaction 1 read a partition, and transaction 2 wrote the next record after those that 1 read
    ww   both wrote to a partition, transaction 1 at the lower offset, with no other writer between them
    wr   transaction 2 read a record that transaction 1 wrote

A dependency says that transaction 1 was before transaction 2. With a cycle, no order of the transactions
explains what was read. Operations outside transactions are ignored.

Kafka's read_committed rules out cycles of `wr` alone. Its transactions take no locks. So two concurrent
transactions may lie in two partitions in opposite orders, which is a cycle of `ww`. A reader may be behind in
one partition and not in another, which is a cycle with `rw`. If transactions that share a partition are never
concurrent, `ww` adds no cycles. If each transaction also reads to the end, `rw` adds none.

Source: Adya's G0, G1c and G2; Elle (VLDB 2020) for the order of versions, here a partition's offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from oncelog_simulator.history.index import History, Noted, Operation, Partition, Unit

ALL_KINDS = ("rw", "ww", "wr")

N = TypeVar("N", bound=Hashable)


class Dependency(NamedTuple):
    """The unit of the first operation is before the unit of the second."""

    kind: str
    first: Operation
    second: Operation


Graph = dict[Unit, dict[Unit, Dependency]]


def cycles(history: History, kinds: frozenset[str]) -> Iterator[list[Dependency]]:
    """Yield a short cycle of each strongly connected component of transactions."""
    graph = _dependencies(history, kinds)
    for knot in components({unit: list(following) for unit, following in graph.items()}):
        if len(knot) > 1:
            yield [graph[a][b] for a, b in pairwise(_cycle_in(graph, set(knot)))]


def _dependencies(history: History, kinds: frozenset[str]) -> Graph:
    graph: Graph = {}

    def add(kind: str, first: Operation, second: Operation) -> None:
        if kind in kinds and first.unit != second.unit and first.transaction is not None:
            graph.setdefault(first.unit, {}).setdefault(second.unit, Dependency(kind, first, second))

    polls = [(poll, item) for poll, item in history.polls if poll.transaction is not None]
    # Add `wr` first: the graph keeps only the first dependency between two transactions, and `wr` is the only
    # kind about which Kafka makes promises.
    for poll, item in polls:
        if item.value in history.sends:
            add("wr", history.sends[item.value][0], poll)
    writers = {partition: _writers(history, partition) for partition in history.log}
    for sends in writers.values():
        for (_, before), (_, after) in pairwise(sends):
            add("ww", before, after)
    for (_, partition), (offset, poll) in _last_reads(polls).items():
        sends = writers[partition]
        following = bisect_right(sends, offset, key=lambda row: row[0])
        if following < len(sends):
            add("rw", poll, sends[following][1])
    return graph


def _writers(history: History, partition: Partition) -> list[tuple[int, Operation]]:
    """Return the committed records of transactions in a partition: their offsets in order, and their
    sends.
    """
    rows = []
    for offset, (_, item) in history.log[partition].items():
        send, _ = history.sends.get(item.value, (None, None))
        if send is not None and send.transaction is not None and send.unit in history.committed:
            rows.append((offset, send))
    return sorted(rows, key=lambda row: row[0])


def _last_reads(polls: Iterable[Noted]) -> dict[tuple[Unit, Partition], tuple[int, Operation]]:
    """Return the highest offset that each transaction read in each partition."""
    reads: dict[tuple[Unit, Partition], tuple[int, Operation]] = {}
    for poll, item in polls:
        key = (poll.unit, (item.topic, item.partition))
        if item.offset is not None and item.offset > reads.get(key, (-1, poll))[0]:
            reads[key] = (item.offset, poll)
    return reads


def components(graph: Mapping[N, Sequence[N]]) -> Iterator[list[N]]:
    """Yield the strongly connected components.

    Source: Tarjan 1972, with a list instead of recursion.
    """
    order: dict[N, int] = {}
    low: dict[N, int] = {}
    # A stack with a fast membership test.
    waiting: dict[N, None] = {}
    for root in graph:
        if root in order:
            continue
        order[root] = low[root] = len(order)
        waiting[root] = None
        path = [(root, iter(graph[root]))]
        while path:
            node, following = path[-1]
            child = next(following, None)
            if child is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    yield _taken_until(waiting, node)
            elif child not in order:
                order[child] = low[child] = len(order)
                waiting[child] = None
                path.append((child, iter(graph.get(child, ()))))
            elif child in waiting:
                low[node] = min(low[node], order[child])


def _taken_until(stack: dict[N, None], node: N) -> list[N]:
    taken: list[N] = []
    while not taken or taken[-1] != node:
        taken.append(stack.popitem()[0])
    return taken


def _cycle_in(graph: Graph, knot: set[Unit]) -> list[Unit]:
    """Return a shortest path from one unit of the component back to itself."""
    start = min(knot, key=lambda unit: len(graph[unit]))
    came_from: dict[Unit, Unit] = {}
    queue = deque([start])
    while queue:
        unit = queue.popleft()
        for following in graph[unit]:
            if following == start:
                path = [start, unit]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if following in knot and following not in came_from:
                came_from[following] = unit
                queue.append(following)
    raise AssertionError("a knot without a cycle")
