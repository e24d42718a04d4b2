"""A process that has imported PySpark and this project, and forks Spark's Python workers.

Spark starts a Python process for each stream, sink and task, and each needs half a second of processor time
for its imports. The session of the quick tests has about a hundred of them. `ForkServer` imports once. The
program of worker_python.py sends it the arguments, environment and standard streams that Spark gave. The
server then forks a process that runs the same module with the same arguments.

Only the session of tests/spark uses the server. A worker's parent is then the server instead of the JVM, so
tests that kill executors use real workers.

    python fork_server.py PATH    listen at PATH until standard input ends
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

ADDRESS = "ONCELOG_TEST_FORK_SERVER"
"""The name of the environment variable that tells the worker's program the server's address."""
_PRELOADED = (
    "pandas",
    "pyarrow.compute",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "oncelog",
    "oncelog.spark.sink.atomic_task",
    "oncelog.spark.sink.sink",
    "oncelog.spark.source.source",
)
# Settings that keep pyarrow's allocator and numpy's library from starting threads before the fork.
_ONE_THREAD = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # as Spark sets it for its workers
}


class ForkServer:
    """A context manager that runs the server in a process. The server listens at `address`."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="oncelog-spark-fork-")
        self.address = str(Path(self._directory.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.address],
            env={**os.environ, **_ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only pytest
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the server has ended"

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._directory.cleanup()


def main(path: str) -> None:
    import gc
    import importlib
    import select

    for name in _PRELOADED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread runs before the fork"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([0, server], [], [])
            if 0 in ready:
                return
            connection, _ = server.accept()
            with connection:
                if os.fork() == 0:
                    server.close()
                    _run(connection)


def _reap(_signal: int, _frame: object) -> None:
    """Wait for child processes that have ended. Only then does their processor time count for this
    process.
    """
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def _run(connection: socket.socket) -> None:
    """Turn this forked process into the requested worker.

    The client reads the worker's process id. The end of the stream shows it that the worker has ended.
    """
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as stream:
        arguments, environment, directory = marshal.loads(stream.read(int.from_bytes(size, "big")))
    connection.sendall(b"%d\n" % os.getpid())
    for number, received in enumerate(streams):
        os.dup2(received, number)
        os.close(received)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [directory, *filter(None, paths), *sys.path[1:]]
    sys.argv[:] = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(sys.argv[1])
