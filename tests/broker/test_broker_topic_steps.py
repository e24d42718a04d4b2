"""Topics that grow and are deleted in steps, with other events between two steps.

The events are a deletion, a creation of the same name, another growth, a stop, a kill and a failing disk.
A topic then has all of the new partitions or none. No step touches another topic's directories, and no
acknowledged record is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

import pytest
from support.faulty_disk import Fault, FaultyDisk
from support.log.partitions import batch, read_all

from oncelog.broker.dispatch import handle, tick
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import run_work
from oncelog.broker.topics import topics as topics_module
from oncelog.broker.topics.topics import Topic
from oncelog.config import BROKER
from oncelog.errors import (
    InvalidPartitions,
    KafkaStorageError,
    StorageError,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.limits import Limits
from oncelog.log.manager import LogManager
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Origin
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    IncrementalAlterConfigsRequest,
    MetadataRequest,
)

NOW_MS = 1_700_000_000_000
LIMITS = Limits(partitions_per_step=2, request_step_elements=2)
SETTINGS = BROKER.parse({"offsets.topic.num.partitions": 1, "transaction.state.log.num.partitions": 1})
OLD, NEW = 3, 9


class Broker:
    """A broker whose background tasks the test runs step by step."""

    def __init__(self, disk: Any, numbers: Iterator[int]) -> None:
        self.disk, self.numbers = disk, numbers

        def new_uuid() -> bytes:
            return next(numbers).to_bytes(16, "big")

        self.logs = LogManager.open(disk, node_id=1, new_uuid=new_uuid, now_ms=NOW_MS, limits=LIMITS)
        try:
            self.node = BrokerState(self.logs, SETTINGS, new_uuid=new_uuid, now_ms=NOW_MS)
        except StorageError:
            self.logs.release()
            raise
        self.background = self.logs.background
        self.background.on_added = lambda: None

    def ask(self, message: Any) -> Answer:
        header = RequestHeader(message.api.key, message.api.max_version, 1, "c", 0)
        return Answer(handle(self.node, Request(1, header, message, "/127.0.0.1"), NOW_MS))

    def create(self, name: str, partition_count: int) -> Answer:
        topic = CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=partition_count, replication_factor=1, assignments=[], configs=[]
        )
        return self.ask(CreateTopicsRequest(topics=[topic], timeout_ms=1000))

    def make(self, name: str, partition_count: int) -> None:
        """Create a topic, and run all steps. The creation must succeed."""
        answer = self.create(name, partition_count)
        self.finish()
        assert answer.code == 0

    def grow(self, name: str, partition_count: int) -> Answer:
        topic = CreatePartitionsRequest.CreatePartitionsTopic(
            name=name, count=partition_count, assignments=None
        )
        return self.ask(CreatePartitionsRequest(topics=[topic], timeout_ms=1000))

    def alter(self, names: str, **settings: str) -> Answer:
        """Set settings of the topics with these letters as their names."""
        request = IncrementalAlterConfigsRequest
        configs = [
            request.AlterableConfig(name=key.replace("_", "."), config_operation=0, value=value)
            for key, value in settings.items()
        ]
        resources = [
            request.AlterConfigsResource(resource_type=2, resource_name=name, configs=configs)
            for name in names
        ]
        return self.ask(request(resources=resources))

    def delete(self, name: str) -> Answer:
        topic = DeleteTopicsRequest.DeleteTopicState(name=name)
        return self.ask(DeleteTopicsRequest(topics=[topic], timeout_ms=1000))

    def step(self) -> None:
        job = self.background.step()
        if job is not None:
            with suppress(Exception):  # the task raises this error in its next step
                job()

    def steps(self, max_steps: int) -> int:
        """Run at most `max_steps` steps of the background tasks, and return how many were run."""
        for done in range(max_steps):
            if not self.background:
                return done
            with suppress(OSError, StorageError, KafkaStorageError):
                self.step()
        return max_steps

    def finish(self) -> None:
        assert self.steps(2000) < 2000

    def retry_deletions(self) -> None:
        """Advance the clock by a minute and run the periodic tasks, which retry deletions."""
        tick(self.node, NOW_MS + next(self.numbers) * 60_000)

    def topic(self, name: str) -> Topic:
        topic = self.node.topics.get(name)
        assert topic is not None
        return topic

    def fill(self, name: str) -> None:
        """Store a record in each partition of a topic."""
        for partition in self.topic(name).partitions:
            partition.append(memoryview(bytearray(batch())), origin=Origin.CLIENT, now_ms=NOW_MS)
            partition.flush()

    def shape(self, name: str) -> list[int] | None:
        """Return 1 for each partition with records and 0 for each empty one, or None if the topic does not
        exist.
        """
        topic = self.node.topics.get(name)
        return (
            None
            if topic is None
            else [len(list(read_all(partition))) and 1 for partition in topic.partitions]
        )

    def topic_codes(self, answer: Answer) -> list[int] | None:
        return None if answer.code is None else [row.error_code for row in answer._answers[0].topics]

    def directories(self, name: str) -> list[str]:
        return [directory for directory in self.disk.list() if directory.startswith(f"{name}-")]

    def after_kill(self) -> Broker:
        disk = self.disk.disk if isinstance(self.disk, FaultyDisk) else self.disk
        return Broker(disk.after_kill(), self.numbers)


class Answer:
    """A response that is ready now or later."""

    def __init__(self, answer: Any) -> None:
        self._answers: list[Any] = []
        if isinstance(answer, PendingResponse):
            answer.add_done_callback(self._answers.append)
        else:
            self._answers.append(answer)

    @property
    def code(self) -> int | None:
        """The first error code; None while there is no response."""
        if not self._answers:
            return None
        rows = next(getattr(self._answers[0], key) for key in ("topics", "results", "responses")
                    if hasattr(self._answers[0], key))  # fmt: skip
        return int(rows[0].error_code)


def with_topic() -> Broker:
    """Return a broker with topic t, which has a record in each partition."""
    broker = Broker(MemoryDisk(), count(1))
    broker.make("t", OLD)
    broker.fill("t")
    return broker


def growths() -> Iterator[tuple[Broker, Answer]]:
    """Yield a new broker for each number of steps that the growth of topic t can have run."""
    for steps in count():
        broker = with_topic()
        answer = broker.grow("t", NEW)
        if broker.steps(steps) < steps:
            return
        if answer.code is None:
            yield broker, answer


def test_many_partitions_are_added_in_steps_and_seen_together() -> None:
    step_count = 0
    for broker, answer in growths():
        step_count += 1
        assert broker.shape("t") == [1] * OLD
        broker.finish()
        assert answer.code == 0
        assert broker.shape("t") == [1] * OLD + [0] * (NEW - OLD)
    assert step_count >= (NEW - OLD) // LIMITS.partitions_per_step


def test_a_topic_that_is_deleted_while_it_grows_stays_away() -> None:
    for broker, answer in growths():
        deletion = broker.delete("t")
        assert broker.node.topics.get("t") is None
        broker.finish()
        assert (answer.code, deletion.code) == (UnknownTopicOrPartition.code, 0)
        assert not broker.directories("t")
        broker.make("t", 1)
        broker.fill("t")
        assert broker.after_kill().shape("t") == [1]


def test_another_growth_waits_for_the_first() -> None:
    for broker, answer in growths():
        smaller, larger = broker.grow("t", NEW - 1), broker.grow("t", NEW + 1)
        assert (smaller.code, larger.code) == (InvalidPartitions.code, None)
        broker.finish()
        assert (answer.code, larger.code) == (0, 0)
        assert broker.shape("t") == [1] * OLD + [0] * (NEW + 1 - OLD)


def test_another_growth_is_judged_by_what_became_of_the_first() -> None:
    for broker, answer in growths():
        same, larger = broker.grow("t", NEW + 1), broker.grow("t", NEW + 1)
        broker.finish()
        assert answer.code == 0
        assert sorted([same.code or 0, larger.code or 0]) == [0, InvalidPartitions.code]


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_start_ends_a_growth(is_killed: bool) -> None:
    for broker, answer in growths():
        if not is_killed:
            broker.node.close(NOW_MS)
            assert answer.code in (KafkaStorageError.code, 0)
        again = broker.after_kill()
        assert again.logs.was_clean is not is_killed
        assert again.shape("t") == [1] * OLD + [0] * (NEW - OLD)


def test_a_growth_that_the_disk_refuses_leaves_nothing() -> None:
    for index in range(OLD, NEW):
        broker = with_topic()
        broker.disk.errors["mkdir", f"t-{index}"] = 5
        answer = broker.grow("t", NEW)
        broker.finish()
        assert answer.code == KafkaStorageError.code
        assert broker.shape("t") == [1] * OLD and len(broker.directories("t")) == OLD
        broker.disk.errors.clear()
        assert broker.after_kill().shape("t") == [1] * OLD
        answer = broker.grow("t", NEW)
        broker.finish()
        assert answer.code == 0 and broker.shape("t") == [1] * OLD + [0] * (NEW - OLD)


def test_new_partitions_have_the_settings_that_a_topic_got_meanwhile() -> None:
    for broker, _ in growths():
        broker.node.topics.alter([(broker.topic("t"), {"max.message.bytes": "99"})])
        broker.finish()
        assert {partition.config.max_message_bytes for partition in broker.topic("t").partitions} == {99}


def with_topics() -> Broker:
    broker = Broker(MemoryDisk(), count(1))
    for name in "abcde":
        broker.make(name, 1)
    return broker


def alterations() -> Iterator[tuple[Broker, Answer]]:
    """Yield a new broker for each number of steps that a change of five topics' settings can have run."""
    for steps in count():
        broker = with_topics()
        answer = broker.alter("abcde", retention_ms="5")
        if broker.steps(steps) < steps:
            return
        if answer.code is None:
            yield broker, answer


def own(broker: Broker, name: str) -> dict[str, str]:
    return broker.topic(name).overrides


def creation_of(names: str) -> Any:
    """Return a request that creates topics with these letters as their names."""
    topic = CreateTopicsRequest.CreatableTopic
    topics = [topic(name=name, num_partitions=1, replication_factor=1) for name in names]
    return CreateTopicsRequest(topics=topics, timeout_ms=1000)


def most_calls_in_a_step(broker: Broker, request: Any, calls: list[Any]) -> int:
    """Run a request to its end, and return by how much `calls` grew in one step at most."""
    calls.clear()
    answer = broker.ask(request)
    most = len(calls)
    while broker.background:
        calls.clear()
        broker.step()
        most = max(most, len(calls))
    assert answer.code == 0
    return most


def test_many_topics_are_prepared_in_steps_before_they_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1673: the settings of all topics of a request were parsed in one step, and their rows of the file
    encoded: 0.12 s for 5,000 topics. So were the rows of all topics that a request deletes.
    """
    calls: list[Any] = []
    configure, encode = Topic.configure, topics_module.encode_row

    def counted_configure(self: Topic, broker: Any, overrides: dict[str, str]) -> None:
        calls.append(self)
        configure(self, broker, overrides)

    def counted_encode(row: Any) -> Any:
        calls.append(row)
        return encode(row)

    monkeypatch.setattr(Topic, "configure", counted_configure)
    monkeypatch.setattr(topics_module, "encode_row", counted_encode)
    broker = Broker(MemoryDisk(), count(1))
    names = "abcdefghijklmnopqrst"
    assert most_calls_in_a_step(broker, creation_of(names), calls) <= 2 * LIMITS.partitions_per_step
    deletion = DeleteTopicsRequest(
        topics=[DeleteTopicsRequest.DeleteTopicState(name=name) for name in names], timeout_ms=1000
    )
    assert most_calls_in_a_step(broker, deletion, calls) <= LIMITS.request_step_elements


def change_topics(broker: Broker) -> None:
    changes = [(topic, {"retention.ms": "123456"}) for topic in broker.node.topics.all()]
    broker.node.topics.alter(changes)


def change_broker(broker: Broker) -> None:
    broker.node.settings.lay_over([{"log.retention.ms": "123456"}])
    run_work(broker.node.topics.reconfigure())


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("change", [change_topics, change_broker])
def test_new_partitions_have_the_settings_that_were_set_between_the_steps(
    change: Callable[[Broker], None], is_new: bool
) -> None:
    """The settings may change after some of the new partitions were configured for the last time."""
    partition = CreatePartitionsRequest.CreatePartitionsTopic
    growth = [partition(name=name, count=2, assignments=None) for name in "abcde"]
    for step_count in count():
        broker = Broker(MemoryDisk(), count(1))
        if not is_new:
            broker.ask(creation_of("abcde"))
            broker.finish()
        request = CreatePartitionsRequest(topics=growth, timeout_ms=1000)
        answer = broker.ask(creation_of("abcde") if is_new else request)
        if broker.steps(step_count) < step_count:
            break
        change(broker)
        broker.finish()
        assert answer.code == 0
        if change is change_topics and is_new and not broker.topic("a").overrides:
            continue  # no topic was live yet
        assert [
            partition.config.retention_ms for name in "abcde" for partition in broker.topic(name).partitions
        ] == [123_456] * (5 if is_new else 10)
    assert step_count > 6


def test_settings_of_many_topics_are_changed_in_steps_with_one_write_in_another_thread() -> None:
    broker, calls = with_topics(), []
    answer = broker.alter("abcde", retention_ms="5")
    step_count = 0
    while broker.background:
        assert answer.code is None
        job = broker.background.step()
        step_count += 1
        if job is not None:
            syncs = broker.disk.steps
            job()
            calls.append(broker.disk.steps - syncs)
    assert answer.code == 0 and step_count > 5 and len(calls) == 2
    for found in (broker, broker.after_kill()):
        assert all(own(found, name) == {"retention.ms": "5"} for name in "abcde")
        assert all(found.topic(name).partitions[0].config.retention_ms == 5 for name in "abcde")


def test_two_requests_that_change_settings_take_turns() -> None:
    for broker, answer in alterations():
        other = broker.alter("edcba", segment_ms="7")
        broker.finish()
        assert answer.code == other.code == 0
        for found in (broker, broker.after_kill()):
            assert all(own(found, name) == {"retention.ms": "5", "segment.ms": "7"} for name in "abcde")


def test_settings_are_stored_beside_other_changes_of_topics() -> None:
    """Neither the write of the settings nor that of the other request undoes the other one."""
    step_count = 0
    for broker, answer in alterations():
        step_count += 1
        created, deleted = broker.create("f", 1), broker.delete("c")
        broker.finish()
        assert created.code == deleted.code == 0 and answer.code == 0
        codes = [row.error_code for row in answer._answers[0].responses]
        assert codes[2] in (0, UnknownTopicOrPartition.code) and not any(codes[:2] + codes[3:])
        for found in (broker, broker.after_kill()):
            assert all(own(found, name) == {"retention.ms": "5"} for name in "abde")
            assert own(found, "f") == {} and found.node.topics.get("c") is None
    assert step_count > 5


def test_settings_are_stored_while_other_requests_change_topics_again_and_again() -> None:
    broker = with_topics()
    answer = broker.alter("abcde", retention_ms="5")
    numbers = count()
    while answer.code is None:
        broker.step()
        if answer.code is None:
            broker.node.topics.create(f"x{next(numbers)}", 1, {}, NOW_MS)
    assert answer.code == 0 and next(numbers) < 30
    again = broker.after_kill()
    assert own(again, "a") == {"retention.ms": "5"} and again.node.topics.get("x0") is not None


@pytest.mark.parametrize("failing", [("write", ".new"), ("sync", ".new"), ("rename", ".new")])
def test_settings_that_the_disk_refuses_are_not_changed(failing: tuple[str, str]) -> None:
    broker = with_topics()
    broker.disk.errors[failing] = 28
    answer = broker.alter("abcde", retention_ms="5")
    broker.finish()
    assert answer.code == KafkaStorageError.code
    broker.disk.errors.clear()
    for found in (broker, broker.after_kill()):
        assert all(own(found, name) == {} for name in "abcde")
    answer = broker.alter("abcde", retention_ms="6")
    broker.finish()
    assert answer.code == 0 and own(broker.after_kill(), "a") == {"retention.ms": "6"}


def deletions() -> Iterator[tuple[Broker, Answer]]:
    """Yield a new broker for each number of steps that the deletion of topic t can have run."""
    for steps in count():
        broker = with_topic()
        answer = broker.delete("t")
        if broker.steps(steps) < steps:
            return
        if answer.code is None:
            yield broker, answer


def test_a_name_is_taken_until_the_last_step_of_a_deletion() -> None:
    step_count = 0
    for broker, answer in deletions():
        step_count += 1
        assert broker.create("t", 2).code == TopicAlreadyExists.code
        assert broker.delete("t").code == UnknownTopicOrPartition.code
        broker.retry_deletions()
        broker.finish()
        assert answer.code == 0 and not broker.directories("t")
        broker.make("t", 2)
        broker.fill("t")
        broker.finish()
        assert broker.after_kill().shape("t") == [1, 1]
    assert step_count >= 2


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_start_ends_a_deletion(is_killed: bool) -> None:
    for broker, answer in deletions():
        if not is_killed:
            broker.node.close(NOW_MS)
            assert answer.code == 0
        again = broker.after_kill()
        assert again.logs.was_clean is not is_killed
        assert again.shape("t") is None and not again.directories("t")


@pytest.mark.parametrize("is_by_id", [False, True])
def test_one_of_two_deletions_at_a_time_finds_no_topic(is_by_id: bool) -> None:
    broker = Broker(MemoryDisk(), count(1))
    for number in range(5):
        broker.make(f"t{number}", 1)
    state = DeleteTopicsRequest.DeleteTopicState
    topics = [*broker.node.topics.all()]
    asked = [
        state(name=None, topic_id=topic.topic_id) if is_by_id else state(name=topic.name) for topic in topics
    ]
    answers = [broker.ask(DeleteTopicsRequest(topics=asked, timeout_ms=1000)) for _ in range(2)]
    broker.finish()
    unknown = UnknownTopicId if is_by_id else UnknownTopicOrPartition
    assert {answer.code for answer in answers} == {0, unknown.code}
    assert not len(broker.node.topics)


def test_a_topic_created_while_files_of_another_are_removed_is_unknown_for_a_moment() -> None:
    """A Metadata request asks for t and u. Files of a deleted topic delay the creation of t. Meanwhile
    another request creates u.
    """
    broker = with_topic()
    broker.disk.errors["rename", "t-2"] = 24
    broker.delete("t")
    broker.finish()
    broker.disk.errors.clear()
    rows = [MetadataRequest.MetadataRequestTopic(name=name) for name in ("t", "u")]
    answer = broker.ask(MetadataRequest(topics=rows, allow_auto_topic_creation=True))
    assert answer.code is None and broker.create("u", 7).code is None
    broker.steps(3)
    other = broker.topic_codes(answer)
    broker.finish()
    assert other is None and broker.topic_codes(answer) in ([0, 0], [0, UnknownTopicOrPartition.code])


class Play:
    """Random requests for a few topic names, with steps, faults and restarts between them.

    The class keeps the results that are allowed.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.broker = Broker(FaultyDisk(MemoryDisk()), count(1))
        self.stored: dict[bytes, dict[int, int]] = {}
        """The number of acknowledged records, by topic id, then by partition."""
        self.doomed: set[bytes] = set()
        """Ids of topics whose deletion was requested."""
        self.shown: dict[bytes, tuple[str, int]] = {}
        """For each topic id that a client has seen, the topic's name and its largest number of partitions."""

    def act(self) -> None:
        name, broker = self.rng.choice("ab"), self.broker
        topic = broker.node.topics.get(name)
        match self.rng.randrange(12):
            case 0 | 1:
                broker.create(name, self.rng.randint(1, 6))
            case 2 | 3 if topic is not None:
                broker.grow(name, len(topic.partitions) + self.rng.randint(1, 6))
            case 4 if topic is not None:
                self.doomed.add(topic.topic_id)
                broker.delete(name)
            case 5 if topic is not None:
                self.store(topic)
            case 6:
                broker.retry_deletions()
            case 7:
                fault = self.rng.choice([*Fault])
                broker.disk.arm(self.rng.randrange(30), fault, self.rng.random() < 0.3)
            case 8:
                broker.disk.fail_in = None
            case 9 if self.rng.random() < 0.3:
                self.restart(is_killed=self.rng.random() < 0.6)
            case _:
                broker.steps(self.rng.randint(1, 6))

    def store(self, topic: Topic) -> None:
        index = self.rng.randrange(len(topic.partitions))
        with suppress(KafkaStorageError, StorageError, OSError):
            partition = topic.partitions[index]
            partition.append(memoryview(bytearray(batch())), origin=Origin.CLIENT, now_ms=NOW_MS)
            partition.flush()
            counts = self.stored.setdefault(topic.topic_id, {})
            counts[index] = partition.log_end_offset

    def restart(self, *, is_killed: bool) -> None:
        self.broker.disk.fail_in = None
        if not is_killed:
            with suppress(KafkaStorageError, StorageError):
                self.broker.node.close(NOW_MS)
        disk = FaultyDisk(self.broker.disk.disk.after_kill())
        self.broker = Broker(disk, self.broker.numbers)

    def check(self) -> None:
        topics = self.broker.node.topics
        for topic in topics.all():
            for index, partition in enumerate(topic.partitions):
                tp = partition.topic_partition
                assert (tp.topic, tp.partition) == (topic.name, index)
                assert self.broker.logs.partitions[tp] is partition
            most = max(len(topic.partitions), self.shown.get(topic.topic_id, ("", 0))[1])
            assert len(topic.partitions) == most
            self.shown[topic.topic_id] = topic.name, most
        for topic_id in self.shown.keys() - self.doomed:
            assert topics.by_id(topic_id) is not None, self.shown[topic_id]
        for topic_id, counts in self.stored.items():
            if (topic := topics.by_id(topic_id)) is not None:
                for index, end_offset in counts.items():
                    assert topic.partitions[index].log_end_offset >= end_offset

    def end(self) -> None:
        """Check that on a working disk, each topic can be deleted without a trace and re-created after a
        kill.
        """
        self.broker.disk.fail_in = None
        self.broker.finish()
        self.broker.retry_deletions()
        self.broker.finish()
        self.check()
        for name in "ab":
            self.broker.delete(name)
            self.broker.finish()
            assert not self.broker.directories(name), name
            self.broker.make(name, 2)
            self.broker.fill(name)
        self.restart(is_killed=True)
        assert self.broker.shape("a") == self.broker.shape("b") == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_in_steps_with_faults_and_restarts(seed: int) -> None:
    play(seed)


def play(seed: int) -> None:
    game = Play(seed)
    for _ in range(80):
        try:
            game.act()
        except SimulatedCrash:
            game.restart(is_killed=True)
        game.check()
    game.end()
