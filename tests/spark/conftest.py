"""One Spark session for all Spark tests of a run, and a broker for each module."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.scheduler import group_of
from support.spark.fork_server import ADDRESS, ForkServer
from support.spark.worker_python import AUTHENTICATION_TIMEOUT

import oncelog
from oncelog.spark.session import SHORT_LIVED

CHEAP = f"{SHORT_LIVED} -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""Options for a JVM that lives for only two minutes on two cores.

With one compiler, one collector thread and no verification of bytecode, it starts faster.
"""

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer | None]:
    """Start the process from which the Python workers of the session `spark` are forked, and yield it.

    Yield None except on Linux: on macOS, libraries start threads, so a fork is not safe.
    """
    if sys.platform != "linux":
        yield None
        return
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def spark(fork_server: ForkServer | None) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    with TemporaryDirectory(prefix="oncelog-spark-") as work_dir:
        builder = (
            SparkSession.builder.master("local[2]")
            .appName("oncelog tests")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "OFF")
            .config("spark.python.authenticate.socketTimeout", AUTHENTICATION_TIMEOUT)
            .config("spark.driver.memory", "1g")
            .config("spark.driver.extraJavaOptions", CHEAP)
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.local.dir", work_dir)
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.warehouse.dir", f"{work_dir}/warehouse")
            # Interpret plans: in these tests a plan has a few hundred rows, and to compile it would take
            # longer.
            .config("spark.sql.codegen.wholeStage", "false")
            .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        )
        with pytest.MonkeyPatch.context() as patch:  # the JVM gets its environment when it starts
            if fork_server is not None:
                patch.setenv(ADDRESS, fork_server.address)
            session = builder.getOrCreate()
        _SESSION.callback(_end_session, session)
        yield session
        _SESSION.close()


_SESSION = ExitStack()
"""Ends the session of the fixture `spark`, if it runs."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """End the JVM after the last test of its group, because an idle JVM takes processor time too.

    Without xdist the tests of other directories may come between, so it then stays until the end.
    """
    try:
        return (yield)
    finally:
        # Other files of this directory have no session, and may run before those that have it.
        is_last = nextitem is None or group_of(nextitem.nodeid, is_quick=True) != "spark"
        if is_last and hasattr(item.config, "workerinput"):
            _SESSION.close()


def _end_session(session: Any) -> None:
    """Stop the session, end its JVM, and wait for it.

    Otherwise the JVM would outlive this process, and be killed before it has removed its files.
    """
    from pyspark import SparkContext

    session.stop()
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[oncelog.Broker]:
    """Run a broker for the tests of a module that only add topics, each under its own name.

    It compacts without a pause. With the topics of all modules its cleaner took 7 % of a core while idle.
    """
    with oncelog.Broker(config={"log.cleaner.backoff.ms": 20}) as broker:
        yield broker


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Return a name that no other test uses."""
    return str(request.node.name).translate(str.maketrans("[]", "--")).rstrip("-")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
