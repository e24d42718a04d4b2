"""Tests of a consumer's reactions to coordinator errors, by tests/tables/group_errors.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncelog.errors import ERROR_BY_CODE
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest, group_action

TABLE = Path(__file__).parents[1] / "tables" / "group_errors.txt"
NAMES = {cls.kafka_name: code for code, cls in ERROR_BY_CODE.items()}
ROWS = [
    line.partition("!")[0].split() for line in TABLE.read_text().splitlines() if line and line[0] not in "# "
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_each_error_has_the_action_of_the_table(row: list[str]) -> None:
    name, request, action = row
    assert group_action(NAMES[name], GroupRequest(request)) is GroupAction(action)


def test_a_code_from_the_future_is_raised() -> None:
    assert {group_action(9_999, request) for request in GroupRequest} == {GroupAction.RAISE}


def test_a_fenced_name_ends_the_member_whatever_it_asked_as_a_member() -> None:
    as_member = set(GroupRequest) - {GroupRequest.FETCH}
    assert {group_action(82, request) for request in as_member} == {GroupAction.END}
    assert not any(
        group_action(code, request) is GroupAction.END
        for code in set(ERROR_BY_CODE) - {82}
        for request in GroupRequest
    )


def test_losing_the_coordinator_costs_no_membership() -> None:
    for code in (7, 14, 15, 16):
        actions = {group_action(code, request) for request in GroupRequest}
        assert actions <= {GroupAction.RETRY, GroupAction.FIND}
