"""The states of a topic name: the table of transitions, and a path from every state to ABSENT."""

from __future__ import annotations

import pytest
from support.append_notation import rows

from oncelog.errors import MisuseError
from oncelog.rules.storage.topic_state import (
    TopicEvent,
    TopicState,
    is_going,
    listed,
    next_state,
    state_at_start,
)


@pytest.mark.parametrize("row", list(rows("topic_state.txt")), ids=lambda row: f"{row[0]}, {row[1]}")
def test_the_table(row: tuple[str, ...]) -> None:
    state, event, expected, text = row
    if expected == "refused":
        with pytest.raises(MisuseError, match=state):
            next_state(TopicState(state), TopicEvent(event))
        return
    found = next_state(TopicState(state), TopicEvent(event))
    assert found is TopicState(expected)
    if found is not TopicState.ABSENT:
        is_deleting, count = listed(found, 2, 3)
        assert f"{'deleting' if is_deleting else 'live'}/{count}" == text


def test_a_start_ends_in_a_state_that_requests_know() -> None:
    assert next_state(state_at_start(False), TopicEvent.OPENED) is TopicState.LIVE
    assert next_state(state_at_start(True), TopicEvent.REMOVED) is TopicState.ABSENT
    assert [state for state in TopicState if is_going(state)] == [
        TopicState.DOOMED,
        TopicState.BEING_DELETED,
    ]
