"""Help in sections, suggestions, narrow terminals, styles, and pipes whose reader has gone."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.cli import oncelog
from support.terminal import PseudoTerminal
from support.topics import new_topic, producer_of

from oncelog.cli.common import emit
from oncelog.cli.main import SECTIONS, main

ROWS = [
    {"topic": "flights", "partition": 0, "held_back_by": "a transactional id (producer id 77, epoch 3)"},
    {"topic": "größe 日本", "partition": 1, "held_back_by": None},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, columns: int, stdout: io.StringIO, term: str = "xterm") -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "20")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stdout", stdout)
    emit(ROWS, "table")
    return stdout.getvalue()


def test_help_has_sections_with_all_commands() -> None:
    sections = oncelog("--help").out.split("\n\n")
    for title, commands in SECTIONS.items():
        (section,) = [text for text in sections if text.startswith(f"{title}:\n")]
        assert re.findall(r"^  (\S+)", section, re.MULTILINE) == list(commands)


def test_the_lowest_version_of_click_suggests_subcommands() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (lowest,) = [text for text in project["dependencies"] if text.startswith("click>=")]
    assert [int(part) for part in lowest.removeprefix("click>=").split(".")] >= [8, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["topics", "lst"], "'list'"),
        (["topics", "list", "--outptu", "json"], "--output"),
        (["consume", "t", "--from-begining"], "--from-beginning"),
    ],
)
def test_a_mistyped_command_or_option_gets_a_suggestion(arguments: list[str], says: str) -> None:
    got = oncelog(*arguments)
    assert got.code == 2 and "Did you mean" in got.err and says in got.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "describe", "{}"],
        ["topics", "trim", "{}:0", "--to-end"],
        ["consume", "{}", "-e"],
        ["producers", "list", "{}"],
        ["configs", "describe", "--topic", "{}"],
        ["groups", "reset-offsets", "g", "--topic", "{}:0,1", "--to-latest"],
    ],
    ids=" ".join,
)
def test_a_mistyped_topic_gets_a_suggestion(arguments: list[str], ours: str) -> None:
    topic = new_topic(ours)
    typo = topic.replace("produced", "prodcued")
    short = ["-X", "request.timeout.ms=1000"]
    got = oncelog(*(part.format(typo) for part in arguments), *short, servers=ours)
    assert got.code == 1
    assert f"topic '{typo}'" in got.err and "; did you mean 'produced-" in got.err
    far = oncelog(*(part.format("zzz") for part in arguments), *short, servers=ours)
    assert far.code == 1 and "did you mean" not in far.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["configs", "alter", "--topic", "{topic}", "--set"],
        ["configs", "alter", "--topic", "{topic}", "--yes", "--set"],
        ["topics", "alter", "{topic}", "--config"],
        ["topics", "create", "{topic}-other", "-c"],
    ],
    ids=" ".join,
)
def test_a_mistyped_setting_gets_a_suggestion(arguments: list[str], ours: str) -> None:
    arguments = [part.format(topic=new_topic(ours)) for part in arguments]
    got = oncelog(*arguments, "retention.m=1", servers=ours)
    assert got.code == 1 and "INVALID_CONFIG" in got.err
    assert "retention.m" in got.err and "; did you mean retention.ms?" in got.err
    for other in ("zzz=1", "retention.ms=soon"):
        got = oncelog(*arguments, other, servers=ours)
        assert got.code == 1 and "INVALID_CONFIG" in got.err and "did you mean" not in got.err


def test_a_wide_terminal_shows_a_table_and_a_narrow_one_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    table = printed(monkeypatch, 100, Terminal())
    assert "TOPIC" in table.splitlines()[0] and "HELD BACK BY" in table.splitlines()[0]
    assert len(table.splitlines()) == 3
    assert printed(monkeypatch, 30, Terminal()) == (
        "TOPIC         flights\n"
        "PARTITION     0\n"
        "HELD BACK BY  a transactional id (producer id 77, epoch 3)\n"
        "\n"
        "TOPIC         größe 日本\n"
        "PARTITION     1\n"
        "HELD BACK BY  -\n"
    )
    assert len(printed(monkeypatch, 30, io.StringIO()).splitlines()) == 3, "a pipe has no width"


def test_styles_are_only_for_terminals_and_only_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in printed(monkeypatch, 100, Terminal())
    assert "\x1b" not in printed(monkeypatch, 100, io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(monkeypatch, 100, Terminal())
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in printed(monkeypatch, 100, Terminal(), "dumb"), "it prints control sequences"


def test_a_table_is_as_wide_as_the_terminal(ours: str) -> None:
    topic = new_topic(ours)
    command = [sys.executable, "-m", "oncelog.cli.main", "topics", "describe", topic, "-b", ours]
    with PseudoTerminal(70, 20) as terminal:
        assert terminal.start(command).wait(120) == 0
        rows = terminal.screen().rows
        assert terminal.printed.startswith("\x1b[1mTOPIC ")
    titles = re.split("  +", rows[0])
    assert titles == ["TOPIC", "PARTITION", "LEADER", "START OFFSET", "END OFFSET", "STABLE END"]
    assert rows[1].split() == ["OFFSET"] and rows[2].split() == [topic, "0", "1", "0", "0", "0"]


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_reader_that_has_gone_ends_a_command_quietly(output: str, ours: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "oncelog.cli.main", "cluster", "versions", "-o", output, "-b", ours]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=240)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_standard_output_cannot_encode_is_escaped(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, out = new_topic(ours), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with producer_of(ours) as producer:
        producer.send(name, "größe".encode())
    arguments = ["oncelog", "consume", name, "--tail", "1", "-e", "-o", "table", "-b", ours]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and rb"gr\xf6\xdfe" in out.buffer.getvalue()  # type: ignore[attr-defined]
