"""ACLs that are created, described and deleted by filters, and responses to users with few permissions."""

from __future__ import annotations

from random import Random
from typing import Any

from differential.sequence import (
    SALT,
    SENTINEL,
    Body,
    Rule,
    Sequence,
    Step,
    Subject,
    batch,
    name,
    principal,
    ref,
    topic,
)

LENGTHS = (8, 14, 20)
ANY, TOPIC, GROUP, CLUSTER, TRANSACTION, TOKEN, USER = 1, 2, 3, 4, 5, 6, 7
PATTERN_ANY, MATCH, LITERAL, PREFIXED = 1, 2, 3, 4
OPERATIONS = range(3, 13)
"""The operations from READ to IDEMPOTENT_WRITE: all but UNKNOWN, ANY and ALL."""
DENY, ALLOW = 2, 3
TOPICS = {"T0": {"partitions": 1}, "T1": {"partitions": 2}, SENTINEL: {"partitions": 1}}
CLIENT = "u"
"""Name of a user whose only permissions come from ACLs, and of this user's connection."""


class Acls:
    """Draw the steps of an administrator, who may do everything, and of one user."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.steps: list[Step] = []

    def _often(self, chance: float) -> bool:
        return self._random.random() < chance

    def _add(
        self, api: str, versions: tuple[int, int], body: Body, connection: str = "main", **more: Any
    ) -> None:
        user = connection if connection == CLIENT else ""
        self.steps.append(Step(api, self._random.randint(*versions), body, connection, user=user, **more))

    def _principal(self) -> Any:
        choices = [principal("u")] * 8 + [principal("v"), "User:*", "user:x", "x", "", "Group:u"]
        return self._random.choice(choices)

    def _resource(self) -> tuple[int, Any]:
        """Return a resource of this sequence, sometimes only a prefix of its name, or the name of a missing
        resource.
        """
        random = self._random
        kind = random.choices([TOPIC, GROUP, TRANSACTION, CLUSTER, USER], [10, 6, 4, 3, 1])[0]
        if kind == CLUSTER:
            return kind, "kafka-cluster" if self._often(0.9) else "other"
        texts = {
            TOPIC: ["T0", "T1", "T", "T00"],
            GROUP: ["g", "gh", "h"],
            TRANSACTION: ["x", "xy"],
            USER: ["u"],
        }[kind]
        text = random.choice(texts)
        wide = [name(""), "", "*"]
        if kind in (CLUSTER, USER):
            return kind, name(text)
        return kind, (topic(text) if kind == TOPIC and self._often(0.9) else name(text)) if self._often(
            0.9
        ) else random.choice(wide)

    def _acl(self) -> Body:
        random = self._random
        kind, resource = self._resource()
        pattern = random.choices([LITERAL, PREFIXED], [12, 8])[0]
        if resource == "*":
            pattern = LITERAL
        owner = self._principal()
        is_own = isinstance(owner, dict) or isinstance(resource, dict)
        if not is_own:  # an ACL for all users and all resources would affect other sequences
            owner = principal("u")
        return {
            "resource_type": kind,
            "resource_name": resource,
            "resource_pattern_type": pattern,
            "principal": owner,
            "host": random.choices(["*", "127.0.0.1", "10.0.0.1", "x"], [20, 4, 2, 0.3])[0],
            "operation": random.choice([2, *OPERATIONS, 3, 4, 8]),
            "permission_type": random.choices([ALLOW, DENY], [14, 5])[0],
        }

    def create(self) -> None:
        rows = [self._acl() for _ in range(self._random.choice([1, 2, 3, 4]))]
        self._add("CreateAcls", (1, 3), {"creations": rows + rows[:1] if self._often(0.05) else rows})

    def _filter(self) -> Body:
        """Return a filter that finds only ACLs of this sequence, because it names a principal or resource of
        the sequence.
        """
        random = self._random
        kind, resource = self._resource()
        is_wide = not isinstance(resource, dict) or self._often(0.3)
        return {
            "resource_type_filter": ANY if self._often(0.3) else kind,
            "resource_name_filter": None if is_wide and self._often(0.6) else resource,
            "pattern_type_filter": random.choices([PATTERN_ANY, MATCH, LITERAL, PREFIXED], [6, 6, 4, 4])[0],
            "principal_filter": principal("u") if is_wide or self._often(0.5) else None,
            "host_filter": random.choices([None, "*", "127.0.0.1"], [12, 2, 2])[0],
            "operation": random.choices([1, random.choice([2, *OPERATIONS])], [10, 5])[0],
            "permission_type": random.choices([1, ALLOW, DENY], [10, 3, 3])[0],
        }

    def describe(self) -> None:
        self._add("DescribeAcls", (1, 3), self._filter())

    def delete(self) -> None:
        filters = [self._filter() for _ in range(self._random.choice([1, 1, 2]))]
        self._add("DeleteAcls", (1, 3), {"filters": filters})

    # Requests that the user sends

    def _topic(self) -> Any:
        return topic(self._random.choice(["T0", "T0", "T1", "none"]))

    def produce(self) -> None:
        data = {"index": 0, "records": batch(values=["v"])}
        body: Body = {"acks": -1, "timeout_ms": 5_000}
        some = self._random.sample(["T0", "T1"], self._random.choice([1, 1, 2]))
        body["topic_data"] = [{"name": topic(each), "partition_data": [data]} for each in some]
        self._add("Produce", (3, 9), body, CLIENT)

    def fetch(self) -> None:
        rows = [
            {
                "topic": self._topic(),
                "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}],
            }
        ]
        self._add("Fetch", (4, 12), {"max_bytes": 1000, "topics": rows, "max_wait_ms": 0}, CLIENT)

    def list_offsets(self) -> None:
        rows = [{"name": self._topic(), "partitions": [{"partition_index": 0, "timestamp": -2}]}]
        self._add("ListOffsets", (1, 7), {"topics": rows}, CLIENT)

    def metadata(self) -> None:
        body = {
            "topics": [{"name": self._topic()}],
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": True,
            "include_cluster_authorized_operations": True,
        }
        self._add("Metadata", (4, 12), body, CLIENT)

    def groups(self) -> None:
        """Draw one request of the user that concerns a group."""
        group = name(self._random.choice(["g", "g", "gh", "h"]))
        row = {"name": topic("T0"), "partitions": [{"partition_index": 0, "committed_offset": 1}]}
        api, versions, body = self._random.choice(
            [
                ("OffsetCommit", (2, 9), {"group_id": group, "topics": [row]}),
                ("OffsetFetch", (8, 8), {"groups": [{"group_id": group, "topics": None}]}),
                (
                    "OffsetFetch",
                    (1, 7),
                    {"group_id": group, "topics": [{"name": self._topic(), "partition_indexes": [0]}]},
                ),
                ("DescribeGroups", (3, 6), {"groups": [group], "include_authorized_operations": True}),
                (
                    "ConsumerGroupDescribe",
                    (0, 1),
                    {"group_ids": [group], "include_authorized_operations": True},
                ),
                ("ListGroups", (0, 5), {}),
                ("DeleteGroups", (0, 2), {"groups_names": [group]}),
                ("Heartbeat", (0, 4), {"group_id": group, "generation_id": 1, "member_id": "m"}),
                ("LeaveGroup", (3, 5), {"group_id": group, "members": [{"member_id": "m"}]}),
                ("SyncGroup", (0, 4), {"group_id": group, "generation_id": 1, "member_id": "m"}),
                (
                    "OffsetDelete",
                    (0, 0),
                    {
                        "group_id": group,
                        "topics": [{"name": topic("T0"), "partitions": [{"partition_index": 0}]}],
                    },
                ),
                ("FindCoordinator", (0, 3), {"key": group}),
                ("FindCoordinator", (1, 3), {"key": name("x"), "key_type": 1}),
            ]
        )
        self._add(api, versions, body, CLIENT)

    def transactions(self) -> None:
        """Draw one request of the user as a transactional producer, or about such a producer."""
        producer = {
            "transactional_id": name("x"),
            "producer_id": ref("x.producer", 77),
            "producer_epoch": ref("x.epoch", 0),
        }
        row = {"name": topic("T0"), "partitions": [{"partition_index": 0, "committed_offset": 1}]}
        binds = {"x.producer": "producer_id", "x.epoch": "producer_epoch"}
        api, versions, body, bound = self._random.choice(
            [
                (
                    "InitProducerId",
                    (0, 4),
                    {"transactional_id": name("x"), "transaction_timeout_ms": 60_000},
                    binds,
                ),
                ("InitProducerId", (0, 4), {"transactional_id": None, "transaction_timeout_ms": 60_000}, {}),
                (
                    "AddPartitionsToTxn",
                    (0, 3),
                    {
                        "v3_and_below_transactional_id": producer["transactional_id"],
                        "v3_and_below_producer_id": producer["producer_id"],
                        "v3_and_below_producer_epoch": producer["producer_epoch"],
                        "v3_and_below_topics": [
                            {"name": topic(each), "partitions": [0]}
                            for each in self._random.choice([["T0"], ["T0", "T1"]])
                        ],
                    },
                    {},
                ),
                ("AddOffsetsToTxn", (0, 3), {**producer, "group_id": name("g")}, {}),
                ("TxnOffsetCommit", (0, 3), {**producer, "group_id": name("g"), "topics": [row]}, {}),
                ("EndTxn", (0, 3), {**producer, "committed": True}, {}),
                ("DescribeTransactions", (0, 0), {"transactional_ids": [name("x")]}, {}),
                (
                    "DescribeProducers",
                    (0, 0),
                    {"topics": [{"name": topic("T0"), "partition_indexes": [0]}]},
                    {},
                ),
            ]
        )
        self._add(api, versions, body, CLIENT, binds=bound)

    def administer(self) -> None:
        """Draw one request that administrators usually send, and let the user send it."""
        new = {"name": name("new"), "num_partitions": 1, "replication_factor": 1}
        setting = {"name": "retention.ms", "config_operation": 0, "value": "1000"}
        changed = {"resource_type": 2, "resource_name": topic("T0"), "configs": [setting]}
        shown = {"resource_type": 2, "resource_name": topic("T0"), "configuration_keys": ["retention.ms"]}
        grown = {"name": topic("T0"), "count": 3, "assignments": None}
        cut = {"name": topic("T0"), "partitions": [{"partition_index": 0, "offset": 0}]}
        api, versions, body = self._random.choice(
            [
                ("CreateTopics", (2, 6), {"topics": [new], "timeout_ms": 9_000, "validate_only": True}),
                ("CreatePartitions", (0, 3), {"topics": [grown], "timeout_ms": 9_000, "validate_only": True}),
                ("DeleteTopics", (1, 5), {"topic_names": [topic("none")], "timeout_ms": 9_000}),
                ("IncrementalAlterConfigs", (0, 1), {"resources": [changed], "validate_only": True}),
                ("DescribeConfigs", (1, 4), {"resources": [shown]}),
                (
                    "DescribeConfigs",
                    (1, 4),
                    {
                        "resources": [
                            {
                                "resource_type": 4,
                                "resource_name": "1",
                                "configuration_keys": ["num.partitions"],
                            }
                        ]
                    },
                ),
                ("DeleteRecords", (0, 2), {"topics": [cut], "timeout_ms": 9_000}),
                ("DescribeLogDirs", (1, 4), {"topics": [{"topic": topic("T0"), "partitions": [0]}]}),
                ("DescribeAcls", (1, 3), self._filter()),
                ("DeleteAcls", (1, 3), {"filters": [self._filter()]}),
                ("DescribeClientQuotas", (0, 1), {"components": [], "strict": True}),
                ("DescribeTopicPartitions", (0, 0), {"topics": [{"name": self._topic()}]}),
                ("DescribeUserScramCredentials", (0, 0), {"users": [{"name": name("nobody")}]}),
                ("ListPartitionReassignments", (0, 0), {"topics": None}),
            ]
        )
        self._add(api, versions, body, CLIENT)

    def ask(self) -> None:
        """Draw one request of any kind, sent by the user."""
        choices = [
            self.produce,
            self.fetch,
            self.list_offsets,
            self.metadata,
            self.groups,
            self.transactions,
            self.administer,
        ]
        (action,) = self._random.choices(choices, [4, 4, 2, 4, 6, 5, 6])
        action()

    def act(self) -> None:
        """Draw a change of ACLs, a description of ACLs, or a request of the user."""
        choices = [self.create, self.delete, self.describe, self.ask]
        (action,) = self._random.choices(choices, [5, 2, 5, 12])
        action()


def _put_user(text: str) -> Step:
    """Return the step that sets the password of a user of this sequence."""
    row = {"name": name(text), "mechanism": 1, "iterations": 4096, "salt": {"$hex": SALT.hex()}}
    return Step(
        "AlterUserScramCredentials", 0, {"upsertions": [row | {"salted_password": {"$salted": "secret"}}]}
    )


def draw(random: Random) -> Sequence:
    """Draw the steps of an administrator, and of a user whose permissions change."""
    acls = Acls(random)
    acls.steps.append(_put_user("u"))
    acls.create()
    length = random.choice(LENGTHS)
    while len(acls.steps) < length:
        acls.act()
    own = {"principal_filter": principal("u"), "operation": 1, "permission_type": 1}
    anything = {"resource_type_filter": ANY, "pattern_type_filter": PATTERN_ANY}
    observations = (Step("DescribeAcls", 3, anything | own),)
    return Sequence("acls", 0, TOPICS, tuple(acls.steps), observations)


def _is_empty_row(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    return (
        step.api == "DescribeUserScramCredentials" and path == "results" and ours == [] and len(theirs) == 1
    )


RULES = (
    Rule(
        "a denied DescribeUserScramCredentials lists nobody",
        "Kafka lists one user without a name.",
        _is_empty_row,
        key="A denied DescribeUserScramCredentials lists no user",
    ),
)
SUBJECTS = (Subject("acls", draw, RULES, secured=True),)
