"""The environment of a story: an embedded broker or a cluster, with a topic and a proxy for each run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.explain.stories.story_run import StoryRun
from oncelog.server.embedded import Broker
from oncelog.testing.proxy.proxy import Proxy
from oncelog.testing.proxy.rules import Rule
from oncelog.types import TopicPartition

READY_SECONDS = 20.0


class StoryEnvironment:
    """The cluster on which a story runs, as a context manager.

    If `bootstrap_servers` is None, it is a broker inside this process, which is stopped at the end. Each run
    has its own topic `oncelog-explain-...`, which is deleted after the run.
    """

    def __init__(self, bootstrap_servers: str | None = None) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._broker: Broker | None = None
        self.runs: list[StoryRun] = []

    def __enter__(self) -> Self:
        if self._bootstrap_servers is None:
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
        """The address of the cluster itself, without the proxy.

        Raises MisuseError outside the with statement.
        """
        if self._bootstrap_servers is not None:
            return self._bootstrap_servers
        if self._broker is None:
            raise MisuseError("the environment is not open: use it in a with statement")
        return self._broker.bootstrap_servers

    @property
    def is_own_broker(self) -> bool:
        """True if the cluster is this environment's own broker, and not a cluster of the user."""
        return self._bootstrap_servers is None

    @contextmanager
    def run(
        self,
        heading: str,
        rules: Sequence[Rule] = (),
        *,
        partitions: int = 1,
        seed: int = 0,
        is_drawn: bool = True,
        upstream: str | None = None,
    ) -> Iterator[StoryRun]:
        """Yield a StoryRun whose topic exists and whose proxy is running, for the body of the `with`
        statement.

        After the body, read the log, count the records and delete the topic. `upstream`: address of the
        cluster, by default that of the environment.
        """
        address = upstream or self.upstream
        topic = f"oncelog-explain-{uuid.uuid4().hex[:12]}"
        create_topic(address, topic, partitions)
        try:
            with Proxy(address, rules=rules, seed=seed) as proxy:
                run = StoryRun(heading, proxy, address, topic, partitions, is_drawn)
                yield run
                run.finish()
            self.runs.append(run)
        finally:
            delete_topic(address, topic)


def create_topic(bootstrap_servers: str, topic: str, partitions: int = 1) -> None:
    """Create a topic, and wait until the leader of each partition responds.

    Raises OncelogError, for example TimedOut after READY_SECONDS.
    """
    deadline = time.monotonic() + READY_SECONDS
    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        while (error := _try_to_create(admin, topic, partitions)) is not None:
            # Retry all errors until the deadline: Apache Kafka refuses to create a topic again until its
            # deletion is complete.
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.05)
        while not _has_leaders(admin, topic):
            if time.monotonic() > deadline:
                raise TimedOut(f"topic {topic} has no leader after {READY_SECONDS:g} s")
            time.sleep(0.05)
        # Apache Kafka's metadata may name a leader that does not accept requests yet. `list_offsets` retries
        # until each leader responds.
        admin.list_offsets({TopicPartition(topic, index): "latest" for index in range(partitions)})


def _try_to_create(admin: Admin, topic: str, partitions: int) -> OncelogError | None:
    outcome = admin.create_topics([NewTopic(topic, num_partitions=partitions)], raise_errors=False)
    return outcome[topic].error


def _has_leaders(admin: Admin, topic: str) -> bool:
    described = admin.describe_topics([topic], raise_errors=False)[topic]
    return described.error is None and all(partition.leader is not None for partition in described.partitions)


def delete_topic(bootstrap_servers: str, topic: str) -> None:
    """Delete a topic. Errors are ignored, such as an unknown topic or a broker that does not respond."""
    try:
        with Admin({"bootstrap.servers": bootstrap_servers, "request.timeout.ms": 5_000}) as admin:
            admin.delete_topics([topic], raise_errors=False)
    except OncelogError:
        pass
