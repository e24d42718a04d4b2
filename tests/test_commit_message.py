"""Tests of tools/commit_message.py, which git runs as its commit-msg hook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.tool import TOOLS, load_tool

commit_message = load_tool("commit_message")

BODY = "\n\nA retry after a restart was stored twice.\n"


@pytest.mark.parametrize(
    "message",
    [
        "log: keep five batches in a snapshot" + BODY,
        "broker, spark: name the topic in errors" + BODY,
        "log: keep five batches\n# Please enter the commit message\n\nWhy it matters.\n# On branch main\n",
        "Merge branch 'main'",
        'Revert "log: keep five batches"\n\nThis reverts commit 0123.',
        "log: keep five batches\n\nhttps://" + "x" * 200,
    ],
)
def test_messages_in_the_style_pass(message: str) -> None:
    assert commit_message.problems(message) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("", "subject is missing"),
        ("# only git's own lines", "subject is missing"),
        ("Keep five batches" + BODY, "scope: imperative subject"),
        ("log:keep five batches" + BODY, "scope: imperative subject"),
        ("log: " + "x" * 68 + BODY, "has 73 characters"),
        ("log: keep five batches." + BODY, "full stop"),
        ("log: wip" + BODY, "draft"),
        ("fixup! log: keep five batches" + BODY, "draft"),
        ("log: keep five batches", "body is missing"),
        ("log: keep five batches\nand say why", "second line is not blank"),
        ("log: keep five batches\n\n" + "word " * 30, "a line has"),
    ],
)
def test_each_fault_is_named(message: str, problem: str) -> None:
    assert any(problem in text for text in commit_message.problems(message))


def test_a_fault_sets_the_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text("log: keep five batches" + BODY)
    command = [sys.executable, TOOLS / "commit_message.py", file]
    assert subprocess.run(command, timeout=60).returncode == 0
    file.write_text("wip")
    done = subprocess.run(
        [sys.executable, TOOLS / "commit_message.py", file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "scope: imperative subject" in done.stderr
