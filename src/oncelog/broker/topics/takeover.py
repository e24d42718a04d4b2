"""Adoption of a data directory that Apache Kafka has used, or whose list of topics is missing.

Before any partition is opened, Kafka's metadata is converted to this broker's own small files: topics with
ids and settings, the next producer id, ACLs, SCRAM users, quotas. A problem is something in the directory
that this broker cannot adopt. It stops the start before anything is written, unless the setting
`oncelog.takeover.accept` contains the word for this kind of problem.

`oncelog-takeover.json` is written last, so that the next start repeats an adoption that a crash interrupted.
The file has the names and sizes of the files of the metadata log. If they differ from the current files,
Kafka has run since the adoption, and the newer metadata is adopted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from oncelog.broker.coordinators.internal_topic_config import INTERNAL_TOPICS, METADATA_LOG
from oncelog.broker.coordinators.producer_ids import stored_next_id, write_next_id
from oncelog.broker.quota_manager import FILE_NAME as QUOTAS_FILE
from oncelog.broker.quota_manager import QuotaChange, QuotaManager
from oncelog.broker.request_limits import MAX_PARTITIONS
from oncelog.broker.security.authorizer import FILE_NAME as ACLS_FILE
from oncelog.broker.security.authorizer import Authorizer
from oncelog.broker.security.users import FILE_NAME as USERS_FILE
from oncelog.broker.security.users import Users
from oncelog.broker.state_file import read_state, write_state
from oncelog.broker.topics.kafka_metadata import (
    BROKER as BROKER_SETTINGS,
)
from oncelog.broker.topics.kafka_metadata import (
    DIRECTORY,
    KafkaMetadata,
    KafkaTopic,
    fingerprint,
    read_metadata,
    topics_by_name,
)
from oncelog.broker.topics.kafka_metadata import (
    GROUP as GROUP_SETTINGS,
)
from oncelog.broker.topics.topic_config import BROKER_DEFAULT_OF, topic_settings
from oncelog.broker.topics.topics_file import TopicEntry, read_topics, write_topics
from oncelog.config import BROKER, TOPIC
from oncelog.errors import BrokerError, ConfigError, InvalidConfig, StorageError
from oncelog.log.checkpoint import LOG_STARTS, RECOVERY_POINTS, encode_uuid
from oncelog.log.manager import LogManager
from oncelog.rules.limits.quotas import QuotaEntity, apply_changes, normalize_entity, parse_entity
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.rules.security.scram import Credential, Mechanism
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.header import MAGIC

FILE_NAME = "oncelog-takeover.json"
ACCEPT = "oncelog.takeover.accept"
KEPT_FOREVER = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
"""Settings of a topic whose own settings are unknown: its records are never deleted."""

_WITHOUT_MEANING = {
    "file.delete.delay.ms", "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas", "message.downconversion.enable", "message.format.version",
    "preallocate", "segment.jitter.ms", "unclean.leader.election.enable", "local.retention.ms",
    "local.retention.bytes", "remote.log.copy.disable", "remote.log.delete.on.disable",
}  # fmt: skip
"""Kafka's topic settings that have no effect on a single broker. They are not adopted."""
_STRAY = re.compile(r"(?P<topic>.+)-(?P<partition>\d+)\.[0-9a-f]{32}-stray")
_UNASSIGNED = (1).to_bytes(16, "big")
"""Directory id of a replica that has no directory yet.

Id 0 (MIGRATING) means a directory that exists but is not known, and id 2 (LOST) a directory that failed. Both
kinds of directory may have records. Source: kafka DirectoryId.
"""
_LOG = re.compile(r"\d{20}\.log")
_MAX_NAMED = 100
"""Maximum number of missing partitions of a topic that an error text names."""
_MAGIC_POSITION = 16
"""Position of the message format version in a batch or message. It is the same in every format."""


@dataclass(slots=True)
class TakeoverPlan:
    """The changes and problems of an adoption.

    `problems` has pairs of a word and a text. If `oncelog.takeover.accept` contains the word, the start
    continues in spite of the problem. The text says what would be lost and what to do. `leftovers` are
    directories without records that no list of topics names. They are removed.
    """

    topics: dict[str, TopicEntry]
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def add_problem(self, word: str, text: str) -> None:
        """Add a problem. It stops the start unless `oncelog.takeover.accept` contains `word`."""
        self.problems.append((word, text))


def take_over(logs: LogManager, settings: Settings) -> list[str]:
    """Adopt the directory if necessary. Return notes about the adoption, which the server logs. Kafka's
    metadata is read only if its files differ from those of the last adoption.

    Raises StorageError if any problem is not accepted; then nothing is written.
    """
    disk, accepted = logs.disk, set(settings[ACCEPT])
    before = read_topics(disk)
    state = read_state(logs.disk, FILE_NAME, _parse)
    files = fingerprint(disk)
    plan = TakeoverPlan({name: entry for name, entry in before.items() if name != METADATA_LOG})
    if METADATA_LOG in before:
        # Version 0.4.1 adopted Kafka's metadata log as a topic, and until 0.9.1 clients could create a topic
        # with its name (R1760).
        text = f"left out the topic {METADATA_LOG}: Kafka's log has this name; {DIRECTORY} is kept"
        plan.notes.append(text)
    metadata = None
    if files and (state is None or state["files"] != files):
        metadata = _metadata(logs, plan)
    if metadata is not None:
        _plan_topics(plan, metadata, logs, settings, is_first=state is None)
        _plan_gone(plan, metadata, logs, before, set() if state is None else set(state["topic_ids"]))
        _plan_partitions_aside(plan, metadata, logs, before, set() if state is None else set(state["strays"]))
        _plan_broker_settings(plan, metadata, settings)
    _plan_unnamed(plan, logs)
    _plan_formats(plan, logs, set(before) if metadata is None else set())
    security = None
    if metadata is not None:
        security = _Security(plan, metadata, logs, settings, {} if state is None else state["taken"])
    refused = [(word, text) for word, text in plan.problems if word not in accepted]
    if refused:
        raise StorageError(_problem_text(disk.describe(""), refused))
    for directory in plan.leftovers:
        disk.remove_tree(directory)
    if plan.topics != before:
        write_topics(disk, plan.topics)
    accepted_notes = [f"accepted ({word}): {text}" for word, text in plan.problems]
    if metadata is None or security is None:
        return plan.notes + accepted_notes
    if metadata.next_producer_id > stored_next_id(disk):
        write_next_id(disk, metadata.next_producer_id)
    security.store()
    logs.forget_index_starts()
    content = {
        "files": files,
        "topic_ids": [encode_uuid(topic_id) for topic_id in metadata.topics],
        "taken": security.found,
        "strays": [name for name in disk.list() if _STRAY.fullmatch(name)],
    }
    write_state(disk, FILE_NAME, content)
    plan.notes.append(f"took over {len(metadata.topics)} topics with their settings from {DIRECTORY}")
    return plan.notes + accepted_notes


def _problem_text(path: str, refused: list[tuple[str, str]]) -> str:
    words = ",".join(sorted({word for word, _ in refused}))
    lines = "".join(f"\n  [{word}] {text}" for word, text in refused)
    return (
        f"{path} cannot be adopted as it is; no topic was changed:{lines}\n"
        f"Repair this, or start with {ACCEPT}={words} to continue without it (docs/operations.md)"
    )


def _parse(content: dict[str, Any]) -> dict[str, Any]:
    required = {key: content[key] for key in ("files", "topic_ids")}
    return {**required, "taken": content.get("taken", {}), "strays": content.get("strays", [])}


def _metadata(logs: LogManager, plan: TakeoverPlan) -> KafkaMetadata | None:
    try:
        return read_metadata(logs.disk)
    except StorageError as error:
        plan.add_problem("metadata", f"{error}: its topic settings, ACLs, users and quotas are lost")
        return None


# Topics


def _plan_topics(
    plan: TakeoverPlan, metadata: KafkaMetadata, logs: LogManager, settings: Settings, *, is_first: bool
) -> None:
    here = set(logs.partition_directories())
    unlisted: list[TopicPartition] = []
    for topic, configs in topics_by_name(metadata):
        missing = {}
        for index, partition in sorted(topic.partitions.items()):
            tp = TopicPartition(topic.name, index)
            if tp in here and logs.stored_topic_id(tp) in (None, topic.topic_id):
                nodes = partition.whole_at
                if nodes and logs.node_id not in nodes:
                    plan.add_problem(
                        "partitions", f"{tp} is not in sync here; nodes {nodes} have more records"
                    )
                if logs.lacks_recovery_point(tp):
                    unlisted.append(tp)
            elif not _is_unmade(topic, index, logs):
                missing[index] = partition.replicas
        if missing:
            text = ", ".join(f"{topic.name}-{index} (nodes {nodes})" for index, nodes in missing.items())
            plan.add_problem("partitions", f"not in this directory: {text}")
            if len(missing) == len(topic.partitions):
                continue
        own = _own_settings(plan, topic.name, configs, settings)
        existing = plan.topics.get(topic.name)
        if is_first and existing is not None:
            # An older version of this broker has adopted the directory before, and clients may have changed
            # the topic's settings since. So the existing settings override Kafka's.
            own |= existing.settings
        count, leader_epoch = len(topic.partitions), topic.leader_epoch + 1
        if existing is not None and existing.topic_id == topic.topic_id:
            # Partitions that this broker has added, and Kafka does not know. `_plan_partitions_aside` reports
            # those that Kafka has set aside.
            while count < existing.partition_count and TopicPartition(topic.name, count) in here:
                count += 1
            leader_epoch = max(leader_epoch, existing.leader_epoch)
        plan.topics[topic.name] = TopicEntry(
            topic.topic_id, count, own, is_deleting=False, leader_epoch=leader_epoch
        )
    if unlisted:
        # Kafka had several log.dirs, and the checkpoint files of one of them have replaced those of another.
        plan.add_problem(
            "partitions",
            f"{RECOVERY_POINTS} lacks {', '.join(map(str, unlisted))}, and {LOG_STARTS} may "
            "lack them too: merge these files from all of Kafka's log.dirs",
        )


def _is_unmade(topic: KafkaTopic, index: int, logs: LogManager) -> bool:
    """Return True if this node has the only replica and Kafka has not created its directory yet."""
    partition = topic.partitions[index]
    if partition.replicas != [logs.node_id]:
        return False
    # Metadata that is older than directory ids (KIP-858) has an empty list: assume that the directory exists.
    return bool(partition.directories) and all(
        directory == _UNASSIGNED for directory in partition.directories
    )


def _own_settings(
    plan: TakeoverPlan, name: str, configs: Mapping[str, str], settings: Settings
) -> dict[str, str]:
    own: dict[str, str] = {}
    for key, value in sorted(configs.items()):
        text = f"topic {name}: {key}={value}"
        if key == "cleanup.policy" and not value.strip():
            # With an empty list of policies, Kafka neither deletes nor compacts, so keep the records forever.
            own |= KEPT_FOREVER
        elif key == "remote.storage.enable" and value == "true":
            plan.add_problem(
                "settings", f"{text}: some of its records are in remote storage, not in this directory"
            )
        elif TOPIC.get(key) is not None and (error := _error_of(settings, key, value)) is None:
            own.setdefault(key, value)
        elif key in _WITHOUT_MEANING or key == "remote.storage.enable":
            plan.notes.append(f"{text} has no effect on a single broker and is left out")
        elif TOPIC.get(key) is not None:
            plan.add_problem(
                "settings", f"{text} is not supported ({error}); the topic is kept forever instead"
            )
            own |= KEPT_FOREVER
        else:
            plan.add_problem("settings", f"{text} is unknown; without it the topic is kept forever")
            own |= KEPT_FOREVER
    return own


def _error_of(settings: Settings, key: str, value: str) -> InvalidConfig | None:
    try:
        topic_settings(settings, {key: value})
    except InvalidConfig as error:
        return error
    return None


def _plan_gone(
    plan: TakeoverPlan,
    metadata: KafkaMetadata,
    logs: LogManager,
    before: Mapping[str, TopicEntry],
    taken: set[str],
) -> None:
    """Remove from the plan those topics of this broker that Kafka has deleted.

    Add a problem for each of this broker's topics that Kafka has set aside as a stray.
    """
    names = {topic.name: topic.topic_id for topic in metadata.topics.values()}
    here = {tp.topic for tp in logs.partition_directories()}
    strays = [name for name in logs.disk.list() if _STRAY.fullmatch(name)]
    for name, entry in before.items():
        if name == METADATA_LOG or names.get(name) == entry.topic_id or (name in here and name not in names):
            continue
        stray = next((directory for directory in strays if _is_stray_of(directory, name)), None)
        if stray is not None:
            plan.add_problem(
                "strays",
                f"topic {name} was set aside by Apache Kafka, because its metadata does not "
                f"contain the topic: to keep it, rename {stray} (and its other partitions) "
                f"back to {name}-N",
            )
        if name not in names and (stray is not None or encode_uuid(entry.topic_id) in taken):
            del plan.topics[name]
            plan.notes.append(f"topic {name} is missing: Apache Kafka deleted it or set it aside")


def _plan_partitions_aside(
    plan: TakeoverPlan,
    metadata: KafkaMetadata,
    logs: LogManager,
    before: Mapping[str, TopicEntry],
    known: Collection[str],
) -> None:
    """Add a problem for each topic in Kafka's metadata that has partitions which this broker added and Kafka
    then set aside as strays. `known` are the strays at the last adoption.
    """
    strays = [name for name in logs.disk.list() if _STRAY.fullmatch(name) and name not in known]
    for topic in metadata.topics.values():
        entry = before.get(topic.name)
        if entry is None or entry.topic_id != topic.topic_id:
            continue
        own = range(entry.partition_count)
        aside = [directory for directory in strays if _is_stray_of(directory, topic.name, own)]
        if aside:
            plan.add_problem(
                "strays",
                f"{len(aside)} partitions of topic {topic.name} were set aside by Apache Kafka, because its "
                f"metadata did not contain them: to keep them, rename {aside[0]} (and the others) back to "
                f"{topic.name}-N",
            )


def _is_stray_of(directory: str, name: str, partitions: Container[int] | None = None) -> bool:
    """Return True if the directory is a stray of the topic, and of one of `partitions` unless that is None.

    Kafka renames a directory to `...-stray` if the cluster's metadata does not assign the partition to the
    node. Kafka truncates names that are too long.
    """
    match = _STRAY.fullmatch(directory)
    assert match is not None
    if partitions is not None and int(match["partition"]) not in partitions:
        return False
    start: str = match["topic"]
    return start == name or (len(directory) == 255 and name.startswith(start))


def _plan_broker_settings(plan: TakeoverPlan, metadata: KafkaMetadata, settings: Settings) -> None:
    """Compare the broker settings in Kafka's metadata with this broker's. Nothing is adopted.

    Add a problem for each setting that is a default of topics and has another value here. Add a note for
    each other broker or group setting.
    """
    stored = dict(metadata.configs.get((BROKER_SETTINGS, ""), {}))
    stored |= metadata.configs.get((BROKER_SETTINGS, str(settings["node.id"])), {})
    for key, value in sorted(stored.items()):
        if key not in BROKER_DEFAULT_OF.values():
            plan.notes.append(f"broker setting {key} in Kafka's metadata is not adopted")
            continue
        try:
            is_same = BROKER.parse({key: value})[key] == settings[key]
        except ConfigError:
            is_same = False
        if not is_same:
            plan.add_problem(
                "broker-settings",
                f"Kafka stores the broker setting {key}={value}, but this broker has "
                f"{settings[key]}: start it with {key}={value}",
            )
    for (kind, name), own in sorted(metadata.configs.items()):
        if kind == GROUP_SETTINGS:
            texts = ", ".join(f"{key}={value}" for key, value in sorted(own.items()))
            plan.notes.append(f"settings of group {name} in Kafka's metadata are not adopted: {texts}")


def _plan_unnamed(plan: TakeoverPlan, logs: LogManager) -> None:
    """Plan for partition directories that no list of topics names: their topics' settings are lost.

    A topic with records is kept forever, and directories without records become leftovers. Add a problem for
    each directory with records that no client could read.
    """
    unnamed: dict[str, dict[int, bool]] = {}
    for tp in logs.partition_directories():
        entry = plan.topics.get(tp.topic)
        is_beyond = tp.partition >= MAX_PARTITIONS
        if (entry is None or is_beyond) and not logs.is_partition(tp):
            plan.notes.append(f"{logs.disk.describe(str(tp))} is not a partition and is left alone")
        elif is_beyond:
            # The directory may be a copy whose name ends in a date. As a partition, it would give its topic
            # millions of partitions. See
            # test_a_copy_of_a_partition_whose_name_ends_in_a_date_stops_the_start.
            if not logs.is_without_records(tp):
                plan.add_problem(
                    "partitions",
                    f"{tp} contains records, but a topic has at most {MAX_PARTITIONS} partitions: move the "
                    "directory away, or rename it if it belongs to a topic",
                )
        elif entry is None:
            unnamed.setdefault(tp.topic, {})[tp.partition] = not logs.is_without_records(tp)
        elif tp.partition >= entry.partition_count and not logs.is_without_records(tp):
            plan.add_problem(
                "partitions",
                f"topic {tp.topic} has {entry.partition_count} partitions in the metadata, "
                f"but {tp} contains records, which no client could read",
            )
    for name, indexes in sorted(unnamed.items()):
        if not any(indexes.values()):
            # A failed creation of a topic leaves directories without records, so their removal loses nothing.
            plan.leftovers += [f"{name}-{index}" for index in sorted(indexes)]
            continue
        # Empty partitions count too: the partition of a key or group depends on the number of all partitions.
        count = max(indexes) + 1
        if name not in INTERNAL_TOPICS:
            plan.add_problem(
                "settings",
                f"topic {name}: its directory exists, but its settings do not (neither {METADATA_LOG} nor"
                " oncelog-topics.json names it); restore one of them, or the topic is kept forever",
            )
        if len(indexes) < count:
            missing = sorted(set(range(count)) - set(indexes))
            text = ", ".join(map(str, missing[:_MAX_NAMED])) + (", ..." if len(missing) > _MAX_NAMED else "")
            plan.add_problem(
                "partitions",
                f"topic {name}: {len(missing)} partitions are not in this directory: {text}",
            )
        topic_id = logs.stored_topic_id(TopicPartition(name, min(indexes))) or logs.new_uuid()
        own = {} if name in INTERNAL_TOPICS else dict(KEPT_FOREVER)
        plan.topics[name] = TopicEntry(topic_id, count, own, is_deleting=False)


def _plan_formats(plan: TakeoverPlan, logs: LogManager, own_topics: set[str]) -> None:
    """Add a problem for each topic with an old message format, unless this broker had the topic already.

    If the start continued, recovery would truncate the records as unreadable.
    """
    old: dict[str, int] = {}
    for tp in logs.partition_directories():
        if tp.topic in plan.topics and tp.topic not in own_topics:
            for name in filter(_LOG.fullmatch, logs.disk.list(str(tp))):
                file = logs.disk.open(f"{tp}/{name}")
                head = file.pread(_MAGIC_POSITION + 1, 0)
                file.close()
                # A power loss may leave zeros instead of a message. A message's length is never 0, so the
                # bytes of the length distinguish them.
                if len(head) > _MAGIC_POSITION and head[_MAGIC_POSITION] < MAGIC and any(head[8:12]):
                    old.setdefault(tp.topic, head[_MAGIC_POSITION])
    for topic, version in sorted(old.items()):
        plan.add_problem(
            "formats",
            f"topic {topic} has records in message format {version} from before Kafka 0.11, which cannot be"
            " read: copy them to a new topic while Apache Kafka runs, and delete this one",
        )


# ACLs, users and quotas


class _Security:
    """The ACLs, users and quotas in Kafka's metadata, compared with ours.

    `found` has a digest of each kind in Kafka's metadata. `taken` has the digests of the last adoption. They
    show whether Kafka or this broker has changed its side since.
    """

    def __init__(
        self,
        plan: TakeoverPlan,
        metadata: KafkaMetadata,
        logs: LogManager,
        settings: Settings,
        taken: Mapping[str, str],
    ) -> None:
        self._plan, self._metadata, self._settings, self._taken = plan, metadata, settings, taken
        self._disk, self._new_secret = logs.disk, logs.new_uuid() + logs.new_uuid()
        self.found: dict[str, str] = {}
        self._stores: list[Callable[[], None]] = []
        self._acls()
        self._users()
        self._quotas()

    def store(self) -> None:
        """Store the kinds that are adopted, each with one write. Raises StorageError."""
        for store in self._stores:
            store()

    def _merge(self, word: str, file: str, found: list[Any], held: list[Any], store: Any) -> None:
        """Compare one kind with the last adoption. If only Kafka has changed it, adopt Kafka's values.

        If only this broker has changed it, or if the values are equal, keep ours. If both have changed it,
        add a problem.
        """
        theirs, ours = _digest(found), _digest(held)
        self.found[word] = theirs
        last = self._taken.get(word, _digest([]))
        if theirs in (ours, last):
            return
        if ours == last:
            self._stores.append(store)
        else:
            self._plan.add_problem(word, f"{file} differs from Kafka's {word}; remove it to use Kafka's")

    def _acls(self) -> None:
        acls = [acl for record in self._metadata.acls.values() if (acl := self._acl(record)) is not None]
        if acls and not self._settings["authorizer.class.name"]:
            names = ", ".join(sorted({acl.principal for acl in acls})[:5])
            self._plan.add_problem(
                "acls",
                f"Kafka has {len(acls)} ACLs (of {names}), but this broker has no authorizer, "
                "so every client could do everything: set authorizer.class.name and "
                "super.users as in Kafka",
            )
        authorizer = Authorizer(self._disk, "", allows_if_none=False)
        found, held = ([_text_of(acl) for acl in group] for group in (set(acls), authorizer.acls))
        self._merge("acls", ACLS_FILE, found, held, lambda: authorizer.replace(acls))

    def _acl(self, record: Any) -> Acl | None:
        try:
            return Acl(
                ResourceType(record.resource_type),
                record.resource_name,
                PatternType(record.pattern_type),
                record.principal,
                record.host,
                Operation(record.operation),
                Permission(record.permission_type),
            )
        except ValueError as error:
            self._plan.add_problem("acls", f"an ACL of {record.principal} on {record.resource_name}: {error}")
            return None

    def _users(self) -> None:
        found: dict[tuple[str, Mechanism], Credential] = {}
        for (name, number), record in self._metadata.users.items():
            try:
                mechanism = Mechanism(number)
            except ValueError:
                self._plan.add_problem("users", f"SCRAM user {name}: mechanism {number} is unknown")
                continue
            keys = bytes(record.salt), bytes(record.stored_key), bytes(record.server_key)
            found[name, mechanism] = Credential(*keys, record.iterations)
        users = Users(self._disk, self._new_secret)
        held = {
            (name, mechanism): credential
            for name in users.names()
            for mechanism, credential in users.of(name)
        }
        theirs, ours = (
            [_text_of_user(*item) for item in credentials.items()] for credentials in (found, held)
        )
        self._merge("users", USERS_FILE, theirs, ours, lambda: users.take_over(found))

    def _quotas(self) -> None:
        found: dict[QuotaEntity, Mapping[str, float]] = {}
        for pairs, rates in self._metadata.quotas.items():
            try:
                entity = normalize_entity(parse_entity(pairs))
                found[entity] = apply_changes(entity, {}, rates.items())
            except BrokerError as error:
                self._plan.add_problem("quotas", f"quotas {rates} of {dict(pairs)}: {error}")
        quotas = QuotaManager(self._disk, self._settings, {})
        theirs, ours = (
            [(sorted(entity.parts.items()), sorted(rates.items())) for entity, rates in table.items()]
            for table in (found, quotas.values)
        )
        gone = [(entity, [(key, None) for key in rates]) for entity, rates in quotas.values.items()]
        changes: list[QuotaChange] = [
            *gone,
            *((entity, list(rates.items())) for entity, rates in found.items()),
        ]
        self._merge("quotas", QUOTAS_FILE, theirs, ours, lambda: quotas.alter_all(changes, is_test=False))


def _digest(values: list[Any]) -> str:
    return sha256(json.dumps(sorted(json.dumps(value) for value in values)).encode()).hexdigest()


def _text_of(acl: Acl) -> list[Any]:
    return [
        acl.resource_type.name,
        acl.name,
        acl.pattern_type.name,
        acl.principal,
        acl.host,
        acl.operation.name,
        acl.permission.name,
    ]


def _text_of_user(key: tuple[str, Mechanism], held: Credential) -> list[Any]:
    texts = [data.hex() for data in (held.salt, held.stored_key, held.server_key)]
    return [key[0], key[1].label, *texts, held.iterations]
