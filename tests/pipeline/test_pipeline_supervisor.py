"""The supervisor with real processes and signals; a stand-in for Spark is supervised."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from support.broker import wait_until
from support.pipeline import child_program
from support.pipeline.child_program import BATCH

STARTED = {"event": "started", "query_id": "q-1", "name": None}
DONE = {"event": "ended", "ending": "done"}
PROGRAM = """
import json, sys
from pathlib import Path
from oncelog.runtime.event_log import log_to_stderr
from oncelog.pipeline.supervisor import Pipeline, Supervisor
from oncelog.pipeline.restart_policy import Limits
log_to_stderr()
interpreter, child, directory, plan = sys.argv[1:]
settings = {"COUNTER": directory + "/runs", "SETTING": "given"}
pipeline = Pipeline(Path("enrich.py"), settings, status_file=Path(directory) / "status.json")
sys.exit(Supervisor(pipeline, Limits(10, 20, 3, 60_000), [interpreter, child, plan]).run())
"""


class Supervised:
    """A supervisor in its own process, with its log and status."""

    def __init__(self, directory: Path, *runs: list[Any], interpreter: str = sys.executable) -> None:
        self.directory = directory
        arguments = [interpreter, child_program.__file__, str(directory), json.dumps(runs)]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=log)

    def exit_code(self) -> int:
        return self.process.wait(200)

    @property
    def status(self) -> dict[str, Any]:
        path = self.directory / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def jobs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "runs").read_text().splitlines()]

    def wait_for(self, state: str) -> None:
        wait_until(lambda: self.status.get("state") == state)


def failed(error: str, ending: str = "failed") -> dict[str, str]:
    return {"event": "ended", "ending": ending, "error": error}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_failed_query_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    error = failed("SinkError: cannot connect")
    it = Supervised(tmp_path, [STARTED, "die"], [STARTED, error], [STARTED, BATCH, DONE])
    assert it.exit_code() == 0
    assert [(job["query_id"], job["setting"]) for job in it.jobs] == [
        (None, "given"),
        ("q-1", "given"),
        ("q-1", "given"),
    ]
    status = it.status
    assert (status["state"], status["runs"], status["query_id"]) == ("finished", 3, "q-1")
    assert status["batch"] == {key: value for key, value in BATCH.items() if key != "event"}
    assert "error" not in status
    assert 'error="the process of the query died (SIGKILL)"' in it.log
    assert 'error="SinkError: cannot connect"' in it.log
    assert "event=batch batch_id=0 rows_in=3 rows_out=3 seconds=0.1 lag=0" in it.log


def test_a_query_is_given_up_and_one_that_cannot_succeed_is_not_repeated(tmp_path: Path) -> None:
    it = Supervised(tmp_path, [STARTED, "exit"])
    assert it.exit_code() == 1
    assert (len(it.jobs), it.status["state"]) == (3, "gave_up")
    assert it.status["error"] == "the process of the query died (exit code 7)"
    for ending, count in (("setup", 1), ("refused", 1)):
        directory = tmp_path / ending
        directory.mkdir()
        it = Supervised(directory, [failed("KeyError: 'SOURCE'", ending)])
        assert it.exit_code() == 2
        assert (len(it.jobs), it.status["state"]) == (count, "refused")


def test_the_first_signal_waits_for_the_batch_and_the_second_does_not(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        directory = tmp_path / number.name
        directory.mkdir()
        it = Supervised(directory, [STARTED, "stay", BATCH, DONE])
        it.wait_for("running")
        it.process.send_signal(number)
        assert it.exit_code() == 0
        assert (it.status["state"], it.status["batch"]["batch_id"]) == ("stopped", 0)
    it = Supervised(tmp_path, [STARTED, "deaf"])
    it.wait_for("running")
    it.process.send_signal(signal.SIGTERM)
    it.wait_for("stopping")
    it.process.send_signal(signal.SIGTERM)
    assert it.exit_code() == 128 + signal.SIGTERM
    assert it.status["state"] == "broken_off" and not is_alive(it.jobs[0]["pid"])


def test_a_signal_that_comes_together_with_the_start_stops_it(tmp_path: Path) -> None:
    it = Supervised(tmp_path, ["hold", STARTED, "release", "stay", BATCH, DONE])
    assert it.exit_code() == 0
    assert (it.status["state"], it.status["batch"]["batch_id"]) == ("stopped", 0)


def test_nothing_is_left_of_a_run_before_the_next(tmp_path: Path) -> None:
    it = Supervised(tmp_path, [STARTED, "orphan", failed("no more")], [STARTED, "stay", DONE])
    wait_until(lambda: it.status.get("runs") == 2, 200)
    assert not is_alive(int((tmp_path / "orphan").read_text()))
    it.process.send_signal(signal.SIGTERM)
    assert it.exit_code() == 0


def test_a_query_whose_helper_process_survives_it_is_started_again(tmp_path: Path) -> None:
    """R1060: a helper process, such as one that `multiprocessing` forks, kept the pipe of events open. So the
    supervisor waited forever and did not restart the query.
    """
    it = Supervised(tmp_path, [STARTED, "fork", "die"], [STARTED, DONE])
    assert it.exit_code() == 0
    assert len(it.jobs) == 2
    assert not is_alive(int((tmp_path / "orphan").read_text()))


def test_a_process_that_cannot_be_started_counts_as_a_failure(tmp_path: Path) -> None:
    """R1061: if starting the query failed, the supervisor ended with a traceback and did not try again."""
    it = Supervised(tmp_path, [STARTED, DONE], interpreter=str(tmp_path / "python"))
    assert it.exit_code() == 1
    status = it.status
    assert (status["state"], status["runs"]) == ("gave_up", 3)
    assert "could not be started" in status["error"] and "Traceback" not in it.log


def test_a_supervisor_that_is_killed_takes_its_query_along(tmp_path: Path) -> None:
    file = tmp_path / "waits.py"
    file.write_text(
        "import os, subprocess, time\n"
        "other = subprocess.Popen(['sleep', '600'])  # in the place of the JVM\n"
        "open('pids.new', 'w').write(f'{os.getpid()} {other.pid}')\n"
        "os.rename('pids.new', 'pids')\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "oncelog.cli.main", "pipeline", "run", str(file)]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        wait_until((tmp_path / "pids").exists, 200)
        process.kill()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: not is_alive(pid), 200)


def run_file(tmp_path: Path, text: str, *arguments: str) -> tuple[int, str]:
    file = tmp_path / "some.py"
    file.write_text(text)
    command = [sys.executable, "-m", "oncelog.cli.main", "pipeline", "run", str(file), *arguments]
    began = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return began.returncode, began.stderr


def test_a_file_that_cannot_be_run_is_reported_with_the_reason(tmp_path: Path) -> None:
    code, output = run_file(tmp_path, "x = 1\n")
    assert code == 2 and "defines no function pipeline(spark, settings)" in output
    code, output = run_file(tmp_path, "import no_such_thing\n")
    assert code == 2 and "ModuleNotFoundError: No module named 'no_such_thing'" in output
    assert 'some.py", line 1' in output
    code, output = run_file(tmp_path, "", "-X", "restart.backof.ms=5")
    assert code == 2 and "restart.backoff.ms" in output
