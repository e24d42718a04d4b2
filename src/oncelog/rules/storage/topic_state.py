"""The states of a topic's name, what leads from one to another, and what the list of topics says in each.

    state           event              next state
    ABSENT          CREATE             BEING_MADE
    BEING_MADE      NOT_LISTED         ABSENT         the list was not written: nothing of it exists
    BEING_MADE      OPENED             LIVE           every partition has a directory, and these are durable
    BEING_MADE      FAILED             DOOMED
    LIVE            DELETE             DOOMED
    DOOMED          NOT_MARKED         LIVE           the list was not written, and the old one stands
    DOOMED          MARKED             BEING_DELETED  the list says so, durably
    BEING_DELETED   REMOVED            ABSENT         no directory is left

Clients find a topic that is LIVE. In every state but ABSENT the name is taken, and the list names the topic.
A directory is removed in BEING_DELETED only, so a crash at any step finds either the whole topic or its
deletion. A start makes what a BEING_MADE or LIVE topic lacks, and goes on with a deletion. A DOOMED topic
is served no more although the list may still call it live: a write that failed late may be found or not.
A topic that gets more partitions stays LIVE: the list names the new ones first, and clients find them when
all are made. A deletion in between takes them, too.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from oncelog.errors import MisuseError


class TopicState(Enum):
    """Where a topic's name is between its creation and the end of its deletion."""

    ABSENT = "absent"
    BEING_MADE = "being made"
    LIVE = "live"
    DOOMED = "doomed"
    BEING_DELETED = "being deleted"


class TopicEvent(Enum):
    """What was asked for a topic, or what became of the attempt."""

    CREATE = "create"
    NOT_LISTED = "not listed"
    OPENED = "opened"
    FAILED = "failed"
    DELETE = "delete"
    NOT_MARKED = "not marked"
    MARKED = "marked"
    REMOVED = "removed"


class ListedTopic(NamedTuple):
    """What the list of topics says of a topic's state."""

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
    """Return the state after an event. Raises MisuseError for an event that the state does not know."""
    try:
        return _NEXT[state, event]
    except KeyError:
        raise MisuseError(f"a topic that is {state.value} cannot be {event.value}") from None


def is_going(state: TopicState) -> bool:
    """Return whether a topic is on its way out, so that its name gets free once its files are gone."""
    return state in (TopicState.DOOMED, TopicState.BEING_DELETED)


def listed(state: TopicState, partition_count: int, directory_count: int) -> ListedTopic:
    """Return what the list says of a topic.

    `partition_count`: how many partitions it has or will have. `directory_count`: no directory of it has
    this index or a larger one. A deletion must know that: a partition that could not be made may leave one.
    """
    if is_going(state):
        return ListedTopic(True, max(partition_count, directory_count))
    return ListedTopic(False, partition_count)


def state_at_start(is_deleting: bool) -> TopicState:
    """Return the state of a topic that the list names, before any of its partitions is open."""
    return TopicState.BEING_DELETED if is_deleting else TopicState.BEING_MADE
