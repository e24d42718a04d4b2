"""Fetch sessions (KIP-227): the broker remembers the partitions that a client fetches.

A full fetch (epoch 0) opens a session. An incremental fetch (epoch n > 0) contains only changes to the list
of partitions. Its response contains only partitions with records, an error or changed offsets. Source:
Kafka's FetchSession and FetchSessionCache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from oncelog.broker.topics.topic_names import MAX_LENGTH
from oncelog.errors import (
    BrokerError,
    FetchSessionIdNotFound,
    FetchSessionTopicIdError,
    InvalidFetchSessionEpoch,
)
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.wire.messages import NO_ID, FetchRequest, FetchResponse

FULL_AND_CREATE, FULL_WITHOUT_SESSION = 0, -1
INT32_MAX = 2**31 - 1

PartitionKey = tuple[str, bytes, int]
"""(topic name, topic id, partition). The name is "" from version 13 on; the id is NO_ID before version 13."""


@dataclass(slots=True)
class SessionPartition:
    """One partition of a fetch request or session."""

    key: PartitionKey
    requested: FetchRequest.FetchPartition
    sent: tuple[int, int, int] | None = None
    """(high watermark, last stable offset, log start offset) in the last response. None before the first
    response and after an error.
    """


@dataclass(slots=True)
class FetchSession:
    """The partitions that a client fetches, in the order in which responses contain them."""

    session_id: int
    uses_topic_ids: bool
    next_epoch: int
    """The epoch that the next request must have."""
    used_ms: int
    owner: str
    """The principal that opened the session."""
    targets: dict[PartitionKey, SessionPartition] = field(default_factory=dict)

    def update(self, message: FetchRequest) -> None:
        """Apply the added, changed and forgotten partitions of an incremental request."""
        for key, requested in _partitions(message):
            existing = self.targets.get(key)
            if existing is None:
                self.targets[key] = SessionPartition(key, requested)
            else:
                existing.requested = requested
        for topic in message.forgotten_topics_data:
            for partition in topic.partitions:
                self.targets.pop((topic.topic, topic.topic_id, partition), None)


@dataclass(frozen=True, slots=True)
class FetchContext:
    """The partitions and the session of one fetch request.

    `session` is None if the client uses no session. The response then contains all partitions.
    """

    targets: tuple[SessionPartition, ...]
    session: FetchSession | None
    is_incremental: bool

    @property
    def session_id(self) -> int:
        return self.session.session_id if self.session else 0

    def select(
        self, results: Iterable[tuple[SessionPartition, FetchResponse.PartitionData]]
    ) -> list[tuple[SessionPartition, FetchResponse.PartitionData]]:
        """Return the results that belong in the response, and record their offsets in the session."""
        if self.session is None:
            return list(results)
        return [pair for pair in results if self._note_sent(*pair)]

    def _note_sent(self, target: SessionPartition, result: FetchResponse.PartitionData) -> bool:
        sent = (result.high_watermark, result.last_stable_offset, result.log_start_offset)
        # Errors and diverging epochs are repeated in every response until they end.
        is_problem = result.error_code or result.diverging_epoch
        has_news = bool(is_problem or result.records) or sent != target.sent
        target.sent = None if result.error_code else sent
        if result.records and self.session and target.key in self.session.targets:
            # A partition that had records moves to the end. If max_bytes is too small for all partitions, the
            # other partitions come first in the next response.
            self.session.targets[target.key] = self.session.targets.pop(target.key)
        return has_news or not self.is_incremental


class FetchSessions:
    """The fetch sessions of a broker.

    There are at most `slots` sessions, with at most `limits.max_session_partitions` partitions in total. If a
    new session would exceed a limit, sessions that were not used for `limits.session_eviction_ms` are closed
    first. If that is not enough, the client gets session id 0 and continues with full fetches. Only the
    principal that opened a session can use it. Other principals get FETCH_SESSION_ID_NOT_FOUND. `new_id` must
    return random ids that cannot be guessed.

    A session contains no name that is too long for a topic: it may have 30,000 characters, but the limit
    counts only partitions. The client continues with full fetches, too.
    """

    def __init__(self, slots: int, *, new_id: Callable[[], int], limits: Limits = DEFAULT_LIMITS) -> None:
        self._slots = slots
        self._new_id = new_id
        self._max_partitions = limits.max_session_partitions
        self._eviction_ms, self._expiry_ms = limits.session_eviction_ms, limits.session_expiry_ms
        self._partition_count = 0
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()  # ordered by last use, oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def partition_count(self) -> int:
        """The number of partitions in all sessions."""
        return self._partition_count

    def open(self, message: FetchRequest, version: int, now_ms: int, owner: str = "") -> FetchContext:
        """Open or resume the session of a fetch request, and return the partitions to fetch. A full fetch
        (session epoch 0 or -1) closes the session that the request names.

        Raises FetchSessionIdNotFound, InvalidFetchSessionEpoch, FetchSessionTopicIdError.
        """
        uses_topic_ids = version >= 13
        if message.session_epoch in (FULL_AND_CREATE, FULL_WITHOUT_SESSION):
            self.end(message.session_id, owner)
            targets = {key: SessionPartition(key, requested) for key, requested in _partitions(message)}
            session = None
            if message.session_epoch == FULL_AND_CREATE and not _has_long_name(message):
                session = self._create(targets, uses_topic_ids, now_ms, owner)
            return FetchContext(tuple(targets.values()), session, is_incremental=False)
        session = self._resume(message, uses_topic_ids, owner)
        session.used_ms = now_ms
        self._sessions.move_to_end(session.session_id)
        if _has_long_name(message):
            self._close(session)
            raise FetchSessionIdNotFound(f"fetch session {session.session_id} has too long a topic name")
        old_count = len(session.targets)
        session.update(message)
        self._partition_count += len(session.targets) - old_count
        if self._partition_count > self._max_partitions and len(session.targets) > old_count:
            self._close(session)
            raise FetchSessionIdNotFound(f"fetch session {session.session_id} has too many partitions")
        if not session.targets:
            # A session without partitions ends. Session id 0 in the response tells the client that the
            # session has ended.
            self._close(session)
            return FetchContext((), None, is_incremental=False)
        return FetchContext(tuple(session.targets.values()), session, is_incremental=True)

    def end(self, session_id: int, owner: str) -> None:
        """Close the session that a full fetch names, if it exists."""
        self._close(self._find(session_id, owner))

    def expire(self, now_ms: int) -> None:
        """Close the sessions that have not been used for `limits.session_expiry_ms`."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now_ms - oldest.used_ms < self._expiry_ms:
                return
            self._close(oldest)

    def _find(self, session_id: int, owner: str) -> FetchSession | None:
        session = self._sessions.get(session_id)
        return session if session is not None and session.owner == owner else None

    def _close(self, session: FetchSession | None) -> None:
        if session is not None:
            del self._sessions[session.session_id]
            self._partition_count -= len(session.targets)

    def _resume(self, message: FetchRequest, uses_topic_ids: bool, owner: str) -> FetchSession:
        session = self._find(message.session_id, owner)
        if session is None:
            raise FetchSessionIdNotFound(f"fetch session {message.session_id} does not exist")
        if message.session_epoch != session.next_epoch:
            raise InvalidFetchSessionEpoch(
                f"fetch session {session.session_id}: epoch {message.session_epoch}, "
                f"expected {session.next_epoch}"
            )
        if session.uses_topic_ids != uses_topic_ids:
            raise FetchSessionTopicIdError("a fetch session must use either topic ids or topic names")
        session.next_epoch = 1 if session.next_epoch == INT32_MAX else session.next_epoch + 1
        return session

    def _create(
        self, targets: dict[PartitionKey, SessionPartition], uses_topic_ids: bool, now_ms: int, owner: str
    ) -> FetchSession | None:
        while len(self._sessions) >= self._slots or self._exceeds_limit(len(targets)):
            if not self._evict_one(now_ms):
                return None
        session_id = self._new_id()
        while session_id in self._sessions or session_id <= 0:
            session_id = self._new_id()
        session = FetchSession(session_id, uses_topic_ids, 1, now_ms, owner, targets)
        self._sessions[session_id] = session
        self._partition_count += len(targets)
        return session

    def _exceeds_limit(self, more_count: int) -> bool:
        return self._partition_count + more_count > self._max_partitions

    def _evict_one(self, now_ms: int) -> bool:
        oldest = next(iter(self._sessions.values()), None)
        if oldest is None or now_ms - oldest.used_ms < self._eviction_ms:
            return False
        self._close(oldest)
        return True


def error_response(error: BrokerError) -> FetchResponse:
    """Return the response to a session error. It contains no partitions."""
    return FetchResponse(error_code=error.code, session_id=0, responses=[])


def _has_long_name(message: FetchRequest) -> bool:
    return any(len(topic.topic) > MAX_LENGTH for topic in message.topics)


def _partitions(message: FetchRequest) -> Iterable[tuple[PartitionKey, FetchRequest.FetchPartition]]:
    for topic in message.topics:
        for requested in topic.partitions:
            yield (topic.topic, topic.topic_id or NO_ID, requested.partition), requested
