"""The Kafka clients of the sink's tasks, which a Python worker keeps from one task to the next.

Opening connections, looking up coordinators and fetching metadata cost several times as much as a transaction
with a few rows. So a task borrows clients whose connections earlier tasks of its worker have opened. Only
connections and look-ups are kept. A task still gets an epoch of its own (InitProducerId), which fences every
other attempt. Only then does it read its task marker: the last batch that it committed (state.py). So nothing
depends on which tasks ran in which worker before.

The first task of a worker in a micro-batch also looks up the partitions of its topics again. A topic may have
more of them than before, or fewer, if it was deleted and created again. Each task compares the ids of its
topics with those at that look-up before it commits.

Clients are closed if their borrower fails. A task also closes kept clients that were idle for half a minute
or are five minutes old, so replaced certificate files take effect soon. If a broker has closed a kept
connection, the client opens it again, as any client does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import OncelogError, UnknownTopicOrPartition
from oncelog.runtime.system import Runtime, current
from oncelog.spark.sink.sink_options import SinkSettings
from oncelog.spark.sink.topic_ids import topic_ids

MAX_KEPT = 4
"""The maximum number of TaskClients that a worker keeps. Each has different settings."""
_MAX_IDLE_NS, _MAX_AGE_NS = 30 * 10**9, 300 * 10**9


class TaskClients:
    """An admin client and a transactional producer, used by one task at a time."""

    def __init__(self, settings: SinkSettings) -> None:
        self.admin = Admin(settings.admin)
        self._settings = settings
        self._producer: Producer | None = None
        self._scope: object = None
        self._topic_ids: dict[str, str | None] = {}
        self._is_scope_new = False
        self.made_ns = self.used_ns = current().monotonic_ns()

    def begin(self, scope: object) -> None:
        """Set the scope of the next use, such as a micro-batch. Within one scope, partitions and ids of
        topics are looked up once.

        Guard: test_a_micro_batch_uses_the_partitions_that_its_topic_has_now.
        """
        if scope != self._scope:
            self._is_scope_new = True
            self._topic_ids = {}
        self._scope = scope

    def topic_id(self, topic: str) -> str | None:
        """Return the id that a topic had at the first call for it in this scope.

        Call it after `producer`: the broker may create the topic, as for the first record of a producer.
        """
        if topic not in self._topic_ids:
            try:
                found = topic_ids(self.admin, [topic])
            except UnknownTopicOrPartition:
                # Let the producer look the topic up: the admin client never lets the broker create a topic,
                # and a broker may not know a new topic yet. Guard:
                # test_the_broker_creates_a_missing_topic_of_the_column_topic.
                assert self._producer is not None
                self._producer._look_up_topic(topic)
                found = topic_ids(self.admin, [topic])
            self._topic_ids |= found
        return self._topic_ids[topic]

    def producer(self, transactional_id: str) -> Producer:
        """Return the producer, set to this transactional id. Before any other use, the caller must call
        `init_transactions`.
        """
        if self._producer is None:
            self._producer = Producer({**self._settings.producer, "transactional.id": transactional_id})
        else:
            self._producer._change_transactional_id(transactional_id, forgets_topics=self._is_scope_new)
        self._is_scope_new = False
        return self._producer

    def drop_producer(self) -> None:
        """Close the producer. The next call of `producer` creates a new one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def is_usable(self, now_ns: int) -> bool:
        """Return True if the clients were created less than five minutes ago and used less than half a minute
        ago.
        """
        return now_ns - self.used_ns < _MAX_IDLE_NS and now_ns - self.made_ns < _MAX_AGE_NS

    def close(self) -> None:
        """Close both clients. An open transaction is aborted."""
        try:
            self.drop_producer()
        finally:
            self.admin.close()


class KeptClients:
    """The clients that a process keeps. Threads may share this object; each of them borrows different
    clients.
    """

    def __init__(self) -> None:
        self._kept: dict[object, TaskClients] = {}

    @contextmanager
    def borrow(self, settings: SinkSettings, scope: object = None) -> Iterator[TaskClients]:
        """Yield kept clients for these settings, or new ones. If the `with` block raises, close them.
        Otherwise keep them if there is room. `scope` identifies the micro-batch, for `TaskClients.begin`.
        """
        runtime = current()
        key = tuple(sorted(settings.producer.items(), key=str))
        clients = self._take(key, runtime) or TaskClients(settings)
        clients.begin(scope)
        try:
            yield clients
        except BaseException:
            with suppress(OncelogError):
                clients.close()
            raise
        clients.used_ns = runtime.monotonic_ns()
        if key in self._kept or len(self._kept) >= MAX_KEPT:
            clients.close()
        else:
            self._kept[key] = clients

    def _take(self, key: object, runtime: Runtime) -> TaskClients | None:
        """Close clients that are no longer usable. Remove and return the kept clients for these settings, or
        None.
        """
        now_ns = runtime.monotonic_ns()
        for other, clients in list(self._kept.items()):
            if not clients.is_usable(now_ns) and self._kept.pop(other, None) is not None:
                with suppress(OncelogError):
                    clients.close()
        return self._kept.pop(key, None)

    def close(self) -> None:
        """Close all clients that are not borrowed."""
        while self._kept:
            self._kept.popitem()[1].close()
