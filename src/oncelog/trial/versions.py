"""The facts in a trial's report: the pipeline, its target, and the versions of the software."""

from __future__ import annotations

import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oncelog.trial.masters import STANDALONE, standalone_hosts
from oncelog.trial.plan import TargetKind
from oncelog.trial.run import Trial
from oncelog.trial.targets import server_version


def facts_of(trial: Trial, cluster: str) -> dict[str, str]:
    """Return the facts about a trial that its report shows, by name. `cluster` is the cluster's name."""
    facts = {
        "pipeline": trial.file.name,
        "target": trial.kind.value,
        "rows": f"{trial.rows} per run, in {trial.micro_batches} micro-batches",
        "cluster": cluster,
        "Oncelog": _version("oncelog"),
        "Spark": _version("pyspark"),
        "Python": platform.python_version(),
        "Java": _java_version(),
    }
    if standalone_hosts(trial.master):
        facts["master"] = STANDALONE
    if trial.kind is TargetKind.DELTA:
        facts["deltalake"] = _version("deltalake")
    if trial.kind is TargetKind.ICEBERG:
        facts["pyiceberg"] = _version("pyiceberg")
    if trial.database is not None:
        facts["PostgreSQL"] = server_version(trial.database)
        facts["adbc-driver-postgresql"] = _version("adbc-driver-postgresql")
    if packages := trial.conf.get("spark.jars.packages"):
        facts["jars"] = packages
    elif jars := trial.conf.get("spark.jars"):
        facts["jars"] = ", ".join(path.rpartition("/")[2] for path in jars.split(","))
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _java_version() -> str:
    """Return the version in the file `release` of the Java installation, without starting it."""
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    try:
        text = (Path(os.path.realpath(program or "")).parents[1] / "release").read_text()
    except (OSError, IndexError):
        return "unknown"
    found = re.search(r'^JAVA_VERSION="([^"]+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"
