"""Fixtures that all tests share. A test is skipped with a reason if a program or library that it needs is not
installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from oncelog_devtools.apache_kafka import ApacheKafka, MissingDependency, fetch_jars
from oncelog_devtools.spark_connector import connector_jars, postgresql_driver
from support import TESTS, collection_plugin, costs_plugin, tiers_plugin, time_limit_plugin
from support.scheduler import OneOfEach

from oncelog import Admin, Broker, Producer
from oncelog.errors import TransactionalIdNotFound

if TYPE_CHECKING:
    from support.postgresql import PostgresqlServer
    from support.security.brokers import Certificates

# pytest rewrites the asserts of helpers, so they explain failures and also run under `python -OO`.
_PLUGINS = {"collection_plugin", "costs_plugin", "scheduler", "tiers_plugin", "time_limit_plugin"}
pytest.register_assert_rewrite(
    *(f"support.{path.stem}" for path in (TESTS / "support").iterdir() if path.stem not in _PLUGINS)
)

# No deadline: a busy machine makes examples slow, and Hypothesis must judge only their results.
settings.register_profile("oncelog", deadline=None)
settings.load_profile("oncelog")

QUICK_SCANS = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
    "log.cleaner.backoff.ms": 200,
}
"""Settings with which a broker aborts timed-out transactions and compacts topics within a second, while a
test waits.
"""
PROMPT = {
    "group.consumer.assignment.interval.ms": 0,
    "group.consumer.assignor.offload.enable": "false",
    "group.consumer.min.heartbeat.interval.ms": 300,
    "group.consumer.heartbeat.interval.ms": 300,
}
"""Settings with which Apache Kafka assigns partitions in the first heartbeat that needs it. Our broker always
does.
"""
STEADY = {"broker.session.timeout.ms": 120_000}
"""A setting for Apache Kafka: its controller does not fence a broker that stalls on a busy machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write each test's wall and processor time to FILE")
    parser.addoption("--stop-after", metavar="SECONDS", type=float, help="skip tests that begin later")
    parser.addoption("--order-seed", metavar="N", type=int, help="run files and tests in a random order")


TEMPORARY = pytest.StashKey[str]()


def use_own_temporary_directory(config: pytest.Config) -> None:
    """Put the temporary files of all processes into one directory, which is deleted after the run.

    A process that is killed leaves its files behind. pytest's own directories stay where they were, so that
    the files of failed tests are kept. All processes of xdist use the directory of the first one.
    """
    if hasattr(config, "workerinput"):
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    directory = tempfile.mkdtemp(prefix="oncelog-tests-")
    config.stash[TEMPORARY] = directory
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    # A JVM ignores TMPDIR. spark-submit adds these options to those of the driver.
    os.environ["SPARK_SUBMIT_OPTS"] = f"-Djava.io.tmpdir={directory}"


def pytest_unconfigure(config: pytest.Config) -> None:
    if TEMPORARY in config.stash:
        shutil.rmtree(config.stash[TEMPORARY], ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    use_own_temporary_directory(config)
    config.pluginmanager.register(tiers_plugin.Tiers())
    config.pluginmanager.register(collection_plugin.Collection())
    # Imported here, below `register_assert_rewrite`, so that pytest rewrites the asserts of this helper.
    from support.spark.worker_python import spark_python

    # Spark's planner and tasks run in Python workers, which must be this interpreter.
    os.environ["PYSPARK_PYTHON"] = spark_python()
    seconds = config.getoption("--stop-after")
    if seconds is not None:
        config.pluginmanager.register(time_limit_plugin.TimeLimit(seconds))
    path = config.getoption("--costs")
    if path:
        config.pluginmanager.register(costs_plugin.Measure())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(costs_plugin.Costs(Path(path).absolute()))
    # A shell starts background jobs with SIGINT ignored, and the programs that a test starts would inherit
    # that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG_ONES = ("spark", "sim", "pipeline", "dev", "cli", "kill", "interop", "bench")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes for `-n auto`: two for each core, because tests often wait."""
    return min(2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4, 8)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneOfEach:
    return OneOfEach(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--order-seed") is None:
        # Start the directories with long tests first. Otherwise one process would still run a long test when
        # all others are idle.
        rank = {room: number for number, room in enumerate(LONG_ONES)}
        items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))
    if shutil.which("java"):
        return
    for item in items:
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.skip(reason="no Java found: install a JDK 17 or newer to run Spark"))


@pytest.fixture(scope="session")
def kafka_class_path() -> str:
    """The class path of Apache Kafka's server, tools and Java client."""
    try:
        return fetch_jars()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def connector_jar_files() -> list[str]:
    """The jars of Spark's own Kafka connector."""
    try:
        return [str(jar) for jar in connector_jars()]
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One PostgreSQL server for the whole run. Each test uses its own schema."""
    pytest.importorskip("adbc_driver_postgresql", reason="needs the package adbc-driver-postgresql")
    from support.postgresql import programs, running_postgresql

    if (where := programs()) is None:
        pytest.skip("no PostgreSQL found: install the package postgresql")
    with running_postgresql(where) as server:
        yield server


@pytest.fixture(scope="session")
def postgresql_jar() -> str:
    """The path of the JDBC driver of PostgreSQL."""
    try:
        return str(postgresql_driver())
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def apache_kafka(kafka_class_path: str) -> Iterator[ApacheKafka]:
    """One Apache Kafka node for the whole run, started by the first test that requests it."""
    with ApacheKafka(properties=QUICK_SCANS | PROMPT | STEADY) as kafka:
        _create_internal_topics(kafka.bootstrap_servers)
        yield kafka


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    """Return the settings of the fixture `broker`. A test module that needs other settings overrides this
    fixture.
    """
    return {}


@pytest.fixture(scope="module")
def broker(broker_config: Mapping[str, object]) -> Iterator[Broker]:
    """Run a broker in this process for the tests of one module. Each test uses its own topics."""
    with Broker(config=broker_config) as broker:
        yield broker


@pytest.fixture(scope="module")
def ours(broker: Broker) -> str:
    """Return the address of the fixture `broker`."""
    return broker.bootstrap_servers


@pytest.fixture(params=["ours", "apache"])
def servers(request: pytest.FixtureRequest) -> str:
    """Run the test twice: with the address of our broker, and with Apache Kafka's."""
    from support.servers import bootstrap_servers

    return bootstrap_servers(request)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return a certificate authority, with certificates of a broker and of clients."""
    from support.security.brokers import make_certificates

    return make_certificates(tmp_path_factory.mktemp("certificates"))


def _create_internal_topics(servers: str) -> None:
    """Look up all coordinators once, because a busy machine creates their topics more slowly than tests wait.

    A look-up loads one of the 50 partitions of `__consumer_offsets` and `__transaction_state`. The names 0 to
    86 hash to all 50.
    """
    patient = {"bootstrap.servers": servers, "request.timeout.ms": 120_000, "max.block.ms": 300_000}
    with Producer({**patient, "transactional.id": "first-of-all"}) as producer:
        producer.init_transactions()
    with Admin({"bootstrap.servers": servers, "request.timeout.ms": 120_000}) as admin:
        for name in map(str, range(87)):
            admin.group_offsets(name)
            with contextlib.suppress(TransactionalIdNotFound):
                admin.describe_transactions(name)
