"""The state of a broker: topics, coordinators, quotas, delayed fetches and counters.

It has no socket, thread or clock: the server passes `now_ms`, the milliseconds since the epoch, which never
decrease. `broker.dispatch` handles requests and timed work with this state.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

from oncelog.broker.append_events import AppendEvent
from oncelog.broker.coordinators.groups import GroupCoordinator
from oncelog.broker.coordinators.internal_topic import InternalTopic
from oncelog.broker.coordinators.internal_topic_config import CONSUMER_OFFSETS, TRANSACTION_STATE
from oncelog.broker.coordinators.markers import MarkerWriter
from oncelog.broker.coordinators.producer_ids import ProducerIds
from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.fetch_sessions import FetchSessions
from oncelog.broker.group_commit import FlushQueue
from oncelog.broker.metrics import Metrics, PartitionOffsets
from oncelog.broker.periodic import PeriodicTasks
from oncelog.broker.purgatory import FetchPurgatory
from oncelog.broker.quota_manager import QuotaManager
from oncelog.broker.request import Request
from oncelog.broker.security.authenticator import Authenticator
from oncelog.broker.security.authorizer import FULL_ACCESS, Access, Authorizer
from oncelog.broker.security.sasl import TokenCheck, token_check
from oncelog.broker.security.users import Users
from oncelog.broker.settings.dynamic_config import DynamicConfig
from oncelog.broker.settings.listeners import Listener
from oncelog.broker.stepwise import ResponseSlots, RoundMeter, StepBudget, run_work
from oncelog.broker.topics.takeover import take_over
from oncelog.broker.topics.topics import Topics
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.rules.limits.connections import MemoryBudget
from oncelog.rules.security.authorization import ANONYMOUS
from oncelog.settings import Settings
from oncelog.types import BrokerAddress, TopicPartition
from oncelog.wire.messages import API_BY_KEY, Api

OFFERED: dict[int, Api] = dict(sorted(API_BY_KEY.items()))
"""The APIs that the broker offers, by API key, in the order of the ApiVersions response."""


class BrokerState:
    """The state of one broker.

    `on_append` is called with the verdict on every produced batch, unless it is None. The constructor loads
    the coordinators from their topics. It raises StorageError if a required file or topic cannot be read.
    """

    clock_lead_ms: Callable[[], int] = staticmethod(lambda: 0)
    """A function that returns how many ms `now_ms` is ahead of a wall clock that was set back. The server
    sets it.
    """

    def __init__(
        self,
        log_manager: LogManager,
        settings: Settings,
        *,
        new_uuid: Callable[[], bytes],
        now_ms: int,
        on_append: Callable[[AppendEvent], None] | None = None,
    ) -> None:
        self.log_manager = log_manager
        self.limits = limits = log_manager.limits
        # A copy, because clients may change the settings of this broker at run time.
        self.settings = settings = settings.replaced({})
        self.dynamic = DynamicConfig(log_manager.disk, settings)
        self.on_append = on_append
        self.offered = OFFERED
        self.features = {
            "transaction.version": (settings["oncelog.transaction.version"], 2),
            "group.version": (int("consumer" in settings["group.coordinator.rebalance.protocols"]), 1),
        }
        """(finalized level, highest supported level) of each feature. Level 0: the feature is off."""
        self.node_id: int = settings["node.id"]
        self.cluster_id = log_manager.cluster_id
        self.metrics = Metrics()
        self.takeover_notes = take_over(log_manager, settings)
        """Notes about taking over a directory that another broker wrote: what was left out or accepted."""
        self.topics = Topics(log_manager, settings, new_uuid=new_uuid, now_ms=now_ms)
        self.producer_ids = ProducerIds(log_manager.disk, now_ms, limits.producer_id_block)
        self.users = Users(log_manager.disk, new_secret=new_uuid() + new_uuid())
        self.token_keys: str | None = None
        """The keys (JWKS) that verify OAUTHBEARER tokens, as JSON text. The server sets them."""
        self.check_token: TokenCheck = token_check(settings, lambda: self.token_keys)
        self.authorizer = _authorizer(log_manager, settings)
        self.quotas = QuotaManager(
            log_manager.disk, settings, self.metrics.throttled, limits.max_quota_shares
        )
        self.sessions = FetchSessions(
            settings["max.incremental.fetch.session.cache.slots"],
            new_id=lambda: int.from_bytes(new_uuid()[:4], "big") >> 1,
            limits=limits,
        )
        self.fetch_purgatory = FetchPurgatory()
        self.slots = ResponseSlots(log_manager.background)
        self.flush_queue = FlushQueue(self._note_partition_visible)
        self.connection_count = 0
        self.round_meter = RoundMeter()
        """The unusual work of requests: to open batches, to begin segments, and to write files, large
        transactions and large groups.
        """
        self.request_memory: MemoryBudget[Any] = MemoryBudget(settings["queued.max.request.bytes"])
        self.response_memory: MemoryBudget[Any] = MemoryBudget(settings["oncelog.queued.max.response.bytes"])
        self._new_uuid = new_uuid
        self._visible_bytes: dict[TopicPartition, int] = {}
        """Newly visible bytes by partition, for the next `complete_satisfied_fetches`."""
        self.groups = self.new_group_coordinator()
        self.markers = MarkerWriter(self.topics, self.note_stored, self.groups.on_marker)
        self.transactions = self.new_transaction_coordinator()
        self.topics.offset_ends = self.groups.offsets.ends_of
        self.periodic = self._periodic_tasks(now_ms)
        self._recover(now_ms)

    def new_group_coordinator(self) -> GroupCoordinator:
        """Return a new group coordinator for this broker. The caller loads it."""
        settings = self.settings
        topic = InternalTopic(
            CONSUMER_OFFSETS,
            settings["offsets.topic.num.partitions"],
            topics=self.topics,
            note_stored=self.note_stored,
            max_record_bytes=lambda: settings["message.max.bytes"],
        )
        return GroupCoordinator(
            topic,
            settings,
            topics=self.topics,
            dynamic=self.dynamic,
            round_meter=self.round_meter,
            flush_queue=self.flush_queue,
            background=self.log_manager.background,
            limits=self.limits,
            is_closing=lambda: self.log_manager.is_closing,
        )

    def new_transaction_coordinator(self) -> TransactionCoordinator:
        """Return a new transaction coordinator for this broker. The caller loads it."""
        topic = InternalTopic(
            TRANSACTION_STATE,
            self.settings["transaction.state.log.num.partitions"],
            topics=self.topics,
            note_stored=self.note_stored,
        )
        return TransactionCoordinator(
            topic,
            self.settings,
            topics=self.topics,
            producer_ids=self.producer_ids,
            markers=self.markers,
            round_meter=self.round_meter,
            flush_queue=self.flush_queue,
            background=self.log_manager.background,
            limits=self.limits,
        )

    def new_authenticator(
        self, listener: Listener, host: str = "", *, needs_sasl: bool = False, principal: str = ANONYMOUS
    ) -> Authenticator:
        """Return the authenticator of a new connection. `host` is the client's address."""
        return Authenticator(
            listener,
            host,
            needs_sasl=needs_sasl,
            principal=principal,
            users=self.users,
            check_token=self.check_token,
            new_name=self.new_name,
            access=self.access,
            wall_ms=self.wall_ms,
        )

    def _periodic_tasks(self, now_ms: int) -> PeriodicTasks:
        return PeriodicTasks(
            self.settings,
            now_ms,
            log_manager=self.log_manager,
            topics=self.topics,
            transactions=self.transactions,
            groups=self.groups,
            sessions=self.sessions,
            flush_queue=self.flush_queue,
            metrics=self.metrics,
            wall_ms=self.wall_ms,
        )

    def _recover(self, now_ms: int) -> None:
        """Load the coordinators, and complete the work that a stop or crash interrupted."""
        self.transactions.load()
        self.groups.load(now_ms)
        self.groups.resume_deletions(now_ms)
        self.producer_ids.begin_above(self._largest_producer_id())
        self.transactions.resume(now_ms)

    def _largest_producer_id(self) -> int:
        """Return the largest producer id in partitions and in the transaction coordinator; -1 if there is
        none.
        """
        ids = [p.largest_producer_id for _, p in self.topics.all_partitions()]
        for entry in self.transactions.all():
            ids += [entry.producer_id, entry.previous_producer_id, entry.next_producer_id]
        return max(ids, default=-1)

    def step_budget(self) -> StepBudget:
        """Return the budget of a request in steps. Its elements count in the round, too."""
        return StepBudget(self.limits.request_step_elements, self.round_meter)

    def access(self, principal: str, host: str) -> Access:
        """Return the permissions of a principal that connects from `host`, an address."""
        return FULL_ACCESS if self.authorizer is None else self.authorizer.access(principal, host)

    def address(self, request: Request) -> BrokerAddress:
        """Return the address at which the client can reach this broker.

        It is the address of the listener that received the request.
        """
        host, port = ("", -1) if request.authenticator is None else request.authenticator.listener.address
        return BrokerAddress(self.node_id, host, port)

    def note_stored(self, partition: Partition, size_bytes: int) -> None:
        """Count an append of `size_bytes` for the fetches that wait for this partition.

        The fetches that then have enough bytes are completed at the end of the round of requests, or once a
        flush has made the records visible.
        """
        if partition.high_watermark < partition.log_end_offset:
            self.flush_queue.add_hidden(partition, size_bytes)
        else:
            self._note_partition_visible(partition, size_bytes)

    def _note_partition_visible(self, partition: Partition, size_bytes: int) -> None:
        self.note_visible(partition.topic_partition, size_bytes)

    def note_visible(self, tp: TopicPartition, size_bytes: int) -> None:
        """If delayed fetches wait for this partition, count `size_bytes` that became visible to readers.
        `complete_satisfied_fetches` uses the count.
        """
        if self.fetch_purgatory.is_watched(tp):
            self._visible_bytes[tp] = self._visible_bytes.get(tp, 0) + size_bytes

    @property
    def has_visible_bytes(self) -> bool:
        """True if there are new records for delayed fetches, so that `complete_satisfied_fetches` must be
        called.
        """
        return bool(self._visible_bytes)

    def complete_satisfied_fetches(self) -> None:
        """Subtract the bytes that became visible since the last call from the `missing_bytes` of delayed
        fetches, and complete the fetches that now have enough.
        """
        while self._visible_bytes:
            visible_bytes, self._visible_bytes = self._visible_bytes, {}
            for tp, size_bytes in visible_bytes.items():
                self.fetch_purgatory.check_and_complete(tp, size_bytes, self._stable_end(tp))

    def _stable_end(self, tp: TopicPartition) -> int | None:
        """Return the last stable offset of a partition; None if the partition was deleted."""
        topic = self.topics.get(tp.topic)
        if topic is None or tp.partition >= len(topic.partitions):
            return None
        return topic.partitions[tp.partition].last_stable_offset

    def wall_ms(self, now_ms: int) -> int:
        """Return the wall clock's time in ms. It is below `now_ms` if the wall clock was set back."""
        return now_ms - self.clock_lead_ms()

    def gauges(self) -> dict[str, float]:
        """Compute all gauges, and return them by name."""
        return run_work(self.gauges_in_steps())

    def gauges_in_steps(self) -> Generator[None, None, dict[str, float]]:
        """Return what `gauges` returns. Yields after each partition."""
        producer_count = open_count = offline_count = held_back = held_back_count = 0
        partitions = [partition for _, partition in self.topics.all_partitions()]
        for partition in partitions:
            producer_count += partition.producer_count
            open_count += partition.open_transaction_count
            offline_count += partition.is_offline
            offsets = partition.high_watermark - partition.last_stable_offset
            held_back += offsets
            held_back_count += offsets > 0
            yield
        _, free_bytes = self.log_manager.disk.volume()
        return {
            "producer_ids_active": float(producer_count),
            "partitions": float(len(partitions)),
            "partitions_offline": float(offline_count),
            "disk_free_bytes": float(free_bytes),
            "connections": float(self.connection_count),
            "request_bytes_held": float(self.request_memory.total_bytes),
            "response_bytes_held": float(self.response_memory.total_bytes),
            "fetches_waiting": float(len(self.fetch_purgatory)),
            "transactions_open": float(open_count),
            "records_held_back": float(held_back),
            "partitions_held_back": float(held_back_count),
        }

    def partition_offsets(self, max_partitions: int) -> Iterator[PartitionOffsets]:
        """Yield the offsets of the first `max_partitions` partitions, for the metrics by partition.

        Topics may be created and deleted meanwhile.
        """
        for tp, partition in list(islice(self.topics.all_partitions(), max_partitions)):
            yield PartitionOffsets(
                tp.topic,
                tp.partition,
                partition.log_start_offset,
                partition.last_stable_offset,
                partition.high_watermark,
                partition.size_bytes,
            )

    def new_name(self) -> str:
        """Return a new UUID in its text form."""
        digits = self._new_uuid().hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def close(self, now_ms: int) -> None:
        """Write snapshots, sync the files and store that the stop was clean.

        Raises KafkaStorageError; the next start then recovers the partitions.
        """
        self.groups.consumers.patterns.close()
        self.groups.close()
        self.transactions.close()
        # Pass the wall clock's time, as `PeriodicTasks` does, because closing expires producer ids. See
        # test_a_stop_after_a_clock_was_ahead_makes_no_producer_expire.
        self.log_manager.close(self.wall_ms(now_ms))

    def release(self) -> None:
        """Close the files and the lock without writing, for a data directory that is removed afterwards."""
        self.log_manager.release()


def _authorizer(log_manager: LogManager, settings: Settings) -> Authorizer | None:
    if not settings["authorizer.class.name"]:
        return None
    return Authorizer(
        log_manager.disk,
        settings["super.users"],
        allows_if_none=settings["allow.everyone.if.no.acl.found"],
    )
