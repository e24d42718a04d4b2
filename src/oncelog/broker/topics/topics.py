"""The topics of this node: names, ids, settings, partitions; durable before they are answered.

`oncelog-topics.json` (written whole, to a temporary file, synced, renamed) is the truth about which topics
there are; partition directories hold the data and, as in Kafka, the topic id in `partition.metadata`. Each
name is in one state of `rules/storage/topic_state.py`, which says in what order the file and the directories
change. Here they are changed, and what became of that is told to the rules. A deleted topic stays in the file
until its directories are gone, and its committed offsets until they are deleted durably
(`offsets_to_delete`). Directories that no entry names were looked at before (`broker/topics/takeover.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from oncelog.broker.coordinators.internal_topic_config import INTERNAL_TOPICS, with_internal_settings
from oncelog.broker.request_limits import MAX_PARTITIONS
from oncelog.broker.state_file import NotDurable, read_state, write_state
from oncelog.broker.stepwise import run_work
from oncelog.broker.topics.file import FILE_NAME, parse_topics
from oncelog.broker.topics.names import TopicNames, check_topic_name
from oncelog.broker.topics.topic_config import stored_overrides, topic_settings
from oncelog.config import INT64_MAX
from oncelog.errors import (
    BrokerError,
    InvalidPartitions,
    KafkaStorageError,
    StorageError,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from oncelog.log.disk import explain
from oncelog.log.manager import LogManager
from oncelog.log.partition import LogConfig, Partition
from oncelog.rules.storage.topic_state import (
    TopicEvent,
    TopicState,
    is_going,
    listed,
    next_state,
    state_at_start,
)
from oncelog.settings import Settings, SettingValue
from oncelog.types import TopicPartition

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Bounded steps between which others are served, and what comes of them."""


@dataclass(eq=False, slots=True)
class Topic:
    """A topic. `overrides` are its own settings, `settings` what holds with the broker's defaults.

    `is_plain`: an append is open to clients, opens no payload, and waits for neither the disk nor replicas.
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
    state: TopicState = TopicState.ABSENT
    partition_count: int = 0
    """How many partitions it has, or will have when all are made."""
    directory_count: int = 0
    """No directory of it has this index or a larger one."""
    new_partitions: list[Partition] = field(default_factory=list)
    """Opened ones that clients do not find yet: they are shown when all are there and durable."""
    is_growing: bool = False
    """A request adds partitions, in steps. Another one waits until that has ended."""
    is_being_removed: bool = False
    """A request removes its directories, in steps: nobody else may, and the name is taken."""

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
        codec, policies = self.settings["compression.type"], self.settings["cleanup.policy"]
        is_opened = codec != "producer" or "compact" in policies
        self.is_plain = is_alone and not self.is_internal and not is_opened


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
        self._entries: dict[str, Topic] = {}
        """Topics in every state but ABSENT, as the file names them."""
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}
        """The live ones, as requests find them; only `_move` changes these three."""
        self._opened_count = 0
        self.large_answers: dict[object, bytes] = {}
        """Encoded answers that describe topics; forgotten when any topic changes."""
        self.offsets_to_delete: dict[str, OffsetsToDelete] = {}
        """Deleted topics whose committed offsets are perhaps not deleted yet, by name."""
        self._held_names: set[str] = set()
        """Names of deleted topics whose committed offsets are still in memory."""
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
        """Return the names that are taken, without those that are free once the disk lets files go."""
        return [*(name for name in self._entries if not self.is_left(name)), *self._held_names]

    def being_made(self) -> frozenset[str]:
        """Return the names of topics that are being made, or grow."""
        return frozenset(
            name
            for name, topic in self._entries.items()
            if topic.state is TopicState.BEING_MADE or topic.is_growing
        )

    def is_left(self, name: str) -> bool:
        """True for a deleted topic whose files, or whose name in the file, the disk has not let go."""
        topic = self._entries.get(name)
        return topic is not None and is_going(topic.state) and not topic.is_being_removed

    def is_changing(self, name: str) -> bool:
        """True for a name that is taken while `get` does not find it: its topic is being made or deleted."""
        topic = self._entries.get(name)
        if topic is None:
            return name in self._held_names
        return topic.state is TopicState.BEING_MADE or topic.is_being_removed or name in self._held_names

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
        return run_work(self.create_in_steps(asked, now_ms))

    def create_in_steps(
        self, asked: Iterable[NewTopic], now_ms: int
    ) -> Steps[list[Topic | BrokerError | StorageError]]:
        """Do what `create_all` does in bounded steps, to be taken to the end once the first was taken.

        The file names all topics with all partitions before the first is made: after a crash the next start
        makes what is missing. The topics are found when all their partitions are there.
        """
        asked = list(asked)
        yield from self._remove_left([new.name for new in asked])
        if self._logs.is_closing:
            raise KafkaStorageError("the broker stops")
        results: list[Topic | BrokerError | StorageError] = []
        made: list[Topic] = []
        names = TopicNames(self.names())
        for new in asked:
            try:
                topic = self._checked(new, names)
            except (BrokerError, StorageError) as error:
                results.append(error)
                continue
            names.add(new.name)
            self._move([topic], TopicEvent.CREATE)
            made.append(topic)
            results.append(topic)
        if not made:
            return results
        try:
            self._save()
        except Exception:
            # Found by a start if the file was written and not synced: then the topics are made, and empty.
            self._move(made, TopicEvent.NOT_LISTED)
            raise
        failures = yield from self._open_new(made, now_ms)
        return [failures.get(each.name, each) if isinstance(each, Topic) else each for each in results]

    def _checked(self, new: NewTopic, names: TopicNames) -> Topic:
        """The topic if it can be made. Raises what `create` does, except errors of the disk."""
        check_topic_name(new.name)
        if self.is_left(new.name):
            raise KafkaStorageError(
                f"files of a deleted topic {new.name!r} remain; they are removed once the disk lets go"
            )
        if new.name in self._by_name or self.is_changing(new.name):
            raise TopicAlreadyExists(f"topic {new.name!r} is already there")
        names.check(new.name)
        topic = self._new_topic(new.name, self._new_uuid(), new.overrides)
        topic.partition_count = new.partition_count
        return topic

    def _open_new(self, made: list[Topic], now_ms: int) -> Steps[dict[str, BrokerError | StorageError]]:
        """Make the partitions of topics that the file names already.

        Return why topics could not be made. Raises errors of other kinds, when everything else is done.
        """
        failures = yield from self._open_missing(made, now_ms)
        self._move([topic for topic in made if topic.name not in failures], TopicEvent.OPENED)
        self._changed()
        failed = [topic for topic in made if topic.name in failures]
        self._move(failed, TopicEvent.FAILED)
        yield from self._finish_deletions(failed)
        return _known(failures)

    def _open_missing(self, topics: Sequence[Topic], now_ms: int) -> Steps[dict[str, Exception]]:
        """Make the partitions that topics lack, with one sync for all directories, and show them.

        Return why those of a topic could not be made; they are in `new_partitions` then. Raises
        KafkaStorageError when the broker stops meanwhile.
        """
        failures: dict[str, Exception] = {}
        for topic in topics:
            while topic.name not in failures and _is_served(topic) and _missing_count(topic):
                index = len(topic.partitions) + len(topic.new_partitions)
                try:
                    topic.new_partitions.append(self._open_partition(topic, index, now_ms))
                except Exception as error:
                    failures[topic.name] = error
                self._opened_count += 1
                if self._opened_count % self._logs.limits.partitions_per_step == 0:
                    yield None
                    if self._logs.is_closing:
                        raise KafkaStorageError("the broker stops; its next start makes the other partitions")
        try:
            self._logs.disk.sync_directory()
        except Exception as error:
            failures = {topic.name: error for topic in topics}
        for topic in topics:
            if not _is_served(topic):
                failures[topic.name] = UnknownTopicOrPartition(f"topic {topic.name!r} was deleted meanwhile")
            if topic.name in failures:
                continue
            # Its own settings, or the broker's, may have changed meanwhile.
            topic.configure(self._settings, topic.overrides)
            config = self._log_config(topic)
            for partition in topic.new_partitions:
                partition.reconfigure(config)
            topic.partitions += topic.new_partitions
            topic.new_partitions.clear()
        return failures

    def delete(self, topics: Sequence[Topic]) -> None:
        """Do what `doom` and `remove_in_steps` do, in one step. Raises StorageError."""
        self.doom(topics)
        run_work(self.remove_in_steps(topics))

    def doom(self, topics: Sequence[Topic]) -> None:
        """Nobody finds them when this returns, and no start brings them back. Raises StorageError.

        One write however many they are. Their committed offsets are remembered, also by the file, as to be
        deleted until `forget_deletions`. Take the first step of `remove_in_steps` next.
        """
        self._move(topics, TopicEvent.DELETE)
        try:
            self._save()
        except NotDurable:
            # A kill finds them deleted, so they must not take another record: the deletion goes on later.
            raise
        except Exception:
            self._move(topics, TopicEvent.NOT_MARKED)
            raise
        self._mark_deleted(topics)

    def resume_deletions(self) -> Steps[list[str]]:
        """Go on with deletions that the disk interrupted, as far as it lets us now, in steps.

        Return the names whose committed offsets must be deleted now.
        """
        left = [topic for topic in self._entries.values() if self.is_left(topic.name)]
        return (yield from self._finish_deletions(left))

    def _remove_left(self, names: Iterable[str]) -> Steps[None]:
        """Free names of deleted topics that are to be made, unless their offsets must be deleted before."""
        left = [self._entries[name] for name in names if self.is_left(name)]
        doomed = {topic.name for topic in left if topic.state is TopicState.DOOMED}
        ends = self.offset_ends(doomed) if doomed else {}
        yield from self._finish_deletions([topic for topic in left if not ends.get(topic.name)])

    def _finish_deletions(self, topics: Sequence[Topic]) -> Steps[list[str]]:
        """Mark and remove topics, as far as the disk lets us; the names of those that are marked now."""
        if not topics:
            return []
        doomed = [topic for topic in topics if topic.state is TopicState.DOOMED]
        if doomed:
            try:
                self._save()
            except StorageError:
                doomed = []
            else:
                self._mark_deleted(doomed)
        yield from self.remove_in_steps(
            [topic for topic in topics if topic.state is TopicState.BEING_DELETED]
        )
        return [topic.name for topic in doomed]

    def _mark_deleted(self, topics: Sequence[Topic]) -> None:
        """The file says durably that they are being deleted: note which offsets they leave."""
        self._move(topics, TopicEvent.MARKED)
        ends = self.offset_ends({topic.name for topic in topics})
        for topic in topics:
            # An earlier topic of this name may have left offsets too, in other partitions.
            earlier = self.offsets_to_delete.get(topic.name)
            known = {} if earlier is None or earlier.before is None else earlier.before
            if before := {**known, **ends.get(topic.name, {})}:
                self.offsets_to_delete[topic.name] = OffsetsToDelete(topic.topic_id.hex(), before)

    def remove_in_steps(self, topics: Sequence[Topic]) -> Steps[None]:
        """Remove the directories of topics that are being deleted; those that keep none are gone then.

        The others are removed later (`resume_deletions`). The names are taken until then: a step must never
        meet the directories of another topic of the name.
        """
        if not topics:
            return
        for topic in topics:
            topic.is_being_removed = True
        try:
            kept = yield from self._remove_directories(topics)
        finally:
            for topic in topics:
                topic.is_being_removed = False
        gone = [topic for topic in topics if topic.name not in kept]
        if not gone:
            return
        self._move(gone, TopicEvent.REMOVED)
        with suppress(StorageError):  # the file says that they are being deleted, which is as good
            self._save()

    def _move(self, topics: Iterable[Topic], event: TopicEvent) -> None:
        """Lead topics to their next state, and let names and ids find those that are live."""
        for topic in topics:
            topic.state = next_state(topic.state, event)
            if topic.state is TopicState.ABSENT:
                del self._entries[topic.name]
            else:
                self._entries[topic.name] = topic
            if topic.state is TopicState.LIVE:
                self._by_name[topic.name] = self._by_id[topic.topic_id] = topic
            elif self._by_name.get(topic.name) is topic:
                del self._by_name[topic.name], self._by_id[topic.topic_id]

    def forget_deletions(self, deletions: Mapping[str, OffsetsToDelete]) -> None:
        """The offsets of deleted topics are deleted durably."""
        done = [name for name, each in deletions.items() if self.offsets_to_delete.get(name) is each]
        for name in done:
            del self.offsets_to_delete[name]
        if done:
            with suppress(StorageError):  # else they go with the next change of any topic
                self._save()

    def bound_deletion(self, name: str, before: Mapping[int, int]) -> None:
        """Say anew which offsets a deleted topic has left. Raises StorageError if a topic has the name again.

        Without one no offset can be taken for the deleted topic's before one is made, which writes the file.
        """
        deletion = self.offsets_to_delete[name]
        if before != deletion.before:
            self.offsets_to_delete[name] = deletion._replace(before=before)
            try:
                self._save()
            except StorageError:
                if name in self._by_name:
                    raise

    def add_partitions(self, changes: Sequence[tuple[Topic, int]], now_ms: int) -> None:
        """Raise partition counts, in one step. Raises BrokerError, StorageError: the first failure."""
        for failure in run_work(self.grow_in_steps(changes, now_ms)).values():
            raise failure

    def grow_in_steps(
        self, changes: Sequence[tuple[Topic, int]], now_ms: int
    ) -> Steps[dict[str, BrokerError | StorageError]]:
        """Raise partition counts, in one write and bounded steps, to be taken to the end.

        The file names the new counts first: after a crash the next start makes what is missing. A topic's new
        partitions are found when all are there. Return why a topic has no new ones: the disk failed, or the
        topic was deleted or grew meanwhile. Raises KafkaStorageError, StorageError when none has.
        """
        while any(topic.is_growing for topic, _ in changes) and not self._logs.is_closing:
            yield None
        if self._logs.is_closing:
            raise KafkaStorageError("the broker stops")
        refused = {topic.name: error for topic, count in changes if (error := _growth_refusal(topic, count))}
        grown = [(topic, count) for topic, count in changes if topic.name not in refused]
        topics, before = [topic for topic, _ in grown], [topic.partition_count for topic, _ in grown]
        for topic, count in grown:
            topic.is_growing, topic.partition_count = True, count
        try:
            failures: dict[str, Exception] = {}
            try:
                if topics:
                    self._save()
                    failures = yield from self._open_missing(topics, now_ms)
                    self._changed()
            except StorageError as error:
                failures = {topic.name: error for topic in topics}
            failed = [pair for pair in zip(topics, before, strict=True) if pair[0].name in failures]
            yield from self._take_back(failed)
        finally:
            for topic in topics:
                topic.is_growing = False
        return refused | _known(failures)

    def alter(self, changes: Sequence[tuple[Topic, dict[str, str]]]) -> None:
        """Replace own settings of topics, in one write; they are checked. Raises StorageError."""
        before = [(topic, topic.overrides) for topic, _ in changes]
        for topic, overrides in changes:
            topic.configure(self._settings, with_internal_settings(topic.name, overrides, self._settings))
        try:
            self._save()
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
        topic = Topic(name, topic_id, overrides, self._settings)
        topic.configure(self._settings, overrides)
        return topic

    def _log_config(self, topic: Topic) -> LogConfig:
        expiration_ms = self._settings["producer.id.expiration.ms"]
        return LogConfig.from_settings(topic.settings, expiration_ms, self._logs.limits)

    def _open_partition(self, topic: Topic, index: int, now_ms: int) -> Partition:
        topic.directory_count = max(topic.directory_count, index + 1)
        tp, topic_id, config = TopicPartition(topic.name, index), topic.topic_id, self._log_config(topic)
        try:
            return self._logs.open_partition(tp, config, topic_id, now_ms)
        except StorageError:
            if not self._logs.remove_leftover(tp, topic_id):
                raise
            return self._logs.open_partition(tp, config, topic_id, now_ms)

    def _take_back(self, failed: Sequence[tuple[Topic, int]]) -> Steps[None]:
        """Not all new partitions could be made: let these topics have as many as before.

        What the disk keeps of the new ones goes with the topic, or is opened when it grows again. A deletion
        takes all of them, so nothing is removed here once that has begun.
        """
        if not failed:
            return
        for topic, count in failed:
            topic.partition_count = count
            topic.new_partitions.clear()
        with suppress(StorageError):
            self._save()
        step = self._logs.limits.partitions_per_step
        for topic, count in failed:
            is_kept = False
            for end in range(topic.directory_count, count, -step):
                if not _is_served(topic) or self._logs.is_closing:
                    break
                doomed = [TopicPartition(topic.name, index) for index in range(max(count, end - step), end)]
                is_kept |= bool(self._logs.delete_partitions(doomed, {topic.name: topic.topic_id}))
                if not is_kept:
                    topic.directory_count = max(count, end - step)
                yield None

    def _remove_directories(self, topics: Iterable[Topic]) -> Steps[Collection[str]]:
        """Remove directories, also of partitions that are not open; the names of topics that keep some."""
        doomed = [
            TopicPartition(topic.name, index)
            for topic in topics
            for index in range(max(topic.partition_count, topic.directory_count))
        ]
        topic_ids = {topic.name: topic.topic_id for topic in topics}
        return (yield from self._logs.delete_in_steps(doomed, topic_ids)).keys()

    def _load(self, now_ms: int) -> None:
        stored = read_state(self._logs.disk, FILE_NAME, self._parse)
        self._entries, self.offsets_to_delete = stored or ({}, {})
        present = set(self._logs.partition_directories())
        self._count_directories()
        for topic in [*self._entries.values()]:
            if topic.state is TopicState.BEING_MADE:
                opened = (self._open_partition(topic, i, now_ms) for i in range(topic.partition_count))
                topic.partitions.extend(opened)
                self._move([topic], TopicEvent.OPENED)
        if not self._logs.partitions.keys() <= present:
            self._sync_new_directories()
        going = [topic for topic in self._entries.values() if is_going(topic.state)]
        for topic in going:
            self.offsets_to_delete[topic.name] = OffsetsToDelete(topic.topic_id.hex(), None)
        with suppress(OSError):  # of a full disk; then they are forgotten until the next start
            self._logs.forget_missing_partitions()
        # If no topic is being deleted nothing is written, so that a broker starts on a full disk.
        run_work(self.remove_in_steps(going))

    def _parse(self, content: dict[str, Any]) -> tuple[dict[str, Topic], dict[str, OffsetsToDelete]]:
        deletions = {
            entry["name"]: OffsetsToDelete(entry["topic_id"], _bounds(entry["before"]))
            for entry in content.get("offsets_to_delete", ())
        }
        topics = {}
        for name, entry in parse_topics(content).items():
            topic = self._new_topic(name, entry.topic_id, stored_overrides(entry.settings))
            topic.partition_count, topic.state = entry.partition_count, state_at_start(entry.is_deleting)
            topics[name] = topic
        return topics, deletions

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

    def _count_directories(self) -> None:
        """Note what a growth that failed has left beyond the partitions that the file counts."""
        try:
            for tp in self._logs.partition_directories():
                topic = self._entries.get(tp.topic)
                if topic is None or not topic.partition_count <= tp.partition < MAX_PARTITIONS:
                    continue
                if self._logs.is_partition(tp) and self._logs.is_without_records(tp):
                    topic.directory_count = max(topic.directory_count, tp.partition + 1)
        except OSError as error:
            raise StorageError(f"{self._logs.directory} cannot be read: {explain(error)}") from error

    def _changed(self) -> None:
        self.large_answers.clear()
        self.revision += 1

    def _save(self) -> None:
        """Write the file. Raises NotDurable when it is written, and another StorageError when it is not."""
        self._changed()
        topics = []
        for topic in self._entries.values():
            is_deleting, count = listed(topic.state, topic.partition_count, topic.directory_count)
            topics.append(
                {
                    "name": topic.name,
                    "topic_id": topic.topic_id.hex(),
                    "partitions": count,
                    "settings": topic.overrides,
                    "is_deleting": is_deleting,
                }
            )
        content: dict[str, Any] = {"topics": topics}
        if self.offsets_to_delete:
            content["offsets_to_delete"] = [
                {"name": name, "topic_id": topic_id, "before": before}
                for name, (topic_id, before) in self.offsets_to_delete.items()
            ]
        write_state(self._logs.disk, FILE_NAME, content)


def _is_served(topic: Topic) -> bool:
    """Return whether a topic is there to stay, or will be when its partitions are made."""
    return topic.state in (TopicState.BEING_MADE, TopicState.LIVE)


def _missing_count(topic: Topic) -> int:
    return topic.partition_count - len(topic.partitions) - len(topic.new_partitions)


def _growth_refusal(topic: Topic, count: int) -> BrokerError | None:
    """Return why a topic cannot have this many partitions now."""
    if topic.state is not TopicState.LIVE:
        return UnknownTopicOrPartition(f"topic {topic.name!r} was deleted meanwhile")
    if count <= topic.partition_count:
        return InvalidPartitions(
            f"topic {topic.name!r} has {topic.partition_count} partitions by now; {count} is not more"
        )
    return None


def _known(failures: Mapping[str, Exception]) -> dict[str, BrokerError | StorageError]:
    """Return failures as a client is told them. Raises one that is no error of the broker or of the disk."""
    known: dict[str, BrokerError | StorageError] = {}
    for name, failure in failures.items():
        if not isinstance(failure, (BrokerError, StorageError, OSError)):
            raise failure
        known[name] = KafkaStorageError(str(failure)) if isinstance(failure, OSError) else failure
    return known


def _bounds(before: Mapping[str, int] | None) -> dict[int, int] | None:
    return None if before is None else {int(index): int(end) for index, end in before.items()}
