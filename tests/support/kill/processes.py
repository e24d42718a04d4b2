"""A broker, a program that consumes, transforms and produces, and a reader of its output: processes to be
killed; and what must be true of the output, however they were."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from oncelog import Consumer, Producer, TopicPartition
from oncelog.errors import OncelogError, TimedOut
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy import Proxy, WireEvent
from oncelog.testing.proxy.rules import Action, Rule
from support.kill import programs
from support.topics import new_topic, read
from support.wait import attempts, pause

PATIENCE_S = 240.0
_CHILDREN = [sys.executable, programs.__file__]


class Child:
    """A process of `programs`; `look_after` starts it again when it ended by itself."""

    def __init__(self, log_file: Path, *arguments: str) -> None:
        self.arguments, self.log_file = arguments, log_file
        self.failures = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen([*_CHILDREN, *self.arguments], stderr=log)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def look_after(self) -> None:
        """Start it if it does not run."""
        if self._process is None:
            self.start()
        elif self._process.poll() is not None:
            self.failures += 1
            self.start()


class FragileBroker(BrokerProcess):
    """`oncelog serve` that dies by itself where `plan` says: see programs.broker."""

    @property
    def plan(self) -> Path:
        return self.data_dir.with_name("plan")

    def _command(self) -> list[str]:
        serve = super()._command()
        return [*_CHILDREN, "broker", str(self.plan), *serve[serve.index("serve") :]]

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def revive(self) -> int:
        """Start it until it stays; how often it died on the way up."""
        self.kill()
        for deaths in range(10):
            try:
                self.start()
            except TimedOut:
                continue
            return deaths
        raise AssertionError(f"the broker does not start; see {self.log_file}")


class World:
    """The processes, and a topic of numbers that they copy. A context manager.

    The copier reaches the broker through `proxy`. `fed`: how many numbers are in the source; `ended`: how
    often the copier was told that a transaction is committed.
    """

    def __init__(self, directory: Path, **settings: object) -> None:
        given = {key.replace("_", "."): value for key, value in settings.items()}
        self.broker = FragileBroker(directory / "data", settings=given)
        self.directory, self.fed, self.ended = directory, 0, 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.broker)
        self.servers = self.broker.bootstrap_servers
        self.source, self.target = new_topic(self.servers), new_topic(self.servers, 2)
        self.proxy = self._stack.enter_context(Proxy(self.servers, on_event=self._count))
        self._producer = self._stack.enter_context(
            Producer({"bootstrap.servers": self.servers}, linger_ms=5, retry_backoff_ms=10)
        )
        self.copier = self._child("copier", self.proxy.bootstrap_servers, "copier", self.source, self.target)
        self.seen = self.directory / "seen"
        self.reader = self._child("reader", self.servers, "reader", self.target, str(self.seen))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _child(self, *arguments: str) -> Child:
        child = Child(self.directory / f"{arguments[2]}.log", *arguments)
        self._stack.callback(child.kill)
        child.start()
        return child

    def feed(self, count: int = 20) -> None:
        """Put more numbers into the source."""
        numbers = range(self.fed, self.fed + count)
        self._producer.send_many(self.source, [b"%d" % number for number in numbers]).result(PATIENCE_S)
        self.fed += count

    def _count(self, event: WireEvent) -> None:
        if event.api == "EndTxn" and event.direction == "response" and not event.error_code:
            self.ended += event.fate == "passed"

    # Stopping at a step

    def hold(self, api: str, side: str) -> int:
        """From now on the next such message stops in the network; a mark for `wait_held`."""
        mark = self.proxy.events[-1].number if self.proxy.events else 0
        self.proxy.add(Rule(action=Action.HOLD, api=api, direction=side, nth=1))
        return mark

    def wait_held(self, mark: int) -> None:
        def is_held(events: Sequence[WireEvent]) -> bool:
            for event in reversed(events):
                if event.number <= mark:
                    return False
                if event.fate == "held":
                    return True
            return False

        self.wait(lambda: self.proxy.wait_until(is_held, 0.5), "a message of that step")

    def kill(self, *victims: str) -> None:
        """SIGKILL to each of these: broker, copier, reader."""
        for victim in victims:
            getattr(self, victim).kill()

    def revive(self) -> None:
        """Start whoever is dead."""
        if not self.broker.is_alive():
            self.broker.revive()
        self.copier.look_after()
        self.reader.look_after()

    def let_go(self, *, lose: bool) -> None:
        self.proxy.clear()
        self.proxy.release(lose=lose)

    # Waiting

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds; processes that ended by themselves are started again."""
        text = f"waited {PATIENCE_S:g} s for {what}; see {self.directory}"
        for _ in attempts(lambda: text, PATIENCE_S):
            if condition():
                return
            self.copier.look_after()
            self.reader.look_after()
            pause(0.01)

    def committed(self, group: str = "copier") -> int:
        """The next number that the group will read, by what it committed."""
        tp = TopicPartition(self.source, 0)
        try:
            with Consumer({"bootstrap.servers": self.servers, "group.id": group}) as consumer:
                held = consumer.committed([tp])[tp]
        except OncelogError:
            return 0
        return held.offset if held else 0

    def wait_ended(self, count: int) -> None:
        """Until the copier has done so many more transactions."""
        wanted = self.ended + count
        self.wait(lambda: self.ended >= wanted, f"{count} transactions")

    def wait_copied(self, count: int | None = None, group: str = "copier") -> None:
        """Until so many numbers (None: all) are copied and committed."""
        wanted = self.fed if count is None else count
        self.wait(lambda: self.committed(group) >= wanted, f"{wanted} copied numbers")

    # What must be true

    def check(self) -> None:
        """Wait for the rest, then compare with a run without faults and with what the reader got."""
        self.wait_copied()
        found = self._values(self.target)
        calm = new_topic(self.servers, 2)
        undisturbed = self._child("copier", self.servers, "undisturbed", self.source, calm)
        self.wait_copied(group="undisturbed")
        undisturbed.kill()
        assert list(found.values()) == list(self._values(calm).values())
        assert list(found.values()) == [
            *(b"debit %d" % number for number in range(self.fed)),
            *(b"credit %d" % number for number in range(self.fed)),
        ]
        self.wait(lambda: set(self._seen()) >= set(found), "the reader to get everything")
        assert self._seen() == found, "the reader got what was not committed"

    def _values(self, topic: str) -> dict[tuple[int, int], bytes]:
        return {(each.partition, each.offset): each.value or b"" for each in read(self.servers, topic)}

    def _seen(self) -> dict[tuple[int, int], bytes]:
        """What the reader ever got; the same place always with the same value."""
        found: dict[tuple[int, int], bytes] = {}
        for line in self.seen.read_bytes().splitlines():
            partition, offset, value = line.split(b" ", 2)
            place = int(partition), int(offset)
            assert found.setdefault(place, value) == value, f"two values at {place}"
        return found
