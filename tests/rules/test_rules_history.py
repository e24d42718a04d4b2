"""The history checker: the smallest history of each anomaly, near-misses, and histories of a correct log."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oncelog_simulator.history.check import Item, Kind, Operation, Outcome, check
from oncelog_simulator.history.cycles import components
from support.append_notation import rows
from support.history.notation import format_anomaly, parse_history

CASES = list(rows("history.txt"))


@pytest.mark.parametrize(("history", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_the_checker_follows_the_table(history: str, expected: str) -> None:
    found = check(parse_history(history))
    assert ", ".join(map(format_anomaly, found)) == ("" if expected == "-" else expected)


def test_an_anomaly_names_its_operations() -> None:
    write, abort, read = history = parse_history("w.1 send p@0=a, w.1 abort, r poll p@0=a")
    (found,) = check(history)
    assert found.operations == (read, write, abort)
    assert str(found) == "AbortedRead p/0@0='a': r poll ok 20-25; w send ok 0-5 in 1; w abort ok 10-15 in 1"


def test_a_cycle_names_the_operations_of_every_step() -> None:
    text = (
        "a.1 send p@0=a q@1=b, b.1 send p@1=c q@0=d, a.1 commit, b.1 commit, r poll p@1=c q@1=b p@0=a q@0=d"
    )
    history = parse_history(text)
    cycles = [each for each in check(history) if each.item is None]
    assert [set(cycle.operations) for cycle in cycles] == [set(history[:2])]
    assert [each for each in check(history, dependencies=["wr", "rw"]) if each.item is None] == []


def reaches(graph: dict[int, list[int]], start: int) -> set[int]:
    found, left = set(), [start]
    while left:
        new = set(graph.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


@given(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=4), max_size=10))
def test_components_are_those_that_reach_each_other(graph: dict[int, list[int]]) -> None:
    found = {frozenset(component) for component in components(graph)}
    nodes = set(graph).union(*graph.values()) if graph else set()
    reach = {node: reaches(graph, node) for node in nodes}
    expected = {
        frozenset({node} | {other for other in reach[node] if node in reach[other]}) for node in nodes
    }
    assert found == expected


def test_components_of_a_long_path_need_no_recursion() -> None:
    graph = {number: [number + 1] for number in range(50_000)}
    assert sum(1 for _ in components(graph)) == 50_001


class Model:
    """A correct log whose processes take steps in any order. Transactions write, read and end; time is a
    counter.
    """

    def __init__(self, chance: random.Random, *, one_at_a_time: bool) -> None:
        self.chance, self.one_at_a_time = chance, one_at_a_time
        self.now, self.values, self.history = 0, 0, list[Operation]()
        self.logs: dict[str, list[tuple[str, str | None]]] = {name: [] for name in "pqs"}
        self.open: dict[str, set[str]] = {}
        self.number = dict.fromkeys("abc", 0)
        self.fate: dict[str, bool] = {}
        self.positions = {(process, name): 0 for process in "abcrt" for name in "pqs"}

    def note(
        self,
        process: str,
        kind: Kind,
        items: list[Item],
        outcome: Outcome = Outcome.OK,
        txn: str | None = None,
    ) -> None:
        begin, self.now = self.now, self.now + 2
        self.history.append(Operation(process, 0, kind, outcome, begin, begin + 1, tuple(items), txn))

    def send(self, process: str, txn: str | None) -> None:
        items = []
        for _ in range(self.chance.randint(1, 3)):
            name, self.values = self.chance.choice("pqs"), self.values + 1
            is_told = txn is None or self.chance.random() < 0.8
            items.append(Item(name, 0, len(self.logs[name]) if is_told else None, self.values))
            self.logs[name].append((self.values, txn))
        self.note(process, Kind.SEND, items, Outcome.OK, txn)

    def poll(self, process: str, txn: str | None, most: int) -> None:
        items = []
        for name, log in self.logs.items():
            taken = 0
            while taken < most and (at := self.positions[process, name]) < len(log):
                value, writer = log[at]
                if writer in self.open:
                    break  # a read_committed reader ends at the last stable offset
                self.positions[process, name] += 1
                if value is not None and (writer is None or self.fate[writer]):
                    items.append(Item(name, 0, at, value))
                    taken += 1
        self.note(process, Kind.POLL, items, Outcome.OK, txn)

    def end(self, process: str, txn: str) -> None:
        self.fate[txn] = is_commit = self.chance.random() < 0.7
        touched = self.open.pop(txn)
        for name in touched:
            self.logs[name].append((None, None))
        unknown = is_commit and self.chance.random() < 0.3
        self.note(
            process,
            Kind.COMMIT if is_commit else Kind.ABORT,
            [],
            Outcome.UNKNOWN if unknown else Outcome.OK,
            txn,
        )
        self.number[process] += 1

    def step(self) -> None:
        process = self.chance.choice([*self.open_processes()] if self.one_at_a_time and self.open else "abc")
        txn = f"{process}{self.number[process]}"
        if txn not in self.open:
            self.open[txn] = set()
            # A transaction begins with a read. If transactions run one at a time, it reads all records up to
            # the newest.
            self.poll(process, txn, 1_000 if self.one_at_a_time else 2)
        elif self.chance.random() < 0.6:
            self.send(process, txn)
            self.open[txn] |= {item.topic for item in self.history[-1].items}
        else:
            self.end(process, txn)
        if self.chance.random() < 0.3:
            self.poll(self.chance.choice("rt"), None, 2)

    def open_processes(self) -> set[str]:
        return {txn[0] for txn in self.open}

    def run(self, steps: int) -> list[Operation]:
        for _ in range(steps):
            self.step()
        for txn in list(self.open):
            self.end(txn[0], txn)
        for process in "rt":
            self.poll(process, None, 1_000)
        return self.history


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 120))
def test_concurrent_transactions_of_a_correct_log(chance: random.Random, steps: int) -> None:
    assert check(Model(chance, one_at_a_time=False).run(steps), dependencies=["wr"]) == []


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 120))
def test_one_transaction_at_a_time_makes_no_cycle_at_all(chance: random.Random, steps: int) -> None:
    history = Model(chance, one_at_a_time=True).run(steps)
    assert check(history) == []


def polled(history: list[Operation]) -> list[tuple[int, int]]:
    return [
        (index, place)
        for index, operation in enumerate(history)
        if operation.kind is Kind.POLL and operation.process in "rt"
        for place in range(len(operation.items))
    ]


def changed(history: list[Operation], index: int, items: list[Item]) -> list[Operation]:
    return [*history[:index], replace(history[index], items=tuple(items)), *history[index + 1 :]]


def lose(history: list[Operation], index: int, place: int) -> list[Operation]:
    """Take a record that a reader got, and remove it from all polls."""
    value = history[index].items[place].value
    return [
        replace(each, items=tuple(item for item in each.items if item.value != value))
        if each.kind is Kind.POLL
        else each
        for each in history
    ]


def repeat(history: list[Operation], index: int, place: int) -> list[Operation]:
    items = list(history[index].items)
    return changed(history, index, [*items[:place], items[place], *items[place:]])


def move(history: list[Operation], index: int, place: int) -> list[Operation]:
    items = list(history[index].items)
    offset = items[place].offset
    assert offset is not None
    items[place] = items[place]._replace(offset=offset + 1)
    return changed(history, index, items)


def swap_values(history: list[Operation], index: int, place: int) -> list[Operation]:
    items = list(history[index].items)
    items[place] = items[place]._replace(value=-1)
    return changed(history, index, items)


def abort(history: list[Operation], index: int, place: int) -> list[Operation]:
    """Take a record that was read, and record an abort of its transaction."""
    value = history[index].items[place].value
    send = next(
        each for each in history for item in each.items if each.kind is Kind.SEND and item.value == value
    )
    return [
        replace(each, kind=Kind.ABORT, outcome=Outcome.OK)
        if each.kind is Kind.COMMIT and each.unit == send.unit
        else each
        for each in history
    ]


def read_early(history: list[Operation], index: int, place: int) -> list[Operation]:
    """Move a poll to a time before the first send."""
    return changed(
        [replace(history[index], begin=-2, end=-1), *history[:index]], 0, list(history[index].items)
    )


@settings(deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(10, 120),
    st.sampled_from([lose, repeat, move, swap_values, abort, read_early]),
)
def test_a_corrupted_history_is_found(chance: random.Random, steps: int, corrupt) -> None:
    history = Model(chance, one_at_a_time=False).run(steps)
    places = polled(history)
    if not places:
        return
    index, place = chance.choice(places)
    if corrupt is lose and not _is_due(history, history[index].items[place]):
        return
    assert check(corrupt(history, index, place), dependencies=["wr"]) != []


def _is_due(history: list[Operation], lost: Item) -> bool:
    """Return True if the checker must report a lost record.

    It must if the commit is recorded and a later offset was read.
    """
    send = next(
        each for each in history for item in each.items if each.kind is Kind.SEND and item.value == lost.value
    )
    is_known = send.unit == send or any(
        each.kind is Kind.COMMIT and each.outcome is Outcome.OK and each.unit == send.unit for each in history
    )
    told = next(item for item in send.items if item.value == lost.value)
    later = [
        item.offset or 0
        for index, place in polled(history)
        if (item := history[index].items[place]).topic == lost.topic
    ]
    return is_known and told.offset is not None and max(later) > (lost.offset or 0)
