"""The error policy of producers, against tests/tables/error_policy.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncelog.errors import ERROR_BY_CODE
from oncelog.rules.idempotence.error_policy import Mode, error_policy_for

TABLE = Path(__file__).parents[1] / "tables" / "error_policy.txt"
NAMES = {cls.kafka_name: code for code, cls in ERROR_BY_CODE.items()}
ROWS = [line.split() for line in TABLE.read_text().splitlines() if line and line[0] not in "# "]


@pytest.mark.behaviour("I18")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_reaction(row: list[str]) -> None:
    name, mode, action, error_class, may_be_stored, is_metadata_stale = row
    policy = error_policy_for(NAMES[name], Mode(mode))
    assert (policy.action.value, policy.error_class.value) == (action.replace("-", " "), error_class)
    assert policy.may_be_stored == (may_be_stored == "maybe")
    assert policy.is_metadata_stale == (is_metadata_stale == "stale")


def test_a_code_from_the_future_fails_its_records_as_possibly_stored() -> None:
    policy = error_policy_for(9_999, Mode.IDEMPOTENT)
    assert (policy.action.value, policy.error_class.value, policy.may_be_stored) == (
        "fail",
        "abortable",
        True,
    )
    assert not policy.is_metadata_stale


def test_a_retriable_error_is_never_fatal() -> None:
    for code, error in ERROR_BY_CODE.items():
        if error.retriable:
            assert error_policy_for(code, Mode.IDEMPOTENT).error_class.value != "fatal", error.kafka_name
