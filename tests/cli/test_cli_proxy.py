"""`oncelog proxy` as a process: ports, output lines and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from click.testing import CliRunner
from support.faults import ScriptedBroker, TinyClient, produce

from oncelog.cli.main import cli


@contextmanager
def proxy_process(
    *arguments: str, stdout: int = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "oncelog.cli.main", "proxy", "--listen", "127.0.0.1:0", *arguments]
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("listening on "), line + process.stderr.read()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_the_proxy_forwards_messages_injects_faults_and_prints_events() -> None:
    with ScriptedBroker() as broker:
        arguments = ("--upstream", broker.address, "--rule", "response Produce cut nth=1", "-o", "jsonl")
        with proxy_process(*arguments) as (process, address):
            with TinyClient(address) as client:
                assert client.call(produce(0), 9) is None
            with TinyClient(address) as client:
                assert client.call(produce(0), 9) is not None
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=200)
    assert process.returncode == 0
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["fate"] for event in events] == ["passed", "cut", "passed", "passed"]
    assert events[0]["batches"][0]["base_sequence"] == 0
    assert "4 messages, 1 of them" in errors


def test_the_proxy_prints_a_line_per_message() -> None:
    with ScriptedBroker() as broker, proxy_process("--upstream", broker.address) as (process, address):
        with TinyClient(address) as client:
            client.call(produce(3), 9)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=200)
    assert "→ Produce  t-0  pid 1000 epoch 0  seq 3" in output
    assert "← Produce answer  t-0  ok  offset 0" in output


def test_a_wrong_rule_is_an_error_that_names_the_word() -> None:
    result = CliRunner().invoke(cli, ["proxy", "--rule", "response Produce explode"])
    assert result.exit_code != 0
    assert "'explode' is not a direction" in str(result.exception)


def test_a_port_in_use_is_an_error_of_the_proxy() -> None:
    with ScriptedBroker() as broker:
        result = CliRunner().invoke(cli, ["proxy", "--listen", broker.address])
    assert result.exit_code == 1
    assert f"cannot listen on {broker.address}" in result.output


def test_an_output_that_cannot_be_written_ends_the_proxy() -> None:
    """R1069: if a message could not be printed, its connection ended as if a rule had cut it.

    The exit code was 0.
    """
    with ScriptedBroker() as broker, open("/dev/full", "w") as full:
        arguments = ("--upstream", broker.address)
        with proxy_process(*arguments, stdout=full.fileno()) as (process, address):
            with TinyClient(address) as client:
                client.call(produce(0), 9)
            _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors.splitlines()[-1]) == (
        1,
        "oncelog: OSError: [Errno 28] No space left on device",
    )


def test_a_broker_whose_name_is_not_valid_ends_the_connection_at_once() -> None:
    """R1069: the proxy kept the connection open, and the client waited for its time-out."""
    with proxy_process("--upstream", "bad..host:9092", "-o", "jsonl") as (process, address):
        with TinyClient(address) as client:
            assert client.call(produce(0), 9) is None
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=200)
    assert "no broker at bad..host:9092" in output
