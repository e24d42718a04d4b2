"""The responses of a group's members are sent in bounded steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.groups.node import GroupNode, join, sync

from oncelog.limits import DEFAULT_LIMITS


def test_the_members_of_a_group_are_answered_in_bounded_steps() -> None:
    """Regression: the broker sent the responses to 5,000 members of a rebalance in one step, and other
    clients waited for all of them.
    """
    place = GroupNode(group_initial_rebalance_delay_ms=3_000)
    place.limits = replace(DEFAULT_LIMITS, step_member_responses=2)
    place.restart()
    background = place.node.log_manager.background
    background.on_added = lambda: None

    def answered_counts(answers: list[list[Any]]) -> list[int]:
        """Run the remaining steps, and check that the responses are sent in order.

        Return the number of responses sent so far: before the first step and after each one.
        """
        counts = []
        while True:
            is_answered = [bool(answer) for answer in answers]
            counts.append(sum(is_answered))
            assert is_answered == sorted(is_answered, reverse=True)
            if not background:
                return counts
            assert background.step() is None

    joins = [place.ask(join("g"), 3) for _ in range(5)]
    assert not any(joins)
    place.pass_time(3_000)
    # The first two counts are equal, because the task's first step belongs to the step of the request.
    assert answered_counts(joins) == [2, 2, 4, 5]
    ids = [answer.member_id for (answer,) in joins]
    assert {answer.generation_id for (answer,) in joins} == {1} and len(set(ids)) == 5
    followers = [place.ask(sync("g", member, 1, {}), 3) for member in ids[1:]]
    leader = place.ask(sync("g", ids[0], 1, {member: member.encode() for member in ids}), 3)
    assert answered_counts([leader, *followers]) == [2, 2, 4, 5]
    assert [answer.assignment for (answer,) in (leader, *followers)] == [member.encode() for member in ids]
    # A member of another group gets its response immediately.
    assert len(place.ask(join("other"), 4)) == 1
