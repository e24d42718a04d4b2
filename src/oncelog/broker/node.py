"""The node: one request in, one answer out, and what time brings.

`handle` decides, through the file of the request's API; `settle` wakes the fetches that appends
fed; `tick` does what is due. No socket, thread or clock: the edge hands in `now_ms` (milliseconds
since the epoch, never going back) and carries answers, flushes and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from oncelog.broker.append_events import AppendEvent
from oncelog.broker.coordinators.groups import GroupCoordinator
from oncelog.broker.coordinators.producer_ids import ProducerIds
from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.fetch_sessions import FetchSessions
from oncelog.broker.group_commit import Flushes, FlushWait
from oncelog.broker.handlers import api_versions
from oncelog.broker.metrics import Metrics
from oncelog.broker.purgatory import Deferred, Disconnect, FetchWaits
from oncelog.broker.quota_manager import Quotas
from oncelog.broker.registry import HANDLERS, OFFERED
from oncelog.broker.security.acl_operations import NEEDS
from oncelog.broker.security.authenticator import Door, Farewell
from oncelog.broker.security.authorizer import EVERYTHING, Access, Authorizer, refusal_of
from oncelog.broker.security.sasl import TokenCheck, token_check
from oncelog.broker.security.users import Users
from oncelog.broker.settings.dynamic_config import DynamicConfig
from oncelog.broker.stepwise import StepQueue
from oncelog.broker.topics.takeover import take_over
from oncelog.broker.topics.topics import Topics
from oncelog.config import INT64_MAX
from oncelog.limits import Limits
from oncelog.log.background import BackgroundTask
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.rules.limits.connections import Holdings
from oncelog.rules.limits.quotas import Payer
from oncelog.rules.security.authorization import CLUSTER_NAME, ResourceType
from oncelog.settings import Settings
from oncelog.types import BrokerAddress, TopicPartition
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import Message

FLUSH_CHECK_MS = 500
"""How often flush.ms of the topics is looked at, and so how exactly it is kept."""

Answer = Message | Deferred | Disconnect | Farewell | None
"""None: this request has no response (acks=0)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A decoded request. `records` fields are views of the receive buffer, valid while it is handled.

    `client_host`: where it comes from, as Kafka writes it: /127.0.0.1. `door`: whose connection it came on.
    """

    connection_id: int
    header: RequestHeader
    message: Any
    client_host: str = ""
    door: Door | None = None

    @property
    def access(self) -> Access:
        """What its client may do."""
        return EVERYTHING if self.door is None else self.door.access

    @property
    def payer(self) -> Payer | None:
        """Whose quotas it uses."""
        return None if self.door is None else self.door.payer(self.header.client_id)

    @property
    def principal(self) -> str:
        """Return the client's principal, such as User:alice."""
        return "" if self.door is None else self.door.principal or ""

    def may(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Whether its client may do to the resource what its API does (`broker.security.acl_operations`)."""
        access = self.access
        return access is EVERYTHING or access.may(
            NEEDS[self.message.api.name][resource_type], resource_type, name
        )

    def check(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raises the resource's ..._AUTHORIZATION_FAILED."""
        if not self.may(resource_type, name):
            raise refusal_of(resource_type)


class Node:
    """One broker. `on_append` gets every Produce verdict when set; None costs nothing."""

    clock_lead_ms: Callable[[], int] = staticmethod(lambda: 0)
    """How far `now_ms` is ahead of the wall clock after that was set back; the edge replaces it."""

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
        # A copy: what clients change while it runs is this node's alone.
        self.settings = settings = settings.replaced({})
        self.dynamic = DynamicConfig(log_manager.disk, settings)
        self.on_append = on_append
        self.offered = OFFERED
        self.features = {
            "transaction.version": (settings["oncelog.transaction.version"], 2),
            "group.version": (int("consumer" in settings["group.coordinator.rebalance.protocols"]), 1),
        }
        """Feature -> level that holds (0: off), highest level there is."""
        self.node_id: int = settings["node.id"]
        self.cluster_id = log_manager.cluster_id
        self.metrics = Metrics()
        self.takeover_notes = take_over(log_manager, settings)
        """What was left out or accepted when a directory of another broker became ours."""
        self.topics = Topics(log_manager, settings, new_uuid=new_uuid, now_ms=now_ms)
        self.producer_ids = ProducerIds(log_manager.disk, now_ms, limits.producer_id_block)
        self.users = Users(log_manager.disk, new_secret=new_uuid() + new_uuid())
        self.token_keys: str | None = None
        """The key set (JWKS) that signs OAUTHBEARER tokens, as JSON; the edge reads and replaces it."""
        self.check_token: TokenCheck = token_check(settings, lambda: self.token_keys)
        self.authorizer = _authorizer(log_manager, settings)
        self.quotas = Quotas(log_manager.disk, settings, self.metrics.throttled, limits.max_quota_shares)
        self.sessions = FetchSessions(
            settings["max.incremental.fetch.session.cache.slots"],
            new_id=lambda: int.from_bytes(new_uuid()[:4], "big") >> 1,
            limits=limits,
        )
        self.fetch_waits = FetchWaits()
        self.steps = StepQueue()
        self.flushes = Flushes(self._note_visible)
        self.flushed_ms: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()
        self.connection_count = 0
        self.opened_cost = 0
        """The cost of opening batches of Produce requests so far, in records."""
        self.requests_held: Holdings[Any] = Holdings(settings["queued.max.request.bytes"])
        self.answers_held: Holdings[Any] = Holdings(settings["oncelog.queued.max.response.bytes"])
        self._new_uuid = new_uuid
        self._appended: dict[TopicPartition, int] = {}
        self.transactions = TransactionCoordinator(self)
        self.groups = GroupCoordinator(self)
        self.topics.offset_ends = self.groups.offsets.ends_of
        self._jobs = _periodic_jobs(settings, limits, now_ms)
        self._next_job_ms = min(due_ms for due_ms, _, _ in self._jobs)
        self.transactions.load()
        self.groups.load(now_ms)
        self.groups.resume_deletions(now_ms)
        self.producer_ids.begin_above(self._largest_producer_id())
        self.transactions.resume(now_ms)

    def _largest_producer_id(self) -> int:
        """The largest id that a partition or the transaction coordinator remembers; -1 without one."""
        ids = [p.largest_producer_id for _, p in self.topics.all_partitions()]
        for entry in self.transactions.all():
            ids += [entry.producer_id, entry.previous_producer_id, entry.next_producer_id]
        return max(ids, default=-1)

    def access(self, principal: str, host: str) -> Access:
        """What a principal may do from a host (an address)."""
        return EVERYTHING if self.authorizer is None else self.authorizer.access(principal, host)

    def address(self, request: Request) -> BrokerAddress:
        """What a client is told to connect to: the listener by which it asked."""
        host, port = ("", -1) if request.door is None else request.door.listener.address
        return BrokerAddress(self.node_id, host, port)

    def refuse(self, header: RequestHeader) -> Message | Disconnect | None:
        """None when the version is served. ApiVersions gets its version 0 answer; else the end, as Kafka."""
        api = OFFERED.get(header.api_key)
        if api is not None and api.first_version <= header.api_version <= api.max_version:
            return None
        if header.api_key == api_versions.KEY:
            return api_versions.unsupported()
        name = api.name if api else f"API key {header.api_key}"
        return Disconnect(f"{name} version {header.api_version} is not served")

    def handle(self, request: Request, now_ms: int) -> Answer:
        """Carry the request out. Its header must have passed `refuse`."""
        answer: Answer = HANDLERS[request.header.api_key](self, request, now_ms)
        return answer

    def note_stored(self, partition: Partition, size_bytes: int) -> None:
        """Wake the fetches that wait for an append: at the next `settle`, or once it is visible."""
        if partition.high_watermark < partition.log_end_offset:
            self.flushes.show(partition, size_bytes)
        else:
            self._note_visible(partition, size_bytes)

    def _note_visible(self, partition: Partition, size_bytes: int) -> None:
        self.note_append(partition.topic_partition, size_bytes)

    def note_append(self, partition: TopicPartition, size_bytes: int) -> None:
        """Data arrived that readers see; fetches that wait for it are woken by the next `settle`."""
        if not self.fetch_waits.is_awaited(partition):
            return
        self._appended[partition] = self._appended.get(partition, 0) + size_bytes

    def settle(self, now_ms: int) -> None:
        """After a round of requests: answer the fetches their appends completed."""
        self.transactions.end_round()
        while self._appended:
            appended, self._appended = self._appended, {}
            for tp, size_bytes in appended.items():
                self.fetch_waits.appended(tp, size_bytes, self._stable_end(tp))

    def _stable_end(self, tp: TopicPartition) -> int | None:
        """Return the last stable offset of a partition; None if it is gone."""
        topic = self.topics.get(tp.topic)
        is_there = topic is not None and tp.partition < len(topic.partitions)
        return topic.partitions[tp.partition].last_stable_offset if topic is not None and is_there else None

    def next_wakeup_ms(self) -> int:
        """When `tick` has something to do at the latest."""
        first_ms, groups = self._next_job_ms, self.groups
        for due_ms in (
            self.fetch_waits.next_deadline_ms,
            groups.next_deadline_ms,
            groups.consumers.next_deadline_ms,
        ):
            if due_ms is not None and due_ms < first_ms:
                first_ms = due_ms
        return first_ms

    def tick(self, now_ms: int) -> None:
        """What is due: fetches at their max_wait_ms, retention, expiry, checkpoints."""
        self.fetch_waits.expire(now_ms)
        self.groups.tick(now_ms)
        self.groups.consumers.tick(now_ms)
        for index, (due_ms, every_ms, job) in enumerate(self._jobs):
            if due_ms <= now_ms:
                self._jobs[index] = (now_ms + every_ms, every_ms, job)
                self._next_job_ms = min(due_ms for due_ms, _, _ in self._jobs)
                job(self, now_ms)

    def wall_ms(self, now_ms: int) -> int:
        """Return what the wall clock says, which was set back if it is not `now_ms`."""
        return now_ms - self.clock_lead_ms()

    def gauges(self) -> dict[str, float]:
        """What metrics ask for when they are read."""
        partitions = list(self.topics.all_partitions())
        _, free_bytes = self.log_manager.disk.volume()
        return {
            "producer_ids_active": float(sum(p.producer_count for _, p in partitions)),
            "partitions": float(len(partitions)),
            "partitions_offline": float(sum(p.is_offline for _, p in partitions)),
            "disk_free_bytes": float(free_bytes),
            "connections": float(self.connection_count),
            "request_bytes_held": float(self.requests_held.total_bytes),
            "response_bytes_held": float(self.answers_held.total_bytes),
            "fetches_waiting": float(len(self.fetch_waits)),
            "transactions_open": float(sum(p.open_transaction_count for _, p in partitions)),
        }

    def new_name(self) -> str:
        """A name nobody else has: a uuid."""
        digits = self._new_uuid().hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def close(self, now_ms: int) -> None:
        """Snapshots, synced files and the clean-shutdown marker."""
        self.groups.consumers.patterns.close()
        self.groups.close()
        self.transactions.close()
        self.log_manager.close(now_ms)


def _authorizer(log_manager: LogManager, settings: Settings) -> Authorizer | None:
    if not settings["authorizer.class.name"]:
        return None
    return Authorizer(
        log_manager.disk,
        settings["super.users"],
        allows_if_none=settings["allow.everyone.if.no.acl.found"],
    )


_Job = Callable[[Node, int], None]


def _periodic_jobs(settings: Settings, limits: Limits, now_ms: int) -> list[tuple[int, int, _Job]]:
    """(due_ms, every_ms, job)."""
    jobs: list[tuple[str, _Job]] = [
        ("log.retention.check.interval.ms", _enforce_retention),
        ("log.cleaner.backoff.ms", _compact),
        ("producer.id.expiration.check.interval.ms", _expire_producers),
        ("log.flush.offset.checkpoint.interval.ms", _write_checkpoints),
        ("log.flush.offset.checkpoint.interval.ms", _resume_deletions),
        ("transaction.abort.timed.out.transaction.cleanup.interval.ms", _abort_timed_out),
        ("transaction.remove.expired.transaction.cleanup.interval.ms", _forget_transactional_ids),
        ("offsets.retention.check.interval.ms", _forget_offsets),
    ]
    timed: list[tuple[int, _Job]] = [(max(settings[key], 1), job) for key, job in jobs]
    session_check_ms = max(limits.session_expiry_ms // 4, 1)
    timed += [(FLUSH_CHECK_MS, _flush_by_time), (session_check_ms, _expire_sessions)]
    return [(now_ms + every_ms, every_ms, job) for every_ms, job in timed]


def _enforce_retention(node: Node, now_ms: int) -> None:
    # Producers' clocks are right while ours is still ahead of the wall clock that was set right. See
    # test_a_clock_that_was_ahead_deletes_nothing_once_it_is_right.
    wall_ms = node.wall_ms(now_ms)

    def enforce(partition: Partition) -> Iterator[None]:
        yield from partition.confirm_times(wall_ms)
        if not partition.is_closed:
            partition.enforce_retention(wall_ms)

    node.log_manager.for_each_partition(enforce)


def _compact(node: Node, now_ms: int) -> None:
    if not node.settings["log.cleaner.enable"]:
        return
    node.transactions.hold_young_decisions(now_ms)
    for coordinator in (node.transactions, node.groups):
        coordinator.topic.close_long_segments(now_ms)
    wall_ms = node.wall_ms(now_ms)  # it is compared with times of records, as in _enforce_retention
    # Only what is synced is compacted. The round begins when these syncs have ended: otherwise a segment that
    # was just closed waits for the next round. See test_one_round_compacts_what_was_just_closed.
    _flush_closed(node, is_compacted=True, then=lambda: node.log_manager.compact(wall_ms))


def _expire_producers(node: Node, now_ms: int) -> None:
    def expire(partition: Partition) -> Iterator[None]:
        for expired_count in partition.expire_producers(now_ms):
            node.metrics.producers_expired += expired_count
            yield

    node.log_manager.for_each_partition(expire)


def _abort_timed_out(node: Node, now_ms: int) -> None:
    node.transactions.retry_markers(now_ms)
    node.transactions.abort_timed_out(now_ms)


def _expire_sessions(node: Node, now_ms: int) -> None:
    node.sessions.expire(now_ms)


def _forget_transactional_ids(node: Node, now_ms: int) -> None:
    node.transactions.forget_expired(now_ms)


def _forget_offsets(node: Node, now_ms: int) -> None:
    node.groups.forget_expired(now_ms)


def _flush_by_time(node: Node, now_ms: int) -> None:
    """flush.ms: sync what has waited that long since the partition's last sync by time.

    Ask again for the sync of what readers do not see yet: a sync that failed may have been the last one.
    """
    for topic in node.topics.all():
        if topic.flush_messages < INT64_MAX:
            for partition in topic.partitions:
                if partition.high_watermark < partition.log_end_offset and not partition.is_offline:
                    node.flushes.show(partition, 1)
        if topic.flush_ms < INT64_MAX:
            for partition in topic.partitions:
                due_ms = node.flushed_ms.setdefault(partition, now_ms) + topic.flush_ms
                if partition.unflushed_record_count and now_ms >= due_ms:
                    node.flushed_ms[partition] = now_ms
                    node.flushes.add(partition, FlushWait(partition.log_end_offset - 1, lambda error: None))


def _write_checkpoints(node: Node, now_ms: int) -> None:
    _flush_closed(node, is_compacted=False, then=lambda: None)
    node.log_manager.write_checkpoints()


def _resume_deletions(node: Node, now_ms: int) -> None:
    """Try again what a failing disk kept of deleted topics and partitions."""
    node.log_manager.background.add(_finish_deletions(node, now_ms))
    node.log_manager.remove_deleted()


def _finish_deletions(node: Node, now_ms: int) -> BackgroundTask:
    # In one background task: no topic of the name may be made before its offsets are being deleted.
    marked = yield from node.topics.resume_deletions()
    yield from node.groups.delete_offsets_of(marked, now_ms)


def _flush_closed(node: Node, *, is_compacted: bool, then: Callable[[], None]) -> None:
    """Sync closed segments, so that after a kill only the active one is read again.

    `is_compacted`: only those of compacted topics. `then` is called once every sync has ended, or failed.
    """
    due = [
        partition
        for _, partition in node.topics.all_partitions()
        if partition.is_flush_due and (partition.config.is_compacted or not is_compacted)
    ]
    left = len(due)

    def on_flushed(error: Exception | None) -> None:
        nonlocal left
        left -= 1
        if not left:
            then()

    for partition in due:
        node.flushes.add(partition, FlushWait(partition.log_end_offset - 1, on_flushed))
    if not due:
        then()
