"""The matrix of clients: docs/conformance.md agrees with the stored results, and the judgements are right for
recordings made by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from oncelog_devtools.client_matrix import judgements
from oncelog_devtools.client_matrix.judgements import FAULTS_END, FENCED, FIRST_ENDS, ROWS, Cell, Verdict
from oncelog_devtools.client_matrix.recording import Recording, Reply, highest_versions, parse_reply
from oncelog_devtools.client_matrix.scenarios import SCENARIOS
from support.tool import load_tool

from oncelog.testing.proxy import BatchSummary, Direction, Fate, WireEvent
from oncelog.testing.proxy.group_messages import MemberRequest
from oncelog.testing.proxy.txn_messages import TxnRequest

YES, NO, UNCLEAR = Verdict.YES, Verdict.NO, Verdict.UNCLEAR


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("clients_matrix")


def test_the_page_is_fresh(tool: ModuleType) -> None:
    text = tool.PAGE.read_text()
    assert text == tool.page(text), "run .venv/bin/python tools/clients_matrix.py"


def test_every_stored_result_has_all_rows_and_what_was_seen(tool: ModuleType) -> None:
    results = [*tool.stored(), *tool.stored(tool.KAFKA_FOLDER)]
    assert results
    for result in results:
        assert list(result["cells"]) == [row.key for row in ROWS], result["title"]
        for cell in result["cells"].values():
            assert cell["verdict"] in set(Verdict) and cell["seen"], result["title"]


def test_the_readme_names_the_date_of_the_check(tool: ModuleType) -> None:
    readme = (tool.ROOT / "README.md").read_text()
    own = next(result for result in tool.stored() if result["title"] == "Oncelog")
    assert f"last check of clients: {own['date']}" in readme


def test_a_cell_that_is_different_on_another_broker_is_listed(tool: ModuleType) -> None:
    result = tool.stored()[0]
    key = ROWS[0].key
    cells = {**result["cells"], key: {"verdict": "no", "seen": "something else"}}
    other = {**result, "broker": "another broker", "cells": cells}
    text = tool.render([result], [other])
    assert f"{ROWS[0].title}: no (something else) on another broker, {result['date']}" in text
    same = f"The {len(ROWS)} cells of 1 clients are the same"
    assert same in tool.render([result], [result]) and same not in text


def test_every_row_has_a_scenario() -> None:
    assert {row.scenario for row in ROWS} == set(SCENARIOS)


class Log:
    """A recording made by hand. Each request gets a number; responses name the number."""

    def __init__(self) -> None:
        self.events: list[WireEvent] = []
        self.replies: dict[str, Reply] = {}
        self.requests: list[WireEvent] = []

    def _add(self, event: WireEvent, **changes: Any) -> None:
        fields = {name: getattr(event, name) for name in WireEvent.__dataclass_fields__}
        self.events.append(WireEvent(**{**fields, "number": len(self.events) + 1, **changes}))

    def request(self, api: str, version: int = 0, fate: Fate = Fate.PASSED, **fields: Any) -> Log:
        event = WireEvent(
            Direction.REQUEST, api, version, len(self.requests) + 1, connection=1, fate=fate, **fields
        )
        self.requests.append(event)
        self._add(event)
        return self

    def produce(
        self, sequence: int | None, epoch: int = 0, pid: int = 7, version: int = 12, fate: Fate = Fate.PASSED,
        partition: int = 0,
    ) -> Log:  # fmt: skip
        number = (None, None, None, None) if sequence is None else (pid, epoch, sequence, sequence)
        batch = BatchSummary("t", partition, *number, 1, 70)
        return self.request("Produce", version, fate, batches=(batch,), acks=-1)

    def respond(self, number: int, fate: Fate = Fate.PASSED, **fields: Any) -> Log:
        self._add(self.requests[number - 1], direction=Direction.RESPONSE, batches=(), fate=fate, **fields)
        return self

    def note(self, text: str) -> Log:
        self._add(WireEvent(Direction.NOTE, "", detail=text))
        return self

    def reply(self, label: str, line: str) -> Log:
        self.replies[label] = parse_reply(line.replace(" ", "\t") if line.startswith("results ") else line)
        return self

    def recording(self, *stored: str) -> Recording:
        return Recording(self.events, self.replies, stored)


def verdict(judge: Callable[[Recording], Cell], log: Log, *stored: str) -> Verdict:
    return judge(log.recording(*stored)).verdict


def test_batches_with_a_producer_id_are_idempotent() -> None:
    assert verdict(judgements.judge_default, Log().produce(0)) == YES
    assert verdict(judgements.judge_default, Log().produce(None)) == NO
    assert verdict(judgements.judge_default, Log()) == UNCLEAR


@pytest.mark.parametrize(("batches", "expected"), [(1, YES), (5, YES), (6, NO)])
def test_five_batches_in_flight_are_the_most_that_a_broker_remembers(batches: int, expected: Verdict) -> None:
    log = Log()
    for sequence in range(batches):
        log.produce(sequence)
    assert verdict(judgements.judge_in_flight, log) == expected


def test_a_delivered_response_makes_room_and_a_held_one_does_not() -> None:
    log = Log().produce(0).respond(1, Fate.HELD)
    for sequence in range(1, 5):
        log.produce(sequence)
    assert verdict(judgements.judge_in_flight, log) == YES
    assert verdict(judgements.judge_in_flight, Log().produce(0).respond(1)) == YES
    log.respond(1, Fate.RELEASED).produce(5)
    assert (
        judgements.judge_in_flight(log.recording()).seen == "5 batches of a partition and 5 requests at most"
    )
    assert verdict(judgements.judge_in_flight, log.produce(6)) == NO


def test_batches_of_another_partition_do_not_count() -> None:
    log = Log()
    for sequence in range(4):
        log.produce(sequence).produce(sequence, partition=1)
    assert (
        judgements.judge_in_flight(log.recording()).seen == "4 batches of a partition and 8 requests at most"
    )


def lost(sequence: int | None, epoch: int = 0) -> Log:
    """Batch 0 is acknowledged; the acknowledgement of the next is lost."""
    return Log().produce(0).respond(1).produce(sequence, epoch).respond(2, Fate.CUT)


def test_a_lost_acknowledgement() -> None:
    def judged(log: Log, *stored: str) -> Verdict:
        return verdict(judgements.judge_lost_ack, log.reply("results", "results a=ok b=ok"), *stored)

    assert judged(lost(1).produce(1), "a", "b") == YES
    assert judged(lost(1).produce(2), "a", "b") == NO  # a new sequence
    assert judged(lost(1).produce(0, epoch=1), "a", "b") == NO  # a new epoch
    assert judged(lost(1), "a", "b") == NO  # not sent again
    assert judged(lost(1).produce(1), "a", "b", "b") == NO  # stored twice
    assert judged(lost(None).produce(None), "a", "b", "b") == NO
    assert judged(Log().produce(0), "a") == UNCLEAR


def refused() -> Log:
    return Log().produce(0).produce(1, fate=Fate.FORGED).respond(2, Fate.FORGED).produce(2)


def test_order_after_a_retriable_error() -> None:
    log = refused().reply("results", "results a=ok b=ok c=ok")
    assert verdict(judgements.judge_order, log, "a", "b", "c") == YES
    assert verdict(judgements.judge_order, log, "a", "c", "b") == NO
    assert verdict(judgements.judge_order, log, "a", "c") == NO
    assert (
        verdict(judgements.judge_order, refused().reply("results", "results a=ok b=REFUSED c=ok"), "a", "c")
        == NO
    )
    assert verdict(judgements.judge_order, Log().produce(0), "a") == UNCLEAR


def given_up(result: str = "TIMED_OUT") -> Log:
    return lost(1).reply("first", "results first=ok").reply("lost", f"results lost={result}").note(FAULTS_END)


def test_a_batch_that_may_be_stored_keeps_its_number() -> None:
    def judged(log: Log, later: str = "ok", stored: tuple[str, ...] = ("first", "lost", "later")) -> Cell:
        return judgements.judge_unknown_state(log.reply("later", f"results later={later}").recording(*stored))

    assert (
        judged(given_up().produce(2)).seen
        == "the sequence continues: epoch 0 sequence 1, then epoch 0 sequence 2"
    )
    assert judged(given_up().produce(0, epoch=1)).seen.startswith("a new epoch")
    assert judged(given_up().produce(0, pid=8)).seen.startswith("a new producer id")
    assert judged(given_up(), later="FATAL", stored=("first", "lost")).seen.startswith("the producer ends")
    assert judged(given_up("pending").produce(1).produce(2)).verdict == YES
    # The number of the lost batch for another record: the broker takes it for a repetition.
    assert judged(given_up().produce(1), stored=("first", "lost")).verdict == NO
    assert judged(given_up().produce(0), later="OUT_OF_ORDER", stored=("first", "lost")).verdict == NO
    assert judged(given_up().produce(2), stored=("first", "lost", "later", "later")).verdict == NO


def test_recovery_from_a_lost_state() -> None:
    def judged(log: Log, refused_result: str, later: str, *stored: str) -> Cell:
        log.reply("first", "results a=ok").reply("refused", f"results b={refused_result}")
        return judgements.judge_recovery(log.reply("later", f"results c={later}").recording(*stored))

    assert judged(refused(), "ok", "ok", "a", "b", "c").seen == "sent again under the same number"
    assert (
        judged(refused().produce(0, epoch=1), "ok", "ok", "a", "b", "c").seen
        == "epoch 0 to 1, then sent again"
    )
    assert judged(refused(), "UNKNOWN", "ok", "a", "c") == (NO, "b failed: UNKNOWN; later records are sent")
    assert judged(refused(), "UNKNOWN", "FATAL", "a") == (NO, "b failed: UNKNOWN; later records fail, too")


COORDINATOR = TxnRequest(coordinator_keys=("id",), is_transaction_coordinator=True)
ADDED = TxnRequest(partitions=(("t", 0),))


def found() -> Log:
    return Log().request("FindCoordinator", 4, txn=COORDINATOR).respond(1, txn_error_code=0)


def added(**fields: Any) -> Log:
    return found().request("AddPartitionsToTxn", 3, txn=ADDED).respond(2, txn_error_code=0, **fields)


def test_partitions_join_the_transaction_first() -> None:
    judge = judgements.judge_partitions_added
    assert verdict(judge, added().produce(0, version=11)) == YES
    assert verdict(judge, found().produce(0, version=12)) == YES
    assert verdict(judge, found().produce(0, version=11)) == NO
    assert verdict(judge, added().produce(0, version=11, partition=1)) == NO
    refused = found().request("AddPartitionsToTxn", 3, txn=ADDED).respond(2, txn_error_code=51)
    assert verdict(judge, refused.produce(0, version=11)) == NO
    assert verdict(judge, Log().produce(0, version=12)) == NO
    # A partition belongs to one transaction, not to the next.
    assert verdict(judge, added().produce(0, version=11).request("EndTxn").produce(1, version=11)) == NO


def two_transactions(second_epoch: int, end: int = 5, produce: int = 12) -> Log:
    log = found().produce(0, epoch=0, version=produce).request("EndTxn", end).note(FIRST_ENDS)
    return log.produce(0, epoch=second_epoch, version=produce).request("EndTxn", end)


def test_transactions_of_version_2() -> None:
    judge = judgements.judge_transaction_v2
    assert verdict(judge, two_transactions(second_epoch=1)) == YES
    assert verdict(judge, two_transactions(second_epoch=0)) == NO
    assert verdict(judge, two_transactions(second_epoch=1, end=4)) == NO
    assert verdict(judge, two_transactions(second_epoch=1, produce=11)) == NO
    assert verdict(judge, two_transactions(second_epoch=1).request("AddPartitionsToTxn", 3)) == NO
    assert verdict(judge, found().note(FIRST_ENDS)) == UNCLEAR


@pytest.mark.parametrize(
    ("member_id", "generation", "expected"), [("m", 3, YES), ("", 3, NO), ("m", None, NO), ("", None, NO)]
)
def test_offsets_with_the_member_of_the_group(
    member_id: str, generation: int | None, expected: Verdict
) -> None:
    member = MemberRequest("g", member_id, generation, None)
    assert (
        verdict(judgements.judge_group_metadata, Log().request("TxnOffsetCommit", 3, member=member))
        == expected
    )


def test_a_fenced_producer() -> None:
    def judged(log: Log, commit: str, again: str) -> Verdict:
        return verdict(judgements.judge_fenced, log.reply("commit", commit).reply("again", again))

    log = found().request("InitProducerId").note(FENCED)
    assert judged(log, "error\tFENCED", "error\tFENCED") == YES
    assert judged(log, "ok", "error\tFENCED") == NO
    assert judged(log, "error\tFENCED", "ok") == NO
    assert judged(log.request("InitProducerId"), "error\tFENCED", "error\tFENCED") == NO


END = TxnRequest("id", 7, 0, is_commit=True)


def test_a_lost_response_to_a_commit() -> None:
    def judged(log: Log, commit: str, *stored: str) -> Verdict:
        log.reply("results", "results a=ok").reply("commit", commit)
        return verdict(judgements.judge_lost_end, log, *stored)

    def cut() -> Log:
        return Log().request("EndTxn", 5, txn=END).respond(1, Fate.CUT)

    assert judged(cut().request("EndTxn", 5, txn=END), "ok", "a") == YES
    assert judged(cut().request("EndTxn", 5, txn=END), "ok") == NO
    assert judged(cut(), "ok", "a") == NO
    assert judged(cut().request("EndTxn", 5, txn=END), "error\tTIMED_OUT", "a") == NO
    other = TxnRequest("id", 7, 1, is_commit=True)
    assert judged(cut().request("EndTxn", 5, txn=other), "ok", "a") == NO
    assert judged(Log().request("EndTxn", 5, txn=END), "ok", "a") == UNCLEAR


def test_reading_only_committed_records() -> None:
    def judged(level: int, reply: str, *stored: str) -> Verdict:
        log = Log().request("Fetch", 16, isolation_level=level).reply("read", reply)
        return verdict(judgements.judge_read_committed, log, *stored)

    assert judged(1, "records\ta\tb", "a", "b") == YES
    assert judged(0, "records\ta\tb", "a", "b") == NO
    assert judged(1, "records\ta\taborted", "a", "b") == NO
    assert judged(1, "error\tno", "a", "b") == UNCLEAR


def test_consumers_of_kip_848() -> None:
    judge = judgements.judge_consumer_protocol
    log = Log().request("ConsumerGroupHeartbeat", 1).reply("read", "records\ta")
    assert verdict(judge, log, "a") == YES
    assert verdict(judge, log, "a", "b") == NO
    assert verdict(judge, Log().request("JoinGroup", 9).reply("read", "records\ta"), "a") == NO


def test_static_members() -> None:
    judge = judgements.judge_static_member

    def joined(instance_id: str | None) -> Log:
        member = MemberRequest("g", "", None, instance_id)
        return Log().request("JoinGroup", 9, member=member).reply("read", "records\ta")

    assert verdict(judge, joined("i"), "a") == YES
    assert verdict(judge, joined(None), "a") == NO
    assert verdict(judge, joined("i").request("LeaveGroup", 5), "a") == NO


def test_the_highest_version_of_each_api_is_noted() -> None:
    log = Log().request("Fetch", 4).request("Fetch", 16).request("Metadata", 9).respond(1)
    assert highest_versions(log.events) == {"Fetch": 16, "Metadata": 9}


def test_a_line_that_is_no_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="hello"):
        parse_reply("hello\tworld\n")
