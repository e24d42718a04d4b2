"""The states of a topic name, their transitions, and the entry in the list of topics in each state.

    state           event              next state
    ABSENT          CREATE             BEING_MADE
    BEING_MADE      NOT_LISTED         ABSENT         the list was not written: nothing of the topic exists
    BEING_MADE      OPENED             LIVE           every partition has a durable directory
    BEING_MADE      FAILED             DOOMED
    LIVE            DELETE             DOOMED
    DOOMED          NOT_MARKED         LIVE           the list was not written: the old one is valid
    DOOMED          MARKED             BEING_DELETED  the list durably marks the topic as deleted
    BEING_DELETED   REMOVED            ABSENT         no directory is left

Clients can use a topic that is LIVE. In every state but ABSENT the name is taken, and the list names the
topic. Directories are removed only in BEING_DELETED, so a crash at any step leaves either the whole topic, or
a deletion that the next start continues. At its start, the broker creates the missing partitions of a
BEING_MADE or LIVE topic, and continues a deletion. Clients cannot use a DOOMED topic. The list on disk may
mark it as live or as deleted, because a failed write may still have reached the disk.

A topic that gets more partitions stays LIVE. The list names the new partitions first, and clients see them
when all are created. If the topic is deleted before that, the new partitions are deleted, too.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from oncelog.errors import MisuseError


class TopicState(Enum):
    """The state of a topic name between its creation and the end of its deletion."""

    ABSENT = "absent"
    BEING_MADE = "being made"
    LIVE = "live"
    DOOMED = "doomed"
    BEING_DELETED = "being deleted"


class TopicEvent(Enum):
    """A request for a topic, or the result of one step of carrying out a request."""

    CREATE = "create"
    NOT_LISTED = "not listed"
    OPENED = "opened"
    FAILED = "failed"
    DELETE = "delete"
    NOT_MARKED = "not marked"
    MARKED = "marked"
    REMOVED = "removed"


class ListedTopic(NamedTuple):
    """The entry of a topic in the list of topics."""

    is_deleting: bool
    partition_count: int


_NEXT = {
    (TopicState.ABSENT, TopicEvent.CREATE): TopicState.BEING_MADE,
    (TopicState.BEING_MADE, TopicEvent.NOT_LISTED): TopicState.ABSENT,
    (TopicState.BEING_MADE, TopicEvent.OPENED): TopicState.LIVE,
    (TopicState.BEING_MADE, TopicEvent.FAILED): TopicState.DOOMED,
    (TopicState.LIVE, TopicEvent.DELETE): TopicState.DOOMED,
    (TopicState.DOOMED, TopicEvent.NOT_MARKED): TopicState.LIVE,
    (TopicState.DOOMED, TopicEvent.MARKED): TopicState.BEING_DELETED,
    (TopicState.BEING_DELETED, TopicEvent.REMOVED): TopicState.ABSENT,
}


def next_state(state: TopicState, event: TopicEvent) -> TopicState:
    """Return the state after an event. Raises MisuseError if the state does not allow the event."""
    try:
        return _NEXT[state, event]
    except KeyError:
        raise MisuseError(f"a topic that is {state.value} cannot be {event.value}") from None


def is_going(state: TopicState) -> bool:
    """Return True if a topic in this state is being deleted and its name is not free yet."""
    return state in (TopicState.DOOMED, TopicState.BEING_DELETED)


def listed(state: TopicState, partition_count: int, directory_count: int) -> ListedTopic:
    """Return the entry of a topic in the list.

    `partition_count` is the number of partitions that the topic has or will have. `directory_count` is above
    the index of every directory of the topic, even of one that a failed creation of a partition has left. A
    deletion must cover all directories.
    """
    if is_going(state):
        return ListedTopic(True, max(partition_count, directory_count))
    return ListedTopic(False, partition_count)


def state_at_start(is_deleting: bool) -> TopicState:
    """Return the state of a listed topic at the start of the broker, before its partitions are opened."""
    return TopicState.BEING_DELETED if is_deleting else TopicState.BEING_MADE
