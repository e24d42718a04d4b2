"""Where stories play: a broker of our own or a given cluster, a topic and a proxy per scene."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.explain.stories.scene import Scene
from oncelog.server.embedded import Broker
from oncelog.testing.proxy.proxy import Proxy
from oncelog.testing.proxy.rules import Rule
from oncelog.types import TopicPartition

READY_SECONDS = 20.0


class Stage:
    """A context manager. `bootstrap_servers` None: a broker inside this process, gone at the end.

    On a given cluster each scene has a topic of its own, named `oncelog-explain-...`, deleted after it.
    """

    def __init__(self, bootstrap_servers: str | None = None) -> None:
        self._given = bootstrap_servers
        self._broker: Broker | None = None
        self.scenes: list[Scene] = []

    def __enter__(self) -> Self:
        if self._given is None:
            self._broker = Broker()
            self._broker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._broker is not None:
            self._broker.stop()

    @property
    def upstream(self) -> str:
        """The broker's own address, past the proxy."""
        if self._given is not None:
            return self._given
        if self._broker is None:
            raise MisuseError("the stage is not open: use it in a with statement")
        return self._broker.bootstrap_servers

    @property
    def is_own_broker(self) -> bool:
        """Whether the broker belongs to the stage, so that a story may kill it."""
        return self._given is None

    @contextmanager
    def scene(
        self,
        heading: str,
        rules: Sequence[Rule] = (),
        *,
        partitions: int = 1,
        seed: int = 0,
        is_drawn: bool = True,
        upstream: str | None = None,
    ) -> Iterator[Scene]:
        """Play a scene: topic and proxy are ready inside; at the end the log is read and counted."""
        address = upstream or self.upstream
        topic = f"oncelog-explain-{uuid.uuid4().hex[:12]}"
        create_topic(address, topic, partitions)
        try:
            with Proxy(address, rules=rules, seed=seed) as proxy:
                scene = Scene(heading, proxy, address, topic, partitions, is_drawn)
                yield scene
                scene.finish()
            self.scenes.append(scene)
        finally:
            delete_topic(address, topic)


def create_topic(bootstrap_servers: str, topic: str, partitions: int = 1) -> None:
    """Create a topic and wait until every partition has a leader that answers. Raises OncelogError."""
    deadline = time.monotonic() + READY_SECONDS
    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        while (error := _try_to_create(admin, topic, partitions)) is not None:
            # A topic that is being deleted still exists for a moment on Apache Kafka.
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.05)
        while not _has_leaders(admin, topic):
            if time.monotonic() > deadline:
                raise TimedOut(f"topic {topic} has no leader after {READY_SECONDS:g} s")
            time.sleep(0.05)
        # Repeated until each leader serves it, which on Apache Kafka is a moment after it was told of.
        admin.list_offsets({TopicPartition(topic, index): "latest" for index in range(partitions)})


def _try_to_create(admin: Admin, topic: str, partitions: int) -> OncelogError | None:
    outcome = admin.create_topics([NewTopic(topic, num_partitions=partitions)], raise_errors=False)
    return outcome[topic].error


def _has_leaders(admin: Admin, topic: str) -> bool:
    described = admin.describe_topics([topic], raise_errors=False)[topic]
    return described.error is None and all(each.leader is not None for each in described.partitions)


def delete_topic(bootstrap_servers: str, topic: str) -> None:
    """Delete a topic; that it is gone already, or its broker, is no error."""
    try:
        with Admin({"bootstrap.servers": bootstrap_servers, "request.timeout.ms": 5_000}) as admin:
            admin.delete_topics([topic], raise_errors=False)
    except OncelogError:
        pass
