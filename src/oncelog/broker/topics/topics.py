"""The topics of this broker: names, ids, settings and partitions. A change is durable before its response.

`oncelog-topics.json` defines which topics exist. Each change writes the whole file: to a temporary file,
which is synced and renamed. Partition directories contain the data and, as in Kafka, the topic id in
`partition.metadata`. `rules/storage/topic_state.py` decides the state of each name, and in which order the
file and the directories change.

A deleted topic stays in the file until its directories are removed. After that, `offsets_to_delete` in the
file names the topic until its committed offsets are durably deleted. At the start,
`broker/topics/takeover.py` runs first and handles directories that the file does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from oncelog.broker.coordinators.internal_topic_config import INTERNAL_TOPICS, with_internal_settings
from oncelog.broker.request_limits import MAX_PARTITIONS
from oncelog.broker.state_file import (
    EncodedRow,
    NotDurable,
    encode_row,
    not_durable,
    put_state,
    read_state,
    write_state,
    write_state_aside,
)
from oncelog.broker.stepwise import Work, run_work
from oncelog.broker.topics.topic_config import stored_overrides, topic_settings
from oncelog.broker.topics.topic_names import TopicNames, check_topic_name
from oncelog.broker.topics.topics_file import FILE_NAME, parse_topics
from oncelog.config import INT64_MAX
from oncelog.errors import (
    BrokerError,
    InvalidPartitions,
    KafkaStorageError,
    StorageError,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
    without_traceback,
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

_MAX_WRITES_ASIDE = 3
"""Maximum number of attempts to write the topics file with new settings in another thread. An attempt fails
if another request has written the file meanwhile. After the last one, the file is written in the broker's
thread.
"""

MAX_CACHED_BYTES = 64 << 20
"""Maximum size of all cached encoded responses with their keys. The response to a request for 100,000 topics
by name needs 25 MB.
"""

_T = TypeVar("_T")
Steps = Work[_T]
"""A generator that does work in bounded steps and returns its result.

Other requests run between the steps, and during a blocking call that a step has yielded.
"""


@dataclass(eq=False, slots=True)
class Topic:
    """A topic. `overrides` are its own settings; `settings` are the effective ones.

    `allows_direct_produce` is true if an append needs no flush, no other replicas and no decompression, and
    the topic is not internal.
    """

    name: str
    topic_id: bytes
    overrides: dict[str, str]
    settings: Settings
    partitions: list[Partition] = field(default_factory=list)
    min_insync_replicas: int = 1
    flush_messages: int = 1
    flush_ms: int = INT64_MAX
    allows_direct_produce: bool = False
    state: TopicState = TopicState.ABSENT
    leader_epoch: int = 0
    """The lowest leader epoch of the partitions. See TopicEntry."""
    partition_count: int = 0
    """The number of partitions, including those that are being created."""
    directory_count: int = 0
    """One above the highest index of a directory that the topic may have.

    After a failed attempt to add partitions, this may exceed `partition_count`.
    """
    new_partitions: list[Partition] = field(default_factory=list)
    """Partitions that are open but not usable yet.

    They become usable together, once all are open and durable.
    """
    is_growing: bool = False
    """True while a request adds partitions in steps.

    Other requests that add partitions to the topic wait until it is False.
    """
    encoded_row: tuple[tuple[object, ...], EncodedRow] | None = None
    """The row in oncelog-topics.json, and the values that it was encoded from."""
    encoded_deletion: tuple[tuple[object, ...], EncodedRow] | None = None
    """The same for the row of the topic while it is being deleted."""
    is_being_removed: bool = False
    """True while the topic's directories are removed in steps.

    Until that ends, no new topic can have the name.
    """

    @property
    def is_internal(self) -> bool:
        """True for a coordinator's topic, to which clients may not write."""
        return self.name in INTERNAL_TOPICS

    def partition(self, index: int) -> Partition:
        """Return a partition. Raises UnknownTopicOrPartition."""
        if not 0 <= index < len(self.partitions):
            raise UnknownTopicOrPartition(
                f"topic {self.name!r} has the partitions 0..{len(self.partitions) - 1}, not {index}"
            )
        return self.partitions[index]

    def configure(self, broker: Settings, overrides: dict[str, str]) -> None:
        """Set the topic's own settings, and the attributes that are derived from the effective settings."""
        self.overrides = overrides
        self.settings = topic_settings(broker, overrides)
        self.min_insync_replicas = self.settings["min.insync.replicas"]
        self.flush_messages = self.settings["flush.messages"]
        self.flush_ms = self.settings["flush.ms"]
        is_alone = self.flush_messages == INT64_MAX and self.min_insync_replicas <= 1
        codec, policies = self.settings["compression.type"], self.settings["cleanup.policy"]
        is_opened = codec != "producer" or "compact" in policies
        self.allows_direct_produce = is_alone and not self.is_internal and not is_opened


class OffsetsToDelete(NamedTuple):
    """The committed offsets of a deleted topic. They must be deleted, too.

    `before` maps partitions of `__consumer_offsets` to offsets: only records below these offsets belong to
    the deleted topic. None means all records, because no later topic had the name.
    """

    topic_id: str
    before: Mapping[int, int] | None


class NewTopic(NamedTuple):
    """The name, partition count and own settings of a topic before its creation."""

    name: str
    partition_count: int
    overrides: dict[str, str]


class Topics:
    """All topics of the broker, by name and by id."""

    def __init__(
        self, log_manager: LogManager, settings: Settings, *, new_uuid: Callable[[], bytes], now_ms: int
    ) -> None:
        self._logs = log_manager
        self._settings = settings
        self._new_uuid = new_uuid
        self._entries: dict[str, Topic] = {}
        """Name -> topic, for topics in every state except ABSENT. oncelog-topics.json lists them."""
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[bytes, Topic] = {}
        """Topic id -> live topic. `_by_name` has the same topics.

        Only `_move` changes these two dicts and `_entries`.
        """
        self._opened_count = 0
        self.large_responses: dict[object, Any] = {}
        """Cached encoded responses that describe topics. Any change of a topic clears the cache."""
        self._cached_bytes = 0
        self.offsets_to_delete: dict[str, OffsetsToDelete] = {}
        """Name of a deleted topic -> its committed offsets that may still be in `__consumer_offsets`."""
        self._held_names: set[str] = set()
        """Names of deleted topics whose committed offsets are still in memory.

        No topic can be created with them.
        """
        self.offset_ends: Callable[[Collection[str]], Mapping[str, Mapping[int, int]]] = lambda names: {}
        """A callback with topic names as its argument. It returns topic name -> partition of
        `__consumer_offsets` -> log end offset of that partition.

        The result includes each partition that may have committed offsets of the topic.
        """
        self.revision = 0
        """Incremented by every change of a topic."""
        self._save_count = 0
        """Incremented by every write of oncelog-topics.json."""
        self._load(now_ms)

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Topic | None:
        """Return the live topic with this name; None if there is none."""
        return self._by_name.get(name)

    def by_id(self, topic_id: bytes | memoryview) -> Topic | None:
        """Return the live topic with this id; None if there is none."""
        return self._by_id.get(bytes(topic_id))

    def existing(self, names: frozenset[str]) -> list[str]:
        """Return those of the names that live topics have, in any order.

        The cost depends on the smaller number: a consumer may name 90,000 topics that do not exist.
        """
        if len(self._by_name) < len(names):
            return [name for name in self._by_name if name in names]
        return [name for name in names if name in self._by_name]

    def all(self) -> Iterator[Topic]:
        """Return an iterator over all live topics."""
        return iter(self._by_name.values())

    def all_partitions(self) -> Iterator[tuple[TopicPartition, Partition]]:
        """Yield the partitions of all live topics."""
        for topic in self._by_name.values():
            for index, partition in enumerate(topic.partitions):
                yield TopicPartition(topic.name, index), partition

    def partition(self, tp: TopicPartition) -> tuple[Topic, Partition]:
        """Return a live topic and its partition. Raises UnknownTopicOrPartition."""
        topic = self._by_name.get(tp.topic)
        if topic is None:
            raise UnknownTopicOrPartition(f"topic {tp.topic!r} does not exist")
        return topic, topic.partition(tp.partition)

    def keep_response(self, key: object, response: object, size_bytes: int) -> None:
        """Cache an encoded response, which needs `size_bytes` of memory together with its key.

        If the cache is full, all its entries are removed first. This suffices, because clients repeat the
        same few large requests. See test_responses_with_long_names_are_not_cached_without_bound.
        """
        if size_bytes > MAX_CACHED_BYTES:
            return
        is_full = len(self.large_responses) >= self._logs.limits.max_answers_kept
        if is_full or self._cached_bytes + size_bytes > MAX_CACHED_BYTES:
            self._clear_responses()
        self._cached_bytes += size_bytes
        self.large_responses[key] = response

    def _clear_responses(self) -> None:
        self.large_responses.clear()
        self._cached_bytes = 0

    def settings_of(self, name: str) -> Mapping[str, SettingValue]:
        """Return the effective settings of a live topic; an empty mapping if it does not exist."""
        topic = self._by_name.get(name)
        return topic.settings if topic else {}

    def create(self, name: str, partition_count: int, overrides: dict[str, str], now_ms: int) -> Topic:
        """Create a topic durably, and return it.

        Raises InvalidTopicException, TopicAlreadyExists, InvalidConfig, KafkaStorageError, StorageError.
        """
        (created,) = self.create_all([NewTopic(name, partition_count, overrides)], now_ms)
        if isinstance(created, Exception):
            raise created
        return created

    def names(self) -> list[str]:
        """Return all names that a new topic must not have or collide with.

        A deleted topic whose name can be freed for a new topic is left out.
        """
        return [*(name for name in self._entries if not self.is_deletion_incomplete(name)), *self._held_names]

    def names_being_created(self) -> frozenset[str]:
        """Return the names of topics that are being created or that get new partitions."""
        return frozenset(
            name
            for name, topic in self._entries.items()
            if topic.state is TopicState.BEING_MADE or topic.is_growing
        )

    def is_deletion_incomplete(self, name: str) -> bool:
        """Return True if the topic is deleted, but the disk failed to remove its directories or its entry in
        the file.
        """
        topic = self._entries.get(name)
        return topic is not None and is_going(topic.state) and not topic.is_being_removed

    def is_changing(self, name: str) -> bool:
        """Return True if the name is in use, but `get` does not find it: the topic is being created or
        deleted.
        """
        topic = self._entries.get(name)
        if topic is None:
            return name in self._held_names
        return topic.state is TopicState.BEING_MADE or topic.is_being_removed or name in self._held_names

    @contextmanager
    def hold_names(self, names: Collection[str]) -> Iterator[None]:
        """Prevent the creation of topics with these names while the context is active."""
        self._held_names.update(names)
        try:
            yield
        finally:
            self._held_names.difference_update(names)

    def create_all(
        self, new_topics: Iterable[NewTopic], now_ms: int
    ) -> list[Topic | BrokerError | StorageError]:
        """Create topics durably in one step.

        For each new topic, return the topic or the error that `create` would raise. Raises StorageError if
        oncelog-topics.json cannot be written, KafkaStorageError if the broker is stopping.
        """
        return run_work(self.create_in_steps(new_topics, now_ms))

    def create_in_steps(
        self, new_topics: Iterable[NewTopic], now_ms: int
    ) -> Steps[list[Topic | BrokerError | StorageError]]:
        """Create topics as `create_all` does, in bounded steps. The caller must run all steps, even if its
        client disconnects.

        The file names all topics with all partitions before the first partition is created. After a crash,
        the next start creates the missing ones. A topic becomes live when all its partitions exist.
        """
        prepared = yield from self._prepare(new_topics)
        yield from self._remove_left([new.name for new, _ in prepared])
        if self._logs.is_closing:
            raise KafkaStorageError("the broker is stopping")
        results: list[Topic | BrokerError | StorageError] = []
        created: list[Topic] = []
        names = TopicNames(self.names())
        for new, topic in prepared:
            try:
                self._check_new(new.name, names)
                if isinstance(topic, BrokerError):
                    raise topic
            except (BrokerError, StorageError) as error:
                results.append(without_traceback(error))
                continue
            names.add(new.name)
            self._move([topic], TopicEvent.CREATE)
            created.append(topic)
            results.append(topic)
        if not created:
            return results
        try:
            self._save()
        except Exception:
            # If the file was written but not synced, the next start may find the topics in it, and creates
            # them as empty topics.
            self._move(created, TopicEvent.NOT_LISTED)
            raise
        failures = yield from self._open_new(created, now_ms)
        return [
            failures.get(result.name, result) if isinstance(result, Topic) else result for result in results
        ]

    def _prepare(self, new_topics: Iterable[NewTopic]) -> Steps[list[tuple[NewTopic, Topic | BrokerError]]]:
        """Return new topics with their rows of the file, or the errors of their settings, in steps.

        Nothing refers to the topics yet. See test_many_topics_are_prepared_in_steps_before_they_are_created.
        """
        prepared: list[tuple[NewTopic, Topic | BrokerError]] = []
        for new in new_topics:
            try:
                topic = self._new_topic(new.name, self._new_uuid(), new.overrides)
            except BrokerError as error:
                prepared.append((new, without_traceback(error)))
                continue
            topic.partition_count = new.partition_count
            _encoded_row(topic, TopicState.BEING_MADE)
            prepared.append((new, topic))
            if len(prepared) % self._logs.limits.partitions_per_step == 0:
                yield None
        return prepared

    def _check_new(self, name: str, names: TopicNames) -> None:
        """Raise the errors of `create` unless a topic can have the name now."""
        check_topic_name(name)
        if self.is_deletion_incomplete(name):
            raise KafkaStorageError(
                f"files of a deleted topic {name!r} remain and could not be removed yet; retry later"
            )
        if name in self._by_name or self.is_changing(name):
            raise TopicAlreadyExists(f"topic {name!r} already exists")
        names.check(name)

    def _open_new(self, created: list[Topic], now_ms: int) -> Steps[dict[str, BrokerError | StorageError]]:
        """Create the partitions of new topics that the file already names.

        Return the error of each topic that failed. Errors of types other than BrokerError, StorageError and
        OSError are raised at the end.
        """
        failures = yield from self._open_missing(created, now_ms)
        self._move([topic for topic in created if topic.name not in failures], TopicEvent.OPENED)
        self._changed()
        failed = [topic for topic in created if topic.name in failures]
        self._move(failed, TopicEvent.FAILED)
        yield from self._finish_deletions(failed)
        return _as_client_errors(failures)

    def _open_missing(self, topics: Sequence[Topic], now_ms: int) -> Steps[dict[str, Exception]]:
        """Create the missing partitions of topics, sync the data directory once, and make the partitions
        usable.

        Return the error of each topic that failed; its partitions stay in `new_partitions`. Raises
        KafkaStorageError if the broker begins to stop between the steps.
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
                        raise KafkaStorageError(
                            "the broker is stopping; it creates the other partitions at its next start"
                        )
        try:
            if sum(len(topic.new_partitions) for topic in topics) > self._logs.limits.partitions_per_step:
                # In another thread, because syncing the directory of 10,000 new partitions may take a second.
                # See test_the_directory_of_many_new_partitions_is_synced_in_another_thread.
                yield self._logs.disk.sync_directory
            else:
                self._logs.disk.sync_directory()
        except Exception as error:
            failures = {topic.name: error for topic in topics}
        configured: dict[Topic, tuple[object, object]] = {}
        for count, topic in enumerate(topics, 1):
            if _is_served(topic) and topic.name not in failures:
                configured[topic] = self._configure_new(topic)
            if count % self._logs.limits.partitions_per_step == 0:
                yield None
        if self._logs.is_closing:
            raise KafkaStorageError("the broker is stopping; its next start makes the partitions usable")
        for topic in topics:
            if not _is_served(topic):
                failures[topic.name] = UnknownTopicOrPartition(
                    f"topic {topic.name!r} was deleted while its partitions were created"
                )
            if topic.name in failures:
                continue
            # Configure the few topics again whose settings have changed between the steps.
            values, overrides = configured.get(topic, (None, None))
            if values is not self._settings.values_now or overrides is not topic.overrides:
                self._configure_new(topic)
            topic.partitions += topic.new_partitions
            topic.new_partitions.clear()
        return failures

    def _configure_new(self, topic: Topic) -> tuple[object, object]:
        """Configure a topic and its new partitions again, because the settings of the topic or the broker may
        have changed since the partitions were opened. Return the objects from which the settings were made.
        """
        topic.configure(self._settings, topic.overrides)
        config = self._log_config(topic)
        for partition in topic.new_partitions:
            if partition.config != config:
                partition.reconfigure(config)
        return self._settings.values_now, topic.overrides

    def delete(self, topics: Sequence[Topic]) -> None:
        """Delete topics in one step. Raises StorageError."""
        self.begin_deletion(topics)
        run_work(self.remove_in_steps(topics))

    def prepare_deletion(self, topic: Topic) -> None:
        """Encode the row that `begin_deletion` will write, so that the step of thousands of deletions is
        short. See test_many_topics_are_prepared_in_steps_before_they_are_created.
        """
        _encoded_row(topic, TopicState.DOOMED)

    def begin_deletion(self, topics: Sequence[Topic]) -> None:
        """Delete topics durably, with one write of the file. Their directories remain. Raises StorageError.

        When this returns, the topics are not live, and no start makes them live again. Until
        `forget_deletions`, `offsets_to_delete` contains those that may have committed offsets. The caller
        must take the first step of `remove_in_steps` next.
        """
        self._move(topics, TopicEvent.DELETE)
        try:
            self._save()
        except NotDurable:
            # The file says that the topics are deleted, so a start after a kill would delete them. Do not
            # make them live again, because they must not accept records. `resume_deletions` tries to sync the
            # file again.
            raise
        except Exception:
            self._move(topics, TopicEvent.NOT_MARKED)
            raise
        self._mark_deleted(topics)

    def resume_deletions(self) -> Steps[list[str]]:
        """Retry deletions that failed because of a disk error, in steps.

        Return the names of the topics that this call made durably deleted. The caller must delete their
        committed offsets.
        """
        left = [topic for topic in self._entries.values() if self.is_deletion_incomplete(topic.name)]
        return (yield from self._finish_deletions(left))

    def _remove_left(self, names: Iterable[str]) -> Steps[None]:
        """Complete interrupted deletions of topics with these names, so that new topics can have the names.

        A topic that has committed offsets and is not yet durably deleted is left to `resume_deletions`.
        """
        left = [self._entries[name] for name in names if self.is_deletion_incomplete(name)]
        doomed = {topic.name for topic in left if topic.state is TopicState.DOOMED}
        ends = self.offset_ends(doomed) if doomed else {}
        yield from self._finish_deletions([topic for topic in left if not ends.get(topic.name)])

    def _finish_deletions(self, topics: Sequence[Topic]) -> Steps[list[str]]:
        """In the file, mark those of the topics as deleted that have the state DOOMED
        (`rules/storage/topic_state.py`). Then remove the directories of all marked topics.

        Return the names of the topics that were marked. If the disk fails, the remaining topics stay for a
        later call.
        """
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
        """Record that the file durably marks these topics as deleted, and list their committed offsets for
        deletion.
        """
        self._move(topics, TopicEvent.MARKED)
        ends = self.offset_ends({topic.name for topic in topics})
        for topic in topics:
            # Keep the bounds of an earlier topic with this name: it may have left offsets in other
            # partitions.
            earlier = self.offsets_to_delete.get(topic.name)
            earlier_ends = {} if earlier is None or earlier.before is None else earlier.before
            if before := {**earlier_ends, **ends.get(topic.name, {})}:
                self.offsets_to_delete[topic.name] = OffsetsToDelete(topic.topic_id.hex(), before)

    def remove_in_steps(self, topics: Sequence[Topic]) -> Steps[None]:
        """Remove the directories of deleted topics in steps. Forget the topics that have no directories left.

        If the disk fails to remove a directory, `resume_deletions` tries again later. The topic's name stays
        in use until then, because a step must never remove the directories of a new topic with the same name.
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
        # If the write fails, the file still marks the topics as deleted. Then the next start forgets them.
        with suppress(StorageError):
            self._save()

    def _move(self, topics: Iterable[Topic], event: TopicEvent) -> None:
        """Move topics to their next state, and update the indexes of live topics."""
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
        """Record that the committed offsets of these deleted topics are durably deleted."""
        done = [name for name, deletion in deletions.items() if self.offsets_to_delete.get(name) is deletion]
        for name in done:
            del self.offsets_to_delete[name]
        if done:
            # If the write fails, the next change of any topic writes the file.
            with suppress(StorageError):
                self._save()

    def bound_deletion(self, name: str, before: Mapping[int, int]) -> None:
        """Set the bounds below which a deleted topic's committed offsets are removed. See OffsetsToDelete.

        Raises StorageError if oncelog-topics.json cannot be written and a new topic has the deleted one's
        name. If there is no new topic, the old bounds in the file do no harm: creating a topic writes the
        file first.
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
        """Increase partition counts in one step. Raises the first error, a BrokerError or StorageError."""
        for failure in run_work(self.grow_in_steps(changes, now_ms)).values():
            raise failure

    def grow_in_steps(
        self, changes: Sequence[tuple[Topic, int]], now_ms: int
    ) -> Steps[dict[str, BrokerError | StorageError]]:
        """Increase partition counts in bounded steps, with one write of oncelog-topics.json.

        The caller must run all steps, even if its client disconnects. The file has the new counts before the
        first partition is created. After a crash, the next start creates the missing ones. A topic's new
        partitions become usable together. Return the error of each topic that was not changed, because the
        disk failed or another request deleted or changed the topic. Raises KafkaStorageError if the broker is
        stopping.
        """
        while any(topic.is_growing for topic, _ in changes) and not self._logs.is_closing:
            yield None
        if self._logs.is_closing:
            raise KafkaStorageError("the broker is stopping")
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
        return refused | _as_client_errors(failures)

    def alter(self, changes: Sequence[tuple[Topic, dict[str, str]]]) -> None:
        """Run `alter_in_steps` to its end in one step."""
        run_work(self.alter_in_steps(changes))

    def alter_in_steps(self, changes: Sequence[tuple[Topic, dict[str, str]]]) -> Steps[None]:
        """Replace the own settings of topics in bounded steps. The file is written once, in another thread.

        The new settings are already validated. A topic that is deleted meanwhile is not changed. The caller
        must run all steps. Raises NotDurable if the directory could not be synced, and another StorageError,
        or KafkaStorageError if the broker is stopping, if nothing has changed.
        """
        altered = {topic: with_internal_settings(topic.name, own, self._settings) for topic, own in changes}
        yield from self._write_altered(altered)
        yield from self._reconfigure(list(altered))
        try:
            yield self._logs.disk.sync_directory
        except OSError as error:
            raise not_durable(self._logs.disk, FILE_NAME, error) from error

    def _write_altered(self, altered: Mapping[Topic, dict[str, str]]) -> Steps[None]:
        """Write new settings of topics to the file, and set them. Raises StorageError, KafkaStorageError."""
        disk = self._logs.disk
        for _ in range(_MAX_WRITES_ASIDE):
            save_count = self._save_count
            yield partial(write_state_aside, disk, FILE_NAME, self._content(altered))
            if self._logs.is_closing:
                raise KafkaStorageError("the broker is stopping")
            # If another request has written the file meanwhile, this content is outdated. The file is renamed
            # in this thread, so that no change comes between the check and the rename. See
            # test_settings_are_stored_beside_other_changes_of_topics.
            if save_count == self._save_count:
                put_state(disk, FILE_NAME)
                break
        else:
            write_state(disk, FILE_NAME, self._content(altered))
        self._save_count += 1
        self._changed()
        for topic, own in altered.items():
            topic.overrides = own

    def reconfigure(self) -> Steps[None]:
        """Apply the broker's current settings to all live topics, in bounded steps."""
        return self._reconfigure(list(self._by_name.values()))

    def _reconfigure(self, topics: Iterable[Topic]) -> Steps[None]:
        for count, topic in enumerate(topics, 1):
            if self._logs.is_closing:
                raise KafkaStorageError("the broker is stopping; its next start has the new settings")
            if _is_served(topic):
                topic.configure(self._settings, topic.overrides)
                self._reconfigure_partitions(topic)
            if count % self._logs.limits.partitions_per_step == 0:
                yield None

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
            return self._logs.open_partition(tp, config, topic_id, now_ms, topic.leader_epoch)
        except StorageError:
            if not self._logs.remove_leftover(tp, topic_id):
                raise
            return self._logs.open_partition(tp, config, topic_id, now_ms, topic.leader_epoch)

    def _take_back(self, failed: Sequence[tuple[Topic, int]]) -> Steps[None]:
        """Undo failed attempts to add partitions: restore the old counts, and remove the new directories.

        A directory that the disk does not remove is removed with the topic, or reused when partitions
        are added again. If a deletion of the topic begins, this stops, because the deletion removes all
        directories.
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
        """Remove all directories of topics in steps. Return the names of the topics that still have some."""
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
        # On a full disk this call fails, and the next start repeats it.
        with suppress(OSError):
            self._logs.forget_missing_partitions()
        with suppress(OSError):
            self._logs.forget_last_stop()
        # A start writes oncelog-topics.json only if there are deleted topics, so that a broker can start on a
        # full disk.
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
            topic.leader_epoch = entry.leader_epoch
            topics[name] = topic
        return topics, deletions

    def _sync_new_directories(self) -> None:
        """Sync the data directory, because this start had to create partition directories after a crash.

        Without the sync, a power loss could remove the directories with all records that were synced in them.
        Raises StorageError. See test_a_partition_that_a_start_made_survives_a_power_loss.
        """
        disk = self._logs.disk
        try:
            disk.sync_directory()
        except OSError as error:
            raise StorageError(f"{disk.describe('')} cannot be synced: {explain(error)}") from error

    def _count_directories(self) -> None:
        """Set `directory_count` of topics that have empty directories above their partition counts.

        A failed attempt to add partitions leaves such directories. Raises StorageError.
        """
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
        self._clear_responses()
        self.revision += 1

    def _save(self) -> None:
        """Write oncelog-topics.json.

        Raises NotDurable if the file was written but not synced, StorageError if it was not written.
        """
        self._changed()
        self._save_count += 1
        write_state(self._logs.disk, FILE_NAME, self._content({}))

    def _content(self, altered: Mapping[Topic, dict[str, str]]) -> dict[str, Any]:
        """Return the content of oncelog-topics.json. `altered` are new settings of topics."""
        topics = [
            _row(topic, altered[topic], topic.state) if topic in altered else _encoded_row(topic, topic.state)
            for topic in self._entries.values()
        ]
        content: dict[str, Any] = {"topics": topics}
        if self.offsets_to_delete:
            content["offsets_to_delete"] = [
                {"name": name, "topic_id": topic_id, "before": before}
                for name, (topic_id, before) in self.offsets_to_delete.items()
            ]
        return content


def _row(topic: Topic, overrides: Mapping[str, str], state: TopicState) -> dict[str, Any]:
    """Return the row in oncelog-topics.json of a topic in `state`, with the settings `overrides`."""
    is_deleting, count = listed(state, topic.partition_count, topic.directory_count)
    return {
        "name": topic.name,
        "topic_id": topic.topic_id.hex(),
        "partitions": count,
        "settings": overrides,
        "is_deleting": is_deleting,
        "leader_epoch": topic.leader_epoch,
    }


def _encoded_row(topic: Topic, state: TopicState) -> EncodedRow:
    """Return the encoded row of a topic in `state`. It is encoded again only if the topic has changed."""
    is_deleting, count = listed(state, topic.partition_count, topic.directory_count)
    version = topic.topic_id, topic.overrides, is_deleting, count, topic.leader_epoch
    encoded = topic.encoded_deletion if is_deleting else topic.encoded_row
    if encoded is None or encoded[0] != version:
        encoded = version, encode_row(_row(topic, topic.overrides, state))
        if is_deleting:
            topic.encoded_deletion = encoded
        else:
            topic.encoded_row = encoded
    return encoded[1]


def _is_served(topic: Topic) -> bool:
    """Return True if a topic is live or is being created, so that its partitions may be opened."""
    return topic.state in (TopicState.BEING_MADE, TopicState.LIVE)


def _missing_count(topic: Topic) -> int:
    return topic.partition_count - len(topic.partitions) - len(topic.new_partitions)


def _growth_refusal(topic: Topic, count: int) -> BrokerError | None:
    """Return the error that prevents the increase of a topic's partition count to `count`; None if there is
    none.
    """
    if topic.state is not TopicState.LIVE:
        return UnknownTopicOrPartition(f"topic {topic.name!r} was deleted during the request")
    if count <= topic.partition_count:
        return InvalidPartitions(
            f"topic {topic.name!r} has {topic.partition_count} partitions now; the new count "
            f"{count} is not higher"
        )
    return None


def _as_client_errors(failures: Mapping[str, Exception]) -> dict[str, BrokerError | StorageError]:
    """Return failures as errors for clients, with KafkaStorageError for an OSError.

    Raises errors of other types.
    """
    errors: dict[str, BrokerError | StorageError] = {}
    for name, failure in failures.items():
        if not isinstance(failure, (BrokerError, StorageError, OSError)):
            raise failure
        errors[name] = KafkaStorageError(str(failure)) if isinstance(failure, OSError) else failure
    return errors


def _bounds(before: Mapping[str, int] | None) -> dict[int, int] | None:
    return None if before is None else {int(index): int(end) for index, end in before.items()}
