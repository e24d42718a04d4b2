"""Without the extra `spark`, a command that needs it prints one line with the package to install. The exit
code is 2.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDE_PYSPARK = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
WHAT_TO_INSTALL = "oncelog.spark needs PySpark: pip install 'oncelog[spark]'"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE_PYSPARK + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


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
