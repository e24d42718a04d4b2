"""Steps of scenarios about groups of the consumer protocol (KIP-848).

Each member has a name. `$A_epoch` is the member epoch of A's last response; A's next heartbeat carries it.

    beat A G topics=T -> 1 T/0 T/1     ConsumerGroupHeartbeat: the member epoch, then the assigned partitions,
                                       `nothing`, or `same` for a response without assignment; or an error.
                                       regex=, owned=T/0,T/1 or owned=nothing, epoch=, instance=, id=,
                                       rebalance=, assignor=
    members G -> Stable uniform A B    ConsumerGroupDescribe: state, assignor, members; or an error
    kind G -> consumer                 ListGroups: the group's type
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from oncelog.broker.coordinators.internal_topic import partition_for
from oncelog.conform.context import RETRIED, Context, Verbs
from oncelog.conform.deadline import STEP_S
from oncelog.conform.values import ERROR_NAMES, resolve
from support.groups.topics import wait_until_groups_know
from support.wait import pause

OFFSETS_PARTITIONS = 50


class ConsumerGroupSteps:
    """Requests of members of groups of the consumer protocol."""

    def __init__(self, context: Context) -> None:
        self._context, self._variables = context, context.variables
        self._assignable: set[tuple[int, int, bytes]] = set()
        """Keys for which no wait is needed any more: number of restarts of the broker, partition of
        `__consumer_offsets`, topic id.

        The coordinator of that partition is known to assign partitions of that topic.
        """
        self.verbs: Verbs = {
            "beat": self._beat,
            "members": self._members,
            "kind": self._kind,
        }

    def _member_id(self, member: str) -> str:
        new_id = f"{self._variables['free']}-{member}"
        member_id: str = self._variables.setdefault(f"{member}_member", new_id)
        return member_id

    def _beat(self, member: str, group: str, *words: str) -> None:
        self._context.find_coordinators()
        options, expected = self._context.split(words)
        last_epoch = self._variables.get(f"{member}_epoch", 0)
        epoch = int(resolve(options.get("epoch", last_epoch), self._variables))
        topics, owned = options.get("topics"), options.get("owned", "nothing" if epoch == 0 else None)
        body = {
            "group_id": self._context.group_id(group),
            "member_id": options.get("id", self._member_id(member)),
            "member_epoch": epoch,
            "instance_id": options.get("instance"),
            "rebalance_timeout_ms": options.get("rebalance", 5_000 if epoch == 0 else -1),
            "subscribed_topic_names": None if topics is None else [f"${name}" for name in topics.split(",")],
            "subscribed_topic_regex": options.get("regex"),
            "server_assignor": options.get("assignor"),
            "topic_partitions": None if owned is None else self._owned(owned),
        }
        for name in topics.split(",") if topics else ():
            self._wait_until_assignable(name, self._context.group_id(group))
        response = self._context.call("ConsumerGroupHeartbeat", **body)
        # A broker that has just started may return these errors.
        while ERROR_NAMES[response.error_code] in RETRIED:
            pause(STEP_S)
            response = self._context.call("ConsumerGroupHeartbeat", **body)
        if response.error_code:
            self._context.expect(expected, ERROR_NAMES[response.error_code])
            return
        self._variables[f"{member}_epoch"] = response.member_epoch
        self._context.expect(expected, f"{response.member_epoch} {self._names_of(response.assignment)}")

    def _wait_until_assignable(self, name: str, group_id: str) -> None:
        """Wait until the group's coordinator assigns partitions of the topic.

        To find that out, a member of another group with the same coordinator subscribes to the topic.
        """
        topic_id = self._variables.get(f"{name}.id")
        partition = partition_for(group_id, OFFSETS_PARTITIONS)
        key = (self._context.restarts, partition, topic_id)
        if topic_id is None or key in self._assignable:
            return
        probe = next(
            probe
            for probe in (f"{group_id}-probe-{number}" for number in itertools.count())
            if partition_for(probe, OFFSETS_PARTITIONS) == partition
        )
        heartbeat = functools.partial(self._context.call, "ConsumerGroupHeartbeat")
        count = self._context.partition_counts[topic_id]
        wait_until_groups_know(heartbeat, probe, {self._variables[name]: count})
        self._assignable.add(key)

    def _owned(self, text: str) -> list[dict[str, Any]]:
        partitions = [] if text == "nothing" else [self._context.partition(word) for word in text.split(",")]
        return [{"topic_id": topic_id, "partitions": [index]} for _, topic_id, index in partitions]

    def _names_of(self, assignment: Any) -> str:
        if assignment is None:
            return "same"
        names = {
            bytes(value): name[: -len(".id")]
            for name, value in self._variables.items()
            if name.endswith(".id")
        }
        partitions = [
            f"{names[bytes(topic.topic_id)]}/{index}"
            for topic in assignment.topic_partitions
            for index in topic.partitions
        ]
        return " ".join(sorted(partitions)) or "nothing"

    def _members(self, group: str, *words: str) -> None:
        _, expected = self._context.split(words)
        (described,) = self._context.call(
            "ConsumerGroupDescribe", group_ids=[self._context.group_id(group)]
        ).groups
        if described.error_code:
            self._context.expect(expected, ERROR_NAMES[described.error_code])
            return
        ids = {value: name[: -len("_member")] for name, value in self._variables.items() if "_member" in name}
        names = sorted(ids[row.member_id] for row in described.members)
        self._context.expect(expected, " ".join([described.group_state, described.assignor_name, *names]))

    def _kind(self, group: str, *words: str) -> None:
        _, expected = self._context.split(words)
        listed = self._context.call("ListGroups").groups
        types = [row.group_type for row in listed if row.group_id == self._context.group_id(group)]
        self._context.expect(expected, " ".join(types))
