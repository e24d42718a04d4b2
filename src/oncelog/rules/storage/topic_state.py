"""The states of a topic name, their transitions, and what the list of topics says in each state.

    state           event              next state
    ABSENT          CREATE             BEING_MADE
    BEING_MADE      NOT_LISTED         ABSENT         the list was not written: nothing of the topic exists
    BEING_MADE      OPENED             LIVE           every partition has a durable directory
    BEING_MADE      FAILED             DOOMED
    LIVE            DELETE             DOOMED
    DOOMED          NOT_MARKED         LIVE           the list was not written: the old one is valid
    DOOMED          MARKED             BEING_DELETED  the list durably says so
    BEING_DELETED   REMOVED            ABSENT         no directory is left

Clients can use a topic that is LIVE. In every state but ABSENT the name is taken, and the list names the
topic. Directories are removed only in BEING_DELETED, so a crash at any step leaves either the whole topic or
its deletion. A start creates what a BEING_MADE or LIVE topic lacks, and continues a deletion. A DOOMED topic
is no longer served, although the list may still call it live: a write that failed late may have reached the
disk. A topic that gets more partitions stays LIVE. The list names the new ones first, and clients see them
when all are created. A deletion meanwhile deletes them, too.
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
    """A request for a topic, or the result of carrying it out."""

    CREATE = "create"
    NOT_LISTED = "not listed"
    OPENED = "opened"
    FAILED = "failed"
    DELETE = "delete"
    NOT_MARKED = "not marked"
    MARKED = "marked"
    REMOVED = "removed"


class ListedTopic(NamedTuple):
    """A topic's state in the list of topics."""

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
    """Return True if a topic is being deleted, so that its name becomes free once its files are gone."""
    return state in (TopicState.DOOMED, TopicState.BEING_DELETED)


def listed(state: TopicState, partition_count: int, directory_count: int) -> ListedTopic:
    """Return what the list says of a topic.

    `partition_count` is the number of partitions it has or will have. Every directory of the topic has an
    index below `directory_count`. A deletion must cover them all: a partition that could not be created may
    leave one.
    """
    if is_going(state):
        return ListedTopic(True, max(partition_count, directory_count))
    return ListedTopic(False, partition_count)


def state_at_start(is_deleting: bool) -> TopicState:
    """Return the state of a listed topic at a start, before any of its partitions is open."""
    return TopicState.BEING_DELETED if is_deleting else TopicState.BEING_MADE
