"""Run the code of a document from top to bottom, and compare its output with the output in the document.

All `python` blocks of a document run in one interpreter. A `text` block directly after a code block is its
expected output. A `console` block has commands, each after `$ `, with their output. A block with `def test_`
is run by pytest. Blocks of other languages (`sh`, `properties`) are not run.

In the document, the broker is at 127.0.0.1:9092 and files are in /tmp. In the test, both are replaced by the
test's own, and so are the `addresses` of a run. The comparison ignores the widths of columns. `...` stands
for any text, also of several lines.
Producer ids and times differ from run to run, so any id and any time match.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"(?:^|(?<=[|] ))oncelog ", re.MULTILINE)
INTERPRETER = """
import contextlib, io, json, sys, traceback

names = {"__name__": "__main__"}
for line in sys.stdin:
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(json.loads(line), "the document", "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), flush=True)
"""


class Block(NamedTuple):
    """A fenced block of a document, and its expected output if a `text` block follows it directly."""

    language: str
    code: str
    line: int
    output: str | None


class Command(NamedTuple):
    """A command of a `console` block, and the output that is shown below it."""

    text: str
    output: str


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a document in order. A `text` block that follows a code block directly belongs to
    it.
    """
    matches = list(BLOCK.finditer(text))
    blocks = []
    for index, match in enumerate(matches):
        following = matches[index + 1] if index + 1 < len(matches) else None
        is_shown = following is not None and following[1] == "text"
        is_next = is_shown and not text[match.end() : following.start()].strip()  # type: ignore[union-attr]
        output = following[2] if following is not None and is_next else None
        if match[1] != "text":
            blocks.append(Block(match[1], match[2], text.count("\n", 0, match.start()) + 1, output))
    return blocks


def commands_of(code: str) -> list[Command]:
    """Return the commands of a `console` block."""
    joined = code.replace("\\\n", " ")
    parts = re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]
    return [
        Command(first.partition(" #")[0].strip(), rest)
        for first, _, rest in (p.partition("\n") for p in parts)
    ]


def plain(text: str) -> str:
    """Return the text with single blanks, and with producer ids and times replaced."""
    text = re.sub(r"\b\d{13,}\b", "ID", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*Z?", "TIME", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def assert_prints(expected: str, printed: str, where: str) -> None:
    """Fail if the command printed something else than the document shows."""
    pattern = ".*".join(re.escape(part) for part in plain(expected).split("..."))
    assert re.fullmatch(pattern, plain(printed), re.DOTALL), (
        f"{where}: shown:\n{expected}\nprinted:\n{printed}"
    )


class DocumentRun:
    """The blocks of one document, run against a broker at `servers` with files in `directory`."""

    def __init__(
        self,
        servers: str,
        directory: Path,
        environment: Mapping[str, str] = {},
        addresses: Mapping[str, str] = {},
    ) -> None:
        self._servers, self._directory, self._addresses = servers, directory, addresses
        own = {"ONCELOG_BOOTSTRAP_SERVERS": servers, "XDG_CONFIG_HOME": str(directory / "config")}
        self._environment = {**os.environ, **own, **environment}

    def run(self, path: Path, leave_out: str = "\0") -> int:
        """Run every block that does not contain `leave_out`; return the number of blocks that ran."""
        count = 0
        with self._interpreter() as interpreter:
            for block in blocks_of(path.read_text()):
                if leave_out in block.code:
                    continue
                where = f"{path.name}:{block.line}"
                if block.language == "console":
                    self._run_console(block, where)
                elif block.language != "python":
                    continue
                elif "def test_" in block.code:
                    self._run_pytest(block, where)
                else:
                    printed = self._run_python(interpreter, block, where)
                    assert_prints(self._here(block.output or "..."), printed, where)
                count += 1
        return count

    def _here(self, text: str) -> str:
        for shown, actual in self._addresses.items():
            text = text.replace(shown, actual)
        return text.replace("127.0.0.1:9092", self._servers).replace("/tmp/", f"{self._directory}/")

    @contextmanager
    def _interpreter(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", INTERPRETER]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=self._environment, cwd=self._directory
        ) as process:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

    def _run_python(self, interpreter: subprocess.Popen[str], block: Block, where: str) -> str:
        assert interpreter.stdin is not None
        assert interpreter.stdout is not None
        interpreter.stdin.write(json.dumps(self._here(block.code)) + "\n")
        interpreter.stdin.flush()
        printed, error = json.loads(interpreter.stdout.readline())
        assert error is None, f"{where}: {error}"
        return str(printed)

    def _run_pytest(self, block: Block, where: str) -> None:
        (self._directory / "test_example.py").write_text(self._here(block.code))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"]
        done = subprocess.run(
            [*command, "--rootdir", str(self._directory), "test_example.py"],
            capture_output=True, text=True, timeout=240, cwd=self._directory, env=self._environment,
        )  # fmt: skip
        assert done.returncode == 0 and " passed" in done.stdout, f"{where}: {done.stdout}{done.stderr}"

    def _run_console(self, block: Block, where: str) -> None:
        for command in commands_of(block.code):
            if not command.text.startswith(("oncelog ", "printf ", "cat ")) or command.text.endswith("&"):
                continue  # leave out commands that install or start programs; another test runs these
            ours = OURS.sub(f"{sys.executable} -m oncelog.cli.main ", self._here(command.text))
            done = subprocess.run(
                ours, shell=True, env=self._environment, cwd=self._directory,
                capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            assert done.returncode == 0, f"{where}: {command.text}: {done.stdout}{done.stderr}"
            if command.output.strip():
                assert_prints(self._here(command.output), done.stdout, f"{where}: {command.text}")
