"""Small state files of the broker: damaged, edited by hand, or written by an older version."""

from __future__ import annotations

import json
import re

import pytest
from support.fuzz.targets import NOW_MS, open_node

from oncelog.broker import state_file
from oncelog.broker.security.authorizer import Authorizer
from oncelog.broker.security.users import Users
from oncelog.errors import StorageError
from oncelog.rules.limits.quotas import QuotaEntity
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.testing.memory_disk import MemoryDisk

FILES = ("oncelog-topics.json", "oncelog-producer-ids.json")
SETTINGS = {"cleanup.policy": "compact", "retention.ms": "60000"}


def used_disk() -> MemoryDisk:
    disk = MemoryDisk()
    node = open_node(disk)
    node.topics.create("t", 2, SETTINGS, NOW_MS)
    node.producer_ids.take()
    return disk.after_kill()


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_changes_what_a_file_says(name: str) -> None:
    """Regression: without a checksum, one flipped bit could change retention.ms, or stop the start."""
    disk = used_disk()
    whole = disk.read(name)
    end = whole.index(b'"crc32c"')  # behind this point is the checksum itself
    for place in range(end * 8):
        damaged = disk.after_kill()
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        damaged.replace(name, bytes(data))
        with pytest.raises(StorageError, match=rf"{name} is unreadable .*restore it from a backup"):
            open_node(damaged)


def test_a_file_without_a_checksum_is_read_and_gets_one() -> None:
    """Versions before 0.5.1 wrote no checksum, and a user who edits the file must remove the checksum."""
    disk, name = used_disk(), "oncelog-topics.json"
    content = json.loads(disk.read(name))
    del content["crc32c"]
    content["topics"][0]["settings"]["retention.ms"] = "70000"
    disk.replace(name, json.dumps(content).encode())
    node = open_node(disk)
    topic = node.topics.get("t")
    assert topic is not None and topic.overrides["retention.ms"] == "70000"
    node.topics.create("u", 1, {}, NOW_MS)
    assert re.search(rb'"crc32c": "[0-9a-f]{8}"\n}$', disk.read(name))


def test_a_file_that_was_changed_by_hand_says_what_to_do() -> None:
    disk, name = used_disk(), "oncelog-topics.json"
    disk.replace(name, disk.read(name).replace(b"60000", b"70000"))
    with pytest.raises(StorageError, match="if you changed it by hand, remove crc32c from it"):
        open_node(disk)


def test_a_setting_that_is_unknown_names_the_file() -> None:
    disk, name = used_disk(), "oncelog-topics.json"
    content = json.loads(disk.read(name).replace(b"cleanup.policy", b"cleanup.poLicy"))
    del content["crc32c"]
    disk.replace(name, json.dumps(content).encode())
    with pytest.raises(StorageError, match=r"oncelog-topics.json is unreadable .*cleanup\.poLicy"):
        open_node(disk)


def test_the_error_of_an_unreadable_file_does_not_contain_it() -> None:
    """Regression: the error for a byte that is not UTF-8 contained the whole file."""
    disk, name = used_disk(), "oncelog-topics.json"
    disk.replace(name, bytes([0xFF]) + bytes(50_000))
    with pytest.raises(StorageError, match=f"{name} is unreadable") as refused:
        open_node(disk)
    assert len(str(refused.value)) < 300


def test_a_change_encodes_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1532: each change of one ACL, user, quota or topic encoded those of all others. The file says what it
    said before a restart, whatever was changed.
    """
    encoded: list[object] = []
    dumps = state_file.json.dumps
    monkeypatch.setattr(state_file.json, "dumps", lambda row: encoded.append(row) or dumps(row))
    disk = MemoryDisk()
    node = open_node(disk)
    acls = Authorizer(disk, "", allows_if_none=False)
    users, quotas = Users(disk), node.quotas

    def acl(number: int) -> Acl:
        name = f"n{number % 7}"
        fields = PatternType.PREFIXED, "User:a", f"host{number}", Operation.READ, Permission.ALLOW
        return Acl(ResourceType.TOPIC, name, *fields)

    def change(number: int, count: int) -> None:
        acls.add([acl(number)])
        acls.remove([acl(number - 20)])
        credential = 1, b"salt" * 4, bytes([number]) * 32, 4096 + count
        users.alter(f"u{number}", [], [credential])
        quotas.alter(QuotaEntity(user=f"u{number}"), [("producer_byte_rate", float(count))], is_test=False)
        if count == 1:
            node.topics.create(f"t{number}", 1, {"retention.ms": str(number + 1)}, NOW_MS)

    for number in range(40):
        change(number, 1)
    encoded.clear()
    change(40, 1)
    change(3, 2)
    rows = [row for row in encoded if isinstance(row, dict)]
    assert len(rows) == 7
    topic = node.topics.get("t3")
    assert topic is not None
    node.topics.delete([topic])
    started = disk.after_kill()
    assert list(Authorizer(started, "", allows_if_none=False).acls) == list(acls.acls)
    assert {a.host for a in acls.acls} == {f"host{i}" for i in (*range(21, 41), 3)}
    again = Users(started)
    assert {name: list(again.of(name)) for name in again.names()} == {
        name: list(users.of(name)) for name in users.names()
    }
    restarted = open_node(started)
    assert restarted.quotas.values == quotas.values
    held = {topic.name: topic.overrides for topic in node.topics.all()}
    assert {topic.name: topic.overrides for topic in restarted.topics.all()} == held
    assert "t3" not in held and len(held) == 40
