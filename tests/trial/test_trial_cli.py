"""`oncelog trial` on the command line, with a stand-in for Spark."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.cli import oncelog
from support.trial import StandInDriver

from oncelog import Admin, Broker
from oncelog.trial import run

pytestmark = pytest.mark.spark


class Forgetful(StandInDriver):
    remembers = False


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text("def pipeline(spark, settings): ...\n")
    return str(path)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Driver", StandInDriver)


ARGUMENTS = ("--rows", "12", "--cells", "calm,commit-lost")


def test_a_clean_trial_exits_with_0(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: None
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    report = tmp_path / "report.html"
    outcome = oncelog("trial", file, *ARGUMENTS, "--report", str(report))
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["CELL", "FAULT", "HAPPENED", "LOST", "DOUBLED", "VERDICT"]
    assert [line.split()[0] for line in lines[1:]] == ["calm", "commit-lost"]
    assert "Each row is in the target once, in all 2 runs" in outcome.err
    assert "<svg" in report.read_text()


def test_a_report_without_a_directory_is_refused_before_the_runs(file: str, tmp_path: Path) -> None:
    outcome = oncelog("trial", file, "--report", str(tmp_path / "missing" / "report.html"))
    assert outcome.code == 2 and "there is no directory" in outcome.err
    assert "calm" not in outcome.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_trial_that_is_terminated_leaves_no_topic(
    file: str, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def terminate(self: StandInDriver) -> None:
        signal.raise_signal(number)

    def before(*_: object) -> None:
        raise AssertionError("a signal came after the trial")

    monkeypatch.setattr(run, "Driver", type("Driver", (StandInDriver,), {"start": terminate}))
    restored = signal.signal(number, before)
    try:
        options = ("-b", broker.bootstrap_servers, "--work-dir", str(tmp_path / "work"), "--timeout", "1")
        outcome = oncelog("trial", file, *options, "--cells", "calm")
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, restored)
    assert outcome.code == 128 + number
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        assert [topic.name for topic in admin.list_topics() if topic.name.startswith("trial-")] == []


def test_a_doubled_row_gives_exit_code_3_and_keeps_the_directory(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Driver", Forgetful)
    outcome = oncelog("trial", file, *ARGUMENTS, "-o", "json", "--work-dir", str(tmp_path / "work"))
    assert outcome.code == 3, outcome.err
    calm, lost = json.loads(outcome.out)
    assert (calm["verdict"], calm["happened"]) == ("clean", "-")
    assert (lost["verdict"], lost["happened"], lost["lost"]) == ("violated", "yes", 0)
    assert 0 < lost["doubled"] <= 4
    assert {"Oncelog", "Spark", "Python", "Java", "rows"} <= set(lost["facts"])
    assert (tmp_path / "work" / "commit-lost" / "checkpoint" / "commits").is_dir()


def test_a_fault_that_did_not_happen_gives_exit_code_1(file: str, tmp_path: Path, stand_in: None) -> None:
    work = str(tmp_path / "work")
    outcome = oncelog("trial", file, "--rows", "12", "--cells", "task-fails", "--work-dir", work)
    assert outcome.code == 1
    assert "No row was lost or doubled, but these runs prove nothing: task-fails." in outcome.err


def test_topics_on_another_cluster_are_deleted_at_the_end(
    file: str, tmp_path: Path, broker: Broker, stand_in: None
) -> None:
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        before = admin.list_topics()
        outcome = oncelog(
            "trial", file, "--rows", "12", "--cells", "calm", "--work-dir", str(tmp_path / "work"),
            "--cluster-name", "Our Kafka 1.0", "-o", "json", servers=broker.bootstrap_servers,
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        assert json.loads(outcome.out)[0]["facts"]["cluster"] == "Our Kafka 1.0"
        assert admin.list_topics() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cells", "reboot"], "no cell is named 'reboot'"),
        (["--master", "spark://192.0.2.1:7077"], "a standalone cluster on this machine"),
        (["--master", "sc://127.0.0.1:15002"], "a standalone cluster on this machine"),
        (["--master", "yarn"], "It supports local[N], local-cluster[N,CORES,MB]"),
        (["--cluster-name", "x"], "--cluster-name needs -b"),
        (["--rows", "1"], "1 is not in the range"),
        (["--target", "paper"], "'paper' is not one of"),
        (["--set", "x"], "expected key=value"),
        (["--target", "postgresql"], "--target postgresql and --database need each other"),
        (["--database", "jdbc:postgresql://h/d"], "--target postgresql and --database need each other"),
        (["--target", "postgresql", "--database", "mysql://ann:pw@h/d"], "mysql... is not a JDBC URL"),
    ],
)
def test_a_mistake_on_the_command_line_gives_exit_code_2(file: str, arguments: list[str], text: str) -> None:
    outcome = oncelog("trial", file, *arguments)
    assert outcome.code == 2 and text in outcome.err, outcome


def test_a_directory_with_files_is_refused(file: str, tmp_path: Path) -> None:
    outcome = oncelog("trial", file, "--work-dir", str(tmp_path))
    assert outcome.code == 2 and "is not empty" in outcome.err


def test_a_file_that_does_not_exist_gives_exit_code_2(tmp_path: Path) -> None:
    assert oncelog("trial", str(tmp_path / "none.py")).code == 2
