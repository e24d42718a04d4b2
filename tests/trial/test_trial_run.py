"""Runs of a trial on our broker, with a stand-in for Spark."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from support.trial import StandInDriver, trial_of

from oncelog import Admin, Broker, Producer
from oncelog.errors import ConfigError, OncelogError, TimedOut
from oncelog.pipeline.restart_policy import ExitInfo, ExitKind
from oncelog.testing.proxy.events import BatchSummary, Direction, Fate, WireEvent
from oncelog.testing.proxy.events import Outcome as ProduceOutcome
from oncelog.testing.proxy.txn_messages import TxnRequest
from oncelog.trial import run
from oncelog.trial.judgement import Verdict
from oncelog.trial.plan import Moment, Network, TargetKind, choose_cells, has_come, why_not
from oncelog.trial.run import MAX_FAILURES, MarkKind, Outcome, Trial, _CellRun, _Watch, run_cell
from oncelog.trial.targets import TopicTarget


@pytest.fixture
def trial(broker: Broker, tmp_path: Path) -> Trial:
    return trial_of(TargetKind.TOPIC, broker.bootstrap_servers, tmp_path)


def outcome_of(cell: str, trial: Trial, monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> Outcome:
    """Run a cell of the trial with a stand-in driver that has these class attributes."""
    monkeypatch.setattr(run, "Driver", type("Driver", (StandInDriver,), attributes))
    (chosen,) = choose_cells([cell], trial.kind)
    return run_cell(trial, chosen)


def test_a_run_without_a_fault_copies_each_row_once(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of("calm", trial, monkeypatch)
    assert outcome.verdict is Verdict.CLEAN, outcome
    assert outcome.counts is not None and outcome.counts.found == 30 and outcome.starts == 1
    feeds = [mark.text for mark in outcome.marks if mark.kind is MarkKind.FEED]
    assert feeds == [f"rows {first} to {first + 9} sent to the source" for first in (0, 10, 20)]


@pytest.mark.behaviour("P7")
def test_a_lost_commit_entry_doubles_the_micro_batch_of_a_sink_that_does_not_remember_it(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of("commit-lost", trial, monkeypatch, remembers=False)
    assert outcome.verdict is Verdict.VIOLATED and outcome.has_happened, outcome
    assert outcome.counts is not None
    assert (outcome.counts.lost, outcome.starts) == (0, 2)
    # The query may have seen the ten rows in two parts, and only the last micro-batch is repeated.
    assert 0 < outcome.counts.doubled <= 10
    assert set(outcome.counts.doubled_examples) <= {str(number) for number in range(10, 20)}
    faults = [mark.text for mark in outcome.marks if mark.kind is MarkKind.FAULT]
    assert faults[1].endswith(" of Spark's commit log removed")


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize("cell", ["commit-lost", "driver-after-commit"])
def test_a_sink_that_remembers_its_micro_batches_is_clean(
    cell: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(cell, trial, monkeypatch)
    assert outcome.verdict is Verdict.CLEAN and outcome.starts == 2, outcome


@pytest.mark.parametrize("cell", ["task-fails", "driver-in-commit"])
def test_a_fault_that_does_not_happen_is_no_pass(
    cell: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(cell, trial, monkeypatch)
    assert outcome.verdict is Verdict.NOT_REACHED and outcome.detail, outcome


@pytest.mark.parametrize("cell", ["requests-cut", "answers-cut"])
def test_what_is_cut_is_named(cell: str, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(cell, trial, monkeypatch)
    assert outcome.verdict is Verdict.CLEAN, outcome
    assert outcome.detail == "cut: Fetch 1, Produce 1"


def produced(topic: str, error_code: int = 0) -> WireEvent:
    return WireEvent(Direction.RESPONSE, "Produce", outcomes=(ProduceOutcome(topic, 0, error_code, None),))


@pytest.mark.behaviour("P7")
def test_a_record_for_another_topic_is_no_write_to_the_target() -> None:
    """R1394: such a record counted, so the driver was killed before it wrote rows."""
    watch = _Watch("target")
    for event in (produced("announcements"), produced("target", 6), produced("target")):
        assert watch.writes == 0
        watch.see(event)
    assert watch.writes == 1
    (rule,) = watch.rules(Network.LOSE_ACKNOWLEDGEMENTS)
    assert rule.matches(produced("target")) and not rule.matches(produced("announcements"))
    # No record is a write to a directory or database.
    elsewhere = _Watch(None)
    elsewhere.see(produced("target"))
    assert (elsewhere.writes, elsewhere.rules(Network.LOSE_ACKNOWLEDGEMENTS)) == (0, [])


def sent_rows(topic: str, producer_id: int) -> WireEvent:
    batch = BatchSummary(topic, 0, producer_id, 0, 0, 0, 1, 100)
    return WireEvent(Direction.REQUEST, "Produce", batches=(batch,))


def ended(producer_id: int, *, is_commit: bool = True, error_code: int = 0) -> WireEvent:
    txn = TxnRequest(transactional_id="t", producer_id=producer_id, is_commit=is_commit)
    return WireEvent(Direction.RESPONSE, "EndTxn", txn=txn, txn_error_code=error_code)


def test_only_a_commit_with_rows_is_lost() -> None:
    """Another producer, or an earlier transaction of the same one, may have sent the rows."""
    watch = _Watch("target")
    (rule,) = watch.rules(Network.LOSE_COMMITS)
    assert not rule.matches(ended(1))
    watch.see(sent_rows("announcements", 2))
    watch.see(sent_rows("target", 1))
    watch.see(produced("target"))
    assert rule.matches(ended(1)) and not rule.matches(ended(1, error_code=15))
    assert not rule.matches(ended(2)) and not rule.matches(ended(1, is_commit=False))
    watch.see(replace(ended(1), fate=Fate.DROPPED))
    assert rule.matches(ended(1)) and watch.commits_lost == 1
    watch.see(ended(1))
    assert not rule.matches(ended(1))
    watch.see(sent_rows("target", 1))
    watch.see(WireEvent(Direction.RESPONSE, "InitProducerId", producer=(1, 5)))
    assert not rule.matches(ended(1))


def test_the_answers_that_are_cut_are_those_to_rows_of_the_target() -> None:
    """R1397: the first response of each kind was cut, which was perhaps one for another topic."""
    watch = _Watch("target")
    rules = {rule.api: rule for rule in watch.rules(Network.CUT_ANSWERS)}
    assert rules["Produce"].matches(produced("target"))
    assert not rules["Produce"].matches(produced("announcements"))
    assert not rules["Produce"].matches(produced("target", 6))  # no row was stored
    assert not rules["EndTxn"].matches(ended(1))
    watch.see(sent_rows("target", 1))
    assert rules["EndTxn"].matches(ended(1))
    elsewhere = {rule.api: rule for rule in _Watch(None).rules(Network.CUT_ANSWERS)}
    assert elsewhere["Produce"].matches(produced("announcements")) and elsewhere["EndTxn"].matches(ended(1))


def test_the_requests_that_are_cut_are_those_with_rows_of_the_target() -> None:
    watch = _Watch("target")
    rules = {rule.api: rule for rule in watch.rules(Network.CUT_REQUESTS)}
    commit = replace(ended(1), direction=Direction.REQUEST, txn_error_code=None)
    assert rules["Produce"].matches(sent_rows("target", 1))
    assert not rules["Produce"].matches(sent_rows("announcements", 1))
    assert not rules["EndTxn"].matches(commit)
    watch.see(replace(sent_rows("target", 1), fate=Fate.CUT))
    assert rules["EndTxn"].matches(commit) and watch.row_cuts == 1


@pytest.mark.behaviour("P7")
def test_a_sink_that_ignores_its_errors_loses_rows_of_a_request_that_is_cut(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1474: a lost response loses no row of such a sink, so that no cell showed its fault."""

    def copy(self: StandInDriver, consumer: Any, _producer: Any, begin: Any, ends: Any) -> None:
        settings = {"bootstrap.servers": self.settings["BOOTSTRAP_SERVERS"], "enable.idempotence": "false"}
        with suppress(OncelogError), Producer({**settings, "retries": "0"}) as producer:
            StandInDriver._copy(self, consumer, producer, begin, ends)

    answers = outcome_of("answers-cut", trial, monkeypatch, _copy=copy)
    assert answers.verdict is Verdict.CLEAN, answers
    requests = outcome_of("requests-cut", trial, monkeypatch, _copy=copy)
    assert requests.verdict is Verdict.VIOLATED and requests.has_happened, requests
    assert requests.counts is not None and requests.counts.lost > 0 == requests.counts.doubled


@pytest.mark.behaviour("P7")
def test_a_sink_that_ignores_its_errors_loses_rows_that_are_refused(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1524: its producer repeats a request that is lost, so that `requests-cut` showed no fault."""

    def copy(self: StandInDriver, consumer: Any, producer: Any, begin: Any, ends: Any) -> None:
        with suppress(OncelogError):
            StandInDriver._copy(self, consumer, producer, begin, ends)

    lost = outcome_of("requests-cut", trial, monkeypatch, _copy=copy)
    assert lost.verdict is Verdict.CLEAN, lost
    refused = outcome_of("rows-refused", trial, monkeypatch, _copy=copy)
    assert refused.verdict is Verdict.VIOLATED and refused.has_happened, refused
    assert refused.counts is not None and refused.counts.lost > 0 == refused.counts.doubled


@pytest.mark.behaviour("P7")
def test_a_sink_that_notes_a_micro_batch_before_it_sends_it_loses_rows(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1521: all cells called such a sink clean, because none killed it between its note and its rows."""

    class Killed(Exception):
        pass

    def copy(self: StandInDriver, consumer: Any, _producer: Any, begin: Any, ends: Any) -> None:
        note = self._checkpoint / f"noted-{sorted(ends.items())}"
        if note.exists():
            return
        note.touch()
        producer = Producer({"bootstrap.servers": self.settings["BOOTSTRAP_SERVERS"]})
        sender = SimpleNamespace(send=producer.send, flush=lambda: None)
        StandInDriver._copy(self, consumer, sender, begin, ends)
        while not self._stop.is_set():
            with suppress(TimedOut):
                producer.flush(timeout=0.05)
                break
        with suppress(TimedOut):
            producer.close(timeout=0)
        if self._stop.is_set():
            raise Killed

    def micro_batch(self: StandInDriver, consumer: Any, producer: Any) -> None:
        with suppress(Killed):
            StandInDriver._micro_batch(self, consumer, producer)

    methods = {"_copy": copy, "_micro_batch": micro_batch}
    stored = outcome_of("driver-in-write", trial, monkeypatch, **methods)
    assert stored.has_happened, stored
    lost = outcome_of("driver-write-lost", trial, monkeypatch, **methods)
    assert lost.verdict is Verdict.VIOLATED and lost.has_happened, lost
    assert lost.counts is not None and lost.counts.lost > 0 == lost.counts.doubled


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize("notes_first", [True, False])
def test_a_sink_that_notes_a_micro_batch_before_its_commit_loses_rows(
    notes_first: bool, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1626: all cells called such a sink clean, because none killed it between its note and its commit."""

    class Killed(Exception):
        pass

    def wait_or_die(self: StandInDriver, call: Callable[[float], None]) -> None:
        while True:
            with suppress(TimedOut):
                return call(0.05)
            if self._stop.is_set():
                raise Killed

    def copy(self: StandInDriver, consumer: Any, _producer: Any, begin: Any, ends: Any) -> None:
        note = self._checkpoint / f"noted-{sorted(ends.items())}"
        if note.exists():
            return
        settings = {"bootstrap.servers": self.settings["BOOTSTRAP_SERVERS"], "transactional.id": "copy"}
        producer = Producer(settings)
        try:
            # This aborts the transaction of a driver that was killed.
            producer.init_transactions()
            producer.begin_transaction()
            sender = SimpleNamespace(send=producer.send, flush=lambda: wait_or_die(self, producer.flush))
            StandInDriver._copy(self, consumer, sender, begin, ends)
            if notes_first:
                note.touch()
            wait_or_die(self, producer.commit_transaction)
        finally:
            with suppress(TimedOut):
                producer.close(timeout=0)

    def micro_batch(self: StandInDriver, consumer: Any, producer: Any) -> None:
        with suppress(Killed):
            StandInDriver._micro_batch(self, consumer, producer)

    methods = {"_copy": copy, "_micro_batch": micro_batch}
    outcome = outcome_of("driver-before-commit", trial, monkeypatch, **methods)
    assert outcome.has_happened and outcome.counts is not None, outcome
    assert (outcome.counts.lost > 0, outcome.counts.doubled) == (notes_first, 0)


@pytest.mark.behaviour("P7")
def test_a_sink_that_does_not_wait_for_its_rows_loses_them(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1584: the fault did not happen, because the micro-batch was committed before the driver was dead."""

    def copy(self: StandInDriver, consumer: Any, _producer: Any, begin: Any, ends: Any) -> None:
        producer = Producer({"bootstrap.servers": self.settings["BOOTSTRAP_SERVERS"]})
        vars(self).setdefault("open", []).append(producer)
        sender = SimpleNamespace(send=producer.send, flush=lambda: None)
        StandInDriver._copy(self, consumer, sender, begin, ends)
        # Give the rows time to be sent. The stand-in then commits, also if it was "killed" meanwhile.
        with suppress(TimedOut):
            producer.flush(timeout=2)

    def kill(self: StandInDriver) -> None:
        StandInDriver.kill(self)
        for producer in vars(self).pop("open", []):
            with suppress(TimedOut):
                producer.close(timeout=0)

    outcome = outcome_of("driver-write-lost", trial, monkeypatch, _copy=copy, kill=kill)
    assert outcome.verdict is Verdict.VIOLATED and outcome.has_happened, outcome
    assert outcome.counts is not None and outcome.counts.lost > 0 == outcome.counts.doubled


@pytest.mark.behaviour("P7")
def test_a_sink_that_does_not_use_the_proxy_is_not_called_clean(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1470: the response to a fetch was cut, and that was enough for `answers-cut`."""

    def copy(self: StandInDriver, consumer: Any, _producer: Any, begin: Any, ends: Any) -> None:
        with Producer({"bootstrap.servers": trial.servers}) as producer:
            StandInDriver._copy(self, consumer, producer, begin, ends)

    outcome = outcome_of("answers-cut", trial, monkeypatch, _copy=copy)
    assert outcome.verdict is Verdict.NOT_REACHED and "other addresses" in outcome.detail, outcome


@pytest.mark.behaviour("P7")
def test_rows_that_were_locked_at_a_commit_are_no_later_write(trial: Trial) -> None:
    """R1473: the number of rows was an old one while a writer locked the database."""
    chosen = replace(trial, kind=TargetKind.SQLITE)
    (cell,) = choose_cells(["driver-in-write"], chosen.kind)
    cell_run = _CellRun(chosen, cell)
    cell_run._proxy = SimpleNamespace(add=lambda _rule: None)
    directory = trial.work_dir / cell.name
    for name in ("control", "target", "checkpoint/offsets", "checkpoint/commits"):
        (directory / name).mkdir(parents=True)
    with closing(sqlite3.connect(cell_run._target.address, isolation_level=None)) as database:
        database.execute("CREATE TABLE rows (id TEXT)")
        cell_run._arm()
        database.execute("INSERT INTO rows VALUES ('0')")
        database.execute("BEGIN EXCLUSIVE")
        for name in ("offsets/0", "commits/0", "offsets/1"):
            (directory / "checkpoint" / name).touch()
        assert not has_come(Moment.STORED, cell_run._evidence())
        database.execute("ROLLBACK")
        assert not has_come(Moment.STORED, cell_run._evidence())
        database.execute("INSERT INTO rows VALUES ('1')")
        assert has_come(Moment.STORED, cell_run._evidence())


def test_a_write_of_an_earlier_micro_batch_does_not_count(trial: Trial) -> None:
    """The query may read the rows that are sent at once in several micro-batches."""
    chosen = replace(trial, kind=TargetKind.PARQUET)
    (cell,) = choose_cells(["driver-in-write"], chosen.kind)
    cell_run = _CellRun(chosen, cell)
    cell_run._proxy = SimpleNamespace(add=lambda _rule: None)
    directory = trial.work_dir / cell.name
    for name in ("control", "target", "checkpoint/offsets", "checkpoint/commits"):
        (directory / name).mkdir(parents=True)

    def seen(*files: str) -> tuple[bool, str | None]:
        for file in files:
            if file.endswith(".parquet"):
                pyarrow.parquet.write_table(pa.table({"id": ["0"]}), directory / file)
            else:
                (directory / file).touch()
        evidence = cell_run._evidence()
        return has_come(Moment.STORED, evidence), why_not(cell, evidence)

    earlier = "only rows of an earlier micro-batch were written"
    seen("checkpoint/offsets/0", "target/0.parquet", "checkpoint/commits/0")
    cell_run._arm()
    # All this happens between two looks.
    step = ("checkpoint/offsets/1", "target/1.parquet", "checkpoint/commits/1", "checkpoint/offsets/2")
    assert seen(*step) == (False, earlier)
    assert seen("target/2.parquet") == (True, None)


def test_a_target_that_cannot_be_read_does_not_end_the_trial(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: object) -> Iterator[Any]:
        raise OverflowError("date value out of range")

    monkeypatch.setattr(TopicTarget, "read", read)
    outcome = outcome_of("calm", trial, monkeypatch)
    assert outcome.verdict is Verdict.FAILED and outcome.error is not None
    assert outcome.error.endswith("cannot be read: OverflowError: date value out of range")


def test_a_run_that_takes_too_long_names_the_log_of_the_driver(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInDriver, "_micro_batch", lambda *_: None)
    outcome = outcome_of("calm", replace(trial, timeout_s=0.3), monkeypatch)
    assert outcome.verdict is Verdict.FAILED and outcome.error is not None
    assert "did not end within 0.3 s" in outcome.error and str(outcome.log_file) in outcome.error
    assert "the setting CHECKPOINT" in outcome.error


@pytest.mark.parametrize(
    ("kind", "starts", "text"),
    [
        (ExitKind.FAILED, MAX_FAILURES, f"the pipeline failed {MAX_FAILURES} times, last with: broken"),
        (ExitKind.DIED, MAX_FAILURES, f"the pipeline failed {MAX_FAILURES} times"),
        (ExitKind.REFUSED, 1, "the pipeline cannot continue: broken"),
    ],
)
def test_a_pipeline_that_fails_by_itself_is_given_up(
    kind: ExitKind, starts: int, text: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of("calm", trial, monkeypatch, ends_with=ExitInfo(kind, "broken"))
    assert outcome.verdict is Verdict.FAILED and outcome.starts == starts
    assert outcome.error is not None and text in outcome.error and str(outcome.log_file) in outcome.error


def test_a_file_that_is_no_pipeline_ends_the_trial(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ExitInfo(ExitKind.SETUP, "ConfigError: it defines no function pipeline(spark, settings)")
    with pytest.raises(ConfigError, match=r"mine\.py cannot be run as a pipeline: .*driver\.log"):
        outcome_of("calm", trial, monkeypatch, ends_with=ends)


def test_a_source_that_python_was_too_slow_to_name_is_tried_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "AnalysisException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: oncelog"
    outcome = outcome_of("calm", trial, monkeypatch, ends_with=ExitInfo(ExitKind.SETUP, text))
    assert outcome.starts == MAX_FAILURES


def test_a_pipeline_that_keeps_no_id_is_told_how_to_name_it(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of("calm", replace(trial, row="row {n}", id_name="number"), monkeypatch)
    assert outcome.verdict is Verdict.CLEAN  # the option says that the key is the id

    def forget_ids(self: StandInDriver, *_: object) -> None:
        pass

    monkeypatch.setattr(StandInDriver, "_copy", forget_ids)
    lost = outcome_of("driver-after-commit", trial, monkeypatch)
    assert lost.counts is not None and lost.counts.lost == 30 and lost.verdict is Verdict.VIOLATED


def test_the_settings_have_their_placeholders_replaced(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    seen: dict[str, str] = {}

    def keep(self: StandInDriver, job: Any, settings: Any, *rest: Any) -> None:
        seen.update(settings)
        StandInDriver.__init__(self, job, settings, *rest)

    chosen = replace(trial, settings={"IN": "{source}", "OUT": "to {target}", "BRACES": "{x}"})
    outcome_of("calm", chosen, monkeypatch, __init__=keep)
    assert seen["IN"] == seen["SOURCE"] and seen["OUT"] == f"to {seen['TARGET']}" and seen["BRACES"] == "{x}"
    assert seen["BOOTSTRAP_SERVERS"] != broker.bootstrap_servers  # the driver gets the address of the proxy
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        assert {seen["IN"], seen["TARGET"]} <= {topic.name for topic in admin.list_topics()}
