"""Take over a data directory that Apache Kafka left, or whose list of topics is missing.

Before anything is opened, Kafka's metadata becomes our own small files: topics with ids and settings, the
next producer id, ACLs, SCRAM users, quotas. What cannot be honoured stops the start, and nothing is written.
Each such problem has a word that `oncelog.takeover.accept` takes. `oncelog-takeover.json` is written last, so
a crash makes the next start do it again. It remembers the metadata log's files: when Kafka has run since, its
metadata is the newer truth and is taken again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from oncelog.broker.coordinators.internal_topic_config import INTERNAL_TOPICS, METADATA_LOG
from oncelog.broker.coordinators.producer_ids import stored_next_id, write_next_id
from oncelog.broker.quota_manager import FILE_NAME as QUOTAS_FILE
from oncelog.broker.quota_manager import QuotaChange, Quotas
from oncelog.broker.security.authorizer import FILE_NAME as ACLS_FILE
from oncelog.broker.security.authorizer import Authorizer
from oncelog.broker.security.users import FILE_NAME as USERS_FILE
from oncelog.broker.security.users import Users
from oncelog.broker.state_file import read_state, write_state
from oncelog.broker.topics.file import TopicEntry, read_topics, write_topics
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
KEPT_FOR_EVER = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
"""Settings of a topic whose own nobody knows: nothing of it is deleted."""

_WITHOUT_MEANING = {
    "file.delete.delay.ms", "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas", "message.downconversion.enable", "message.format.version",
    "preallocate", "segment.jitter.ms", "unclean.leader.election.enable", "local.retention.ms",
    "local.retention.bytes", "remote.log.copy.disable", "remote.log.delete.on.disable",
}  # fmt: skip
"""Kafka's settings of a topic that change nothing of what one node stores; they are left out."""
_STRAY = re.compile(r"(?P<topic>.+)-\d+\.[0-9a-f]{32}-stray")
_UNASSIGNED = bytes(16)
"""The id of no directory yet. 1 is one that was lost, 2 one not known. Source: Kafka's DirectoryId."""
_LOG = re.compile(r"\d{20}\.log")
_MAGIC_POSITION = 16
"""Of the byte that tells the message format, in each of them."""


@dataclass(slots=True)
class Plan:
    """What a takeover would write. `problems`: (word that accepts it, what would be lost and what to do).

    `leftovers`: directories without a record that no list names; they are removed.
    """

    topics: dict[str, TopicEntry]
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def refuse(self, word: str, text: str) -> None:
        self.problems.append((word, text))


def take_over(logs: LogManager, settings: Settings) -> list[str]:
    """Make the directory ours where it is another's; notes for the log.

    Raises StorageError, and nothing is written.
    """
    disk, accepted = logs.disk, set(settings[ACCEPT])
    before = read_topics(disk)
    state = read_state(logs.disk, FILE_NAME, _parse)
    files = fingerprint(disk)
    plan = Plan({name: entry for name, entry in before.items() if name != METADATA_LOG})
    metadata = None
    if files and (state is None or state["files"] != files):
        metadata = _metadata(logs, plan)
    if metadata is not None:
        _plan_topics(plan, metadata, logs, settings, is_first=state is None)
        _plan_gone(plan, metadata, logs, before, set() if state is None else set(state["topic_ids"]))
        _plan_broker_settings(plan, metadata, settings)
    _plan_unnamed(plan, logs)
    _plan_formats(plan, logs, set(before) if metadata is None else set())
    security = None
    if metadata is not None:
        security = _Security(plan, metadata, logs, settings, {} if state is None else state["taken"])
    refused = [(word, text) for word, text in plan.problems if word not in accepted]
    if refused:
        raise StorageError(_refusal(disk.describe(""), refused))
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
    topic_ids = [encode_uuid(topic_id) for topic_id in metadata.topics]
    write_state(disk, FILE_NAME, {"files": files, "topic_ids": topic_ids, "taken": security.found})
    plan.notes.append(f"took over {len(metadata.topics)} topics with their settings from {DIRECTORY}")
    return plan.notes + accepted_notes


def _refusal(path: str, refused: list[tuple[str, str]]) -> str:
    words = ",".join(sorted({word for word, _ in refused}))
    lines = "".join(f"\n  [{word}] {text}" for word, text in refused)
    return (
        f"{path} cannot be taken over as it is; no topic was changed:{lines}\n"
        f"Repair that, or start with {ACCEPT}={words} to go on without (docs/operations.md)"
    )


def _parse(content: dict[str, Any]) -> dict[str, Any]:
    return {**{key: content[key] for key in ("files", "topic_ids")}, "taken": content.get("taken", {})}


def _metadata(logs: LogManager, plan: Plan) -> KafkaMetadata | None:
    try:
        return read_metadata(logs.disk)
    except StorageError as error:
        plan.refuse("metadata", f"{error}: topics' settings, ACLs, users and quotas in it are lost")
        return None


# Topics


def _plan_topics(
    plan: Plan, metadata: KafkaMetadata, logs: LogManager, settings: Settings, *, is_first: bool
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
                    plan.refuse("partitions", f"{tp} is not in sync here; nodes {nodes} have more of it")
                if logs.lacks_recovery_point(tp):
                    unlisted.append(tp)
            elif not _is_unmade(topic, index, logs):
                missing[index] = partition.replicas
        if missing:
            text = ", ".join(f"{topic.name}-{index} (nodes {nodes})" for index, nodes in missing.items())
            plan.refuse("partitions", f"not in this directory: {text}")
            if len(missing) == len(topic.partitions):
                continue
        own = _own_settings(plan, topic.name, configs, settings)
        known = plan.topics.get(topic.name)
        if is_first and known is not None:
            own |= known.settings  # altered since an older version took the directory over
        plan.topics[topic.name] = TopicEntry(topic.topic_id, len(topic.partitions), own, is_deleting=False)
    if unlisted:
        # Those of one of several log.dirs, whose checkpoint files those of another one have replaced.
        plan.refuse(
            "partitions",
            f"no {RECOVERY_POINTS} has {', '.join(map(str, unlisted))}, nor perhaps {LOG_STARTS}, which tells"
            " of deleted records: put the lines of these files of each of Kafka's log.dirs into one file",
        )


def _is_unmade(topic: KafkaTopic, index: int, logs: LogManager) -> bool:
    """Whether Kafka would make the partition's directory: it is ours alone, in no directory yet."""
    partition = topic.partitions[index]
    if partition.replicas != [logs.node_id]:
        return False
    # None at all: written before directories had ids, of a partition that one has.
    return bool(partition.directories) and all(each == _UNASSIGNED for each in partition.directories)


def _own_settings(plan: Plan, name: str, configs: Mapping[str, str], settings: Settings) -> dict[str, str]:
    own: dict[str, str] = {}
    for key, value in sorted(configs.items()):
        text = f"topic {name}: {key}={value}"
        if key == "cleanup.policy" and not value.strip():
            own |= KEPT_FOR_EVER  # an empty list: Kafka neither deletes nor compacts
        elif key == "remote.storage.enable" and value == "true":
            plan.refuse("settings", f"{text}: a part of its records is in remote storage, not here")
        elif TOPIC.get(key) is not None and (error := _error_of(settings, key, value)) is None:
            own.setdefault(key, value)
        elif key in _WITHOUT_MEANING or key == "remote.storage.enable":
            plan.notes.append(f"{text} means nothing on one node and is left out")
        elif TOPIC.get(key) is not None:
            plan.refuse("settings", f"{text} is not possible here ({error}); it is kept for ever instead")
            own |= KEPT_FOR_EVER
        else:
            plan.refuse("settings", f"{text} is unknown here; without it the topic is kept for ever")
            own |= KEPT_FOR_EVER
    return own


def _error_of(settings: Settings, key: str, value: str) -> InvalidConfig | None:
    try:
        topic_settings(settings, {key: value})
    except InvalidConfig as error:
        return error
    return None


def _plan_gone(
    plan: Plan,
    metadata: KafkaMetadata,
    logs: LogManager,
    before: Mapping[str, TopicEntry],
    taken: set[str],
) -> None:
    """Topics of ours whose directories Kafka has put aside, or deleted as its own."""
    names = {topic.name: topic.topic_id for topic in metadata.topics.values()}
    here = {tp.topic for tp in logs.partition_directories()}
    strays = [name for name in logs.disk.list() if _STRAY.fullmatch(name)]
    for name, entry in before.items():
        if name == METADATA_LOG or names.get(name) == entry.topic_id or (name in here and name not in names):
            continue
        stray = next((each for each in strays if _is_stray_of(each, name)), None)
        if stray is not None:
            plan.refuse(
                "strays",
                f"topic {name} was put aside by Apache Kafka, which does not know it: rename {stray}"
                f" (and its other partitions) back to {name}-N to keep it",
            )
        if name not in names and (stray is not None or encode_uuid(entry.topic_id) in taken):
            del plan.topics[name]
            plan.notes.append(f"topic {name} is gone: Apache Kafka deleted it or put it aside")


def _is_stray_of(directory: str, name: str) -> bool:
    """Whether Kafka would have put the topic aside as that; it cuts a name that is too long."""
    match = _STRAY.fullmatch(directory)
    assert match is not None
    start: str = match["topic"]
    return start == name or (len(directory) == 255 and name.startswith(start))


def _plan_broker_settings(plan: Plan, metadata: KafkaMetadata, settings: Settings) -> None:
    """Settings of the broker and of groups that Kafka keeps in its metadata; ours come from elsewhere."""
    stored = dict(metadata.configs.get((BROKER_SETTINGS, ""), {}))
    stored |= metadata.configs.get((BROKER_SETTINGS, str(settings["node.id"])), {})
    for key, value in sorted(stored.items()):
        if key not in BROKER_DEFAULT_OF.values():
            plan.notes.append(f"broker setting {key} that Kafka stores is not taken over")
            continue
        try:
            is_same = BROKER.parse({key: value})[key] == settings[key]
        except ConfigError:
            is_same = False
        if not is_same:
            plan.refuse(
                "broker-settings",
                f"Kafka stores the broker setting {key}={value}, this broker has {settings[key]}:"
                f" start it with {key}={value}",
            )
    for (kind, name), own in sorted(metadata.configs.items()):
        if kind == GROUP_SETTINGS:
            texts = ", ".join(f"{key}={value}" for key, value in sorted(own.items()))
            plan.notes.append(f"settings that Kafka stores of group {name}: {texts}; they are not taken over")


def _plan_unnamed(plan: Plan, logs: LogManager) -> None:
    """Directories of topics that no list names: their settings are lost."""
    unnamed: dict[str, dict[int, bool]] = {}
    for tp in logs.partition_directories():
        entry = plan.topics.get(tp.topic)
        if entry is None:
            if logs.is_partition(tp):
                unnamed.setdefault(tp.topic, {})[tp.partition] = not logs.is_without_records(tp)
            else:
                plan.notes.append(f"{logs.disk.describe(str(tp))} is no partition and is left alone")
        elif tp.partition >= entry.partition_count and not logs.is_without_records(tp):
            plan.refuse(
                "partitions",
                f"topic {tp.topic} has {entry.partition_count} partitions by the list of topics, and"
                f" {tp} is here with records, which nobody could read",
            )
    for name, indexes in sorted(unnamed.items()):
        if not any(indexes.values()):
            # A creation that failed on a broken disk leaves such directories, and nothing is lost with them.
            plan.leftovers += [f"{name}-{index}" for index in sorted(indexes)]
            continue
        # Empty ones count: keys and groups belong to partitions by the number of all.
        count = max(indexes) + 1
        if name not in INTERNAL_TOPICS:
            plan.refuse(
                "settings",
                f"topic {name}: its directory is here, its settings are not (neither {METADATA_LOG} nor"
                " oncelog-topics.json names it); restore these, or it is kept for ever",
            )
        if len(indexes) < count:
            missing = sorted(set(range(count)) - set(indexes))
            plan.refuse("partitions", f"topic {name}: partitions {missing} are not in this directory")
        topic_id = logs.stored_topic_id(TopicPartition(name, min(indexes))) or logs.new_uuid()
        own = {} if name in INTERNAL_TOPICS else dict(KEPT_FOR_EVER)
        plan.topics[name] = TopicEntry(topic_id, count, own, is_deleting=False)


def _plan_formats(plan: Plan, logs: LogManager, known: set[str]) -> None:
    """Old message formats, in topics that are not `known` as ours: what cannot be read would be cut off."""
    old: dict[str, int] = {}
    for tp in logs.partition_directories():
        if tp.topic in plan.topics and tp.topic not in known:
            for name in filter(_LOG.fullmatch, logs.disk.list(str(tp))):
                file = logs.disk.open(f"{tp}/{name}")
                head = file.pread(_MAGIC_POSITION + 1, 0)
                file.close()
                # Zeros are what a power loss leaves, and no message: the length is in them.
                if len(head) > _MAGIC_POSITION and head[_MAGIC_POSITION] < MAGIC and any(head[8:12]):
                    old.setdefault(tp.topic, head[_MAGIC_POSITION])
    for topic, version in sorted(old.items()):
        plan.refuse(
            "formats",
            f"topic {topic} has records in message format {version}, of before Kafka 0.11, which are not read"
            " here: copy them to a new topic while Apache Kafka runs, and delete this one",
        )


# Who may do what


class _Security:
    """ACLs, users and quotas of Kafka's metadata, beside those that we have already.

    `found`: what Kafka has, as digests. `taken`: the same of the last takeover, by which is told who changed.
    """

    def __init__(
        self,
        plan: Plan,
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
        """Store what is taken, each kind in one write. Raises StorageError."""
        for store in self._stores:
            store()

    def _settle(self, word: str, file: str, found: list[Any], held: list[Any], store: Any) -> None:
        """Take Kafka's, keep ours, or refuse where both have changed."""
        theirs, ours = _digest(found), _digest(held)
        self.found[word] = theirs
        last = self._taken.get(word, _digest([]))
        if theirs in (ours, last):
            return
        if ours == last:
            self._stores.append(store)
        else:
            self._plan.refuse(word, f"{file} differs from Kafka's {word}; remove it to take Kafka's")

    def _acls(self) -> None:
        acls = [acl for record in self._metadata.acls.values() if (acl := self._acl(record)) is not None]
        if acls and not self._settings["authorizer.class.name"]:
            names = ", ".join(sorted({acl.principal for acl in acls})[:5])
            self._plan.refuse(
                "acls",
                f"Kafka has {len(acls)} ACLs (of {names}) and this broker checks none, so everybody could do"
                " everything: set authorizer.class.name and super.users as Kafka had them",
            )
        authorizer = Authorizer(self._disk, "", allows_if_none=False)
        found, held = ([_text_of(acl) for acl in each] for each in (set(acls), authorizer.acls))
        self._settle("acls", ACLS_FILE, found, held, lambda: authorizer.replace(acls))

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
            self._plan.refuse("acls", f"an ACL of {record.principal} on {record.resource_name}: {error}")
            return None

    def _users(self) -> None:
        found: dict[tuple[str, Mechanism], Credential] = {}
        for (name, number), record in self._metadata.users.items():
            try:
                mechanism = Mechanism(number)
            except ValueError:
                self._plan.refuse("users", f"SCRAM user {name}: mechanism {number} is unknown here")
                continue
            keys = bytes(record.salt), bytes(record.stored_key), bytes(record.server_key)
            found[name, mechanism] = Credential(*keys, record.iterations)
        users = Users(self._disk, self._new_secret)
        held = {(name, mechanism): each for name in users.names() for mechanism, each in users.of(name)}
        theirs, ours = ([_text_of_user(*each) for each in which.items()] for which in (found, held))
        self._settle("users", USERS_FILE, theirs, ours, lambda: users.take_over(found))

    def _quotas(self) -> None:
        found: dict[QuotaEntity, Mapping[str, float]] = {}
        for pairs, rates in self._metadata.quotas.items():
            try:
                entity = normalize_entity(parse_entity(pairs))
                found[entity] = apply_changes(entity, {}, rates.items())
            except BrokerError as error:
                self._plan.refuse("quotas", f"quotas {rates} of {dict(pairs)}: {error}")
        quotas = Quotas(self._disk, self._settings, {})
        theirs, ours = (
            [(sorted(entity.parts.items()), sorted(rates.items())) for entity, rates in which.items()]
            for which in (found, quotas.values)
        )
        gone = [(entity, [(key, None) for key in rates]) for entity, rates in quotas.values.items()]
        changes: list[QuotaChange] = [
            *gone,
            *((entity, list(rates.items())) for entity, rates in found.items()),
        ]
        self._settle("quotas", QUOTAS_FILE, theirs, ours, lambda: quotas.alter_all(changes, is_test=False))


def _digest(values: list[Any]) -> str:
    return sha256(json.dumps(sorted(json.dumps(each) for each in values)).encode()).hexdigest()


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
    texts = [each.hex() for each in (held.salt, held.stored_key, held.server_key)]
    return [key[0], key[1].label, *texts, held.iterations]
