"""Steps of scenarios about groups of the consumer protocol. Each member has a name; `$A_epoch` is the epoch
it was told last, and goes with its next heartbeat.

    beat A G topics=T -> 1 T/0 T/1     ConsumerGroupHeartbeat: its epoch and what it may read, `nothing`, or
                                       `same` when that is not told; or an error. regex=, owned=T/0,T/1 or
                                       owned=nothing, epoch=, instance=, id=, rebalance=, assignor=
    members G -> Stable uniform A B    ConsumerGroupDescribe: state, assignor, members; or an error
    kind G -> consumer                 ListGroups: its type
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from oncelog.broker.coordinators.internal_topic import partition_for
from support.groups.topics import wait_until_groups_know
from support.scenarios.groups import GroupSteps
from support.scenarios.transactions import PASSING, STEP_S
from support.scenarios.values import ERROR_NAMES, Mismatch, resolve
from support.wait import pause

OFFSETS_PARTITIONS = 50


class ConsumerGroupSteps(GroupSteps):
    """What `Run` inherits; see the module's text."""

    def _expect_words(self, words: tuple[str, ...], actual: str) -> None:
        if self._expected(words) not in (["_"], actual.split()):
            raise Mismatch(f"got {actual}")

    def _member_id(self, member: str) -> str:
        name: str = self.variables.setdefault(f"{member}_member", f"{self.variables['free']}-{member}")
        return name

    def beat(self, member: str, group: str, *rest: str) -> None:
        self._find_coordinators()
        options, words = self._split(rest)
        known = self.variables.get(f"{member}_epoch", 0)
        epoch = int(resolve(options.get("epoch", known), self.variables))
        topics, owned = options.get("topics"), options.get("owned", "nothing" if epoch == 0 else None)
        body = {
            "group_id": self._group(group),
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
            self._wait_until_group_knows(name, self._group(group))
        answer = self._tell("ConsumerGroupHeartbeat", **body)
        while ERROR_NAMES[answer.error_code] in PASSING:  # as a broker just started answers
            pause(STEP_S)
            answer = self._tell("ConsumerGroupHeartbeat", **body)
        if answer.error_code:
            self._expect_words(words, ERROR_NAMES[answer.error_code])
            return
        self.variables[f"{member}_epoch"] = answer.member_epoch
        self._expect_words(words, f"{answer.member_epoch} {self._told(answer.assignment)}")

    def _wait_until_group_knows(self, name: str, group_id: str) -> None:
        """Return when the group's coordinator knows the topic. A group of the same coordinator tells."""
        topic_id = self.variables.get(f"{name}.id")
        partition = partition_for(group_id, OFFSETS_PARTITIONS)
        if topic_id is None or (partition, topic_id) in self.known_to_groups:
            return
        probe = next(
            probe
            for probe in (f"{group_id}-probe-{number}" for number in itertools.count())
            if partition_for(probe, OFFSETS_PARTITIONS) == partition
        )
        heartbeat = functools.partial(self._tell, "ConsumerGroupHeartbeat")
        wait_until_groups_know(heartbeat, probe, {self.variables[name]: self.partitions[topic_id]})
        self.known_to_groups.add((partition, topic_id))

    def _owned(self, text: str) -> list[dict[str, Any]]:
        places = [] if text == "nothing" else [self._place(each) for each in text.split(",")]
        return [{"topic_id": topic_id, "partitions": [index]} for _, topic_id, index in places]

    def _told(self, assignment: Any) -> str:
        if assignment is None:
            return "same"
        names = {
            bytes(value): name[: -len(".id")]
            for name, value in self.variables.items()
            if name.endswith(".id")
        }
        places = [
            f"{names[bytes(each.topic_id)]}/{index}"
            for each in assignment.topic_partitions
            for index in each.partitions
        ]
        return " ".join(sorted(places)) or "nothing"

    def members(self, group: str, *rest: str) -> None:
        _, words = self._split(rest)
        (told,) = self._tell("ConsumerGroupDescribe", group_ids=[self._group(group)]).groups
        if told.error_code:
            self._expect_words(words, ERROR_NAMES[told.error_code])
            return
        ids = {value: name[: -len("_member")] for name, value in self.variables.items() if "_member" in name}
        names = sorted(ids[each.member_id] for each in told.members)
        self._expect_words(words, " ".join([told.group_state, told.assignor_name, *names]))

    def kind(self, group: str, *rest: str) -> None:
        _, words = self._split(rest)
        listed = self._tell("ListGroups").groups
        kinds = [each.group_type for each in listed if each.group_id == self._group(group)]
        self._expect_words(words, " ".join(kinds))


STEPS = ("beat", "members", "kind")
