"""Without the extra `spark` or `arrow`, a command that needs it prints one line with the package to install.
The exit code is 2.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oncelog import Broker

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError("No module named " + name, name=name)

sys.meta_path.insert(0, Hidden())
"""
SPARK, ARROW = ("pyspark", "py4j"), ("pyspark", "py4j", "pyarrow", "numpy")
WHAT_TO_INSTALL = "oncelog.spark needs PySpark: pip install 'oncelog[spark]'"


def run(
    code: str, *arguments: str, hidden: tuple[str, ...] = SPARK, is_pure: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which the packages `hidden` seem to be missing.

    `is_pure`: without the row loops in C.
    """
    command = [sys.executable, "-c", HIDE.format(packages=hidden) + code, *arguments]
    environment = os.environ | ({"ONCELOG_PURE_PYTHON": "1"} if is_pure else {})
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "topic", "--spark"],
        ["audit", "topic", "--key-expr", "key"],
        ["audit", "--files", ".", "--keys"],
        ["pipeline", "run", __file__],
        ["trial", __file__],
        ["load", __file__, "--topic", "t", "--id", "x", "--format", "lines", "--spark"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_without_spark_names_the_package_to_install(arguments: list[str]) -> None:
    ended = run("from oncelog.cli.main import main; main()", *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"oncelog: MissingDependency: {WHAT_TO_INSTALL}\n"


@pytest.mark.parametrize(
    "statement",
    ["from oncelog.spark import write_atomic", "from oncelog.spark.audit import audit_topic"],
)
def test_an_import_without_spark_names_the_package_to_install(statement: str) -> None:
    ended = run(f"try:\n    {statement}\nexcept ImportError as error:\n    print(error)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, WHAT_TO_INSTALL + "\n", "")


def test_an_audit_without_spark_runs_in_this_process() -> None:
    ended = run("from oncelog.cli.main import main; main()", "audit", "--files", "tests")
    assert (ended.returncode, ended.stdout) == (2, "")
    said, error = ended.stderr.splitlines()
    assert said == "PySpark is not installed: the audit runs in this process"
    assert error.startswith("oncelog: ConfigError: tests: no segment files")


def test_commands_without_spark_work_in_a_plain_installation() -> None:
    ended = run(
        "import oncelog.spark, oncelog.pipeline.supervisor\n"
        "import oncelog.local_audit.log_audit, oncelog.local_audit.table_audit\n"
        "import oncelog_simulator.cli, oncelog_simulator.sink_tasks"
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        (["audit", "topic"], "oncelog audit"),
        (["audit", "topic", "--table", "parquet:here"], "oncelog audit"),
        (["consume", "topic", "--to-parquet", "new.parquet"], "--to-parquet"),
        (["load", __file__, "--topic", "t", "--id", "x", "--format", "lines"], "oncelog load"),
    ],
)
def test_a_command_without_pyarrow_names_the_package_to_install(
    arguments: list[str], feature: str, oncelog_broker: Broker
) -> None:
    code = "from oncelog.cli.main import main; main()"
    ended = run(code, arguments[0], "-b", oncelog_broker.bootstrap_servers, *arguments[1:], hidden=ARROW)
    error = f"oncelog: MissingDependency: {feature} needs PyArrow: pip install 'oncelog[arrow]'"
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1] == error


WITHOUT_ARROW = """
import asyncio
import oncelog
import oncelog.aio
from oncelog.testing import assert_exactly_once

def refused(call):
    try:
        call()
    except oncelog.errors.MissingDependency as error:
        print(error)

async def asynchronous(address):
    async with oncelog.aio.Producer({"bootstrap.servers": address}) as producer:
        await producer.send("payments", b"third")
        try:
            await producer.send_table("payments", None)
        except oncelog.errors.MissingDependency as error:
            print(error)

with oncelog.Broker() as broker:
    address = {"bootstrap.servers": broker.bootstrap_servers}
    with oncelog.Producer(address | {"transactional.id": "t"}) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send_many("payments", [b"first", b"second"])
        refused(lambda: producer.send_table("payments", None))
    asyncio.run(asynchronous(broker.bootstrap_servers))
    with oncelog.Consumer(address | {"group.id": "g", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe(["payments"])
        values = []
        while len(values) < 3:
            values += [record.value for record in consumer.poll()]
        tp = oncelog.TopicPartition("payments", 0)
        refused(lambda: list(consumer.fetch_range(tp, 0, 2)))
    refused(lambda: oncelog.read_table("payments", address))
    refused(lambda: assert_exactly_once("payments", broker))
    print(values)
"""


def test_the_clients_and_the_broker_need_neither_pyarrow_nor_numpy() -> None:
    ended = run(WITHOUT_ARROW, hidden=ARROW)
    features = ("send_table", "send_table", "a record batch of Arrow", "read_table", "an audit")
    said = [f"{feature} needs PyArrow: pip install 'oncelog[arrow]'" for feature in features]
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [*said, "[b'first', b'second', b'third']"]


KILLED = """
import os, signal, sys
import oncelog

with oncelog.Broker(data_dir=sys.argv[1]) as broker:
    address = {"bootstrap.servers": broker.bootstrap_servers}
    with oncelog.Producer(address) as producer:
        for number in range(300):
            producer.send("plain", b"%d" % number)
            producer.flush()
    with oncelog.Producer(address | {"transactional.id": "t"}) as producer:
        producer.init_transactions()
        for value in (b"committed", b"aborted", b"open"):
            producer.begin_transaction()
            producer.send("transactions", value)
            producer.flush()
            if value == b"committed":
                producer.commit_transaction()
            elif value == b"aborted":
                producer.abort_transaction()
        os.kill(os.getpid(), signal.SIGKILL)
"""
STARTED_AGAIN = """
import sys
import oncelog
from oncelog.log import index, scan

def read_all(topic, count):
    how = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    with oncelog.Consumer(address, **how) as consumer:
        consumer.assign([oncelog.TopicPartition(topic, 0)])
        values = []
        while len(values) < count:
            values += [record.value for record in consumer.poll()]
        return values

with oncelog.Broker(data_dir=sys.argv[1]) as broker:
    address = {"bootstrap.servers": broker.bootstrap_servers}
    with oncelog.Producer(address | {"transactional.id": "t"}) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send("transactions", b"later")
    assert read_all("plain", 300) == [b"%d" % number for number in range(300)]
    print(read_all("transactions", 2))
assert not {"numpy", "pyarrow"} & sys.modules.keys()
print(scan._c is None, index._c is None)
"""


@pytest.mark.parametrize("is_pure", [False, True])
def test_a_broker_without_numpy_recovers_from_a_kill(is_pure: bool, tmp_path: Path) -> None:
    killed = run(KILLED, str(tmp_path), hidden=ARROW, is_pure=is_pure)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run(STARTED_AGAIN, str(tmp_path), hidden=ARROW, is_pure=is_pure)
    assert again.returncode == 0, again.stderr
    values, forms = again.stdout.splitlines()
    assert values == "[b'committed', b'later']"
    assert forms == "True True" or not is_pure


@pytest.mark.parametrize(
    ("imported", "hidden", "said"),
    [
        (
            "oncelog.spark import write_atomic",
            ("pyarrow",),
            "oncelog.spark needs PyArrow",
        ),
        ("oncelog.spark.audit import audit_topic", ("pyarrow",), "oncelog.spark needs PyArrow"),
        ("oncelog.spark.audit import audit_topic", ARROW, "oncelog.spark needs PySpark"),
        ("oncelog.spark.audit import audit_topic", ("numpy",), "oncelog.spark needs NumPy"),
        ("oncelog.load.loader import Load", ARROW, "oncelog.load needs PyArrow"),
        ("oncelog.load.loader import Load", ("numpy",), "oncelog.load needs NumPy"),
        ("oncelog.local_audit import audit_topic", ("numpy",), "an audit needs NumPy"),
    ],
)
def test_an_import_names_the_package_to_install(imported: str, hidden: tuple[str, ...], said: str) -> None:
    ended = run(f"try:\n    from {imported}\nexcept ImportError as error:\n    print(error)", hidden=hidden)
    extra = "spark" if "spark" in imported else "arrow"
    assert ended.stdout == f"{said}: pip install 'oncelog[{extra}]'\n", ended.stderr
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("story", ["lost-ack", "transaction"])
def test_a_story_needs_no_pyarrow(story: str) -> None:
    ended = run("from oncelog.cli.main import main; main()", "explain", story, hidden=ARROW)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("The story ended as described.\n")


def test_an_import_of_the_audit_does_not_import_pandas() -> None:
    """A module made empty arrays of lists: pyarrow imports pandas for these, which takes half of the time."""
    code = "import sys, oncelog.local_audit.keys; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
