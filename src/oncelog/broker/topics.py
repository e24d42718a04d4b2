"""The topics of this node: names, ids, settings, partitions; durable before they are answered.

`oncelog-topics.json` (written whole, to a temporary file, synced, renamed) is the truth about which
topics there are; partition directories hold the data and, as in Kafka, the topic id in
`partition.metadata`. Creation writes the file first: a crash after it makes missing directories at
the next start. Deletion marks the topic first: a crash after it finishes the deletion. A deleted topic
stays in the file until its committed offsets are deleted durably (`offsets_to_delete`). Directories
that no entry names were looked at before (`broker/takeover.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from oncelog.broker.internal_topics import INTERNAL_TOPICS, with_internal_settings
from oncelog.broker.names import TopicNames, check_topic_name
from oncelog.broker.state_file import read_state, write_state
from oncelog.broker.topic_config import stored_overrides, topic_settings
from oncelog.broker.topic_file import FILE_NAME
from oncelog.config import INT64_MAX
from oncelog.errors import (
    BrokerError,
    KafkaStorageError,
    StorageError,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from oncelog.log.disk import explain
from oncelog.log.manager import LogManager
from oncelog.log.partition import LogConfig, Partition
from oncelog.settings import Settings, SettingValue
from oncelog.types import TopicPartition


@dataclass(eq=False, slots=True)
class Topic:
    """A topic. `overrides` are its own settings, `settings` what holds with the broker's defaults.

    `is_plain`: an append is open to clients and answered without waiting for the disk or for replicas.
    """

    name: str
    topic_id: bytes
    overrides: dict[str, str]
    settings: Settings
    partitions: list[Partition] = field(default_factory=list)
    min_insync_replicas: int = 1
    flush_messages: int = 1
    flush_ms: int = INT64_MAX
    is_plain: bool = False
    is_deleting: bool = False

    @property
    def is_internal(self) -> bool:
        return self.name in INTERNAL_TOPICS

    def partition(self, index: int) -> Partition:
        """Raises UnknownTopicOrPartition."""
        if not 0 <= index < len(self.partitions):
            raise UnknownTopicOrPartition(
                f"topic {self.name!r} has partitions 0..{len(self.partitions) - 1}, not {index}"
            )
        return self.partitions[index]

    def configure(self, broker: Settings, overrides: dict[str, str]) -> None:
        """Take over settings of its own, and what the request path reads of them."""
        self.overrides = overrides
        self.settings = topic_settings(broker, overrides)
        self.min_insync_replicas = self.settings["min.insync.replicas"]
        self.flush_messages = self.settings["flush.messages"]
        self.flush_ms = self.settings["flush.ms"]
        is_alone = self.flush_messages == INT64_MAX and self.min_insync_replicas <= 1
        self.is_plain = is_alone and not self.is_internal


class OffsetsToDelete(NamedTuple):
    """Committed offsets that a deleted topic leaves.

    `before`: in each partition of `__consumer_offsets`, those below this offset; None: all, for no topic of
    that name was made since.
    """

    topic_id: str
    before: Mapping[int, int] | None


class NewTopic(NamedTuple):
    """A topic to be created."""

    name: str
    partition_count: int
    overrides: dict[str, str]


class Topics:
    """Every topic, found by name and by id."""

    def __init__(
        self, log_manager: LogManager, settings: Settings, *, new_uuid: Callable[[], bytes], now_ms: int
    ) -> None:
        self._logs = log_manager
        self._settings = settings
        self._new_uuid = new_uuid
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}
        self._being_made: dict[str, tuple[Topic, int]] = {}
        """Topics that the file names, whose partitions are being made, and how many those will be."""
        self._opened_count = 0
        self.large_answers: dict[object, bytes] = {}
        """Encoded answers that describe topics; forgotten when any topic changes."""
        self.offsets_to_delete: dict[str, OffsetsToDelete] = {}
        """Deleted topics whose committed offsets are perhaps not deleted yet, by name."""
        self._held_names: set[str] = set()
        """Names of deleted topics whose committed offsets are still in memory."""
        self._half_deleted: dict[str, Topic] = {}
        """Deleted topics whose files the disk would not let go, by name; the next start removes them."""
        self._left_counts: dict[str, int] = {}
        """Half deleted topic -> how many partitions have directories, where these are more than are open."""
        self.offset_ends: Callable[[Collection[str]], Mapping[str, Mapping[int, int]]] = lambda names: {}
        """Where partitions of `__consumer_offsets` with offsets of topics end (`Offsets.ends_of`)."""
        self.revision = 0
        """Raised when any topic changes."""
        self._load(now_ms)

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Topic | None:
        return self._by_name.get(name)

    def by_id(self, topic_id: bytes | memoryview) -> Topic | None:
        return self._by_id.get(bytes(topic_id))

    def all(self) -> Iterator[Topic]:
        return iter(self._by_name.values())

    def all_partitions(self) -> Iterator[tuple[TopicPartition, Partition]]:
        for topic in self._by_name.values():
            for index, partition in enumerate(topic.partitions):
                yield TopicPartition(topic.name, index), partition

    def partition(self, at: TopicPartition) -> tuple[Topic, Partition]:
        """Raises UnknownTopicOrPartition."""
        topic = self._by_name.get(at.topic)
        if topic is None:
            raise UnknownTopicOrPartition(f"there is no topic {at.topic!r}")
        return topic, topic.partition(at.partition)

    def keep_answer(self, key: object, body: bytes) -> None:
        """Remember an answer among the few that are asked for again and again."""
        if len(self.large_answers) >= self._logs.limits.max_answers_kept:
            self.large_answers.clear()
        self.large_answers[key] = body

    def settings_of(self, name: str) -> Mapping[str, SettingValue]:
        """What holds for a topic; empty for one that is not there."""
        topic = self._by_name.get(name)
        return topic.settings if topic else {}

    def create(self, name: str, partition_count: int, overrides: dict[str, str], now_ms: int) -> Topic:
        """Make a topic, durably.

        Raises InvalidTopicException, TopicAlreadyExists, InvalidConfig, KafkaStorageError, StorageError.
        """
        (made,) = self.create_all([NewTopic(name, partition_count, overrides)], now_ms)
        if isinstance(made, Exception):
            raise made
        return made

    def names(self) -> list[str]:
        """Return the names that are taken, also those of topics that are being made or deleted."""
        return [*self._by_name, *self._being_made, *self._held_names]

    def is_changing(self, name: str) -> bool:
        """True for a name that is taken while `get` does not find it: its topic is being made or deleted."""
        return name in self._being_made or name in self._held_names

    @contextmanager
    def names_held(self, names: Collection[str]) -> Iterator[None]:
        """Let no topic of these names be made meanwhile."""
        self._held_names.update(names)
        try:
            yield
        finally:
            self._held_names.difference_update(names)

    def create_all(self, asked: Iterable[NewTopic], now_ms: int) -> list[Topic | BrokerError | StorageError]:
        """Create topics, durably in one step however many they are; returns each, or why it is not there.

        The errors are those of `create`. Raises StorageError when none could be created.
        """
        steps = self.create_in_steps(asked, now_ms)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return cast(list[Topic | BrokerError | StorageError], done.value)

    def create_in_steps(
        self, asked: Iterable[NewTopic], now_ms: int
    ) -> Generator[None, None, list[Topic | BrokerError | StorageError]]:
        """Do what `create_all` does in bounded steps, to be taken to the end once the first was taken.

        The first writes the file, which names all topics with all partitions: after a crash the next start
        makes what is missing. The topics are found when all their partitions are there.
        """
        results: list[Topic | BrokerError | StorageError] = []
        counts: dict[str, int] = {}
        names = TopicNames(self.names())
        for new in asked:
            try:
                check_topic_name(new.name)
                if new.name in self._half_deleted:
                    raise KafkaStorageError(
                        f"files of a deleted topic {new.name!r} remain; the next start removes them"
                    )
                if new.name in self._by_name or self.is_changing(new.name):
                    raise TopicAlreadyExists(f"topic {new.name!r} is already there")
                names.check(new.name)
                topic = self._new_topic(new.name, self._new_uuid(), new.overrides)
            except (BrokerError, StorageError) as error:
                results.append(error)
                continue
            names.add(new.name)
            self._being_made[new.name] = topic, new.partition_count
            counts[new.name] = new.partition_count
            results.append(topic)
        if not counts:
            return results
        try:
            self._save({})
        except Exception:
            for name in counts:
                del self._being_made[name]
            raise
        return (yield from self._open_new(results, now_ms))

    def _open_new(
        self, topics: list[Topic | BrokerError | StorageError], now_ms: int
    ) -> Generator[None, None, list[Topic | BrokerError | StorageError]]:
        """Make the partitions of topics that the file names already; one sync for all directories."""
        made = [topic for topic in topics if isinstance(topic, Topic)]
        failed: dict[str, Exception] = {}
        for topic in made:
            while topic.name not in failed and len(topic.partitions) < self._being_made[topic.name][1]:
                try:
                    self._open_partitions(topic, len(topic.partitions) + 1, now_ms)
                except Exception as error:
                    failed[topic.name] = error
                self._opened_count += 1
                if self._opened_count % self._logs.limits.partitions_per_step == 0:
                    yield None
                    if self._logs.is_closing:
                        raise KafkaStorageError("the broker stops; its next start makes the other partitions")
        try:
            self._logs.disk.sync_directory()
        except Exception as error:
            failed = {topic.name: error for topic in made}
        # Taken back last: the file is written again, and names the partitions that are open by now.
        for topic in made:
            del self._being_made[topic.name]
            if topic.name not in failed:
                # The broker's settings may have changed meanwhile.
                topic.configure(self._settings, topic.overrides)
                self._reconfigure_partitions(topic)
                self._by_name[topic.name] = self._by_id[topic.topic_id] = topic
        self._changed()
        for topic in made:
            if topic.name in failed:
                self._take_back(topic, 0)
        for failure in failed.values():
            if not isinstance(failure, (BrokerError, StorageError)):
                raise failure
        return [failed.get(each.name, each) if isinstance(each, Topic) else each for each in topics]  # type: ignore[misc]

    def delete(self, topics: Sequence[Topic]) -> None:
        """Their data, producers and settings are gone when this returns. Raises StorageError.

        The file is written twice however many they are. Their committed offsets are remembered, also by the
        file, as to be deleted until `forget_deletions`.
        """
        for topic in topics:
            topic.is_deleting = True
        try:
            self._save({})
        except Exception:
            for topic in topics:
                topic.is_deleting = False
            raise
        for topic in topics:
            del self._by_name[topic.name]
            self._by_id.pop(topic.topic_id, None)
        try:
            self._remove_directories(topics)
        except KafkaStorageError:
            # The file must go on naming them: directories that no entry names are taken over as topics.
            self._half_deleted.update((topic.name, topic) for topic in topics)
            raise
        ends = self.offset_ends({topic.name for topic in topics})
        for topic in topics:
            # An earlier topic of this name may have left offsets too, in other partitions.
            earlier = self.offsets_to_delete.get(topic.name)
            known = {} if earlier is None or earlier.before is None else earlier.before
            if before := {**known, **ends.get(topic.name, {})}:
                self.offsets_to_delete[topic.name] = OffsetsToDelete(topic.topic_id.hex(), before)
        with suppress(StorageError):  # the file says that they are being deleted, which is as good
            self._save({})

    def forget_deletions(self, deletions: Mapping[str, OffsetsToDelete]) -> None:
        """The offsets of deleted topics are deleted durably."""
        done = [name for name, each in deletions.items() if self.offsets_to_delete.get(name) is each]
        for name in done:
            del self.offsets_to_delete[name]
        if done:
            with suppress(StorageError):  # else they go with the next change of any topic
                self._save({})

    def bound_deletion(self, name: str, before: Mapping[int, int]) -> None:
        """Say anew which offsets a deleted topic has left. Raises StorageError."""
        deletion = self.offsets_to_delete[name]
        if before != deletion.before:
            self.offsets_to_delete[name] = deletion._replace(before=before)
            self._save({})

    def add_partitions(self, changes: Sequence[tuple[Topic, int]], now_ms: int) -> None:
        """Raise partition counts, in one write. Raises StorageError; then no topic has new ones."""
        before = [(topic, len(topic.partitions)) for topic, _ in changes]
        try:
            self._save({topic.name: count for topic, count in changes})
            for topic, count in changes:
                self._open_partitions(topic, count, now_ms)
            self._logs.disk.sync_directory()
        except Exception:
            for topic, count in before:
                self._take_back(topic, count)
            raise

    def alter(self, changes: Sequence[tuple[Topic, dict[str, str]]]) -> None:
        """Replace own settings of topics, in one write; they are checked. Raises StorageError."""
        before = [(topic, topic.overrides) for topic, _ in changes]
        for topic, overrides in changes:
            topic.configure(self._settings, with_internal_settings(topic.name, overrides, self._settings))
        try:
            self._save({})
        except Exception:
            for topic, overrides in before:
                topic.configure(self._settings, overrides)
            raise
        for topic, _ in changes:
            self._reconfigure_partitions(topic)

    def reconfigure(self) -> None:
        """Let every topic have the broker's settings as they are now."""
        for topic in self._by_name.values():
            topic.configure(self._settings, topic.overrides)
            self._reconfigure_partitions(topic)

    def _reconfigure_partitions(self, topic: Topic) -> None:
        config = self._log_config(topic)
        for partition in topic.partitions:
            partition.reconfigure(config)

    def _new_topic(self, name: str, topic_id: bytes, overrides: dict[str, str]) -> Topic:
        overrides = with_internal_settings(name, overrides, self._settings)
        topic = Topic(name, topic_id, overrides, topic_settings(self._settings, overrides))
        topic.configure(self._settings, overrides)
        return topic

    def _log_config(self, topic: Topic) -> LogConfig:
        expiration_ms = self._settings["producer.id.expiration.ms"]
        return LogConfig.from_settings(topic.settings, expiration_ms, self._logs.limits)

    def _open_partitions(self, topic: Topic, count: int, now_ms: int) -> None:
        config = self._log_config(topic)
        for index in range(len(topic.partitions), count):
            at = TopicPartition(topic.name, index)
            topic.partitions.append(self._logs.open_partition(at, config, topic.topic_id, now_ms))

    def _take_back(self, topic: Topic, first: int) -> None:
        """Not all partitions from `first` on could be made: undo that, as far as the disk lets us."""
        made = topic.partitions[first:]
        del topic.partitions[first:]
        try:
            self._logs.delete_partitions(
                TopicPartition(topic.name, first + index) for index in range(len(made))
            )
            is_left = False
        except KafkaStorageError:
            is_left = True
        # The partition that could not be opened has a directory, too, if that could not be removed.
        has_more = self._logs.has_directory(TopicPartition(topic.name, first + len(made)), topic.topic_id)
        if first == 0 and (is_left or has_more):
            # The directories that remain have this topic's id. With another topic of the name in the
            # file no start would open them.
            topic.is_deleting, topic.partitions = True, made
            self._half_deleted[topic.name] = topic
            if has_more:
                self._left_counts[topic.name] = len(made) + 1
        with suppress(StorageError):
            self._save({})

    def _remove_directories(self, topics: Iterable[Topic]) -> None:
        self._logs.delete_partitions(
            TopicPartition(topic.name, index) for topic in topics for index in range(len(topic.partitions))
        )

    def _load(self, now_ms: int) -> None:
        entries, self.offsets_to_delete = _parse(read_state(self._logs.disk, FILE_NAME))
        present = set(self._logs.partition_directories())
        for name, entry in entries.items():
            topic = self._new_topic(
                name, bytes.fromhex(entry["topic_id"]), stored_overrides(entry["settings"])
            )
            self._open_partitions(topic, entry["partitions"], now_ms)
            if entry["is_deleting"]:
                self._resume_deletion(topic)
            else:
                self._by_name[name] = topic
                self._by_id[topic.topic_id] = topic
        if not self._logs.partitions.keys() <= present:
            self._sync_new_directories()
        with suppress(OSError):  # of a full disk; then they are forgotten until the next start
            self._logs.forget_missing_partitions()
        if self._by_name.keys() | self._half_deleted.keys() != entries.keys():
            # Else nothing is written, so that a broker starts on a full disk.
            self._save({})

    def _sync_new_directories(self) -> None:
        """Make the names of partitions durable that this start had to make: a crash ended their creation.

        Else a power loss takes them with all records that were synced in them. Raises StorageError.
        See test_a_partition_that_a_start_made_survives_a_power_loss.
        """
        disk = self._logs.disk
        try:
            disk.sync_directory()
        except OSError as error:
            raise StorageError(f"{disk.describe('')} cannot be synced: {explain(error)}") from error

    def _resume_deletion(self, topic: Topic) -> None:
        topic.is_deleting = True
        try:
            self._remove_directories([topic])
        except KafkaStorageError:
            self._half_deleted[topic.name] = topic
        else:
            self.offsets_to_delete[topic.name] = OffsetsToDelete(topic.topic_id.hex(), None)

    def _changed(self) -> None:
        self.large_answers.clear()
        self.revision += 1

    def _save(self, counts: Mapping[str, int]) -> None:
        """Write the file; `counts` are partition counts that are not open yet. Raises StorageError."""
        self._changed()
        making = self._being_made.values()
        counts = {**self._left_counts, **counts, **{topic.name: count for topic, count in making}}
        topics = [
            {
                "name": topic.name,
                "topic_id": topic.topic_id.hex(),
                "partitions": counts.get(topic.name, len(topic.partitions)),
                "settings": topic.overrides,
                "is_deleting": topic.is_deleting,
            }
            for topic in (
                *self._by_name.values(),
                *self._half_deleted.values(),
                *(each for each, _ in making),
            )
        ]
        content: dict[str, Any] = {"version": 1, "topics": topics}
        if self.offsets_to_delete:
            content["offsets_to_delete"] = [
                {"name": name, "topic_id": topic_id, "before": before}
                for name, (topic_id, before) in self.offsets_to_delete.items()
            ]
        write_state(self._logs.disk, FILE_NAME, json.dumps(content, indent=1))


def _parse(text: str | None) -> tuple[dict[str, dict[str, Any]], dict[str, OffsetsToDelete]]:
    if text is None:
        return {}, {}
    try:
        content = json.loads(text)
        if content["version"] != 1:
            raise ValueError(f"version {content['version']}")
        deletions = {
            entry["name"]: OffsetsToDelete(entry["topic_id"], _bounds(entry["before"]))
            for entry in content.get("offsets_to_delete", ())
        }
        return {entry["name"]: entry for entry in content["topics"]}, deletions
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{FILE_NAME} is unreadable ({error!r}); restore it from a backup") from error


def _bounds(before: Mapping[str, int] | None) -> dict[int, int] | None:
    return None if before is None else {int(index): int(end) for index, end in before.items()}
