"""Groups of the consumer protocol: members that join, follow their assignments, and leave."""

from __future__ import annotations

from random import Random
from typing import Any

from differential.sequence import Body, Rule, Sequence, Step, Subject, name, ref, topic, topic_id

GROUP = name("c")
TOPICS = {"T0": {"partitions": 1}, "T1": {"partitions": 2}, "T2": {"partitions": 3}}
LENGTHS = (6, 12, 18, 24)
BAD_ASSIGNORS = ("sticky", "", "Uniform")


class Members:
    """Draw the steps of the members of one group. A member reports the partitions of its last assignment."""

    def __init__(self, random: Random, names: str) -> None:
        self._random, self._names = random, names
        # The subscription in a heartbeat that does not change it: an empty list for a single member, and null
        # for several. With other values, Kafka would assign topics to the member.
        self._nothing: list[str] | None = [] if len(names) == 1 else None
        self._instances = {member: f"i{member}" if self._often(0.3) else None for member in self._names}
        self._assignor = random.choice([None, None, "uniform", "range"])
        self._one = random.choice(["T0", "T1", "T2", "T2", None])
        self._joined: set[str] = set()
        self._version = random.choice([None, 0, 1, 1])
        self.steps: list[Step] = []

    def _often(self, chance: float) -> bool:
        return self._random.random() < chance

    def _subscription(self) -> list[Any]:
        """Return mostly the one topic of the group, for which all assignors give the same assignment."""
        random = self._random
        if self._one is not None and self._often(0.85):
            return [topic(self._one)]
        alike = ["T1", "T2"] if self._one is None else [self._one]
        choices = [*[alike] * 6, ["T2"], ["T0", "T1", "T2"], ["T0"], ["none"], ["T1", "T1"]]
        choices += [["T0"] if self._nothing is None else self._nothing] * 3
        return [topic(each) for each in random.choice(choices)]

    def _member_id(self, member: str) -> Any:
        if self._often(0.04):
            return self._random.choice(
                ["", "nobody", ref(f"{self._random.choice(self._names)}.member", "unknown")]
            )
        # In version 1, a member chooses its own id. It sends that id even before its first response.
        return ref(f"{member}.member", {"$name": member})

    def _owned(self, member: str) -> Any:
        """Return partitions for the member to report as owned: mostly those of its last assignment."""
        random = self._random
        if self._often(0.8):
            return ref(f"{member}.assigned", [])
        some = [
            {"topic_id": topic_id(each), "partitions": random.sample(range(TOPICS[each]["partitions"]), 1)}
            for each in TOPICS
            if self._often(0.3)
        ]
        return random.choice([None, [], some, [{"topic_id": topic_id("none"), "partitions": [0]}]])

    def _beat(self, member: str, epoch: Any, **fields: Any) -> None:
        version = self._random.randint(0, 1) if self._version is None else self._version
        body: Body = {
            "group_id": GROUP if self._often(0.99) else "",
            "member_id": self._member_id(member),
            "member_epoch": epoch,
            "instance_id": self._instances[member] if epoch in (0, -1, -2) or self._often(0.1) else None,
        }
        binds = {f"{member}.member": "member_id", f"{member}.epoch": "member_epoch"}
        binds[f"{member}.assigned"] = "assignment.topic_partitions"
        self.steps.append(Step("ConsumerGroupHeartbeat", version, body | fields, member, binds=binds))

    def join(self, member: str) -> None:
        """Draw a heartbeat at epoch 0 with all fields that a join needs, or without one of them."""
        random = self._random
        fields: Body = {
            "rebalance_timeout_ms": 60_000,
            "subscribed_topic_names": self._subscription(),
            "topic_partitions": [],
            "server_assignor": self._assignor,
        }
        if self._often(0.05):
            fields["server_assignor"] = random.choice(["range", "uniform", *BAD_ASSIGNORS])
        if self._often(0.12):
            fields |= {
                "subscribed_topic_regex": self._regex(),
                "subscribed_topic_names": random.choice([None, self._nothing]),
            }
        if self._often(0.05):
            fields |= random.choice(
                [
                    {"rebalance_timeout_ms": -1},
                    {"subscribed_topic_names": None},
                    {"topic_partitions": None},
                    {"topic_partitions": [{"topic_id": topic_id("T0"), "partitions": [0]}]},
                    {"rebalance_timeout_ms": 0},
                    {"instance_id": ""},
                    {"rack_id": ""},
                ]
            )
        self._joined.add(member)
        self._beat(member, 0, **fields)

    def _regex(self) -> Any:
        """Return an invalid pattern, or an empty one, which means no pattern.

        Other valid ones are not drawn, because Kafka resolves them at an unpredictable time.
        """
        return self._random.choice(["(", "[a-", "a{2,1}", "\\", "*", ""])

    def follow(self, member: str) -> None:
        """Draw a heartbeat that reports the partitions that the member owns."""
        self._beat(member, ref(f"{member}.epoch", 7), topic_partitions=self._owned(member))

    def quiet(self, member: str) -> None:
        """Draw a heartbeat that reports no change."""
        self._beat(member, ref(f"{member}.epoch", 7))

    def stale(self, member: str) -> None:
        """Draw a heartbeat with an epoch other than the member's."""
        epoch = f"{member}.epoch"
        choices = [ref(epoch, 7, 1), ref(epoch, 7, -1), ref(epoch, 7, -2), -3, 2**31 - 1, 1]
        self._beat(
            member,
            self._random.choice(choices),
            topic_partitions=self._random.choice([self._owned(member), None]),
        )

    def subscribe(self, member: str) -> None:
        """Draw a heartbeat with another subscription or assignor."""
        fields = self._random.choice(
            [
                {"subscribed_topic_names": self._subscription()},
                {"subscribed_topic_names": self._subscription()},
                {"server_assignor": self._random.choice(["range", "uniform", *BAD_ASSIGNORS])},
                {"subscribed_topic_regex": self._regex(), "subscribed_topic_names": self._nothing},
                {"rebalance_timeout_ms": 70_000},
            ]
        )
        self._beat(member, ref(f"{member}.epoch", 7), topic_partitions=self._owned(member), **fields)

    def leave(self, member: str) -> None:
        """Draw the heartbeat with which a member leaves. A static member leaves for good (-1) or for a time
        (-2).
        """
        self._beat(member, self._random.choice([-1, -1, -2]))

    def commit(self, member: str) -> None:
        """Draw OffsetCommit at the member's epoch."""
        epoch = f"{member}.epoch"
        where = self._random.choice(["T0", "T1"])
        body: Body = {
            "group_id": GROUP,
            "generation_id_or_member_epoch": self._random.choice(
                [*[ref(epoch, 7)] * 6, ref(epoch, 7, 1), -1, 0]
            ),
            "member_id": self._member_id(member),
            "group_instance_id": self._instances[member] if self._often(0.3) else None,
            "topics": [
                {
                    "name": topic(where),
                    "topic_id": topic_id(where),
                    "partitions": [{"partition_index": 0, "committed_offset": self._random.randrange(9)}],
                }
            ],
        }
        self.steps.append(Step("OffsetCommit", self._random.randint(7, 10), body, member))

    def fetch(self, member: str) -> None:
        """Draw OffsetFetch of the member."""
        epoch = f"{member}.epoch"
        group: Body = {
            "group_id": GROUP,
            "member_id": self._member_id(member),
            "member_epoch": self._random.choice([ref(epoch, 7), ref(epoch, 7), ref(epoch, 7, -1), -1]),
            "topics": None,
        }
        if self._often(0.3):
            # No epoch, because Kafka 4.3 answers UNKNOWN_SERVER_ERROR to an epoch without a member id.
            group |= {"member_id": None, "member_epoch": -1}
        self.steps.append(
            Step("OffsetFetch", self._random.choice([8, 9, 9, 10]), {"groups": [group]}, member)
        )

    def classic(self, member: str) -> None:
        """Send a request of the classic protocol for a member of the consumer protocol."""
        random, epoch = self._random, ref(f"{member}.epoch", 7)
        identity = {"group_id": GROUP, "member_id": self._member_id(member)}
        api, body = random.choice(
            [
                ("Heartbeat", identity | {"generation_id": epoch}),
                ("LeaveGroup", {"group_id": GROUP, "members": [{"member_id": self._member_id(member)}]}),
                ("SyncGroup", identity | {"generation_id": epoch, "protocol_type": "consumer"}),
                ("DeleteGroups", {"groups_names": [GROUP]}),
                ("DescribeGroups", {"groups": [GROUP]}),
            ]
        )
        highest = {"Heartbeat": 4, "LeaveGroup": 5, "SyncGroup": 4, "DeleteGroups": 2, "DescribeGroups": 6}[
            api
        ]
        version = random.randint(3 if api == "LeaveGroup" else 0, highest)
        self.steps.append(Step(api, version, body, member, parks=api == "SyncGroup"))

    def describe(self, member: str) -> None:
        groups = self._random.choice([*[[GROUP]] * 6, [GROUP, name("none")], [""], []])
        self.steps.append(Step("ConsumerGroupDescribe", self._random.randint(0, 1), {"group_ids": groups}))

    def act(self) -> None:
        """Draw one action of any member, mostly a heartbeat."""
        member = self._random.choice(self._names)
        if member not in self._joined and self._often(0.9):
            return self.join(member)
        choices = [self.follow, self.quiet, self.join, self.subscribe, self.leave, self.stale]
        choices += [self.commit, self.fetch, self.classic, self.describe]
        (action,) = self._random.choices(choices, [40, 8, 8, 9, 5, 5, 5, 3, 3, 5])
        return action(member)


def draw_few(random: Random) -> Sequence:
    """Draw the steps of one or two members.

    With so few, every sticky assignor assigns the same partitions.
    """
    return _draw(random, random.choice(["A", "AB", "AB", "AB"]))


def draw_three(random: Random) -> Sequence:
    """Draw the steps of three members.

    If one releases a partition, each broker's assignor may give it to a different member.
    """
    return _draw(random, "ABC")


def _draw(random: Random, names: str) -> Sequence:
    members = Members(random, names)
    length = random.choice(LENGTHS)
    while len(members.steps) < length:
        members.act()
    observations = (
        Step("ConsumerGroupDescribe", 1, {"group_ids": [GROUP]}),
        Step("OffsetFetch", 9, {"groups": [{"group_id": GROUP, "topics": None}]}),
        Step("ListGroups", 5),
    )
    return Sequence("consumer_groups", 0, TOPICS, tuple(members.steps), observations)


def _is_other_share(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    return "assignment" in path and step.api in ("ConsumerGroupHeartbeat", "ConsumerGroupDescribe")


def _is_other_share_of_same_size(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    """Return True if the brokers assign different partitions, but the same number of them.

    A different number would mean that another member still has to release a partition on one broker.
    """
    return _is_other_share(step, ours, theirs, path) and _partition_count(ours) == _partition_count(theirs)


def _partition_count(share: Any) -> int:
    """Return the number of partitions in an assignment or in a part of one."""
    if isinstance(share, dict):
        return sum(_partition_count(part) for part in share.values())
    if isinstance(share, list):
        return sum(_partition_count(part) for part in share)
    return int(isinstance(share, int))


def _is_other_epoch(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    """Return True if the member still has its old epoch on one broker, because only there it must first
    release a partition.
    """
    is_shown = path.endswith(("member_epoch", "group_state"))
    return (
        is_shown
        and step.api in ("ConsumerGroupHeartbeat", "ConsumerGroupDescribe")
        and 0 not in (ours, theirs)
    )


OTHER_SHARE = Rule(
    "uniform is our own algorithm",
    "Members with the same number of partitions may have other ones.",
    _is_other_share_of_same_size,
    key="`uniform` is our sticky algorithm",
    ends=True,
)
RULES = (OTHER_SHARE,)
RULES_OF_THREE = (
    OTHER_SHARE._replace(explains=_is_other_share),
    Rule(
        "another share, so another epoch",
        "A member that must give something up stays at its epoch until it has.",
        _is_other_epoch,
        key="`uniform` is our sticky algorithm",
        ends=True,
    ),
)
SUBJECTS = (
    Subject("consumer_groups", draw_few, RULES),
    Subject("consumer_groups_of_three", draw_three, RULES_OF_THREE),
)
