"""Steps of scenarios about groups. Each member has a name and a connection of its own; `$A_member` is its id,
`$A_generation` the generation it was told, `$A_leader` the leader's id.

    join A G                           JoinGroup, answered later; instance=, protocols=range,sticky, session=,
                                       rebalance=, id= (a member id), type=, as=B (with B's id)
    joined A -> 1                      its answer: the generation, or an error; as leader with the members
    joined A -> 1 of A B               (by name)
    sync A G A=x B=y                   SyncGroup, answered later; the leader assigns; generation=, id=
    synced A -> x                      its answer: the assignment, `nothing` for none, or an error
    heartbeat A G -> NONE              generation=, id=, instance=
    leave A G -> NONE                  LeaveGroup; id=, instance=
    commit A G T/0=5 -> NONE           OffsetCommit by the member; `commit - G T/0=5`: by nobody in particular
    group G -> Stable                  DescribeGroups: the state
    shares G -> Stable x nothing       the state and each member's assignment, or `nothing`
    forget G -> NONE                   DeleteGroups

JoinGroup is version 3 unless `Versions:` names it: later ones first give out a member id.
"""

from __future__ import annotations

from typing import Any

from oncelog.wire.messages import API_BY_NAME
from support.scenarios.transactions import PASSING, STEP_S, TransactionSteps
from support.scenarios.values import ERROR_NAMES, Mismatch, add_topic_ids, build, resolve
from support.wait import pause

JOIN_VERSION = 3


class GroupSteps(TransactionSteps):
    """What `Run` inherits; see the module's text."""

    def _send(self, member: str, api_name: str, body: dict[str, Any]) -> None:
        self.connection = member
        api = API_BY_NAME[api_name]
        is_named = self.version is not None and api is self.scenario.api
        version = JOIN_VERSION if api_name == "JoinGroup" and not is_named else self._version_in(api)
        message = add_topic_ids(build(api.request, resolve(body, self.variables)), self.variables)
        self.client.send(message, version)
        self.variables[f"{member}_asked"] = (api, version)

    def _receive(self, member: str) -> Any:
        self.connection = member
        api, version = self.variables[f"{member}_asked"]
        answer = self.client.receive(api.response, version)[1]
        self.connection = "main"
        return answer

    def join(self, member: str, group: str, *rest: str) -> None:
        self._find_coordinators()
        options = self._options(rest)
        names = str(options.get("protocols", "range")).split(",")
        known = self.variables.get(f"{options.get('as', member)}_member", "")
        body = {
            "group_id": self._group(group) if group != "-" else "",
            "session_timeout_ms": options.get("session", 10_000),
            "rebalance_timeout_ms": options.get("rebalance", 5_000),
            "member_id": options.get("id", known),
            "group_instance_id": options.get("instance"),
            "protocol_type": options.get("type", "consumer"),
            "protocols": [{"name": name, "metadata": member.encode()} for name in names if name != "none"],
        }
        self.variables[f"{member}_join"] = body
        self._send(member, "JoinGroup", body)
        self.connection = "main"

    def joined(self, member: str, *rest: str) -> None:
        _, words = self._split(rest)
        answer = self._receive(member)
        while ERROR_NAMES[answer.error_code] in PASSING:  # as a broker just started answers
            pause(STEP_S)
            self._send(member, "JoinGroup", self.variables[f"{member}_join"])
            answer = self._receive(member)
        error = ERROR_NAMES[answer.error_code]
        if answer.member_id:
            self.variables[f"{member}_member"] = answer.member_id
        if error == "NONE":
            self.variables[f"{member}_generation"] = answer.generation_id
            self.variables[f"{member}_leader"] = answer.leader
            self.variables[f"{member}_protocol"] = answer.protocol_name
        expected, *members = self._expected(words)
        if expected != "_" and expected != (str(answer.generation_id) if error == "NONE" else error):
            raise Mismatch(f"got {answer}")
        if members[1:] != sorted(each.metadata.decode() for each in answer.members):
            raise Mismatch(f"got {answer}")

    def sync(self, member: str, group: str, *rest: str) -> None:
        options = self._options(rest)
        body = {
            "group_id": self._group(group),
            "generation_id": options.pop("generation", self.variables.get(f"{member}_generation", 0)),
            "member_id": options.pop("id", self.variables.get(f"{member}_member", "")),
            "group_instance_id": options.pop("instance", None),
            "protocol_type": options.pop("type", "consumer"),
            "protocol_name": options.pop("protocol", self.variables.get(f"{member}_protocol", "range")),
            "assignments": [
                {"member_id": f"${name}_member", "assignment": str(value).encode()}
                for name, value in options.items()
            ],
        }
        self._send(member, "SyncGroup", body)
        self.connection = "main"

    def synced(self, member: str, *rest: str) -> None:
        _, words = self._split(rest)
        answer = self._receive(member)
        error = ERROR_NAMES[answer.error_code]
        self._expect_word(words, error if error != "NONE" else answer.assignment.decode() or "nothing")

    def heartbeat(self, member: str, group: str, *rest: str) -> None:
        options, words = self._split(rest)

        def ask() -> tuple[str, Any]:
            answer = self._tell(
                "Heartbeat",
                group_id=self._group(group),
                generation_id=options.get("generation", self.variables.get(f"{member}_generation", 0)),
                member_id=options.get("id", self.variables.get(f"{member}_member", "")),
                group_instance_id=options.get("instance"),
            )
            return ERROR_NAMES[answer.error_code], answer

        self._until(words, ask, reads=True)

    def leave(self, member: str, group: str, *rest: str) -> None:
        options, words = self._split(rest)
        identity = {
            "member_id": options.get("id", self.variables.get(f"{member}_member", "")),
            "group_instance_id": options.get("instance"),
        }
        body = {"group_id": self._group(group), "member_id": identity["member_id"], "members": [identity]}
        answer = self._tell("LeaveGroup", **body)
        code = answer.error_code or (answer.members[0].error_code if answer.members else 0)
        self._expect_word(words, ERROR_NAMES[code])

    def commit(self, member: str, group: str, *rest: str) -> None:
        self._find_coordinators()
        options, words = self._split(rest)
        topics = []
        for key in [key for key in options if "/" in key]:
            topic, _, index = self._place(key)
            part = {"partition_index": index, "committed_offset": options.pop(key)}
            topics.append(
                {"name": topic, "partitions": [part | {"committed_metadata": options.get("metadata", "")}]}
            )
        is_nobody = member == "-"
        body = {
            "group_id": self._group(group),
            "generation_id_or_member_epoch": options.get(
                "generation", -1 if is_nobody else f"${member}_generation"
            ),
            "member_id": options.get("id", "" if is_nobody else f"${member}_member"),
            "group_instance_id": options.get("instance"),
            "topics": topics,
        }

        def ask() -> tuple[str, Any]:
            answer = self._tell("OffsetCommit", **body)
            codes = {ERROR_NAMES[part.error_code] for topic in answer.topics for part in topic.partitions}
            return " ".join(sorted(codes)), answer

        self._until(words, ask)

    def group(self, name: str, *rest: str) -> None:
        _, words = self._split(rest)

        def ask() -> tuple[str, Any]:
            (told,) = self._tell("DescribeGroups", groups=[self._group(name)]).groups
            return (ERROR_NAMES[told.error_code] if told.error_code else told.group_state), told

        self._until(words, ask, reads=True)

    def shares(self, name: str, *rest: str) -> None:
        _, words = self._split(rest)

        def ask() -> tuple[str, Any]:
            (described,) = self._tell("DescribeGroups", groups=[self._group(name)]).groups
            assignments = sorted(each.member_assignment.decode() or "nothing" for each in described.members)
            return " ".join([described.group_state, *assignments]), described

        self._until(words, ask, reads=True)

    def forget(self, name: str, *rest: str) -> None:
        _, words = self._split(rest)
        (result,) = self._tell("DeleteGroups", groups_names=[self._group(name)]).results
        self._expect_word(words, ERROR_NAMES[result.error_code])


STEPS = ("join", "joined", "sync", "synced", "heartbeat", "leave", "commit", "group", "shares", "forget")
