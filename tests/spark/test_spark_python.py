"""The Python program of Spark's workers in these tests, which connects before it imports anything."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.spark.fork_server import ADDRESS, ForkServer
from support.spark.worker_python import spark_python

SECRET = b"0123456789abcdef" * 4
ECHO = """
import os, sys
from_the_start = "oncelog.spark.source.source" in sys.modules
print(sys.argv[1:], __name__, os.environ["WORD"], sys.stdin.read(), from_the_start)
print("to errors", file=sys.stderr)
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the fork server runs on Linux only")
SOURCE_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


def test_the_worker_authenticates_on_the_connection_that_was_made_first() -> None:
    """The server accepts exactly one connection. On it, the worker must send its secret once, and then its
    process id.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        environment = {
            **os.environ,
            "PYTHON_WORKER_FACTORY_PORT": str(server.getsockname()[1]),
            "PYTHON_WORKER_FACTORY_SECRET": SECRET.decode(),
        }
        with subprocess.Popen([spark_python(), "-m", SOURCE_RUNNER], env=environment) as worker:
            try:
                connection, _ = server.accept()
                with connection, connection.makefile("rb") as stream:
                    connection.settimeout(120)
                    assert stream.read(4 + len(SECRET)) == len(SECRET).to_bytes(4) + SECRET
                    connection.sendall(b"\x00\x00\x00\x02ok")
                    assert stream.read(4) == worker.pid.to_bytes(4)
                server.settimeout(0)
                with pytest.raises(BlockingIOError):
                    server.accept()
            finally:
                worker.kill()


def test_the_worker_connects_although_the_module_cannot_be_imported() -> None:
    """Imports may take over ten seconds on a busy machine, so the worker must connect before them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        environment = {
            **os.environ,
            "PYTHON_WORKER_FACTORY_PORT": str(server.getsockname()[1]),
            "PYTHON_WORKER_FACTORY_SECRET": SECRET.decode(),
        }
        done = subprocess.run([spark_python(), "-m", "no_such_module"], env=environment, capture_output=True)
        connection, _ = server.accept()
        with connection:
            assert len(connection.recv(1_000)) == 4 + len(SECRET)
    assert b"no_such_module" in done.stderr


def test_the_worker_command_runs_anything_else_in_this_interpreter() -> None:
    done = subprocess.run(
        [spark_python(), "-c", "import sys, oncelog; print(sys.argv)", "a"], capture_output=True
    )
    assert done.stdout == b"['-c', 'a']\n"


@on_linux
def test_a_fork_server_gives_a_process_with_the_same_arguments_environment_and_streams(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    environment = {**os.environ, ADDRESS: fork_server.address, "PYTHONPATH": str(tmp_path), "WORD": "told"}
    command = [spark_python(), "-m", "echo", "a", "b"]
    done = subprocess.run(command, env=environment, input=b"read", capture_output=True)
    assert done.stdout == b"['a', 'b'] __main__ told read True\n" and done.stderr == b"to errors\n"


@on_linux
def test_a_worker_of_a_fork_server_ends_with_the_program_that_spark_started(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "wait.py").write_text("print('started', flush=True)\nimport signal\nsignal.pause()")
    environment = {**os.environ, ADDRESS: fork_server.address, "PYTHONPATH": str(tmp_path)}
    command = [spark_python(), "-m", "wait"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"started\n"
        worker.terminate()
        assert worker.stdout.read() == b"", "the stream ends with the last process that holds it"
