"""Clients of other languages as child processes: their expected output, and loads during which the broker
dies.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from oncelog import Broker
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy import Fate, Proxy, Rule
from support import TESTS
from support.broker import RawClient
from support.wait import wait_until

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oncelog"
"""Directory outside the checkout for the programs that these tests build or download."""

INTEROP = TESTS / "interop"
COUNT = 2_000

Command = Callable[..., list[str]]
"""Takes (bootstrap servers, mode, *arguments), and returns the command line of a client program."""


def run(command: list[str], cwd: Path | None = None) -> list[str]:
    """Return the lines that a command prints. If it fails, fail the test with its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()


def prepare(command: list[str], what: str, cwd: Path, **environment: str) -> None:
    """Run a command that downloads or builds a program. If that is impossible, skip the test with the
    reason.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, cwd=cwd, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what} could not be fetched within 300 s")
    if done.returncode:
        pytest.skip(f"{what} could not be fetched and built: {done.stderr[-500:]}")


def state_of(*files: Path) -> str:
    """Return a hash of these files. Programs that are built from them are cached under it."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def compiled_java(program: str, class_path: str, *options: str) -> Command:
    """Compile tests/interop/java/PROGRAM.java, if its source has changed since the last compilation."""
    if not shutil.which("javac"):
        pytest.skip("programs of the Java client are compiled, which needs a JDK, not only Java")
    source = INTEROP / "java" / f"{program}.java"
    classes = CACHE / f"java-{program}-{state_of(source)}"
    if not (classes / f"{program}.class").exists():
        prepare(["javac", "-cp", class_path, "-d", str(classes), str(source)], program, source.parent)
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    base = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", quiet, *options]
    return lambda *arguments: [*base, "-cp", f"{class_path}:{classes}", program, *arguments]


def load_past_a_lost_acknowledgement(command: Command, cwd: Path | None = None) -> None:
    """Cut the connection at the second response to Produce, and check that every record is in the topic
    once, in order.
    """
    rule = Rule(action="cut", api="Produce", direction="response", nth=2)
    with Broker() as broker:
        with RawClient(broker.bootstrap_servers) as client:
            client.create_topic("lossy")
        with Proxy(broker.bootstrap_servers, rules=[rule]) as proxy:
            lines = run(command(proxy.bootstrap_servers, "load", "lossy", str(COUNT)), cwd)
            assert any(event.fate is Fate.CUT for event in proxy.events)
        assert lines[-1] == "done"
        check_once_and_in_order(broker.bootstrap_servers, "lossy")
        assert broker.metrics()["duplicates_acknowledged"] > 0


def load_past_a_kill(command: Command, tmp_path: Path, cwd: Path | None = None) -> None:
    """Kill the broker by SIGKILL while the client produces, and start it again. Check that every record is
    stored once.
    """
    with BrokerProcess(tmp_path / "data") as broker:
        with RawClient(broker.bootstrap_servers) as client:
            client.create_topic("killed")
        arguments = command(broker.bootstrap_servers, "load", "killed", str(COUNT))
        with subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
        ) as child:
            assert child.stdout is not None
            last = ""
            for line in child.stdout:
                if line == "sent 500\n":
                    # A client may print this while it still connects for the first time. franz-go then takes
                    # the kill for a wrong configuration, and fails without a retry.
                    wait_until(lambda: has_records(broker.bootstrap_servers, "killed"))
                    broker.kill()
                    broker.start()
                last = line
            assert child.stderr is not None
            assert child.wait(200) == 0, child.stderr.read()[-3000:]
        assert last == "done\n"
        check_once_and_in_order(broker.bootstrap_servers, "killed")


def has_records(bootstrap_servers: str, topic: str) -> bool:
    with RawClient(bootstrap_servers) as client:
        return client.offset(topic) > 0


def check_once_and_in_order(bootstrap_servers: str, topic: str) -> None:
    with RawClient(bootstrap_servers) as client:
        assert client.values(topic) == [b"%d" % number for number in range(COUNT)]
