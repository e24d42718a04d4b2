"""The demonstration on a small scale, and each of its pure parts alone."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from oncelog_demo.cli import command
from oncelog_demo.driver_kill import _Driver, choose_moment
from oncelog_demo.enriching import Job
from oncelog_demo.flights import (
    RESULT_COLUMNS,
    TOTAL_ROWS,
    delays_by_carrier_and_hour,
    enriched_truth,
    load_flights,
)
from oncelog_demo.loading import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, Load, Semantics, run_load
from oncelog_demo.pictures import counts_picture, delay_picture, sequences_picture, tasks_picture
from oncelog_demo.run import create_topics
from oncelog_demo.sink_attempts import AttemptResult, list_attempts, rows_with_result, with_rows
from oncelog_demo.timeline import BatchEvent, Mark, count_faults, first_lost_acknowledgement, list_marks
from oncelog_devtools.svg_charts import bar_chart, mix, nice_ticks
from playwright.sync_api import Browser
from support.broker import wait_until
from support.browser import chromium

from oncelog import Admin, Broker
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy import Action, BatchSummary, Direction, Fate, Outcome, Rule, WireEvent
from oncelog.testing.proxy.txn_messages import TxnRequest

# -- the timeline, from events ----------------------------------------------------------------------------


def request(
    time_ms: float, connection: int, correlation: int, sequence: int, fate: Fate = Fate.PASSED
) -> WireEvent:
    batch = BatchSummary("flights", 0, 7, 0, sequence, sequence + 9, 10, 500)
    return WireEvent(
        Direction.REQUEST, "Produce", 9, correlation, connection, batches=(batch,), fate=fate, time_ms=time_ms
    )


def response(
    time_ms: float,
    connection: int,
    correlation: int,
    offset: int | None,
    error: int = 0,
    fate: Fate = Fate.PASSED,
) -> WireEvent:
    outcome = Outcome("flights", 0, error, offset)
    return WireEvent(
        Direction.RESPONSE,
        "Produce",
        9,
        correlation,
        connection,
        outcomes=(outcome,),
        fate=fate,
        time_ms=time_ms,
    )


def test_a_lost_acknowledgement_is_followed_by_a_recognised_duplicate() -> None:
    events = [
        request(0, 1, 1, 0),
        response(1, 1, 1, 0, fate=Fate.CUT),
        request(10, 2, 1, 0),
        response(11, 2, 1, 0),
        request(12, 2, 2, 10),
        response(13, 2, 2, 10),
    ]
    marks = list_marks(events)
    assert [mark.event for mark in marks] == [BatchEvent.ACK_LOST, BatchEvent.DUPLICATE, BatchEvent.STORED]
    assert [mark.time_ms for mark in first_lost_acknowledgement(marks)] == [0, 10]
    counts = count_faults(events, marks)
    assert (counts.produce_requests, counts.acknowledgements_lost, counts.duplicates_recognised) == (3, 1, 1)


def test_lost_late_and_out_of_order_requests_are_told_apart() -> None:
    events = [
        request(0, 1, 1, 0, Fate.HELD),
        request(1, 1, 2, 10),
        response(2, 1, 2, None, error=45),
        request(3, 1, 1, 0, Fate.RELEASED),
        response(4, 1, 1, 0),
        request(5, 1, 3, 10, Fate.CUT),
        request(6, 2, 1, 10),
    ]
    marks = list_marks(events)
    assert [(mark.event, mark.late) for mark in marks] == [
        (BatchEvent.STORED, True),
        (BatchEvent.REJECTED, False),
        (BatchEvent.REQUEST_LOST, False),
        (BatchEvent.UNANSWERED, False),
    ]
    counts = count_faults(events, marks)
    assert (counts.requests_lost, counts.requests_late, counts.out_of_order_rejected) == (1, 1, 1)


# -- the sink's tasks, from events ----------------------------------------------------------------------


class Wire:
    """The messages of tasks as the proxy sees them, one per millisecond."""

    def __init__(self) -> None:
        self.events: list[WireEvent] = []

    def say(
        self, direction: Direction, api: str, writer: tuple[int, int] | None = None, **fields: Any
    ) -> None:
        number = len(self.events)
        correlation_id = number if direction is Direction.REQUEST else number - 1
        event = WireEvent(direction, api, 1, correlation_id, 1, producer=writer, time_ms=number, **fields)
        self.events.append(event)

    def begin(self, task: int, writer: tuple[int, int]) -> None:
        self.say(Direction.REQUEST, "InitProducerId", txn=TxnRequest(transactional_id=f"oncelog-5f1c/{task}"))
        self.say(Direction.RESPONSE, "InitProducerId", writer, txn_error_code=0)

    def write(self, writer: tuple[int, int]) -> None:
        batch = BatchSummary("enriched", 0, *writer, 0, 9, 10, 500)
        self.say(Direction.REQUEST, "Produce", batches=(batch,))

    def commit(self, writer: tuple[int, int], fate: Fate = Fate.PASSED) -> None:
        request = TxnRequest(producer_id=writer[0], producer_epoch=writer[1], is_commit=True)
        self.say(Direction.REQUEST, "EndTxn", txn=request, fate=fate)
        if fate is Fate.PASSED:
            self.say(Direction.RESPONSE, "EndTxn", (writer[0], writer[1] + 1), txn_error_code=0)


def test_attempts_before_and_after_the_kill_are_matched_to_batches() -> None:
    wire = Wire()
    for task, writer in enumerate([(1, 0), (2, 0), (3, 0)]):
        wire.begin(task, writer)
        wire.write(writer)
        wire.commit(writer)
    wire.begin(0, (1, 2))
    wire.write((1, 2))
    wire.commit((1, 2))
    wire.begin(1, (2, 2))
    wire.write((2, 2))
    wire.commit((2, 2), Fate.DROPPED)
    wire.begin(2, (3, 2))
    killed_at_ms = len(wire.events) - 0.5
    wire.begin(0, (1, 4))
    for task, writer in ((1, (2, 4)), (2, (3, 4))):
        wire.begin(task, writer)
        wire.write(writer)
        wire.commit(writer)
    attempts = with_rows(list_attempts(wire.events, killed_at_ms), {(1, 2): 7, (2, 2): 8})
    assert [(attempt.task, attempt.batch, attempt.result, attempt.rows) for attempt in attempts] == [
        (0, 0, AttemptResult.COMMITTED, 0),
        (1, 0, AttemptResult.COMMITTED, 0),
        (2, 0, AttemptResult.COMMITTED, 0),
        (0, 1, AttemptResult.COMMITTED, 7),
        (1, 1, AttemptResult.ABORTED, 8),
        (2, 1, AttemptResult.ABORTED, 0),
        (0, 1, AttemptResult.SKIPPED, 0),
        (1, 1, AttemptResult.COMMITTED, 0),
        (2, 1, AttemptResult.COMMITTED, 0),
    ]
    assert rows_with_result(attempts, AttemptResult.ABORTED) == 8
    drawing = tasks_picture(attempts, killed_at_ms)
    assert ElementTree.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"
    assert ">batch 1<" in drawing and ">batch 1 again<" in drawing and "SIGKILL" in drawing


def test_the_lost_commit_is_one_of_an_inner_batch() -> None:
    moments = [choose_moment(seed, tasks=6, rows_per_batch=100) for seed in range(200)]
    assert {moment.commit for moment in moments} == {9, 10, 11, 15, 16, 17}
    assert {(moment.commit // 6, moment.rows) for moment in moments} == {(1, 150), (2, 250)}


# -- pictures ------------------------------------------------------------------------------------------


def test_pictures_are_well_formed_svg() -> None:
    marks = [Mark(float(i), i % 6, i * 10, 10, kind, False, i) for i, kind in enumerate([*BatchEvent] * 3)]
    rows = [{"carrier": "AA", "hour": h, "departed": 2, "dep_delay_min": h * 4} for h in range(5, 9)]
    drawings = [
        sequences_picture(marks, 0.01),
        delay_picture(rows, {"AA": "American & Sons"}),
        counts_picture([("exactly once", 0, 0), ("at least once", 0, 321)]),
        bar_chart("none", []),
    ]
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"
    assert "American &amp; Sons" in drawings[1] and "321" in drawings[2]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def test_no_text_of_a_picture_is_cut_by_its_edge(browser: Browser) -> None:
    marks = [Mark(float(i), i % 6, i * 10, 10, kind, False, i) for i, kind in enumerate([*BatchEvent] * 3)]
    rows = [{"carrier": "EV", "hour": h, "departed": 2, "dep_delay_min": h * 4} for h in range(5, 24)]
    names = ["exactly once, from Spark", "at least once, from Spark", "mmmm WWWW 中文中文中文中文中文"]
    drawings = [
        sequences_picture(marks, 0.01),
        delay_picture(rows, {"EV": "ExpressJet Airlines Inc."}),
        counts_picture([(name, 26_024, 336_776) for name in names]),
        bar_chart("From process start to the first acknowledgement", [("l" * 60, 1.0, "1 s", "#000000")]),
    ]
    cut = """svg => [...svg.querySelectorAll("text")].filter(text => {
        const box = text.getBBox(), whole = svg.viewBox.baseVal
        return box.x < 0 || box.y < 0 || box.x + box.width > whole.width || box.y + box.height > whole.height
    }).map(text => text.textContent)"""
    page = browser.new_page()
    for drawing in drawings:
        page.set_content(drawing)
        assert page.locator("svg").evaluate(cut) == []


@pytest.mark.parametrize(("top", "last"), [(0, 0), (0.3, 0.2), (7, 6), (99, 75), (56_000, 40_000)])
def test_ticks_are_round_and_within(top: float, last: float) -> None:
    assert nice_ticks(top)[0] == 0 and nice_ticks(top)[-1] == pytest.approx(last)


def test_mixed_colours_are_clipped_to_their_ends() -> None:
    assert [mix("#000000", "#ff8000", share) for share in (-1, 0.5, 2)] == ["#000000", "#804000", "#ff8000"]


# -- the data ------------------------------------------------------------------------------------------


def test_all_flights_are_loaded_with_unique_keys() -> None:
    flights = load_flights()
    assert len(flights) == TOTAL_ROWS == len(set(flights.keys.to_pylist()))
    key, value, timestamp_ms = next(flights.records())
    assert key == b"2013/1/1/UA/1545/EWR" and timestamp_ms == 1357034400000
    assert json.loads(value)["dep_delay"] == 2


def test_the_expected_aggregation_counts_every_flight_once() -> None:
    table = pa.table(
        {"carrier": ["B", "A", "A"], "hour": [5, 6, 6], "dep_delay": [1, None, 4], "arr_delay": [0, None, -2]}
    )
    assert delays_by_carrier_and_hour(table).to_pylist() == [
        dict(zip(RESULT_COLUMNS, ("A", 6, 2, 1, 4, -2), strict=True)),
        dict(zip(RESULT_COLUMNS, ("B", 5, 1, 1, 1, 0), strict=True)),
    ]


def test_the_expected_enrichment_keeps_every_flight() -> None:
    truth = enriched_truth(load_flights())
    assert truth.num_rows == TOTAL_ROWS
    (first,) = truth.filter(pc.field("key") == "2013/1/1/UA/1545/EWR").to_pylist()
    assert first["airline"] == "United Air Lines Inc."
    assert first["airport"] == "George Bush Intercontinental"
    assert (first["manufacturer"], first["model"], first["seats"]) == ("BOEING", "737-824", 149)
    assert truth["airport"].null_count > 0, "San Juan is not in the airports table; its flights must be kept"


# -- three semantics under the same faults -------------------------------------------------------------

ROWS = 6_000
HARSH = [
    Rule(action=Action.CUT, direction=Direction.RESPONSE, api="Produce", probability=0.1),
    Rule(action=Action.CUT, direction=Direction.REQUEST, api="Produce", probability=0.1),
    Rule(action=Action.HOLD, api="Produce", probability=0.05, release_after=1, delay_ms=50),
    # Apply each of these two rules once, regardless of the seed. A slow machine sends few requests, so chance
    # may spare all of them.
    Rule(action=Action.CUT, direction=Direction.REQUEST, api="Produce", nth=2),
    Rule(action=Action.CUT, direction=Direction.RESPONSE, api="Produce", nth=2),
]


def times_stored(broker: BrokerProcess, load: Load) -> Counter[str]:
    from oncelog import Consumer, TopicPartition

    counts: Counter[str] = Counter()
    with Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
        partitions = [TopicPartition(load.semantics.topic, p) for p in range(6)]
        ends = consumer.end_offsets(partitions)
        for tp in partitions:
            for batch in consumer.fetch_range(tp, 0, ends[tp]):
                counts.update(key.decode() for key in batch.column("key").to_pylist())
    return counts


@pytest.mark.behaviour("I25", "I1", "I17")
def test_only_exactly_once_neither_loses_nor_doubles_under_faults_and_a_kill(tmp_path: Path) -> None:
    flights = load_flights(ROWS)
    keys = set(flights.keys.to_pylist())

    def lost_and_doubled(broker: BrokerProcess, semantics: Semantics) -> tuple[int, int]:
        load = run_load(semantics, flights, broker, seed=5, rules=HARSH, on_progress=lambda _: None)
        assert load.sent == ROWS and load.acknowledged + load.failed == ROWS
        stored = times_stored(broker, load)
        assert set(stored) <= keys
        return len(keys - set(stored)), stored.total() - len(stored)

    with BrokerProcess(tmp_path / "broker") as broker:
        create_topics(broker.bootstrap_servers)
        assert lost_and_doubled(broker, EXACTLY_ONCE) == (0, 0)
        lost, doubled = lost_and_doubled(broker, AT_LEAST_ONCE)
        assert lost == 0 and doubled > 0
        lost, doubled = lost_and_doubled(broker, AT_MOST_ONCE)
        assert lost > 0 and doubled == 0


def test_a_driver_that_is_killed_leaves_no_temporary_files(tmp_path: Path) -> None:
    """Regression for R541: each demonstration left the files of two killed Spark drivers."""

    class Waits(Job):
        def command(self) -> list[str]:
            program = "import tempfile, signal; print(tempfile.mkdtemp(), flush=True); signal.pause()"
            return [sys.executable, "-c", program]

    log = tmp_path / "log"
    with _Driver(Waits("", "", 1, "oncelog", {}, ""), log):
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), 60)
        temporary = Path(log.read_text().strip())
        assert temporary.is_dir()
    assert not temporary.parent.exists() and "oncelog-demo-" in temporary.parent.name


@pytest.mark.full("the demonstration starts a Spark driver of its own")
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.behaviour("I25", "P1", "P2")
def test_the_demo_command_shows_all_semantics_end_to_end(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    arguments = ["--rows=30000", "--no-control", f"--report={report}", f"--data-dir={tmp_path / 'data'}"]
    run = CliRunner().invoke(command, [*arguments, "-o", "json"], catch_exceptions=False)
    assert run.exit_code == 0, run.stderr
    exact, at_least, at_most, enriched = json.loads(run.stdout)
    assert (exact["sent"], exact["in_topic"], exact["lost"], exact["doubled"]) == (30_000, 30_000, 0, 0)
    assert exact["acks_lost"] > 0
    assert at_least["lost"] == 0 and at_least["doubled"] > 0
    assert at_most["lost"] > 0 and at_most["doubled"] == 0
    assert (enriched["in_topic"], enriched["lost"], enriched["doubled"]) == (30_000, 0, 0)
    assert enriched["aborted"] > 0 and enriched["sent"] == 30_000 + enriched["aborted"]
    page = report.read_text()
    assert page.count("<svg") == 4 and "verdict good" in page
    assert "src=" not in page and "<script" not in page, "the report must need nothing else"
    kept = tmp_path / "data" / "broker"
    assert f"oncelog serve --data-dir {kept} " in run.stderr
    with Broker(data_dir=kept) as broker, Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        assert len(admin.list_topics()) > 3, "the log can be served again"


def test_a_data_directory_that_is_not_empty_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("do not touch")
    run = CliRunner().invoke(command, [f"--data-dir={tmp_path}"])
    assert run.exit_code != 0 and "not empty" in str(run.exception)
    assert (tmp_path / "mine.txt").exists()
