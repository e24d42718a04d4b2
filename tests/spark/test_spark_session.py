"""The Spark session that commands use: missing packages are named, and an existing session is reused."""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import oncelog.spark.session
from oncelog.errors import ConfigError
from oncelog.spark.session import check_spark, local_session
from oncelog.spark.sink.sink_metrics import SinkMetrics


def test_missing_java_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Java 17 or newer.*openjdk"):
        check_spark()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch()
    assert check_spark() is None


def test_missing_pyspark_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.delitem(sys.modules, "oncelog.spark._pyspark", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'oncelog\[spark\]'"):
        check_spark()


@pytest.mark.parametrize(
    ("remove", "text"),
    [
        ("sys.modules['pyarrow'] = None", "more packages: pip install 'oncelog[spark]' (import of pyarrow"),
        ("del datasource.DataSourceStreamArrowWriter", "PySpark 4.2 or newer (cannot import name 'Data"),
    ],
    ids=["pyarrow", "pyspark"],
)
def test_a_missing_package_is_named_and_does_not_hide_other_sources(remove: str, text: str) -> None:
    """R1461: Spark imports all packages named pyspark_* together, and after an error it knew none of them.
    For this format, too, it said only that there is no such data source.
    """
    program = f"""
import pickle, sys
from pyspark.sql import datasource
{remove}
import pyspark_oncelog
source = pickle.loads(pickle.dumps(pyspark_oncelog.DefaultSource))
print(source.name())
source({{}})
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == "oncelog\n"
    assert f"MissingDependency: format('oncelog') needs {text}" in ran.stderr


def test_the_logging_configuration_file_exists() -> None:
    assert "level = error" in oncelog.spark.session._LOG_CONFIG.read_text()


def test_the_jvm_has_the_temporary_directory_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R541: TMPDIR named another directory, but a killed driver left its files in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of tests"))
    options = shlex.split(oncelog.spark.session._java_options(is_short=True))
    assert f"-Djava.io.tmpdir={tmp_path / 'of tests'}" in options


@pytest.mark.spark
def test_an_existing_session_is_used_and_left_running(spark: Any) -> None:
    with local_session("other") as session:
        assert session is spark
    assert spark.range(3).count() == 3


def test_the_audit_package_exports_its_result_types() -> None:
    audit = importlib.import_module("oncelog.spark.audit")
    for name in ("AuditFinding", "AuditResult", "Difference", "KeyTotals", "audit_files", "audit_topic"):
        assert name in audit.__all__ and getattr(audit, name).__name__ == name


def test_the_old_module_of_the_sink_metrics_still_works_and_warns() -> None:
    sys.modules.pop("oncelog.spark.metrics", None)
    with pytest.warns(DeprecationWarning, match=r"oncelog\.spark\.sink\.sink_metrics"):
        old = importlib.import_module("oncelog.spark.metrics")
    assert old.SinkMetrics is SinkMetrics
