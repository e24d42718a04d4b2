"""Steps of scenarios about transactions. Each producer has a name; `$A` is its id, `$A_epoch` its epoch,
`$A_txn` its transactional id.

    init A -> 0                        a new transactional id; -> the epoch or an error
    init B like=A -> 1                 another instance of A's; the same producer again: id=$A epoch=$A_epoch
    add A T/0 T/1 -> NONE              AddPartitionsToTxn; -> each different error, sorted
    add_offsets A G -> NONE            AddOffsetsToTxn for the group $G (made up when first named)
    commit_offsets A G T/0=5 -> NONE   TxnOffsetCommit; generation=, member=, metadata=
    end A commit -> NONE               EndTxn; abort; version 5 takes over the epoch of the answer
    write T/0 a b by=A seq=0 -> 0      Produce of a transactional batch; acks, epoch, pid as in `produce`
    read T/0 -> a <commit> b           values and markers; `read T/0 committed -> a b` as read_committed sees
    offsets G T/0 -> 5                 OffsetFetch; `stable`: with require_stable; none: no offset
    end_offset T/0 -> 3                ListOffsets latest; `committed`: the last stable offset
    state A -> Ongoing                 DescribeTransactions
    open T/0 by=A -> 0                 DescribeProducers: first offset of the open transaction, none: -1

Versions are classic (Produce 11, EndTxn 4, TxnOffsetCommit 4), or with `Transactions: epoch` those that
raise the epoch (12, 5, 5), unless `Versions:` names the API. An answer that passes by itself
(CONCURRENT_TRANSACTIONS, COORDINATOR_...) is asked for again unless it is the expected one; what is read is
read until it is as expected, at most 60 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.types import Isolation
from oncelog.wire.batch import read_header
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.messages import API_BY_NAME, Api
from oncelog.wire.records import decode_records
from support.broker import split_batches
from support.scenarios.values import ERROR_NAMES, Mismatch, Tagged, add_topic_ids, build, resolve
from support.wait import attempts

CLASSIC = {"Produce": 11, "EndTxn": 4, "TxnOffsetCommit": 4, "AddPartitionsToTxn": 3}
EPOCH = {"Produce": 12, "EndTxn": 5, "TxnOffsetCommit": 5, "AddPartitionsToTxn": 3}
PASSING = {
    "CONCURRENT_TRANSACTIONS", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR",
    "NOT_ENOUGH_REPLICAS",
}  # fmt: skip
STEP_S = 0.02
TIMEOUT_MS = 60_000


class TransactionSteps:
    """What `Run` inherits; see the module's text."""

    def _version_in(self, api: Api) -> int:
        if self.version is not None and api is self.scenario.api:
            return min(self.version, CLASSIC["AddPartitionsToTxn"]) if api.key == 24 else self.version
        dialect = EPOCH if self.scenario.raises_epoch else CLASSIC
        return dialect.get(api.name) or self.version_of(api)

    def _tell(self, api_name: str, **body: Any) -> Any:
        api = API_BY_NAME[api_name]
        message = add_topic_ids(build(api.request, resolve(body, self.variables)), self.variables)
        return self.client.ask(message, self._version_in(api))

    def _until(
        self, words: tuple[str, ...], ask: Callable[[], tuple[str, Any]], *, reads: bool = False
    ) -> Any:
        """Ask until the word is the expected one; give up at once on a word that does not pass."""
        expected = self._expected(words)
        told: list[str] = []
        for _ in attempts(lambda: f"got {told[-1] or 'nothing'}", step_s=STEP_S):
            word, answer = ask()
            told.append(word)
            if expected in (["_"], word.split() or ["nothing"]):
                return answer
            if not (reads or word in PASSING):
                raise Mismatch(f"got {word or 'nothing'}")
        raise AssertionError("attempts ended")

    def _split(self, rest: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
        arrow = rest.index("->")
        return self._options(rest[:arrow]), rest[arrow + 1 :]

    def _group(self, name: str) -> str:
        return self.variables.setdefault(name, f"{self.variables['free']}-{name}")

    def _who(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "transactional_id": options.pop("id", f"${name}_txn"),
            "producer_id": options.pop("pid", f"${name}"),
            "producer_epoch": options.pop("epoch", f"${name}_epoch"),
        }

    def _find_coordinators(self) -> None:
        """A broker that was just started makes their topics when it is first asked for them."""
        if getattr(self.broker, "has_coordinators", False):
            return

        def ask(key_type: int) -> tuple[str, Any]:
            answer = self._tell("FindCoordinator", key_type=key_type, coordinator_keys=["any"])
            return ERROR_NAMES[answer.coordinators[0].error_code], answer

        for key_type in (0, 1):
            self._until(("NONE",), lambda key_type=key_type: ask(key_type))
        self.broker.has_coordinators = True

    def init(self, name: str, *rest: str) -> None:
        self._find_coordinators()
        options, words = self._split(rest)
        like = options.pop("like", None)
        own = f"{self.variables['free']}-txn-{name}"
        transactional_id = self.variables[f"{like}_txn"] if like else self.variables.get(f"{name}_txn", own)
        transactional_id = options.pop("id", transactional_id)

        def ask() -> tuple[str, Any]:
            answer = self._tell(
                "InitProducerId",
                transactional_id=transactional_id,
                transaction_timeout_ms=options.get("timeout", TIMEOUT_MS),
                producer_id=options.get("pid", -1),
                producer_epoch=options.get("epoch", -1),
            )
            error = ERROR_NAMES[answer.error_code]
            return (str(answer.producer_epoch) if error == "NONE" else error), answer

        answer = self._until(words, ask)
        self.variables[f"{name}_txn"] = transactional_id
        if not answer.error_code:
            self.variables[name], self.variables[f"{name}_epoch"] = answer.producer_id, answer.producer_epoch

    def add(self, name: str, *rest: str) -> None:
        options, words = self._split(rest)
        places = options.pop("values", [])
        topics = [
            {"name": topic, "partitions": [index]}
            for topic, _, index in (self._place(each) for each in places)
        ]
        who = {f"v3_and_below_{key}": value for key, value in self._who(name, options).items()}

        def ask() -> tuple[str, Any]:
            answer = self._tell("AddPartitionsToTxn", **who, v3_and_below_topics=topics)
            rows = [
                row for topic in answer.results_by_topic_v3_and_below for row in topic.results_by_partition
            ]
            codes = [ERROR_NAMES[row.partition_error_code] for row in rows]
            return " ".join(sorted(set(codes))), answer

        self._until(words, ask)

    def add_offsets(self, name: str, group: str, *rest: str) -> None:
        options, words = self._split(rest)
        who = self._who(name, options)

        def ask() -> tuple[str, Any]:
            answer = self._tell("AddOffsetsToTxn", **who, group_id=self._group(group))
            return ERROR_NAMES[answer.error_code], answer

        self._until(words, ask)

    def commit_offsets(self, name: str, group: str, *rest: str) -> None:
        options, words = self._split(rest)
        topics = []
        for key in [key for key in options if "/" in key]:
            topic, _, index = self._place(key)
            part = {"partition_index": index, "committed_offset": options.pop(key)}
            part["committed_metadata"] = options.get("metadata", "")
            topics.append({"name": topic, "partitions": [part]})
        body = {
            **self._who(name, options),
            "group_id": self._group(group),
            "generation_id": options.get("generation", -1),
            "member_id": options.get("member", ""),
            "group_instance_id": options.get("instance"),
            "topics": topics,
        }

        def ask() -> tuple[str, Any]:
            answer = self._tell("TxnOffsetCommit", **body)
            codes = [ERROR_NAMES[part.error_code] for topic in answer.topics for part in topic.partitions]
            return " ".join(sorted(set(codes))), answer

        self._until(words, ask)

    def end(self, name: str, outcome: str, *rest: str) -> None:
        options, words = self._split(rest)
        who = self._who(name, options)

        def ask() -> tuple[str, Any]:
            answer = self._tell("EndTxn", **who, committed={"commit": True, "abort": False}[outcome])
            return ERROR_NAMES[answer.error_code], answer

        answer = self._until(words, ask)
        if not answer.error_code and answer.producer_id >= 0:
            self.variables[name], self.variables[f"{name}_epoch"] = answer.producer_id, answer.producer_epoch

    def write(self, place: str, *rest: str) -> None:
        options, words = self._split(rest)
        options = {"values": [], "transactional": True} | options
        name = options.pop("by")
        options.setdefault("pid", self.variables[name])
        options.setdefault("epoch", self.variables.get(f"{name}_epoch"))
        transactional_id = options.pop("id", self.variables.get(f"{name}_txn"))
        topic, topic_id, index = self._place(place)
        batch = resolve(Tagged("batch", options), self.variables)
        data = {"name": topic, "topic_id": topic_id, "partition_data": [{"index": index, "records": batch}]}

        def ask() -> tuple[str, Any]:
            answer = self._tell(
                "Produce", transactional_id=transactional_id, acks=-1, timeout_ms=10_000, topic_data=[data]
            )
            result = answer.responses[0].partition_responses[0]
            error = ERROR_NAMES[result.error_code]
            return (str(result.base_offset) if error == "NONE" else error), answer

        self._until(words, ask)

    def read(self, place: str, *rest: str) -> None:
        options, words = self._split(rest)
        is_committed = "committed" in options.pop("values", [])
        topic, topic_id, index = self._place(place)
        part = {"partition": index, "fetch_offset": options.pop("from", 0), "partition_max_bytes": 1 << 20}
        data = {"topic": topic, "topic_id": topic_id, "partitions": [part]}

        def ask() -> tuple[str, Any]:
            answer = self._tell("Fetch", isolation_level=int(is_committed), topics=[data])
            result = answer.responses[0].partitions[0]
            if result.error_code:
                return ERROR_NAMES[result.error_code], answer
            return " ".join(_seen(result, is_committed)), answer

        self._until(words, ask, reads=True)

    def offsets(self, group: str, *rest: str) -> None:
        options, words = self._split(rest)
        place, *flags = options.pop("values")
        topic, _, index = self._place(place)
        asked = {"group_id": self._group(group), "topics": [{"name": topic, "partition_indexes": [index]}]}

        def ask() -> tuple[str, Any]:
            answer = self._tell("OffsetFetch", groups=[asked], require_stable="stable" in flags)
            if answer.groups[0].error_code:
                return ERROR_NAMES[answer.groups[0].error_code], answer
            part = answer.groups[0].topics[0].partitions[0]
            if part.error_code:
                return ERROR_NAMES[part.error_code], answer
            return ("none" if part.committed_offset < 0 else str(part.committed_offset)), answer

        self._until(words, ask, reads=True)

    def end_offset(self, place: str, *rest: str) -> None:
        options, words = self._split(rest)
        is_committed = "committed" in options.pop("values", [])
        topic, _, index = self._place(place)
        asked = {"name": topic, "partitions": [{"partition_index": index, "timestamp": -1}]}

        def ask() -> tuple[str, Any]:
            answer = self._tell(
                "ListOffsets", replica_id=-1, isolation_level=int(is_committed), topics=[asked]
            )
            part = answer.topics[0].partitions[0]
            return (ERROR_NAMES[part.error_code] if part.error_code else str(part.offset)), answer

        self._until(words, ask, reads=True)

    def state(self, name: str, *rest: str) -> None:
        _, words = self._split(rest)

        def ask() -> tuple[str, Any]:
            answer = self._tell("DescribeTransactions", transactional_ids=[f"${name}_txn"])
            (told,) = answer.transaction_states
            return (ERROR_NAMES[told.error_code] if told.error_code else told.transaction_state), answer

        self._until(words, ask, reads=True)

    def open(self, place: str, *rest: str) -> None:
        options, words = self._split(rest)
        producer_id = self.variables[options["by"]]
        topic, _, index = self._place(place)

        def ask() -> tuple[str, Any]:
            answer = self._tell("DescribeProducers", topics=[{"name": topic, "partition_indexes": [index]}])
            producers = answer.topics[0].partitions[0].active_producers
            found = [each.current_txn_start_offset for each in producers if each.producer_id == producer_id]
            return str(found[0] if found else "none"), answer

        self._until(words, ask, reads=True)


def _seen(result: Any, is_committed: bool) -> list[str]:
    """What a reader makes of an answer: values, and for one that reads everything the markers."""
    isolation = Isolation.READ_COMMITTED if is_committed else Isolation.READ_UNCOMMITTED
    aborted = [(each.producer_id, each.first_offset) for each in result.aborted_transactions or ()]
    visible = VisibilityFilter(isolation, aborted)
    seen: list[str] = []
    for batch in split_batches(result.records):
        header = read_header(batch)
        control = decode_control(batch) if header.is_control else None
        kind = control.type if control else None
        verdict = visible.decide(header, is_abort_marker=kind is ControlType.ABORT)
        if verdict is Verdict.DELIVER:
            seen += [(record.value or b"").decode() for record in decode_records(batch)]
        elif verdict is Verdict.MARKER and kind is not None and not is_committed:
            seen.append(f"<{kind.name.lower()}>")
    return seen


STEPS = (
    "init", "add", "add_offsets", "commit_offsets", "end", "write", "read", "offsets", "end_offset", "state",
    "open",
)  # fmt: skip
