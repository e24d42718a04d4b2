"""Classic groups: members with drawn protocols that join, synchronise, heartbeat, leave and commit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from differential.runner import PARKED
from differential.sequence import Body, Rule, Sequence, Step, Subject, name, ref, text, topic

GROUP, OTHER_GROUP = name("g"), name("h")
LENGTHS = (6, 12, 18, 24)
PROTOCOLS = [
    *[["range"]] * 6,
    *[["range", "sticky"]] * 3,
    *[["sticky", "range"]] * 2,
    ["sticky"],
    ["roundrobin", "range"],
    [],
]
STATE_FILTERS = [
    *[[]] * 3,
    ["Stable"],
    ["Empty", "Dead"],
    ["preparingrebalance", "CompletingRebalance"],
    ["nonsense"],
    ["STABLE"],
]
TYPE_FILTERS = [*[[]] * 3, ["classic"], ["consumer"], ["Classic", "Consumer"], ["nonsense"], ["share"]]


class Members:
    """Draw the steps of the members of one group and of an outside observer."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._names = "ABCD"[: random.choice([1, 2, 2, 3, 3, 4])]
        self._instances = {
            member: (f"i{member}" if self._often(0.85) else "iA") if self._often(0.3) else None
            for member in self._names
        }
        self._joined: set[str] = set()
        self.steps: list[Step] = []
        self._is_anchored = self._often(0.6)
        self.anchor()

    def anchor(self) -> None:
        """Commit an offset in both groups, so that the groups exist even without members.

        If a join is refused, a group without offsets stays on Kafka, empty, until its next search for expired
        groups. Our broker has no group then. So in sequences without this step, members join only as real
        clients do.
        """
        for group in (GROUP, OTHER_GROUP) if self._is_anchored else ():
            row = {"name": topic("T"), "partitions": [{"partition_index": 0, "committed_offset": 4}]}
            self.steps.append(Step("OffsetCommit", 5, {"group_id": group, "topics": [row]}))

    def _often(self, chance: float) -> bool:
        return self._random.random() < chance

    def _add(
        self, api: str, versions: tuple[int, int], body: Body, connection: str = "main", **more: Any
    ) -> None:
        version = self._random.randint(*versions)
        self.steps.append(Step(api, version, body, connection, **more))

    def _group(self) -> Any:
        return self._random.choices([GROUP, OTHER_GROUP, ""], [96, 3, 1])[0] if self._is_anchored else GROUP

    def _member_id(self, member: str) -> Any:
        if self._often(0.08):
            other = self._random.choice(self._names)
            return self._random.choice(["", "nobody", ref(f"{other}.member", "unknown")])
        return ref(f"{member}.member", "unknown")

    def _generation(self, member: str) -> Any:
        generation = f"{member}.generation"
        if self._often(0.1):
            others = [ref(generation, 7, 1), ref(generation, 7, -1), 0, -1, 2**31 - 1]
            return self._random.choice(others)
        return ref(generation, 7)

    def _instance(self, member: str) -> str | None:
        return self._random.choice([None, "iA", "iZ"]) if self._often(0.05) else self._instances[member]

    def _identity(self, member: str) -> Body:
        return {
            "group_id": self._group(),
            "generation_id": self._generation(member),
            "member_id": self._member_id(member),
            "group_instance_id": self._instance(member),
        }

    def join(self, member: str) -> None:
        """Draw JoinGroup. From version 4 on, a new member without an instance id repeats it with its assigned
        member id.
        """
        random, is_new = self._random, member not in self._joined
        self._joined.add(member)
        session_ms = random.choice([0, -1, 5_999, 1_800_001, 2**31 - 1]) if self._often(0.03) else 60_000
        names = random.choice(PROTOCOLS)
        is_odd = self._often(0.05)
        if not self._is_anchored:
            session_ms, names, is_odd = 60_000, names or ["range"], False
        body = {
            "group_id": self._group(),
            "session_timeout_ms": session_ms,
            "rebalance_timeout_ms": 60_000,
            "member_id": "" if self._often(0.9 if is_new else 0.05) else self._member_id(member),
            "group_instance_id": self._instances[member],
            "protocol_type": random.choice(["connect", "", "x"]) if is_odd else "consumer",
            "protocols": [
                {"name": name, "metadata": text(random.choice(["m", "m", "n", ""]))} for name in names
            ],
            "reason": random.choice([None, "", "why", "x" * 300]),
        }
        binds = {f"{member}.member": "member_id", f"{member}.generation": "generation_id"}
        # Versions below 5 have no group.instance.id. Kafka fails if a member joins once with and once without
        # an instance id.
        version = random.randint(0 if self._instances[member] is None else 5, 9)
        self.steps.append(Step("JoinGroup", version, body, member, binds=binds, parks=True))
        if is_new and version >= 4 and body["group_instance_id"] is None and self._often(0.9):
            again = body | {"member_id": ref(f"{member}.member", "unknown")}
            self.steps.append(Step("JoinGroup", version, again, member, binds=binds, parks=True))

    def sync(self, member: str) -> None:
        """Draw SyncGroup with assignments for most members, or rarely with an invalid list.

        Any member may send assignments, but brokers must ignore those of members that are not the leader.
        """
        random = self._random
        assignments = [
            {"member_id": ref(f"{other}.member", "unknown"), "assignment": text(f"to {other}")}
            for other in self._names
            if self._often(0.9)
        ]
        if self._often(0.04):
            assignments = random.choice(
                [[], [{"member_id": "nobody", "assignment": text("x")}], assignments * 2]
            )
        body = self._identity(member) | {
            "protocol_type": "consumer" if self._often(0.93) else random.choice([None, "x", ""]),
            "protocol_name": random.choice([*["range"] * 14, None, None, "sticky", "x"]),
            "assignments": assignments,
        }
        self._add("SyncGroup", (0, 5), body, member, parks=True)

    def heartbeat(self, member: str) -> None:
        self._add("Heartbeat", (0, 4), self._identity(member), member)

    def leave(self, member: str) -> None:
        """Draw LeaveGroup of one or several members, some of which may not exist."""
        chance = self._random.choice([0, 0, 0.5, 1])
        some = [member, *(other for other in self._names if other != member and self._often(chance))]
        rows = [
            {
                "member_id": "" if instance and self._often(0.3) else self._member_id(each),
                "group_instance_id": instance,
            }
            for each in some
            for instance in [self._instance(each)]
        ]
        if self._often(0.06):
            strangers = [{"member_id": "", "group_instance_id": "iZ"}, {"member_id": "nobody"}]
            rows = self._random.choice([[], rows * 2, *([*rows, stranger] for stranger in strangers)])
        body = {"group_id": self._group(), "member_id": self._member_id(member), "members": rows}
        self._add("LeaveGroup", (0, 5), body, member)

    def commit(self, member: str) -> None:
        """Draw OffsetCommit of the member, or of a client without a generation."""
        is_anonymous = self._often(0.2)
        partition = {"partition_index": 0, "committed_offset": self._random.randrange(100)}
        body: Body = {
            "group_id": self._group(),
            "generation_id_or_member_epoch": -1 if is_anonymous else self._generation(member),
            "member_id": "" if is_anonymous and self._often(0.7) else self._member_id(member),
            "group_instance_id": None if is_anonymous and self._often(0.8) else self._instance(member),
            "topics": [{"name": topic("T"), "partitions": [partition]}],
        }
        self._add("OffsetCommit", (2, 9), body, member)

    def describe(self) -> None:
        groups = self._random.choice([*[[GROUP]] * 8, [GROUP, OTHER_GROUP, name("none")], ["", GROUP], []])
        self._add("DescribeGroups", (0, 6), {"groups": groups})

    def show(self) -> None:
        """Draw ListGroups, filtered by states and types."""
        filters = {
            "states_filter": self._random.choice(STATE_FILTERS),
            "types_filter": self._random.choice(TYPE_FILTERS),
        }
        self._add("ListGroups", (0, 5), filters)

    def delete(self) -> None:
        choices = [*[[GROUP]] * 6, [OTHER_GROUP], [GROUP, name("none")], [GROUP, GROUP], [""]]
        self._add("DeleteGroups", (0, 2), {"groups_names": self._random.choice(choices)})
        self._is_anchored = True
        self.anchor()

    def rebalance(self) -> None:
        """Let almost all members join and synchronise, in any order."""
        everybody = list(self._names)
        for act in (self.join, self.sync) if self._often(0.7) else (self.join, self.join, self.sync):
            self._random.shuffle(everybody)
            for member in everybody:
                if self._often(0.93):
                    act(member)

    def act(self) -> None:
        """Draw one action of any member."""
        alone = (self.describe, self.show, self.delete, self.rebalance)
        choices: list[Callable[..., None]] = [
            self.join, self.sync, self.heartbeat, self.leave, self.commit, *alone
        ]  # fmt: skip
        (action,) = self._random.choices(choices, [20, 14, 10, 10, 6, 8, 3, 3, 8])
        action(*([] if action in alone else [self._random.choice(self._names)]))


def draw(random: Random) -> Sequence:
    """Draw the steps of a group's members, which mostly behave as real clients do."""
    members = Members(random)
    length = random.choice(LENGTHS)
    if random.random() < 0.7:
        members.rebalance()
    while len(members.steps) < length:
        members.act()
    observations = (
        Step("DescribeGroups", 6, {"groups": [GROUP, OTHER_GROUP]}),
        Step("OffsetFetch", 8, {"groups": [{"group_id": GROUP, "topics": None}]}),
        Step("ListGroups", 5),
    )
    return Sequence("classic_groups", 0, {"T": {"partitions": 1}}, tuple(members.steps), observations)


def _is_tie(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    names = {"range", "sticky", "roundrobin"}
    return (
        step.api == "JoinGroup"
        and path.endswith(("protocol_name", "metadata", "members"))
        and (path != "protocol_name" or {ours, theirs} <= names)
    )


def _is_other_leader(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    is_other = path == "leader" and bool(ours) and bool(theirs)
    return step.api == "JoinGroup" and (is_other or path == "members")


def _waits_for_ever(step: Step, ours: Any, theirs: Any, path: str) -> bool:
    return (
        step.api == "SyncGroup"
        and theirs == PARKED
        and isinstance(ours, dict)
        and ours.get("error_code") == "UNKNOWN_MEMBER_ID"
    )


RULES = (
    Rule(
        "as many members prefer one protocol as another",
        "Kafka takes the one that a hash table has first.",
        _is_tie,
        key="If as many members prefer one protocol",
        ends=True,
    ),
    Rule(
        "another member leads after the leader left",
        "Kafka takes the member that a hash table has first, and member ids are random.",
        _is_other_leader,
        key="If a group loses its leader",
        ends=True,
    ),
    Rule(
        "a member that leaves while its SyncGroup waits",
        "Kafka never answers that SyncGroup.",
        _waits_for_ever,
        key="SyncGroup of a member that leaves meanwhile",
        ends=True,
    ),
)
SUBJECTS = (Subject("classic_groups", draw, RULES),)
