"""Topics and their settings: creation, growth, changes, descriptions and deletion, by name and by id."""

from __future__ import annotations

from random import Random
from typing import Any

from differential.sequence import SENTINEL, Body, Rule, Sequence, Step, Subject, name, ref

LENGTHS = (5, 10, 15)
NAMES = ("a", "b", "c")
ILLEGAL = ("", ".", "..", "a b", "ä", "x" * 250, "a/b", "x" * 249 + "!")
KEYS: dict[str, tuple[Any, ...]] = {
    "retention.ms": ("-1", "1000", "-2", "x", "", "9223372036854775808", "+7", "1_000", " 5 "),
    "retention.bytes": ("-1", "0", "-5", "1e3"),
    "segment.bytes": ("1048576", "1048575", "100", "2147483647", "2147483648"),
    "segment.ms": ("1", "0", "1000"),
    "cleanup.policy": ("compact", "delete", "compact,delete", "compact, delete", "delete,delete", "none", ""),
    "min.cleanable.dirty.ratio": ("0.5", "0", "1", "1.1", "-0.1", ".5", "x"),
    "max.message.bytes": ("0", "1000", "-1", "2147483647"),
    "compression.type": ("lz4", "producer", "uncompressed", "none", "snappy ", "LZ4"),
    "message.timestamp.type": ("LogAppendTime", "CreateTime", "logappendtime"),
    "min.insync.replicas": ("1", "0", "2", "x"),
    "delete.retention.ms": ("0", "-1", "100"),
    "flush.messages": ("1", "0", "9223372036854775807"),
    "message.timestamp.before.max.ms": ("0", "-1", "9223372036854775807"),
    "unclean.leader.election.enable": ("true", "false", "TRUE", "yes", ""),
    "preallocate": ("false", "x"),
    "follower.replication.throttled.replicas": ("*", "0:1", "none", "0:1,1:1", "x"),
    "index.interval.bytes": ("0", "4096", "-1"),
    "max.compaction.lag.ms": ("1", "0", "5000"),
    "min.compaction.lag.ms": ("1", "0", "5000", "-1"),
    "file.delete.delay.ms": ("0", "60000", "-1"),
    "local.retention.ms": ("-2", "-1", "1000"),
    "remote.storage.enable": ("false",),
    "compression.gzip.level": ("1", "9", "10", "0", "-1"),
    "compression.zstd.level": ("22", "23", "-131072"),
    "segment.index.bytes": ("4", "3", "10485760"),
    "nonsense": ("1",),
    "": ("1",),
}
LISTS = ("cleanup.policy", "cleanup.policy", "follower.replication.throttled.replicas")
TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)


class Admin:
    """Draw the steps of an administrator of three topics."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.steps: list[Step] = []

    def _often(self, chance: float) -> bool:
        return self._random.random() < chance

    def _add(self, api: str, versions: tuple[int, int], body: Body, **more: Any) -> None:
        self.steps.append(Step(api, self._random.randint(*versions), body, **more))

    def _topic(self) -> Any:
        return self._random.choice(ILLEGAL) if self._often(0.07) else name(self._random.choice(NAMES))

    def _topics(self) -> list[Any]:
        """Return the topics of a request: mostly one, sometimes several, and seldom one topic twice."""
        some = [name(each) for each in self._random.sample(NAMES, self._random.choice([1, 1, 1, 2, 3]))]
        if self._often(0.08):
            some.append(self._topic())
        return some + some[:1] if self._often(0.05) else some

    def _id(self, topic: str) -> Any:
        unknown = {"$hex": self._random.choice(["61" * 16])}
        return unknown if self._often(0.1) else ref(f"{topic}.id", unknown)

    def _value(self, key: str) -> Any:
        if self._often(0.04):
            return None
        return self._random.choice(KEYS[key])

    def _settings(self) -> list[Body]:
        keys = self._random.sample(sorted(KEYS), self._random.choice([0, 1, 1, 2, 3]))
        rows = [{"name": key, "value": self._value(key)} for key in keys]
        return rows + rows[:1] if self._often(0.05) else rows

    def create(self) -> None:
        """Draw CreateTopics with counts or with an assignment."""
        random, rows = self._random, []
        for topic in self._topics():
            row: Body = {"name": topic, "num_partitions": 1, "replication_factor": 1}
            if self._often(0.4):
                row["num_partitions"] = random.choice([2, 3, -1, 0, -2, 3])
            if self._often(0.12):
                row["replication_factor"] = random.choice([-1, 0, 2, -2, 32767])
            if self._often(0.15):
                row |= {"num_partitions": -1, "replication_factor": -1, "assignments": self._assignment()}
                if self._often(0.1):
                    row["num_partitions"] = 1
            if self._often(0.4):
                row["configs"] = self._settings()
            rows.append(row)
        self._add(
            "CreateTopics", (2, 7), {"topics": rows, "timeout_ms": 30_000, "validate_only": self._often(0.12)}
        )
        self.identify()

    def identify(self) -> None:
        """Draw a Metadata request for all three topics, whose response binds their ids."""
        rows = [{"name": name(each)} for each in NAMES]
        binds = {f"{each}.id": f"topics.{index}.topic_id" for index, each in enumerate(NAMES)}
        body = {"topics": rows, "allow_auto_topic_creation": False}
        self.steps.append(Step("Metadata", 12, body, binds=binds))

    def _assignment(self) -> list[Body]:
        choices = [
            [(0, 1)],
            [(0, 1), (1, 1)],
            [(1, 1)],
            [(0, 7)],
            [(0, 1), (0, 1)],
            [(0, 1), (2, 1)],
            [(-1, 1)],
        ]
        rows = [
            {"partition_index": index, "broker_ids": [broker]}
            for index, broker in self._random.choice(choices)
        ]
        if self._often(0.1):
            rows[0]["broker_ids"] = self._random.choice([[], [1, 1]])
        return rows

    def grow(self) -> None:
        """Draw CreatePartitions."""
        rows = []
        for topic in self._topics():
            row: Body = {
                "name": topic,
                "count": self._random.choice([1, 2, 3, 4, 4, 5, 0, -1]),
                "assignments": None,
            }
            if self._often(0.12):
                row["assignments"] = self._random.choice(
                    [
                        [],
                        [{"broker_ids": [1]}],
                        [{"broker_ids": [1]}] * 2,
                        [{"broker_ids": [7]}],
                        [{"broker_ids": []}],
                    ]
                )
            rows.append(row)
        body = {"topics": rows, "timeout_ms": 30_000, "validate_only": self._often(0.15)}
        self._add("CreatePartitions", (0, 3), body)

    def delete(self) -> None:
        """Draw DeleteTopics by name, and from version 6 on also by id."""
        version = self._random.randint(1, 6)
        some = self._topics()
        body: Body = {"timeout_ms": 30_000, "topic_names": some}
        if version == 6:
            rows: list[Body] = []
            for each in some:
                by_id = self._often(0.4) and isinstance(each, dict)
                rows.append({"name": None, "topic_id": self._id(each["$name"])} if by_id else {"name": each})
            if self._often(0.06):
                rows.append({"name": name("a"), "topic_id": ref("a.id", {"$hex": "61" * 16})})
            body = {"timeout_ms": 30_000, "topics": rows}
        self.steps.append(Step("DeleteTopics", version, body))

    def _resource(self) -> tuple[int, Any]:
        choices = [
            (BROKER, "1"),
            (BROKER, ""),
            (BROKER, "7"),
            (BROKER, "x"),
            (GROUP, name("g")),
            (99, "x"),
            (0, "x"),
        ]
        return self._random.choice(choices) if self._often(0.12) else (TOPIC, self._topic())

    def change(self) -> None:
        """Draw IncrementalAlterConfigs."""
        random, rows = self._random, []
        for _ in range(random.choice([1, 1, 1, 2])):
            kind, resource = self._resource()
            if kind == BROKER:
                kind, resource = TOPIC, name("a")
            configs = []
            if self._often(0.25):
                key = random.choice(LISTS)
                operation = random.choices([SET, APPEND, SUBTRACT], [1, 2, 1])[0]
                configs = [{"name": key, "value": self._value(key), "config_operation": operation}]
            else:
                for setting in self._settings():
                    operation = random.choices([SET, DELETE, APPEND, SUBTRACT], [12, 4, 2, 2])[0]
                    configs.append(setting | {"config_operation": operation})
            if kind == GROUP:
                value = random.choice(["45000", "1", "x", "60000", "44999", "60001"])
                configs = [{"name": "consumer.session.timeout.ms", "config_operation": SET, "value": value}]
            rows.append({"resource_type": kind, "resource_name": resource, "configs": configs})
        self._add("IncrementalAlterConfigs", (0, 1), {"resources": rows, "validate_only": self._often(0.15)})

    def replace(self) -> None:
        """Draw AlterConfigs of one topic."""
        row = {"resource_type": TOPIC, "resource_name": self._topic(), "configs": self._settings()}
        self._add("AlterConfigs", (0, 2), {"resources": [row], "validate_only": self._often(0.15)})

    def describe_settings(self) -> None:
        kind, resource = self._resource()
        keys: list[str] | None = self._random.sample(sorted(KEYS), 2)
        if kind == TOPIC and self._often(0.5):
            keys = None
        if kind == BROKER:
            keys = ["message.max.bytes", "no.such.key"]
        if kind == GROUP:
            keys = ["consumer.session.timeout.ms"]
        row = {"resource_type": kind, "resource_name": resource, "configuration_keys": keys}
        body = {"resources": [row], "include_synonyms": self._often(0.3)}
        self._add("DescribeConfigs", (1, 4), body)

    def metadata(self) -> None:
        """Draw Metadata by names, or from version 12 on by ids.

        Below version 4, use only illegal names, because these versions would create missing topics.
        """
        version = self._random.randint(1, 13)
        rows: list[Body] = [{"name": topic} for topic in self._topics()]
        if version < 4:
            rows = [{"name": each} for each in self._random.sample(ILLEGAL, self._random.choice([0, 1, 2]))]
        if version >= 12 and self._often(0.5):
            rows = [{"name": None, "topic_id": self._id(self._random.choice(NAMES))}]
        body: Body = {"topics": rows}
        if version >= 4:
            body["allow_auto_topic_creation"] = False
        self.steps.append(Step("Metadata", version, body))

    def describe_partitions(self) -> None:
        """Draw DescribeTopicPartitions with several pages."""
        cursor = {
            "topic_name": name(self._random.choice(NAMES)),
            "partition_index": self._random.choice([0, 1, 5, -1]),
        }
        body = {
            "topics": [{"name": topic} for topic in self._topics()],
            "response_partition_limit": self._random.choice([2000, 2000, 1, 2, 0]),
            "cursor": cursor if self._often(0.2) else None,
        }
        self._add("DescribeTopicPartitions", (0, 0), body)

    def describe_directories(self) -> None:
        rows = [
            {"topic": topic, "partitions": self._random.choice([[0], [0, 1], [5], []])}
            for topic in self._topics()
        ]
        self._add("DescribeLogDirs", (1, 4), {"topics": rows})

    def act(self) -> None:
        """Draw one request."""
        choices = [self.create, self.grow, self.delete, self.change, self.replace, self.describe_settings]
        choices += [self.metadata, self.describe_partitions, self.describe_directories]
        (action,) = self._random.choices(choices, [18, 12, 10, 16, 6, 12, 8, 6, 3])
        action()


def draw(random: Random) -> Sequence:
    """Draw the steps of an administrator of three topics, who describes them at the end."""
    admin = Admin(random)
    admin.create()
    length = random.choice(LENGTHS)
    while len(admin.steps) < length:
        admin.act()
    rows = [
        {"resource_type": TOPIC, "resource_name": name(each), "configuration_keys": None} for each in NAMES
    ]
    observations = (
        Step(
            "Metadata",
            12,
            {"topics": [{"name": name(each)} for each in NAMES], "allow_auto_topic_creation": False},
        ),
        Step("DescribeConfigs", 4, {"resources": rows}),
    )
    return Sequence("admin", 0, {SENTINEL: {}}, tuple(admin.steps), observations)


def _is_for_the_cluster(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    return (ours, theirs) == (5, 3) and path.endswith("config_source")


def _is_synonym_of_default(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    return step.api == "DescribeConfigs" and ".synonyms" in path and "TOPIC" not in (ours, theirs)


def _has_an_id(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    return step.api == "CreateTopics" and path.endswith("topic_id") and bool(step.body.get("validate_only"))


WHOLE_CLUSTER = Rule(
    "min.insync.replicas is set for the whole cluster",
    "Kafka sets it there itself, so that it is no default.",
    _is_for_the_cluster,
    key="whole-cluster-settings",
)
RULES = (
    Rule(
        "the broker's setting behind a topic's default",
        "Some broker settings are not known here, and some of Kafka's have no default.",
        _is_synonym_of_default,
        key="Synonyms of a topic's setting",
    ),
    Rule(
        "validate_only tells no topic id",
        "Nothing has that id.",
        _has_an_id,
        key="CreateTopics with `validate_only` returns no topic id",
    ),
    WHOLE_CLUSTER,
)
SUBJECTS = (Subject("admin", draw, RULES),)
