"""Committed offsets: commits with and without members and in transactions; look-ups, deletions and lists."""

from __future__ import annotations

from random import Random
from typing import Any

from differential.sequence import (
    Body,
    Rule,
    Sequence,
    Step,
    Subject,
    answers,
    name,
    ref,
    subscription,
    text,
    topic,
    topic_id,
)

TOPICS = {"T0": {"partitions": 1}, "T1": {"partitions": 2}, "T2": {"partitions": 3}}
BARE, CLASSIC, CONSUMER = name("g"), name("h"), name("k")
GROUPS = [BARE, CLASSIC, CONSUMER]
OFFSETS = (0, 1, 2, 5, 2**31, 2**62, 2**63 - 1, 0, 1, -1, -2, -(2**63))
METADATA = (
    "",
    "m",
    "é",
    None,
    "x" * 4096,
    "x" * 4097,
    "é" * 2048,
    "é" * 2049,
    "😀" * 2048,
    "😀" * 2049,
    "x" * 32767,
)
LENGTHS = (5, 10, 15, 20)


class Offsets:
    """Draws the steps of three groups: one has no members, one has classic members, one has members of
    KIP-848.

    Each group has one offset that is deleted only with the group. Without it, our broker would remove a group
    without offsets immediately, but Kafka only in its next search for expired groups.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.steps: list[Step] = []
        self.anchor()

    def anchor(self) -> None:
        """Commit an offset of topic T2 in each group.

        Of all later steps, only OffsetFetch names T2, so these offsets, and with them the groups, remain.
        """
        for group in GROUPS:
            row = {"name": topic("T2"), "partitions": [{"partition_index": 2, "committed_offset": 4}]}
            self.steps.append(Step("OffsetCommit", 5, {"group_id": group, "topics": [row]}))

    def _often(self, chance: float) -> bool:
        return self._random.random() < chance

    def _add(self, api: str, versions: tuple[int, int], body: Body, **more: Any) -> None:
        self.steps.append(Step(api, self._random.randint(*versions), body, **more))

    def _group(self) -> Any:
        return self._random.choices(GROUPS, [4, 2, 2])[0]

    def _any_group(self) -> Any:
        return self._random.choices([self._group(), name("none"), ""], [12, 1, 1])[0]

    def _groups(self) -> list[Any]:
        """Return up to three group names without duplicates. A group may be missing or have an empty name."""
        return self._random.sample([*GROUPS, name("none"), ""], self._random.choice([1, 1, 2, 3, 0]))

    def _rows(self, make: Any) -> list[Body]:
        """Return rows of topics with partitions. A topic or partition may be unknown or appear twice."""
        random = self._random
        named = random.choice(
            [["T0"]] * 4 + [["T1"]] * 4 + [["T0", "T1"]] * 4 + [["T1", "none"], ["none"], []]
        )
        rows = []
        for each in named:
            indexes = random.choice([[0]] * 6 + [[0, 1]] * 3 + [[5, 0], [-1]])
            rows.append({"name": topic(each), "topic_id": topic_id(each), **make(indexes)})
        return rows

    def _offset(self) -> int:
        return self._random.choice(OFFSETS) if self._often(0.3) else self._random.randrange(1000)

    def _partition(self, index: int) -> Body:
        random = self._random
        return {
            "partition_index": index,
            "committed_offset": self._offset(),
            "committed_leader_epoch": random.choice([-1, -1, 0, 0, 5, -2]),
            "committed_metadata": random.choice(METADATA) if self._often(0.25) else random.choice(["", "m"]),
        }

    def _partitions(self, indexes: list[int]) -> Body:
        return {"partitions": [self._partition(index) for index in indexes]}

    def commit(self) -> None:
        """Draw OffsetCommit without a member, by a member of the group, or by a member of another group."""
        random = self._random
        generation, member = random.choices(
            [
                (-1, ""),
                (ref("m.generation", 1), ref("m.member", "unknown")),
                (1, "nobody"),
                (-1, "nobody"),
                (0, ""),
                (-2, ""),
                (ref("m.generation", 1, 1), ref("m.member", "unknown")),
            ],
            [20, 6, 1, 1, 1, 1, 1],
        )[0]
        body: Body = {
            "group_id": self._group(),
            "generation_id_or_member_epoch": generation,
            "member_id": member,
            "group_instance_id": random.choice([*[None] * 12, "i", ""]),
            "retention_time_ms": random.choice([-1, -1, -1, 0, 1000 * 3600]),
            "topics": self._rows(self._partitions),
        }
        self._add("OffsetCommit", (2, 10), body)

    def fetch(self) -> None:
        """Draw OffsetFetch of one group, or from version 8 on of several."""
        random = self._random
        groups = []
        for group in self._groups():
            rows = self._rows(lambda some: {"partition_indexes": some})
            row: Body = {"group_id": group, "topics": None if self._often(0.4) else rows}
            if self._often(0.1):
                row |= {"member_id": "nobody", "member_epoch": random.choice([-1, 0, 3])}
            groups.append(row)
        first = groups[0] if groups else {"group_id": self._any_group(), "topics": None}
        version = random.randint(1, 10)
        body: Body = {"require_stable": self._often(0.4)}
        if version >= 8:
            body["groups"] = groups
        else:
            rows = first["topics"]
            if version == 1 and rows is None:
                rows = []
            old = (
                None if rows is None else [{k: v for k, v in row.items() if k != "topic_id"} for row in rows]
            )
            body |= {"group_id": first["group_id"], "topics": old}
        self.steps.append(Step("OffsetFetch", version, body))

    def delete_offsets(self) -> None:
        rows = [
            {"name": row["name"], "partitions": [{"partition_index": index} for index in row["partitions"]]}
            for row in self._rows(lambda some: {"partitions": some})
        ]
        self._add("OffsetDelete", (0, 0), {"group_id": self._any_group(), "topics": rows})

    def delete_groups(self) -> None:
        some = self._groups()
        self._add("DeleteGroups", (0, 2), {"groups_names": some * 2 if self._often(0.1) else some})
        self.anchor()

    def describe(self) -> None:
        self._add("DescribeGroups", (0, 6), {"groups": self._groups()})

    def show(self) -> None:
        self._add("ListGroups", (0, 5), {})

    def join(self) -> None:
        """Join one group as a classic member, mostly with metadata that subscribe to T0 and can be parsed."""
        group = CLASSIC
        metadata = subscription(["T0"]) if self._often(0.8) else text("m")
        body: Body = {
            "group_id": group,
            "session_timeout_ms": 60_000,
            "rebalance_timeout_ms": 60_000,
            "member_id": "",
            "protocol_type": "consumer" if self._often(0.8) else "other",
            "protocols": [{"name": "range", "metadata": metadata}],
        }
        binds = {"m.member": "member_id", "m.generation": "generation_id"}
        self.steps.append(Step("JoinGroup", self._random.randint(0, 3), body, "m", binds=binds, parks=True))
        if self._often(0.8):
            sync = {
                "group_id": group,
                "generation_id": ref("m.generation", 1),
                "member_id": ref("m.member", "unknown"),
                "assignments": [{"member_id": ref("m.member", "unknown"), "assignment": text("a")}],
            }
            self.steps.append(Step("SyncGroup", 3, sync, "m", parks=True))

    def beat(self) -> None:
        """Draw a heartbeat that subscribes to T0 as a member of the consumer protocol, or that leaves."""
        body: Body = {"group_id": CONSUMER, "member_id": ref("m.member", {"$name": "m"})}
        if self._often(0.75):
            body |= {"member_epoch": 0, "rebalance_timeout_ms": 60_000, "topic_partitions": []}
            body |= {"subscribed_topic_names": [topic("T0")]}
        else:
            body |= {"member_epoch": -1}
        binds = {"m.member": "member_id", "m.generation": "member_epoch"}
        self.steps.append(Step("ConsumerGroupHeartbeat", 1, body, "m", binds=binds))

    def leave(self) -> None:
        body = {
            "group_id": self._random.choice([CLASSIC, CONSUMER]),
            "members": [{"member_id": ref("m.member", "unknown")}],
        }
        self._add("LeaveGroup", (3, 5), body)

    def begin(self) -> None:
        """Draw InitProducerId for the transactional id again. It fences the id's earlier producer."""
        body: Body = {"transactional_id": name("x"), "transaction_timeout_ms": 60_000}
        binds = {"x.producer": "producer_id", "x.epoch": "producer_epoch"}
        self._add("InitProducerId", (0, 4), body, binds=binds)

    def _producer(self) -> Body:
        epoch = ref("x.epoch", 0, self._random.choice([0] * 12 + [-1, 1]))
        return {"transactional_id": name("x"), "producer_id": ref("x.producer", 77), "producer_epoch": epoch}

    def add_offsets(self, group: Any = None) -> None:
        self._add("AddOffsetsToTxn", (0, 3), {**self._producer(), "group_id": group or self._group()})

    def commit_in_transaction(self, group: Any = None) -> None:
        """Draw TxnOffsetCommit without a member, or by a member of the group."""
        random = self._random
        body: Body = {**self._producer(), "group_id": group or self._group()}
        body |= {"topics": self._rows(self._partitions)}
        for row in body["topics"]:
            del row["topic_id"]
        if self._often(0.3):
            body |= {
                "generation_id": ref("m.generation", 1, random.choice([0, 0, 1])),
                "member_id": random.choice([ref("m.member", "unknown"), "", "nobody"]),
                "group_instance_id": random.choice([None, None, "i"]),
            }
        self._add("TxnOffsetCommit", (0, 5), body)

    def end(self) -> None:
        self._add("EndTxn", (0, 4), {**self._producer(), "committed": self._often(0.6)})

    def transact(self) -> None:
        """Draw a transaction from its start to its end, with commits and reads of other clients in
        between.
        """
        group = self._group()
        self.begin()
        self.add_offsets(group)
        self.commit_in_transaction(group)
        for _ in range(self._random.choice([0, 1, 2, 3])):
            self._random.choice([self.commit, self.fetch, self.fetch])()
        if self._often(0.8):
            self.end()

    def act(self) -> None:
        """Draw one request."""
        choices = [self.commit, self.fetch, self.delete_offsets, self.delete_groups, self.describe, self.show]
        choices += [
            self.join,
            self.beat,
            self.leave,
            self.begin,
            self.add_offsets,
            self.commit_in_transaction,
            self.end,
            self.transact,
        ]
        (action,) = self._random.choices(choices, [24, 20, 7, 5, 3, 2, 6, 4, 2, 4, 3, 6, 4, 9])
        action()


def draw(random: Random) -> Sequence:
    """Draw steps with the offsets of three groups, two topics and one transactional id."""
    offsets = Offsets(random)
    length = random.choice(LENGTHS)
    while len(offsets.steps) < length:
        offsets.act()
    rows = [{"group_id": group, "topics": None} for group in GROUPS]
    observations = (
        Step("OffsetFetch", 8, {"groups": rows}),
        Step("DescribeGroups", 5, {"groups": GROUPS}),
        Step("ListGroups", 5),
        Step("DescribeTransactions", 0, {"transactional_ids": [name("x")]}),
    )
    return Sequence("offsets", 0, TOPICS, tuple(offsets.steps), observations)


RULES = (
    Rule(
        "members that join count as subscribers",
        "Kafka counts the members of the last completed rebalance.",
        answers("OffsetDelete", ours="GROUP_SUBSCRIBED_TO_TOPIC", theirs="NONE"),
        key="OffsetDelete refuses topics of members that are joining",
        ends=True,
    ),
)
SUBJECTS = (Subject("offsets", draw, RULES),)
