"""The pipelines of examples/ under `oncelog pipeline run`, with their input and expected output."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from oncelog import Producer
from support import ROOT
from support.broker import wait_until
from support.spark.topics import create_topic
from support.topics import read

EXAMPLES = ROOT / "examples" / "pipelines"
PATIENCE_S = 500.0
COUNT, PER_BATCH = 240, 30
_MINUTE_S = 60


@dataclass(frozen=True)
class Case:
    """A pipeline with its settings, its input records (key, value), and their expected results.

    The function `result` reads the results. It gets the servers, the target topic and the directory. If
    `is_table` is True it gets the source topic instead, because a table is compared with its source.
    """

    name: str
    partitions: int
    settings: Callable[[Path], dict[str, str]]
    records: Callable[[], Iterator[tuple[bytes, Any]]]
    result: Callable[[str, str, Path], Any]
    expected: Callable[[], Any]
    is_table: bool = False


def _values(servers: str, topic: str, _directory: Path) -> list[Any]:
    return sorted((json.loads(record.value or b"") for record in read(servers, topic)), key=json.dumps)


def _customers(directory: Path) -> dict[str, str]:
    (directory / "customers.csv").write_text("customer,name,country\nc0,Ann,SE\nc1,Bob,FR\n")
    return {"CUSTOMERS": str(directory / "customers.csv")}


def _orders() -> Iterator[tuple[bytes, Any]]:
    for n in range(COUNT):
        yield b"%d" % n, {"id": str(n), "customer": f"c{n % 3}", "cents": n}


def _enriched() -> list[Any]:
    customers = {"c0": {"name": "Ann", "country": "SE"}, "c1": {"name": "Bob", "country": "FR"}}
    rows = [order | customers.get(order["customer"], {}) for _, order in _orders()]
    return sorted(rows, key=json.dumps)


def _at(second: int) -> str:
    return f"2026-01-01T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"


def _sales() -> Iterator[tuple[bytes, Any]]:
    for n in range(COUNT):
        yield b"", {"at": _at(20 * n), "country": "SE" if n % 3 else "FR", "cents": n}
    # this record moves the watermark past all others
    yield b"", {"at": _at(20 * 3600), "country": "end", "cents": 0}


def _minutes() -> list[Any]:
    cents_by_window: dict[tuple[str, int], list[int]] = {}
    for n in range(COUNT):
        cents_by_window.setdefault(("SE" if n % 3 else "FR", 20 * n // _MINUTE_S), []).append(n)
    rows = [
        {
            "country": country,
            "minute": _at(minute * _MINUTE_S).replace("Z", ".000Z"),
            "sales": len(cents),
            "cents": sum(cents),
        }
        for (country, minute), cents in cents_by_window.items()
    ]
    return sorted(rows, key=json.dumps)


def _changes() -> Iterator[tuple[bytes, Any]]:
    for n in range(COUNT):
        account = b"a%d" % (n * 7 % 40)
        yield account, None if n % 11 == 5 else {"owner": f"o{n % 5}", "cents": n}


def _accounts() -> list[Any]:
    newest = {key.decode(): state for key, state in _changes()}
    rows = [{"account": key, **state} for key, state in newest.items() if state]
    return sorted(rows, key=json.dumps)


def _table(_servers: str, _topic: str, directory: Path) -> list[Any]:
    from deltalake import DeltaTable

    rows = DeltaTable(str(directory / "table")).to_pyarrow_table().to_pylist()
    return sorted(rows, key=json.dumps)


def _table_settings(directory: Path) -> dict[str, str]:
    return {"TABLE": str(directory / "table")}


def _appended() -> Iterator[tuple[bytes, Any]]:
    for n in range(COUNT):
        yield b"%d" % n, {"n": n}


def _each_once() -> Any:
    return "clean", COUNT, COUNT


def _audited(servers: str, topic: str, table: str) -> Any:
    """Audit a table against its topic. Return the verdict, and the numbers of records and rows."""
    from oncelog.local_audit import audit_table

    result = audit_table(servers, topic, table)
    return result.verdict, result.totals.records, result.totals.rows


def _audited_delta(servers: str, topic: str, directory: Path) -> Any:
    return _audited(servers, topic, f"delta:{directory / 'table'}")


def _iceberg_settings(directory: Path) -> dict[str, str]:
    return {
        "TABLE": "lake.rows",
        "PYICEBERG_CATALOG__DEFAULT__URI": f"sqlite:///{directory}/catalog.db",
        "PYICEBERG_CATALOG__DEFAULT__WAREHOUSE": directory.as_uri(),
    }


def _audited_iceberg(servers: str, topic: str, directory: Path) -> Any:
    with closing(sqlite3.connect(directory / "catalog.db")) as catalog:
        ((location,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables").fetchall()
    return _audited(servers, topic, f"iceberg:{location}")


def _postgresql_settings(directory: Path) -> dict[str, str]:
    """Return the settings for a database. The test has written its JDBC URL and a new schema to two files."""
    schema = (directory / "schema").read_text()
    return {"TARGET": (directory / "database").read_text(), "TABLE": f"{schema}.orders"}


def _audited_postgresql(servers: str, topic: str, directory: Path) -> Any:
    settings = _postgresql_settings(directory)
    return _audited(servers, topic, f"{settings['TARGET']}&table={settings['TABLE']}")


def _lateness(_directory: Path) -> dict[str, str]:
    return {"LATENESS": "5 minutes"}


CASES = {
    case.name: case
    for case in (
        Case("enrich", 2, _customers, _orders, _values, _enriched),
        Case("windows", 1, _lateness, _sales, _values, _minutes),
        Case("upserts", 2, _table_settings, _changes, _table, _accounts),
        Case("to_delta", 2, _table_settings, _appended, _audited_delta, _each_once, is_table=True),
        Case("to_iceberg", 2, _iceberg_settings, _appended, _audited_iceberg, _each_once, is_table=True),
        Case(
            "to_postgresql",
            2,
            _postgresql_settings,
            _appended,
            _audited_postgresql,
            _each_once,
            is_table=True,
        ),
    )
}


class Supervised:
    """A context manager that runs `oncelog pipeline run` in a process.

    If it is started a second time, it continues from the same checkpoint.
    """

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, case: Case, servers: str, directory: Path) -> None:
        self.case, self.servers, self.directory = case, servers, directory
        self.source, self.target = f"{directory.name}.in", f"{directory.name}.out"
        create_topic(servers, self.source, partitions=case.partitions)
        create_topic(servers, self.target, partitions=2)
        with Producer({"bootstrap.servers": servers}) as producer:
            for key, value in case.records():
                producer.send(self.source, None if value is None else json.dumps(value).encode(), key)
        settings = {
            "BOOTSTRAP_SERVERS": servers,
            "SOURCE": self.source,
            "TARGET": self.target,
            "CHECKPOINT": str(directory / "checkpoint"),
            "MAX_OFFSETS": str(PER_BATCH),
            "TRIGGER": "0 seconds",
            **case.settings(directory),
        }
        self._arguments = [f"{key}={value}" for key, value in settings.items()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()  # the supervised process ends by itself when its supervisor is gone
            self.process.wait()

    def start(self) -> None:
        command = [sys.executable, "-m", "oncelog.cli.main", "pipeline", "run"]
        command += [str(EXAMPLES / f"{self.case.name}.py"), "--master", "local[2]"]
        command += ["--status-file", str(self._status_file), "-X", "restart.backoff.ms=100"]
        command += ["--conf", "spark.driver.memory=700m", "--conf", "spark.sql.shuffle.partitions=2"]
        for pair in self._arguments:
            command += ["--set", pair]
        self._status_file.unlink(missing_ok=True)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def _status_file(self) -> Path:
        return self.directory / "status.json"

    @property
    def status(self) -> dict[str, Any]:
        return json.loads(self._status_file.read_text()) if self._status_file.exists() else {}

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        def holds() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log[-4000:]
            return condition(self.status)

        wait_until(holds, PATIENCE_S)

    def wait_for_batch(self, batch_id: int, *, run: int = 1) -> None:
        """Wait until run number `run` or a later one has finished the batch `batch_id` or a later one."""
        self.wait_for(lambda now: now.get("runs", 0) >= run and batch_of(now) >= batch_id)

    def wait_for_rest(self) -> None:
        """Wait until the query has read everything and no batch is running."""
        self.wait_for(lambda now: now.get("batch", {}).get("lag") == 0)

    def kill(self, *, is_jvm: bool) -> None:
        """Send SIGKILL to the process of the query, or to its JVM."""
        assert self.process is not None
        (query,) = psutil.Process(self.process.pid).children()
        (jvm,) = [child for child in query.children() if "java" in child.name()]
        (jvm if is_jvm else query).kill()

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def result(self) -> Any:
        topic = self.source if self.case.is_table else self.target
        return self.case.result(self.servers, topic, self.directory)

    def entries(self, log: str) -> list[int]:
        """Return the batch ids in one of the checkpoint's logs, sorted."""
        names = (path.name for path in (self.directory / "checkpoint" / log).iterdir())
        return sorted(int(name) for name in names if name.isdigit())


def batch_of(status: dict[str, Any]) -> int:
    return int(status.get("batch", {}).get("batch_id", -1))
