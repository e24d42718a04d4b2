"""Bad input gives one line that says what to do, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import click.shell_completion
import pytest
import yaml
from support.cli import oncelog

from oncelog import Broker
from oncelog.cli.main import cli


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"auto.create.topics.enable": False}


@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "describe", "nosuch"],
        ["topics", "describe", "nosuch", "--configs"],
        ["topics", "delete", "nosuch"],
        ["topics", "delete", "nosuch", "--yes"],
        ["topics", "alter", "nosuch", "-p", "3"],
        ["topics", "alter", "nosuch", "--config", "retention.ms=1"],
        ["groups", "describe", "nosuch"],
        ["groups", "delete", "nosuch", "--yes"],
        ["topics", "trim", "nosuch", "--to-end", "--yes"],
        ["topics", "sizes", "nosuch"],
        ["configs", "describe", "--topic", "nosuch"],
        ["configs", "alter", "--topic", "nosuch", "--set", "retention.ms=1"],
        ["groups", "reset-offsets", "g", "--topic", "nosuch", "--to-latest"],
        ["transactions", "describe", "nosuch"],
        ["transactions", "abort", "nosuch:0", "--producer-id", "1"],
        ["producers", "list", "nosuch"],
        ["producers", "list", "nosuch:0"],
        ["consume", "nosuch"],
        ["consume", "nosuch", "-p", "0"],
    ],
    ids=" ".join,
)
def test_a_missing_name_is_one_plain_error(arguments: list[str], ours: str) -> None:
    got = oncelog(*arguments, "-X", "request.timeout.ms=1000", servers=ours)
    last = got.err.splitlines()[-1]
    assert got.code == 1 and last.startswith("oncelog: ")
    assert "nosuch" in last and ("does not exist" in last or "does not know" in last)
    assert "NotFound" not in last and "UnknownTopic" not in last, "the code's name says it"


@pytest.mark.parametrize(
    "command",
    [["serve"], ["serve", "--metrics-port"], ["web", "--listen"], ["proxy", "--listen"]],
    ids=" ".join,
)
def test_a_port_in_use_is_an_error_with_the_remedy(command: list[str], ours: str, tmp_path: Path) -> None:
    port = ours.rpartition(":")[2]
    if command[0] == "serve":
        command = [*command, *([port] if command[1:] else []), "--data-dir", str(tmp_path)]
        command += ["--listen", "127.0.0.1:0" if "--metrics-port" in command else ours]
    else:
        command = [*command, ours]
    if command[0] == "web":
        command += ["-b", ours]
    child = [sys.executable, "-m", "oncelog.cli.main", *command]
    got = subprocess.run(child, capture_output=True, text=True, timeout=120)
    assert got.returncode == 1 and "Traceback" not in got.stderr
    wanted = f"cannot listen on 127.0.0.1:{port}: Address already in use; stop the process"
    assert wanted in got.stderr.splitlines()[-1]


def test_a_data_directory_that_cannot_be_created_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "data", Path("/proc/data")):
        got = oncelog("serve", "--data-dir", str(path), "--listen", "127.0.0.1:0")
        assert got.code == 1 and f"data directory {path} cannot be used" in got.err
        assert "set another directory with --data-dir" in got.err


def test_an_added_command_that_cannot_be_imported_does_not_break_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("broken", "no_such_package.cli:command", "oncelog.commands")
    monkeypatch.setattr("oncelog.cli.main._added", lambda: {"broken": entry})
    shown = oncelog("--help")
    assert (shown.code, shown.err) == (0, "")
    assert "serve " in shown.out and "No module named 'no_such_package'" in " ".join(shown.out.split())
    used = oncelog("broken", "--help")
    assert used.code == 1
    assert used.err == (
        "Error: the command broken cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'\n"
    )
    completion = click.shell_completion.ShellComplete(cli, {}, "oncelog", "_ONCELOG_COMPLETE")
    names = [item.value for item in completion.get_completions([], "")]
    assert "serve" in names and "broken" not in names


def test_a_command_that_moved_to_a_package_of_its_own_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oncelog.cli.main._added", dict)
    missing = oncelog("demo", "--seed", "1")
    assert missing.code == 2
    assert "No such command 'demo'. It is in the package oncelog-demo, which is not installed." in missing.err


def test_a_misspelt_command_gets_a_suggestion() -> None:
    got = oncelog("topic", "list")
    assert got.code == 2 and "No such command 'topic'. Did you mean 'topics'?" in got.err
    assert oncelog("xyzzy").code == 2


LISTS = [
    ["topics", "list"],
    ["topics", "describe", "{topic}"],
    ["topics", "describe", "{topic}", "--all-configs"],
    ["groups", "list"],
    ["groups", "describe", "{group}"],
    ["groups", "describe", "{group}", "--members"],
    ["groups", "describe", "--all"],
    ["groups", "describe", "--all", "--totals"],
    ["groups", "delete-offsets", "{group}", "{topic}"],
    ["topics", "sizes"],
    ["configs", "describe", "--topic", "{topic}", "--all"],
    ["groups", "reset-offsets", "{group}", "--topic", "{topic}", "--to-latest"],
    ["producers", "list", "{topic}"],
    ["transactions", "list"],
    ["transactions", "find-hanging"],
    ["users", "list"],
    ["quotas", "list"],
    ["consume", "{topic}", "--until-end"],
    ["produce", "{topic}", "/dev/null"],
]

FEW_PARTITIONS = {"offsets.topic.num.partitions": 2, "transaction.state.log.num.partitions": 2}
"""The 50 partitions of each of these topics would take most of the time."""


@pytest.mark.parametrize("full", [False, True], ids=["of an empty cluster", "with hostile names"])
@pytest.mark.parametrize("arguments", LISTS, ids=" ".join)
def test_every_output_can_be_parsed(arguments: list[str], full: bool) -> None:
    from support.topics import producer_of

    from oncelog import Admin, NewTopic, OffsetAndMetadata, TopicPartition

    topic, group = "t.opic_-1", "g\x1b[2J\"'[bold]\u202e中\n" if full else "g"
    with (
        Broker(config=FEW_PARTITIONS) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        servers = broker.bootstrap_servers
        admin.create_topics([NewTopic(topic)])
        admin.alter_group_offsets(group, {TopicPartition(topic, 0): OffsetAndMetadata(0)})
        if full:
            with producer_of(servers, transactional_id=group) as producer:
                producer.init_transactions()
                with producer.transaction():
                    producer.send(topic, group.encode(), headers=[(group, group.encode())])
            admin.set_user("u" + group, "password")
        arguments = [part.format(topic=topic, group=group) for part in arguments]
        for output in ("json", "jsonl", "yaml", "table", "wide"):
            got = oncelog(*arguments, "-o", output, servers=servers)
            assert got.code == 0, got.err
            if output == "json":
                rows = json.loads(got.out)
                assert isinstance(rows, list)
            elif output == "jsonl":
                assert [json.loads(line) for line in got.out.splitlines()] == rows
            elif output == "yaml":
                assert yaml.safe_load(got.out) == rows and got.out.endswith("\n")
            else:
                assert "\x1b" not in got.out and "\u202e" not in got.out


@pytest.mark.parametrize(
    "arguments", [["--config", "retention.ms=1"], ["--delete-config", "retention.ms"], ["--config", "no=1"]]
)
def test_an_error_contains_its_name_once(arguments: list[str], ours: str) -> None:
    got = oncelog("topics", "alter", "nobodys", *arguments, servers=ours)
    assert got.code == 1
    assert re.findall(r"[A-Z]+_[A-Z_]+ \(\d+\)", got.err) in (
        [["UNKNOWN_TOPIC_OR_PARTITION (3)"], ["INVALID_CONFIG (40)"]]
    )


@pytest.mark.parametrize("output", ["a full disk", "a closed pipe"])
def test_a_broker_with_an_unwritable_output_works_and_stops_cleanly(output: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    if output == "a full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "oncelog.cli.main", "serve", "--data-dir", str(tmp_path)]
    command += ["--listen", "127.0.0.1:0", "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        assert process.stderr is not None
        for line in process.stderr:
            if "standard output cannot be written" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert (tmp_path / ".kafka_cleanshutdown").exists()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_abort_a_command(closed: str, ours: str) -> None:
    """R1065: with standard output closed, the event loop got descriptor 1. libuv aborts the process when
    that descriptor is closed.
    """
    command = [sys.executable, "-m", "oncelog.cli.main", "topics", "create", f"closed-{len(closed)}"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command, "-b", ours]
    assert subprocess.run(shell, timeout=240).returncode == 0
    assert f"closed-{len(closed)}" in oncelog("topics", "list", servers=ours).out


@pytest.mark.parametrize(
    "command", [["topics", "list"], ["topics", "list", "-o", "json"], ["explain", "--list"]]
)
def test_an_output_that_cannot_be_written_is_one_plain_error(command: list[str], ours: str) -> None:
    arguments = [sys.executable, "-m", "oncelog.cli.main", *command]
    arguments += [] if command[0] == "explain" else ["-b", ours]
    with open("/dev/full", "w") as full:
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (1, "oncelog: OSError: [Errno 28] No space left on device\n")
