"""Fetch sessions (KIP-227): the broker remembers what a consumer reads, so that it need not repeat it.

A full fetch (epoch 0) opens a session; incremental ones (epoch n > 0) name only what changed, and
their answers only partitions with news. Source: KIP-227, Kafka's FetchSession.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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
"""Topic name ("" from version 13 on), topic id (NO_ID before it), partition."""


@dataclass(slots=True)
class Target:
    """One partition to read: what the client asked, and what it was told last (None: nothing yet)."""

    key: PartitionKey
    asked: FetchRequest.FetchPartition
    told: tuple[int, int, int] | None = None
    """(high watermark, last stable offset, log start offset) of the last answer."""


@dataclass(slots=True)
class FetchSession:
    """A client's remembered partitions, in the order they are served; `next_epoch` is expected next."""

    session_id: int
    uses_topic_ids: bool
    next_epoch: int
    used_ms: int
    owner: str
    """The principal that opened it."""
    targets: dict[PartitionKey, Target] = field(default_factory=dict)

    def update(self, message: FetchRequest) -> None:
        """Take over what an incremental request adds, changes and forgets."""
        for key, asked in _partitions(message):
            known = self.targets.get(key)
            if known is None:
                self.targets[key] = Target(key, asked)
            else:
                known.asked = asked
        for topic in message.forgotten_topics_data:
            for partition in topic.partitions:
                self.targets.pop((topic.topic, topic.topic_id, partition), None)


@dataclass(frozen=True, slots=True)
class FetchContext:
    """What one fetch reads. `session` None: every partition is answered and nothing remembered."""

    targets: tuple[Target, ...]
    session: FetchSession | None
    is_incremental: bool

    @property
    def session_id(self) -> int:
        return self.session.session_id if self.session else 0

    def select(
        self, results: Iterable[tuple[Target, FetchResponse.PartitionData]]
    ) -> list[tuple[Target, FetchResponse.PartitionData]]:
        """The results that belong in the response; remembers what the client is told by it."""
        if self.session is None:
            return list(results)
        return [pair for pair in results if self._tell(*pair)]

    def _tell(self, target: Target, result: FetchResponse.PartitionData) -> bool:
        told = (result.high_watermark, result.last_stable_offset, result.log_start_offset)
        # Each fetch repeats an error, and a diverging epoch, until it is over.
        is_problem = result.error_code or result.diverging_epoch
        has_news = bool(is_problem or result.records) or told != target.told
        target.told = None if result.error_code else told
        if result.records and self.session and target.key in self.session.targets:
            # To the end of the line: partitions behind it get their turn when max_bytes is short.
            self.session.targets[target.key] = self.session.targets.pop(target.key)
        return has_news or not self.is_incremental


class FetchSessions:
    """At most `slots` sessions, which share `limits.max_session_partitions` partitions.

    When there is no room, clients get session id 0 and send everything. A session belongs to the principal
    that opened it; to others its id is not known. `new_id` draws a random one, so that none can be guessed.
    """

    def __init__(self, slots: int, *, new_id: Callable[[], int], limits: Limits = DEFAULT_LIMITS) -> None:
        self._slots = slots
        self._new_id = new_id
        self._max_partitions = limits.max_session_partitions
        self._eviction_ms, self._expiry_ms = limits.session_eviction_ms, limits.session_expiry_ms
        self._partition_count = 0
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def partition_count(self) -> int:
        """Partitions that all sessions remember."""
        return self._partition_count

    def open(self, message: FetchRequest, version: int, now_ms: int, owner: str = "") -> FetchContext:
        """Raises FetchSessionIdNotFound, InvalidFetchSessionEpoch, FetchSessionTopicIdError."""
        uses_topic_ids = version >= 13
        if message.session_epoch in (FULL_AND_CREATE, FULL_WITHOUT_SESSION):
            self._close(self._find(message.session_id, owner))
            targets = {key: Target(key, asked) for key, asked in _partitions(message)}
            session = None
            if message.session_epoch == FULL_AND_CREATE:
                session = self._create(targets, uses_topic_ids, now_ms, owner)
            return FetchContext(tuple(targets.values()), session, is_incremental=False)
        session = self._resume(message, uses_topic_ids, owner)
        session.used_ms = now_ms
        self._sessions.move_to_end(session.session_id)
        known_count = len(session.targets)
        session.update(message)
        self._partition_count += len(session.targets) - known_count
        if self._partition_count > self._max_partitions and len(session.targets) > known_count:
            self._close(session)
            raise FetchSessionIdNotFound(f"fetch session {session.session_id} has grown too large")
        if not session.targets:
            # Nothing is left to remember: the session ends, which the client reads from the id 0.
            self._close(session)
            return FetchContext((), None, is_incremental=False)
        return FetchContext(tuple(session.targets.values()), session, is_incremental=True)

    def expire(self, now_ms: int) -> None:
        """Forget the sessions that nobody has used for long."""
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
            raise FetchSessionIdNotFound(f"fetch session {message.session_id} is not known")
        if message.session_epoch != session.next_epoch:
            raise InvalidFetchSessionEpoch(
                f"fetch session {session.session_id}: epoch {message.session_epoch}, "
                f"expected {session.next_epoch}"
            )
        if session.uses_topic_ids != uses_topic_ids:
            raise FetchSessionTopicIdError("a fetch session uses topic ids or names, not both")
        session.next_epoch = 1 if session.next_epoch == INT32_MAX else session.next_epoch + 1
        return session

    def _create(
        self, targets: dict[PartitionKey, Target], uses_topic_ids: bool, now_ms: int, owner: str
    ) -> FetchSession | None:
        while len(self._sessions) >= self._slots or self._is_too_much(len(targets)):
            if not self._evict_one(now_ms):
                return None
        session_id = self._new_id()
        while session_id in self._sessions or session_id <= 0:
            session_id = self._new_id()
        session = FetchSession(session_id, uses_topic_ids, 1, now_ms, owner, targets)
        self._sessions[session_id] = session
        self._partition_count += len(targets)
        return session

    def _is_too_much(self, more_count: int) -> bool:
        return self._partition_count + more_count > self._max_partitions

    def _evict_one(self, now_ms: int) -> bool:
        oldest = next(iter(self._sessions.values()), None)
        if oldest is None or now_ms - oldest.used_ms < self._eviction_ms:
            return False
        self._close(oldest)
        return True


def error_response(error: BrokerError) -> FetchResponse:
    """A session error stands for the whole request and carries no partitions."""
    return FetchResponse(error_code=error.code, session_id=0, responses=[])


def _partitions(message: FetchRequest) -> Iterable[tuple[PartitionKey, FetchRequest.FetchPartition]]:
    for topic in message.topics:
        for asked in topic.partitions:
            yield (topic.topic, topic.topic_id or NO_ID, asked.partition), asked
