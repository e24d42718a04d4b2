"""deploy/: systemd accepts the unit, and the broker accepts the options of the unit and the container."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oncelog.cli.serve import command

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (DEPLOY / "oncelog.service").read_text()
    path = tmp_path / "oncelog.service"
    # the program must be executable
    path.write_text(unit.replace("/opt/oncelog/bin/oncelog", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_broker_accepts_the_options_of_the_unit_and_the_container(tmp_path: Path) -> None:
    unit = (DEPLOY / "oncelog.service").read_text()
    match = re.search(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)
    container = (DEPLOY / "Containerfile").read_text()
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", container, re.MULTILINE)
    example = re.search(r"^# +(--listen .*)$", container, re.MULTILINE)
    assert match is not None and entry is not None and example is not None
    (tmp_path / "server.properties").write_text("")
    options = shlex.split(match[1].replace("/etc/oncelog", str(tmp_path)))
    assert command.make_context("serve", options).params["data_dir"] == Path("/var/lib/oncelog")
    program, verb, *arguments = json.loads(entry[1])
    assert (program, verb) == ("/opt/oncelog/bin/oncelog", "serve")
    context = command.make_context("serve", [*arguments, *shlex.split(example[1])])
    assert context.params["insecure"] and context.params["listen"] == ("PLAINTEXT://0.0.0.0:9092",)
