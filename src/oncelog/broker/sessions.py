"""Fetch sessions (KIP-227): the broker remembers what a consumer reads, so that it need not repeat it.

A full fetch (epoch 0) opens a session; incremental ones (epoch n > 0) name only what changed, and
their answers only partitions with news. Source: KIP-227, Kafka's FetchSession.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from oncelog.errors import (
    BrokerError,
    FetchSessionIdNotFound,
    FetchSessionTopicIdError,
    InvalidFetchSessionEpoch,
)
from oncelog.wire.messages import NO_ID, FetchRequest, FetchResponse

FULL_AND_CREATE, FULL_WITHOUT_SESSION = 0, -1
INT32_MAX = 2**31 - 1
EVICTION_MS = 120_000
"""A session unused for this long gives up its slot to a new one."""

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
        has_news = bool(result.error_code or result.records) or told != target.told
        # An error is told again with the next fetch, when it may be over.
        target.told = None if result.error_code else told
        if result.records and self.session and target.key in self.session.targets:
            # To the end of the line: partitions behind it get their turn when max_bytes is short.
            self.session.targets[target.key] = self.session.targets.pop(target.key)
        return has_news or not self.is_incremental


class FetchSessions:
    """At most `slots` sessions; when none is free, clients are told session id 0 and send everything."""

    def __init__(self, slots: int, *, first_id: int) -> None:
        self._slots = slots
        self._next_id = first_id
        self._sessions: dict[int, FetchSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, message: FetchRequest, version: int, now_ms: int) -> FetchContext:
        """Raises FetchSessionIdNotFound, InvalidFetchSessionEpoch, FetchSessionTopicIdError."""
        uses_topic_ids = version >= 13
        if message.session_epoch in (FULL_AND_CREATE, FULL_WITHOUT_SESSION):
            self._sessions.pop(message.session_id, None)
            targets = {key: Target(key, asked) for key, asked in _partitions(message)}
            session = None
            if message.session_epoch == FULL_AND_CREATE:
                session = self._create(targets, uses_topic_ids, now_ms)
            return FetchContext(tuple(targets.values()), session, is_incremental=False)
        session = self._resume(message, uses_topic_ids)
        session.used_ms = now_ms
        session.update(message)
        if not session.targets:
            # Nothing is left to remember: the session ends, which the client reads from the id 0.
            del self._sessions[session.session_id]
            return FetchContext((), None, is_incremental=False)
        return FetchContext(tuple(session.targets.values()), session, is_incremental=True)

    def _resume(self, message: FetchRequest, uses_topic_ids: bool) -> FetchSession:
        session = self._sessions.get(message.session_id)
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
        self, targets: dict[PartitionKey, Target], uses_topic_ids: bool, now_ms: int
    ) -> FetchSession | None:
        if len(self._sessions) >= self._slots and not self._evict_one(now_ms):
            return None
        while self._next_id in self._sessions:
            self._advance_id()
        session = FetchSession(self._next_id, uses_topic_ids, 1, now_ms, targets)
        self._advance_id()
        self._sessions[session.session_id] = session
        return session

    def _advance_id(self) -> None:
        self._next_id = 1 if self._next_id == INT32_MAX else self._next_id + 1

    def _evict_one(self, now_ms: int) -> bool:
        oldest = min(self._sessions.values(), key=lambda s: s.used_ms, default=None)
        if oldest is None or now_ms - oldest.used_ms < EVICTION_MS:
            return False
        del self._sessions[oldest.session_id]
        return True


def error_response(error: BrokerError) -> FetchResponse:
    """A session error stands for the whole request and carries no partitions."""
    return FetchResponse(error_code=error.code, session_id=0, responses=[])


def _partitions(message: FetchRequest) -> Iterable[tuple[PartitionKey, FetchRequest.FetchPartition]]:
    for topic in message.topics:
        for asked in topic.partitions:
            yield (topic.topic, topic.topic_id or NO_ID, asked.partition), asked
