"""The authorizer's cache of decisions has a limit in bytes, and all connections of a principal share it."""

from __future__ import annotations

import pytest

from oncelog.broker.security.authorizer import KEPT_BYTES, MAX_KEPT_NAME, AccessByAcls, Authorizer
from oncelog.rules.security.authorization import (
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    is_allowed_somewhere,
)
from oncelog.testing.memory_disk import MemoryDisk

READ, TOPIC = Operation.READ, ResourceType.TOPIC


def access_to_topics() -> tuple[Authorizer, AccessByAcls]:
    authorizer = Authorizer(MemoryDisk(), "", allows_if_none=False)
    authorizer.add([Acl(TOPIC, "t", PatternType.PREFIXED, "User:a", "*", READ, Permission.ALLOW)])
    access = authorizer.access("User:a", "h")
    assert isinstance(access, AccessByAcls)
    return authorizer, access


@pytest.mark.behaviour("I29")
def test_answers_are_kept_up_to_a_number_of_bytes() -> None:
    _, access = access_to_topics()
    for number in range(20_000):
        assert access.may(READ, TOPIC, f"t{number:0200}")
        assert access.kept_bytes <= KEPT_BYTES
    assert len(access._answers) < KEPT_BYTES // 200


@pytest.mark.behaviour("I29")
def test_answers_about_long_names_are_not_kept() -> None:
    _, access = access_to_topics()
    assert access.may(READ, TOPIC, "t" * (MAX_KEPT_NAME + 1))
    assert not access.kept_bytes
    assert access.may(READ, TOPIC, "t" * MAX_KEPT_NAME)
    assert access.kept_bytes


def test_connections_of_one_principal_share_what_is_remembered() -> None:
    authorizer, access = access_to_topics()
    assert authorizer.access("User:a", "h") is access
    assert authorizer.access("User:a", "other") is not access


def test_nothing_is_remembered_past_a_change_of_the_acls() -> None:
    authorizer, access = access_to_topics()
    assert access.may(READ, TOPIC, "t1") and not access.may(READ, TOPIC, "u")
    authorizer.add([Acl(TOPIC, "t1", PatternType.LITERAL, "User:a", "*", READ, Permission.DENY)])
    assert not access.may(READ, TOPIC, "t1")


def test_a_right_on_any_topic_is_looked_up_once_until_an_acl_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: any client may send InitProducerId, and each such request examined all ACLs."""
    authorizer, access = access_to_topics()
    looked: list[Operation] = []

    def look(acls: object, principal: str, host: str, operation: Operation, kind: ResourceType) -> bool:
        looked.append(operation)
        return is_allowed_somewhere(authorizer.acls, principal, host, operation, kind)

    monkeypatch.setattr("oncelog.broker.security.authorizer.is_allowed_somewhere", look)
    for _ in range(3):
        assert access.may_somewhere(READ, TOPIC) and not access.may_somewhere(Operation.WRITE, TOPIC)
    assert looked == [READ, Operation.WRITE]
    authorizer.add([Acl(TOPIC, "t", PatternType.PREFIXED, "User:a", "*", READ, Permission.DENY)])
    assert not access.may_somewhere(READ, TOPIC)
    assert len(looked) == 3
