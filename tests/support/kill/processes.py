"""A broker, a copying program and a reader of its output, as processes that tests kill.

The program consumes, transforms and produces. `CopyUnderKills.check` verifies the output after the kills.
"""

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
    """A process that runs one of the programs of `support.kill.programs`."""

    def __init__(self, log_file: Path, *arguments: str) -> None:
        self.arguments, self.log_file = arguments, log_file
        self.failures = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen([*_CHILDREN, *self.arguments], stderr=log)

    def kill(self) -> None:
        """Kill the process by SIGKILL if it is running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def start_if_dead(self) -> None:
        """Start the process if it is not running. A process that has ended by itself counts as a failure."""
        if self._process is None:
            self.start()
        elif self._process.poll() is not None:
            self.failures += 1
            self.start()


class FragileBroker(BrokerProcess):
    """`oncelog serve` that kills itself at the steps in the file `plan`. See `programs.broker`."""

    @property
    def plan(self) -> Path:
        return self.data_dir.with_name("plan")

    def _command(self) -> list[str]:
        serve = super()._command()
        return [*_CHILDREN, "broker", str(self.plan), *serve[serve.index("serve") :]]

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def revive(self) -> int:
        """Start the broker until it keeps running. Return how many starts ended in its death."""
        self.kill()
        for deaths in range(10):
            try:
                self.start()
            except TimedOut:
                continue
            return deaths
        raise AssertionError(f"the broker does not start; see {self.log_file}")


STARTING = ("FindCoordinator", "InitProducerId")
"""The requests that a copier sends only at its start."""


class CopyUnderKills:
    """A context manager with the processes, and with a topic of numbers that the copier copies.

    The copier reaches the broker through `proxy`. `fed` counts the numbers in the source topic. `ended`
    counts the successful responses to EndTxn that the copier got. `program` has the name of the copier's
    program, and any arguments after its first four.
    """

    def __init__(self, directory: Path, program: Sequence[str] = ("copier",), **settings: object) -> None:
        self._program, *self._arguments = program
        config = {key.replace("_", "."): value for key, value in settings.items()}
        self.broker = FragileBroker(directory / "data", settings=config)
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
        self.copier = self._copier(self.proxy.bootstrap_servers, "copier", self.target)
        self.seen = self.directory / "seen"
        self.reader = self._child("reader", self.servers, "reader", self.target, str(self.seen))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _copier(self, servers: str, group: str, target: str) -> Child:
        return self._child(self._program, servers, group, self.source, target, *self._arguments)

    def _child(self, *arguments: str) -> Child:
        child = Child(self.directory / f"{arguments[2]}.log", *arguments)
        self._stack.callback(child.kill)
        child.start()
        return child

    def feed(self, count: int = 20) -> None:
        """Append `count` more numbers to the source topic."""
        numbers = range(self.fed, self.fed + count)
        self._producer.send_many(self.source, [b"%d" % number for number in numbers]).result(PATIENCE_S)
        self.fed += count

    def _count(self, event: WireEvent) -> None:
        if event.api == "EndTxn" and event.direction == "response" and not event.error_code:
            self.ended += event.fate == "passed"

    # Stopping at a step

    def reach(self, api: str, side: str) -> None:
        """Let transactions run until the proxy holds a message of this API and side."""
        mark = self.hold(api, side)
        if api in STARTING:
            self.copier.restart()
        self.feed()
        self.wait_held(mark)

    def hold(self, api: str, side: str) -> int:
        """Let the proxy hold the next message of this API. Return a mark for `wait_held`.

        `side` is request or response.
        """
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
        """Kill the named processes (broker, copier, reader) by SIGKILL."""
        for victim in victims:
            getattr(self, victim).kill()

    def revive(self) -> None:
        """Start each process that is not running."""
        if not self.broker.is_alive():
            self.broker.revive()
        self.copier.start_if_dead()
        self.reader.start_if_dead()

    def let_go(self, *, lose: bool) -> None:
        self.proxy.clear()
        self.proxy.release(lose=lose)

    # Waiting

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition is true. Restart the copier and the reader when they end by themselves."""
        text = f"waited {PATIENCE_S:g} s for {what}; see {self.directory}"
        for _ in attempts(lambda: text, PATIENCE_S):
            if condition():
                return
            self.copier.start_if_dead()
            self.reader.start_if_dead()
            pause(0.01)

    def committed(self, group: str = "copier") -> int:
        """Return the group's committed offset in the source topic, or 0."""
        tp = TopicPartition(self.source, 0)
        try:
            with Consumer({"bootstrap.servers": self.servers, "group.id": group}) as consumer:
                held = consumer.committed([tp])[tp]
        except OncelogError:
            return 0
        return held.offset if held else 0

    def wait_ended(self, count: int) -> None:
        """Wait until the copier has ended `count` more transactions."""
        target = self.ended + count
        self.wait(lambda: self.ended >= target, f"{count} transactions")

    def wait_copied(self, count: int | None = None, group: str = "copier") -> None:
        """Wait until `count` numbers are copied and their offsets committed. None waits for all."""
        target = self.fed if count is None else count
        self.wait(lambda: self.committed(group) >= target, f"{target} copied numbers")

    # Checks

    def check(self) -> None:
        """Wait until all numbers are copied, and then compare the records of the target topic.

        They must equal those of a copier that ran without faults, and also the records that the reader got.
        """
        self.wait_copied()
        copied = self._values(self.target)
        calm = new_topic(self.servers, 2)
        undisturbed = self._copier(self.servers, "undisturbed", calm)
        self.wait_copied(group="undisturbed")
        undisturbed.kill()
        assert list(copied.values()) == list(self._values(calm).values())
        assert list(copied.values()) == [
            *(b"debit %d" % number for number in range(self.fed)),
            *(b"credit %d" % number for number in range(self.fed)),
        ]
        self.wait(lambda: set(self._seen()) >= set(copied), "the reader to get everything")
        assert self._seen() == copied, "the reader got what was not committed"

    def _values(self, topic: str) -> dict[tuple[int, int], bytes]:
        return {
            (record.partition, record.offset): record.value or b"" for record in read(self.servers, topic)
        }

    def _seen(self) -> dict[tuple[int, int], bytes]:
        """Return the records that the reader got. Check that no offset ever had two values."""
        values: dict[tuple[int, int], bytes] = {}
        for line in self.seen.read_bytes().splitlines():
            partition, offset, value = line.split(b" ", 2)
            place = int(partition), int(offset)
            assert values.setdefault(place, value) == value, f"two values at {place}"
        return values
