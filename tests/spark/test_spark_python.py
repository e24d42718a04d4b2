"""The Python of Spark's workers in these tests: it connects before it imports anything."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest
from helpers_spark_python import spark_python

SECRET = b"0123456789abcdef" * 4
SOURCE_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


def test_the_worker_authenticates_on_the_connection_that_was_made_first() -> None:
    """Exactly one connection comes, with the worker's secret once and then its process id."""
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


def test_it_connects_although_the_module_cannot_be_imported() -> None:
    """Otherwise it would connect after the imports, which a busy machine may not finish in ten seconds."""
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


def test_it_is_this_interpreter_for_everything_else() -> None:
    done = subprocess.run(
        [spark_python(), "-c", "import sys, oncelog; print(sys.argv)", "a"], capture_output=True
    )
    assert done.stdout == b"['-c', 'a']\n"
