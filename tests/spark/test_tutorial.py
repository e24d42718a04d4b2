"""docs/tutorial.md is run command by command: a driver is killed, and the audit finds no lost or doubled
record.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import assert_prints, commands_of

from oncelog import Broker

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
FILE = re.compile(r"`/tmp/(\w+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("pip install", "oncelog serve")
MARK = "-- end of the output of command {}"


def _output_of(script: str, directory: Path, environment: dict[str, str]) -> str:
    """Run a shell script, and return what it printed. End its processes if it fails."""
    shell = subprocess.Popen(
        ["bash", "-e", "-c", script], env=environment, cwd=directory, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        printed, errors = shell.communicate(timeout=840)
    except BaseException:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
        print((directory / "receipts.log").read_text())
        raise
    assert shell.returncode == 0, f"{printed}\n{errors}\n{(directory / 'receipts.log').read_text()}"
    return printed


@pytest.mark.full("kills a Spark driver")
@pytest.mark.timeout(900)
def test_the_tutorial_runs_and_its_audit_is_clean(tmp_path: Path) -> None:
    with Broker() as broker:
        text = PAGE.read_text().replace("127.0.0.1:9092", broker.bootstrap_servers)
        for name, code in FILE.findall(text):
            (tmp_path / name).write_text(code.replace("/tmp/", f"{tmp_path}/"))
        blocks = "".join(CONSOLE.findall(text)).replace("/tmp/", f"{tmp_path}/")
        commands = [command for command in commands_of(blocks) if not command.text.startswith(ELSEWHERE)]
        script = "".join(f"{command.text}\necho '{MARK.format(n)}'\n" for n, command in enumerate(commands))
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"ONCELOG_BOOTSTRAP_SERVERS": broker.bootstrap_servers, "XDG_CONFIG_HOME": str(tmp_path)}
        rest = _output_of(script, tmp_path, {**os.environ, **own, "PATH": programs})
    for n, command in enumerate(commands):
        printed, _, rest = rest.partition(f"{MARK.format(n)}\n")
        if command.output.strip():
            assert_prints(command.output, printed, f"{PAGE.name}: {command.text}")
    assert len((tmp_path / "seen.txt").read_text().splitlines()) == 600
