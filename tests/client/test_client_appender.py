"""The appender in C (client/producer/_appender.c) does the same as the one in Python, appender.py."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.row_loops import c_module

from oncelog.client.producer.appender import PYTHON_FORM
from oncelog.client.producer.batch import BatchResult
from oncelog.client.producer.delivery import Parts, RecordFuture
from oncelog.types import RecordMetadata, TopicPartition
from oncelog.wire.header import HEADER_BYTES

NOW_MS = 1_764_000_000_000
FORMS = ["Python", "C"]

DATA = st.one_of(st.none(), st.binary(max_size=4), st.just(b"x" * 90))
VALUES = st.one_of(DATA, st.sampled_from([bytearray(b"b"), "text", 5]))
KEYS = st.one_of(st.none(), st.sampled_from([b"", b"a", b"b", b"key", "text"]))
HEADERS = st.sampled_from([(), (("h", b"1"),), (("é", None), ("", b""))])
PARTITIONS = st.sampled_from([None, None, 0, 1, 2, -1, 2**70, "0", True])
TOPICS = st.sampled_from(["t", "t", "t", "unknown"])
TIMES = st.sampled_from([None, 0, NOW_MS, NOW_MS + 5, -1, 2**63, "now"])
ROWS = st.tuples(st.sampled_from([0, NOW_MS, NOW_MS - 7, 2**63 - 1]), DATA, DATA, HEADERS)
NEW_BATCH = st.tuples(st.just("begin"), st.integers(0, 1))
STICKY = st.tuples(st.just("stick"), st.integers(-1, 2))
CHANGING = st.tuples(st.just("change"), st.booleans())
CALLBACK = st.sampled_from([None, print])
SEND = st.tuples(st.just("send"), TOPICS, VALUES, KEYS, PARTITIONS, TIMES, HEADERS, CALLBACK)
APPEND = st.tuples(st.just("append"), TOPICS, PARTITIONS, ROWS, st.integers(21, 200), CALLBACK)
MANY = st.tuples(
    st.just("many"),
    TOPICS,
    PARTITIONS,
    st.lists(VALUES, max_size=6),
    st.none() | st.lists(KEYS, max_size=6),
    st.one_of(st.sampled_from([0, NOW_MS, -1]), st.lists(st.sampled_from([5, NOW_MS, -1]), max_size=6)),
    HEADERS,
    st.integers(0, 2),
)


def form_of(name: str) -> Callable[[str], Any]:
    """Return a function that looks up, by name, the classes and functions of the C or the Python appender."""
    if name == "Python":
        return PYTHON_FORM.__getitem__
    module = c_module("oncelog.client.producer._appender")
    return lambda part: getattr(module, part)


class Player:
    """Plays operations on an appender with two partitions, in C or in Python."""

    def __init__(
        self, name: str, *, hashes_keys: bool = True, wall_ns: Any = lambda: NOW_MS * 1_000_000
    ) -> None:
        self.form = form_of(name)
        self.lock = threading.RLock()
        self.appender = self.form("Appender")(700)
        clock = wall_ns or time.time_ns
        self.appender.prepare(self.lock, clock, RecordFuture, is_system_clock=wall_ns is None)
        self.open = self.form("OpenBatches")(hashes_keys, 400)
        self.open.buffers.extend([None, None, None])
        self.open.count = 2
        self.appender.topics["t"] = self.open
        self.batches: list[tuple[BatchResult, Any]] = []

    def play(self, name: str, *arguments: Any) -> object:
        """Carry out one operation.

        Return the part of its result that must be equal in C and Python.
        """
        match name:
            case "begin":
                result = BatchResult(TopicPartition("t", arguments[0]))
                buffer = self.form("RecordBuffer")(result, result.callbacks, HEADER_BYTES)
                self.batches.append((result, buffer))
                self.open.buffers[arguments[0]] = buffer
            case "stick":
                self.open.sticky = arguments[0]
            case "change":
                self.appender.is_changing = arguments[0]
            case "send":
                future = self.appender.send(*arguments)
                return future and (self.number_of(future._batch_result), future._index, type(future))
            case "append":
                appended = self.appender.append(*arguments)
                return appended and (self.number_of(appended[0]), appended[1])
            case "many":
                parts: list[Any] = []
                *columns, first = arguments
                number = self.appender.append_many(*columns, first, 5, parts)
                return number, [(self.number_of(result), *rest) for result, *rest in parts]
        return None

    def number_of(self, result: BatchResult) -> int:
        return [known for known, _ in self.batches].index(result)

    def state(self) -> object:
        """Return all records and counts."""
        return self.appender.buffered_bytes, [
            (
                buffer.count,
                buffer.size_bytes,
                buffer.base_timestamp_ms,
                buffer.max_timestamp_ms,
                list(buffer.times()),
                bytes(buffer.copy()),
                result.callbacks,
            )
            for result, buffer in self.batches
        ]


@given(
    operations=st.lists(st.one_of(SEND, SEND, APPEND, MANY, NEW_BATCH, STICKY, CHANGING), max_size=25),
    hashes_keys=st.booleans(),
)
def test_both_forms_append_the_same_records_to_the_same_batches(
    operations: list[tuple[Any, ...]], hashes_keys: bool
) -> None:
    python, c = Player("Python", hashes_keys=hashes_keys), Player("C", hashes_keys=hashes_keys)
    begin = [("stick", 0), ("begin", 0), ("begin", 1)]
    for operation in begin + operations:
        assert c.play(*operation) == python.play(*operation), operation
        assert c.state() == python.state(), operation
    taken = [[(buffer.take(), result.callbacks) for result, buffer in form.batches] for form in (python, c)]
    assert taken[0] == taken[1]


@pytest.mark.parametrize("name", FORMS)
def test_a_send_gives_the_lock_back(name: str) -> None:
    player = Player(name)
    player.play("begin", 0)
    for value in (b"fits", b"x" * 500):  # the second value needs a new batch
        player.play("send", "t", value, None, 0, None, (), None)
        assert not player.lock._is_owned()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FORMS)
def test_a_send_waits_while_another_thread_holds_the_lock(name: str) -> None:
    player = Player(name)
    player.play("begin", 0)
    holds, may_release = threading.Event(), threading.Event()

    def hold() -> None:
        with player.lock:
            holds.set()
            may_release.wait()
            assert player.batches[0][1].count == 0

    other = threading.Thread(target=hold)
    other.start()
    holds.wait()
    sender = threading.Thread(target=player.play, args=("send", "t", b"v", None, 0, None, (), None))
    sender.start()
    may_release.set()
    other.join()
    sender.join()
    assert player.batches[0][1].count == 1


@pytest.mark.parametrize("name", FORMS)
def test_an_error_of_the_clock_or_the_lock_leaves_no_record(name: str) -> None:
    def fail() -> int:
        raise KeyboardInterrupt

    class Lock:
        def acquire(self) -> None:
            raise KeyboardInterrupt

        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *error: object) -> None:
            raise AssertionError("it was not taken")

    for change in ({"wall_ns": fail}, {}):
        player = Player(name, **change)
        player.play("begin", 0)
        if not change:
            player.appender.lock = Lock()
        with pytest.raises(KeyboardInterrupt):
            player.appender.send("t", b"v", None, 0, None, (), None)
        assert player.batches[0][1].count == player.appender.buffered_bytes == 0


@pytest.mark.parametrize("name", FORMS)
def test_callbacks_get_metadata_or_the_error_and_none_of_their_exceptions_is_lost(name: str) -> None:
    call_back = form_of(name)("call_back")
    got: list[object] = []

    def callback(metadata: RecordMetadata | None, error: Exception | None) -> None:
        got.append((metadata, error))
        if len(got) % 2:
            raise SystemExit(len(got))

    callbacks = {0: callback, 2: callback, 1: callback}
    raised = call_back(callbacks, RecordMetadata, "t", 3, 100, [7, 8, 9], None)
    assert [(type(error), error.args) for error in raised] == [(SystemExit, (1,)), (SystemExit, (3,))]
    assert raised[0].__traceback__ is not None
    assert got == [(RecordMetadata("t", 3, 100 + index, 7 + index), None) for index in (0, 2, 1)]
    assert all(type(metadata) is RecordMetadata for metadata, _ in got)  # type: ignore[misc]
    got.clear()
    assert len(call_back({4: callback}, RecordMetadata, "t", 3, None, 55, None)) == 1
    assert got == [(RecordMetadata("t", 3, None, 55), None)]
    got.clear()
    failure = OSError("no")
    assert len(call_back({4: callback}, RecordMetadata, "t", 3, None, 0, failure)) == 1
    assert got == [(None, failure)]


@given(
    values=st.lists(VALUES, max_size=5),
    keys=st.lists(KEYS, max_size=6),
    max_bytes=st.integers(0, 100),
)
def test_both_forms_find_the_first_unusual_row(values: list[Any], keys: list[Any], max_bytes: int) -> None:
    python, c = (form_of(name)("first_unusual") for name in FORMS)
    assert c(values, keys, max_bytes) == python(values, keys, max_bytes)


def test_no_destructor_runs_within_an_append() -> None:
    """While an append runs, a callback's destructor could free the buffer. So an append must not replace an
    existing callback.

    Only code other than the appender can have put a callback there.
    """
    player = Player("C")
    player.play("begin", 0)
    result, buffer = player.batches[0]
    freed: list[str] = []

    class Callback:
        def __del__(self) -> None:
            freed.append("callback")

        def __call__(self, metadata: object, error: object) -> None: ...

    result.callbacks[0] = Callback()
    assert player.appender.send("t", b"v", None, 0, None, (), print)
    assert (buffer.count, freed) == (1, [])


def test_the_appender_in_c_leaks_nothing() -> None:
    form_of("C")

    def work() -> None:
        for _ in range(20):
            player = Player("C", wall_ns=None)
            player.play("begin", 0)
            callback = player.play  # makes a reference cycle that only the garbage collector frees
            for number in range(30):
                player.play("send", "t", b"v" * 300 * (number % 2), b"k", 0, None, (), callback)
                player.play("many", "t", 0, [b"v", b"w", 5], None, NOW_MS, (("h", b"x"),), 0)
            player.batches[0][1].take()
            player.play("begin", 1)

    def growth_bytes() -> int:
        before, _ = tracemalloc.get_traced_memory()
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        growth_bytes()
        # A leak grows in every round. Other threads of the test process allocate memory in some rounds only.
        assert min(growth_bytes() for _ in range(5)) < 5_000
    finally:
        tracemalloc.stop()


def test_parts_of_a_delivery_join_only_consecutive_records() -> None:
    first, second = (BatchResult(TopicPartition("t", partition)) for partition in (0, 1))
    parts = Parts()
    for result, index, count in ((first, 0, 2), (second, 0, 1), (first, 2, 3), (first, 9, 1), (second, 1, 1)):
        parts.add(result, index, count)
    assert parts.delivery()._parts == [(first, 0, 5), (second, 0, 2), (first, 9, 1)]
