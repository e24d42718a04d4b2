"""`oncelog conform` against our broker, against a broker with a fault, and against servers that are not Kafka
brokers.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.cli import Outcome, oncelog
from support.scenarios.run import endpoint_of
from support.scripted_server import Answer, offers_all, scripted_server
from support.security.brokers import Certificates, client_config, secured_broker

from oncelog import Admin, Broker
from oncelog.broker.state import OFFERED
from oncelog.conform.deadline import Deadline
from oncelog.conform.raw_connection import NoAnswer
from oncelog.conform.scenario_reader import Scenario, read_scenarios
from oncelog.conform.scenario_run import StepFailed
from oncelog.conform.suite import NO_MORE_ANSWERS, OUT_OF_TIME, Limits, Suite
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import API_BY_NAME

SECTIONS = list(dict.fromkeys(scenario.file for scenario in read_scenarios()))
WAITING = "txn_time"
"""The section that these tests leave out, because its scenarios wait for time-outs.

tests/interop/test_interop_conformance.py runs it.
"""


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"oncelog.transaction.version": 2}


def conform(servers: str, *arguments: str, sections: tuple[str, ...] = ()) -> Outcome:
    chosen = [part for section in sections for part in ("--section", section)]
    return oncelog("conform", *chosen, *arguments, servers=servers)


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(outcome.out)
    return rows


@pytest.mark.behaviour("P10")
def test_our_broker_fails_no_scenario_and_shows_its_documented_deviations(ours: str) -> None:
    sections = tuple(section for section in SECTIONS if section != WAITING)
    ended = conform(ours, "--newest", "-o", "json", sections=sections)
    rows = rows_of(ended)
    assert [row for row in rows if row["result"] not in ("pass", "differs")] == []
    assert {row["reason"] for row in rows if row["result"] == "differs"} == {"producer-without-epoch"}
    assert {row["section"] for row in rows} == set(sections)
    assert ended.code == 0, ended.err
    with Admin({"bootstrap.servers": ours}) as admin:
        assert [topic.name for topic in admin.list_topics() if "conform" in topic.name] == []


@pytest.mark.behaviour("P10")
@pytest.mark.parametrize("output", ["table", "json"])
def test_a_broker_that_forgets_a_batch_too_early_is_noticed(
    ours: str, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.setattr("oncelog.rules.idempotence.append.REMEMBERED_BATCHES", 4)
    ended = conform(ours, "--newest", "-o", output, sections=("idempotence",))
    assert ended.code == 3
    if output == "table":
        assert "idempotence: Five batches are remembered (Produce 13)" in ended.out
        assert "expected  0\n  received  OUT_OF_ORDER_SEQUENCE_NUMBER" in ended.out
        return
    failed = {row["scenario"]: row for row in rows_of(ended) if row["result"] == "fail"}
    assert failed["Five batches are remembered"]["step"] == "produce T a by=A seq=0 -> 0"
    assert failed["Five batches are remembered"]["received"] == "OUT_OF_ORDER_SEQUENCE_NUMBER"
    assert "The newest batch again" not in failed


def test_a_field_of_a_response_is_shown_with_what_was_expected(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncelog.rules.idempotence.append._find_remembered", lambda entry, batch: None)
    rows = rows_of(conform(ours, "--newest", "-o", "json", sections=("idempotence",)))
    (row,) = [row for row in rows if row["scenario"] == "A repetition gets the first answer, time included"]
    place = "responses[0].partition_responses[0].error_code"
    assert row["expected"] == f"{place}: 'NONE'" and row["received"].startswith(f"{place}: 'OUT_OF_ORDER")


def test_versions_that_the_broker_does_not_offer_are_skipped_with_the_reason(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce = API_BY_NAME["Produce"]
    monkeypatch.setitem(OFFERED, produce.key, produce._replace(max_version=9))
    ended = conform(ours, "-o", "json", sections=("txn_produce",))
    rows = [row for row in rows_of(ended) if row["scenario"] == "A transactional id that nobody knows"]
    results = {row["version"]: (row["result"], row["reason"]) for row in rows}
    assert results["Produce 9"] == ("pass", None)
    assert results["Produce 12"] == ("skipped", "the broker offers Produce 0-9, not 12")
    table = conform(ours, sections=("txn_produce",))
    assert "Produce 10, 11, 12" in table.out and "the broker offers Produce 0-9" in table.out
    assert (ended.code, table.code) == (0, 0)


def test_a_broker_without_an_epoch_per_transaction_skips_what_needs_it() -> None:
    with Broker(config={"oncelog.transaction.version": 0}) as broker:
        ended = conform(broker.bootstrap_servers, "-o", "json", sections=("txn_end_epoch",))
    reasons = {(row["result"], row["reason"]) for row in rows_of(ended)}
    assert reasons == {("skipped", "the broker's transaction.version is 0, not 2")}
    assert ended.code == 0


def test_kept_topics_have_the_prefix(ours: str) -> None:
    kept = conform(ours, "--prefix", "mine", "--keep", sections=("init_producer_id", "producers"))
    assert kept.code == 0
    with Admin({"bootstrap.servers": ours}) as admin:
        topics = [topic.name for topic in admin.list_topics() if topic.name.startswith("mine-")]
        assert topics
        admin.delete_topics(topics)


def test_the_scenarios_are_listed_without_a_broker() -> None:
    listed = conform("127.0.0.1:1", "--list", "-o", "jsonl", sections=("txn_late",))
    rows = [json.loads(line) for line in listed.out.splitlines()]
    assert listed.code == 0
    assert "A late abort tears a transaction" in {row["scenario"] for row in rows}
    assert {row["section"] for row in rows} == {"txn_late"}


def test_an_unknown_section_is_a_usage_error() -> None:
    ended = conform("127.0.0.1:1", sections=("kafka",))
    assert ended.code == 2 and "expected one of idempotence, " in ended.err


def test_a_secured_broker_is_reached_with_client_settings(certificates: Certificates, tmp_path: Path) -> None:
    with secured_broker(tmp_path / "data", certificates, users=("alice",)) as broker:
        config = client_config(broker, certificates, "alice")
        right = [part for key, value in config.items() for part in ("-X", f"{key}={value}")]
        assert oncelog("conform", "--section", "txn_init", "--newest", *right).code == 0
        wrong = oncelog("conform", *right, "-X", "sasl.password=wrong")
        assert wrong.code == 1 and "refused sasl.mechanism" in wrong.err
        plain = oncelog("conform", "-b", broker.bootstrap_servers, "--timeout", "2")
        assert plain.code in (1, 4) and "security.protocol" in plain.err


# --- servers that are not Kafka brokers


def test_no_broker_is_one_line_and_exit_code_1() -> None:
    ended = conform("127.0.0.1:1")
    assert ended.code == 1 and "cannot connect to 127.0.0.1:1" in ended.err
    assert ended.out == ""


def _silent(header: RequestHeader) -> bytes:
    return b""


def _text(header: RequestHeader) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\n\r\n"


def _drops(header: RequestHeader) -> bytes:
    """Answer ApiVersions with all APIs. Answer any other request with a frame that never ends."""
    return offers_all(header) or b"\0\0\xff\xff" + bytes(100)


def _other_request(header: RequestHeader) -> bytes:
    return offers_all(header) or b"\0\0\0\x08" + bytes(8)


SHORT = ("--timeout", "0.5")
SILENT = "accepted the connection and did not answer"


@pytest.mark.parametrize(
    ("answer", "options", "code", "texts"),
    [
        (_silent, ("-X", "socket.connection.setup.timeout.ms=300"), 4, [SILENT]),
        (offers_all, SHORT, 4, ["the broker did not answer in time", SILENT]),
        (_drops, SHORT, 4, ["the broker did not answer in time", SILENT]),
        (_text, (), 1, ["sent a malformed response"]),
        (_other_request, (), 1, ["MetadataResponse"]),
    ],
)
def test_a_server_that_is_no_broker_ends_the_command_with_a_reason(
    answer: Answer, options: tuple[str, ...], code: int, texts: list[str]
) -> None:
    with scripted_server(answer) as servers:
        ended = conform(servers, *options)
    assert ended.code == code, ended.err
    assert any(text in ended.err for text in texts), ended.err
    assert ended.out == ""


# --- brokers that stop answering


@pytest.fixture
def suite(oncelog_broker: Broker) -> Suite:
    suite = Suite([endpoint_of(oncelog_broker.bootstrap_servers)], "stops", Limits(60.0, 600.0))
    suite.prepare()
    return suite


def test_nothing_is_tried_on_a_broker_that_has_gone(suite: Suite, oncelog_broker: Broker) -> None:
    outcomes = suite.run(read_scenarios(), newest_only=True, keep=False)
    assert next(outcomes).result == "pass"
    oncelog_broker.stop()
    failed, *others = outcomes
    assert failed.result == "fail"
    assert {(outcome.result, outcome.reason) for outcome in others} == {("skipped", NO_MORE_ANSWERS)}


def test_scenarios_without_enough_time_are_skipped_with_exit_code_4(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suite, "prepare", lambda suite: setattr(suite, "_end", Deadline(0)))
    ended = conform(ours, "-o", "json", sections=("txn_late",))
    assert {(row["result"], row["reason"]) for row in rows_of(ended)} == {("skipped", OUT_OF_TIME)}
    assert ended.code == 4


def test_a_scenario_that_the_end_of_the_time_cuts_is_no_failure(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(suite: Suite, scenario: Scenario, version: int | None) -> None:
        monkeypatch.setattr(suite, "_end", Deadline(0))
        raise StepFailed(scenario, "state A -> Ongoing", NoAnswer("the broker did not answer in time"))

    monkeypatch.setattr(Suite, "_run", cut)
    ended = conform(ours, "-o", "json", sections=("txn_late",))
    assert {(row["result"], row["reason"]) for row in rows_of(ended)} == {("skipped", OUT_OF_TIME)}
    assert ended.code == 4


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_run_that_is_terminated_leaves_no_topics(
    ours: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, number = Suite._run, getattr(signal, name)

    def then_terminate(suite: Suite, scenario: Scenario, version: int | None) -> None:
        run(suite, scenario, version)
        signal.raise_signal(number)

    monkeypatch.setattr(Suite, "_run", then_terminate)
    before = signal.signal(number, lambda *_: None)  # otherwise the signal would end the test process
    try:
        ended = conform(ours, "--prefix", name, sections=("producers",))
    finally:
        signal.signal(number, before)
    assert ended.code == 128 + number
    with Admin({"bootstrap.servers": ours}) as admin:
        assert not any(topic.name.startswith(name) for topic in admin.list_topics())
