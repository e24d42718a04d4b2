"""The loop of docs/guides/transactions.md, run as it is printed there, and the claims of that page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import blocks_of
from support.groups.members import SECONDS, fill, member
from support.topics import new_topic, producer_of, read, values
from support.wait import wait_until

from oncelog import Consumer, ConsumerGroupMetadata, Producer, Record, TopicPartition
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.conform.scenario_reader import FOLDER
from oncelog.errors import MisuseError

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "transactions.md"
NAMES = ("consumer.subscribe", "enable.auto.commit", "send_offsets_to_transaction", "seek_to_committed")

CHILD = """
import os, sys
servers, source, target, group, died, failed = sys.argv[1:]

def transform(record):
    if record.value == died.encode():
        os._exit(9)
    if record.value == failed.encode():
        raise ValueError("cannot be transformed")
    return record.value
"""


def documented_loop() -> str:
    (code,) = [block.code for block in blocks_of(PAGE.read_text()) if "def copy(" in block.code]
    assert all(name in code for name in NAMES)
    return code + "\ncopy(servers, source, target, group, transform)\n"


def copier(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + documented_loop(), *arguments], stderr=subprocess.PIPE
    )


@pytest.mark.behaviour("T7")
def test_the_documented_loop_loses_and_doubles_nothing_over_crashes(servers: str, group: str) -> None:
    """The first copier is killed within a transaction, the second raises, and the third finishes."""
    source, target = new_topic(servers), new_topic(servers)
    fill(servers, source, 0, 10, 1)
    place = (servers, source, target, group)
    first = copier(*place, "15", "-")
    wait_until(lambda: len(read(servers, target)) == 10 or first.poll() is not None)
    fill(servers, source, 10, 10, 1)
    assert first.wait(SECONDS) == 9, first.communicate()[1].decode()
    second = copier(*place, "-", "17")
    assert "cannot be transformed" in second.communicate(timeout=SECONDS)[1].decode()
    third = copier(*place, "-", "-")
    try:
        wait_until(lambda: len(read(servers, target)) >= 20 or third.poll() is not None)
    finally:
        third.kill()
        problem = third.communicate()[1].decode()
    assert values(servers, target) == [b"%d" % number for number in range(20)], problem


def test_each_test_and_scenario_that_the_page_names_exists() -> None:
    tests, source = Path(__file__).parents[1], FOLDER.parent
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    scenarios = re.findall(r"`(scenarios/\w+\.md): ([^`]+)`", PAGE.read_text())
    assert len(named) > 20
    assert len(scenarios) > 9
    missing = [name for file, name in named if f"def {name}(" not in (tests / file).read_text()]
    for file, title in scenarios:
        folder = source if (source / file).exists() else tests
        if f"## {title}\n" not in (folder / file).read_text():
            missing.append(title)
    assert missing == []


@pytest.mark.behaviour("T16")
def test_group_metadata_with_automatic_commits_is_refused(ours: str, group: str) -> None:
    """With automatic commits, close() after an exception would commit the positions of records that were
    aborted.
    """
    message = r"enable\.auto\.commit=false.*group_metadata\(\) for send_offsets_to_transaction\(\)"
    with member(ours, group) as consumer, pytest.raises(MisuseError, match=message):
        consumer.group_metadata()
    with pytest.raises(MisuseError, match=message):
        AsyncConsumer({"bootstrap.servers": ours, "group.id": group}).group_metadata()
    with member(ours, group, enable_auto_commit=False) as by_hand:
        assert by_hand.group_metadata().group_id == group


@pytest.mark.behaviour("T16")
def test_a_consumer_in_the_place_of_its_group_metadata_is_refused(ours: str, group: str) -> None:
    with producer_of(ours, transactional_id=group) as producer, member(ours, group) as consumer:
        producer.init_transactions()
        producer.begin_transaction()
        for wrong in (consumer, Consumer, None, 7):
            with pytest.raises(MisuseError, match=r"consumer\.group_metadata\(\)"):
                producer.send_offsets_to_transaction({TopicPartition("t", 0): 1}, wrong)  # type: ignore[arg-type]


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize("is_subscribed", [True, False])
def test_a_group_id_whose_consumer_here_commits_automatically_is_refused(
    ours: str, group: str, is_subscribed: bool
) -> None:
    """`group_metadata()` refuses a consumer that commits automatically.

    If the application passes only the group id, `send_offsets_to_transaction()` must find such a consumer in
    this process.
    """
    tp = TopicPartition(new_topic(ours), 0)
    with producer_of(ours, transactional_id=group) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        with member(ours, group) as consumer:
            consumer.subscribe([tp.topic]) if is_subscribed else consumer.assign([tp])
            wait_until(lambda: consumer.poll(0.1) == [] and consumer.assignment())
            for named in (group, ConsumerGroupMetadata(group)):
                with pytest.raises(
                    MisuseError, match=r"commits automatically .* set enable\.auto\.commit=false"
                ):
                    producer.send_offsets_to_transaction({tp: 1}, named)
            producer.send_offsets_to_transaction({tp: 1}, f"{group}-other")
        producer.send_offsets_to_transaction({tp: 0}, group)
        producer.commit_transaction()


@pytest.mark.behaviour("T7")
def test_records_kept_over_a_rebalance_are_processed_twice(ours: str, group: str) -> None:
    """`group_metadata()` returns the generation at the time of the call, not the one in which the records
    were polled.
    """
    topic = new_topic(ours, 2)
    fill(ours, topic, 0, 4, 2)
    dropped: list[TopicPartition] = []
    config = {"bootstrap.servers": ours, "transactional.id": f"late-{topic}"}
    with (
        member(ours, group, enable_auto_commit=False) as one,
        member(ours, group, enable_auto_commit=False) as two,
        Producer(config) as producer,
    ):
        producer.init_transactions()
        one.subscribe([topic], on_revoked=dropped.extend)
        kept: list[Record] = []
        wait_until(lambda: kept.extend(one.poll(0.1)) or len(kept) == 4)  # type: ignore[func-returns-value]
        generation = one.group_metadata().generation_id
        two.subscribe([topic])
        again: list[Record] = []

        def is_shared() -> bool:
            again.extend(two.poll(0.1))
            one.poll(0.1)
            return len(one.assignment()) == len(two.assignment()) == 1 and len(again) == 2

        wait_until(is_shared)
        assert len(dropped) == 2, "here an application drops what it has gathered"
        assert one.group_metadata().generation_id > generation
        with producer.transaction():
            ends = {TopicPartition(record.topic, record.partition): 2 for record in kept}
            producer.send_offsets_to_transaction(ends, one.group_metadata())
        assert {record.value for record in again} < {record.value for record in kept}, (
            "committed by one, read by two"
        )
