"""Steps of scenarios about groups of the classic protocol.

Each member has a name and a connection. `$A_member` is the id of member A. The last successful JoinGroup of A
sets `$A_generation` and `$A_leader`, the leader's member id.

    join A G                           JoinGroup without reading the response; instance=, session=,
                                       rebalance=, protocols=range,sticky, type=, id= (a member id), as=B
    joined A -> 1                      the response to `join`: the generation, or an error
    joined A -> 1 of A B               the response to the leader: also the members' names
    sync A G A=x B=y                   SyncGroup without reading the response; the leader adds assignments;
                                       generation=, id=
    synced A -> x                      the response to `sync`: the assignment, `nothing`, or an error
    heartbeat A G -> NONE              Heartbeat; generation=, id=, instance=
    leave A G -> NONE                  LeaveGroup; id=, instance=
    commit A G T/0=5 -> NONE           OffsetCommit by member A; `commit - G T/0=5` without a member
    group G -> Stable                  DescribeGroups: the state
    shares G -> Stable x nothing       DescribeGroups: the state, and each member's assignment or `nothing`
    forget G -> NONE                   DeleteGroups

JoinGroup is version 3 unless `Versions:` names it: from version 4 on, the first response only gives out a
member id.
"""

from __future__ import annotations

from typing import Any

from oncelog.conform.context import RETRIED, Context, Verbs, parse_options
from oncelog.conform.deadline import STEP_S
from oncelog.conform.values import ANYTHING, ERROR_NAMES, Mismatch, add_topic_ids, build, resolve
from oncelog.wire.messages import API_BY_NAME, Api
from support.wait import pause

JOIN_VERSION = 3


class GroupSteps:
    """Requests of members of classic groups, and requests of administrators."""

    def __init__(self, context: Context) -> None:
        self._context, self._variables = context, context.variables
        self._pending: dict[str, tuple[Api, int]] = {}
        """For each member: API and version of the request whose response it reads next."""
        self._joins: dict[str, dict[str, Any]] = {}
        """For each member: the body of its latest JoinGroup."""
        self.verbs: Verbs = {
            "join": self._join,
            "joined": self._joined,
            "sync": self._sync,
            "synced": self._synced,
            "heartbeat": self._heartbeat,
            "leave": self._leave,
            "commit": self._commit,
            "group": self._group,
            "shares": self._shares,
            "forget": self._forget,
        }

    def _send(self, member: str, api_name: str, body: dict[str, Any]) -> None:
        """Send a request on the member's connection. `_receive` reads its response."""
        self._context.connection = member
        api = API_BY_NAME[api_name]
        has_default = api_name == "JoinGroup" and not self._context.is_under_test(api)
        version = JOIN_VERSION if has_default else self._context.protocol_version_of(api)
        message = add_topic_ids(build(api.request, resolve(body, self._variables)), self._variables)
        self._context.client.send(message, version)
        self._pending[member] = (api, version)
        self._context.connection = "main"

    def _receive(self, member: str) -> Any:
        self._context.connection = member
        api, version = self._pending[member]
        response = self._context.client.receive(api.response, version)[1]
        self._context.connection = "main"
        return response

    def _join(self, member: str, group: str, *words: str) -> None:
        self._context.find_coordinators()
        options = parse_options(words)
        names = str(options.get("protocols", "range")).split(",")
        member_id = self._variables.get(f"{options.get('as', member)}_member", "")
        body = {
            "group_id": self._context.group_id(group) if group != "-" else "",
            "session_timeout_ms": options.get("session", 10_000),
            "rebalance_timeout_ms": options.get("rebalance", 5_000),
            "member_id": options.get("id", member_id),
            "group_instance_id": options.get("instance"),
            "protocol_type": options.get("type", "consumer"),
            "protocols": [{"name": name, "metadata": member.encode()} for name in names if name != "none"],
        }
        self._joins[member] = body
        self._send(member, "JoinGroup", body)

    def _joined(self, member: str, *words: str) -> None:
        _, expected = self._context.split(words)
        response = self._receive(member)
        # A broker that has just started may return these errors.
        while ERROR_NAMES[response.error_code] in RETRIED:
            pause(STEP_S)
            self._send(member, "JoinGroup", self._joins[member])
            response = self._receive(member)
        error = ERROR_NAMES[response.error_code]
        if response.member_id:
            self._variables[f"{member}_member"] = response.member_id
        if error == "NONE":
            self._variables[f"{member}_generation"] = response.generation_id
            self._variables[f"{member}_leader"] = response.leader
            self._variables[f"{member}_protocol"] = response.protocol_name
        result, *members = self._context.expected(expected)
        if result != ANYTHING and result != (str(response.generation_id) if error == "NONE" else error):
            raise Mismatch(f"got {response}")
        if members[1:] != sorted(member.metadata.decode() for member in response.members):
            raise Mismatch(f"got {response}")

    def _sync(self, member: str, group: str, *words: str) -> None:
        options = parse_options(words)
        body = {
            "group_id": self._context.group_id(group),
            "generation_id": options.pop("generation", self._variables.get(f"{member}_generation", 0)),
            "member_id": options.pop("id", self._variables.get(f"{member}_member", "")),
            "group_instance_id": options.pop("instance", None),
            "protocol_type": options.pop("type", "consumer"),
            "protocol_name": options.pop("protocol", self._variables.get(f"{member}_protocol", "range")),
            "assignments": [
                {"member_id": f"${name}_member", "assignment": str(value).encode()}
                for name, value in options.items()
            ],
        }
        self._send(member, "SyncGroup", body)

    def _synced(self, member: str, *words: str) -> None:
        _, expected = self._context.split(words)
        response = self._receive(member)
        error = ERROR_NAMES[response.error_code]
        self._context.expect(
            expected, error if error != "NONE" else response.assignment.decode() or "nothing"
        )

    def _heartbeat(self, member: str, group: str, *words: str) -> None:
        options, expected = self._context.split(words)

        def call() -> tuple[str, Any]:
            response = self._context.call(
                "Heartbeat",
                group_id=self._context.group_id(group),
                generation_id=options.get("generation", self._variables.get(f"{member}_generation", 0)),
                member_id=options.get("id", self._variables.get(f"{member}_member", "")),
                group_instance_id=options.get("instance"),
            )
            return ERROR_NAMES[response.error_code], response

        self._context.call_until(expected, call, is_read=True)

    def _leave(self, member: str, group: str, *words: str) -> None:
        options, expected = self._context.split(words)
        identity = {
            "member_id": options.get("id", self._variables.get(f"{member}_member", "")),
            "group_instance_id": options.get("instance"),
        }
        body = {
            "group_id": self._context.group_id(group),
            "member_id": identity["member_id"],
            "members": [identity],
        }
        response = self._context.call("LeaveGroup", **body)
        code = response.error_code or (response.members[0].error_code if response.members else 0)
        self._context.expect(expected, ERROR_NAMES[code])

    def _commit(self, member: str, group: str, *words: str) -> None:
        self._context.find_coordinators()
        options, expected = self._context.split(words)
        is_member = member != "-"
        body = {
            "group_id": self._context.group_id(group),
            "generation_id_or_member_epoch": options.get(
                "generation", f"${member}_generation" if is_member else -1
            ),
            "member_id": options.get("id", f"${member}_member" if is_member else ""),
            "group_instance_id": options.get("instance"),
            "topics": self._context.offsets_to_commit(options),
        }

        def call() -> tuple[str, Any]:
            response = self._context.call("OffsetCommit", **body)
            codes = {ERROR_NAMES[part.error_code] for topic in response.topics for part in topic.partitions}
            return " ".join(sorted(codes)), response

        self._context.call_until(expected, call)

    def _group(self, name: str, *words: str) -> None:
        _, expected = self._context.split(words)

        def call() -> tuple[str, Any]:
            (described,) = self._context.call("DescribeGroups", groups=[self._context.group_id(name)]).groups
            error = ERROR_NAMES[described.error_code]
            return (described.group_state if error == "NONE" else error), described

        self._context.call_until(expected, call, is_read=True)

    def _shares(self, name: str, *words: str) -> None:
        _, expected = self._context.split(words)

        def call() -> tuple[str, Any]:
            (described,) = self._context.call("DescribeGroups", groups=[self._context.group_id(name)]).groups
            assignments = sorted(
                member.member_assignment.decode() or "nothing" for member in described.members
            )
            return " ".join([described.group_state, *assignments]), described

        self._context.call_until(expected, call, is_read=True)

    def _forget(self, name: str, *words: str) -> None:
        _, expected = self._context.split(words)
        (result,) = self._context.call("DeleteGroups", groups_names=[self._context.group_id(name)]).results
        self._context.expect(expected, ERROR_NAMES[result.error_code])
