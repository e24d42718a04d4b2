"""A PostgreSQL server for tests: Debian's programs, in a temporary directory, on a free port of loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from oncelog.errors import StorageError
from oncelog.local_audit.tables.postgresql_table import connect, parse_database
from oncelog.testing.process import dying_with_parent, end_process, free_ports
from support.wait import attempts

USER, PASSWORD = "ann", "s3cret/%"
_ENCODED_PASSWORD = "s3cret%2F%25"
_OWNERS = ("postgres", "nobody")
"""Users for the server if the tests run as root, because PostgreSQL refuses to do so."""
_OPTIONS = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "max_wal_size=64MB")
_NUMBERS = count()


def programs() -> Path | None:
    """Return the directory of the programs of the newest PostgreSQL; None if there is none."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found, key=lambda path: float(path.parent.name))
    on_path = shutil.which("postgres")
    return Path(on_path).parent if on_path else None


class PostgresqlServer(NamedTuple):
    """A running server. `url` is the JDBC URL of its database, with USER and PASSWORD."""

    url: str

    def connection(self) -> Any:
        """Return a connection that commits each statement."""
        return connect(parse_database(self.url), autocommit=True)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Execute statements, and return the rows of the last one."""
        with closing(self.connection()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def new_schema(self) -> str:
        """Create a schema for a test, and return its name."""
        name = f"schema_{next(_NUMBERS)}"
        self.execute(f"CREATE SCHEMA {name}")
        return name

    def ingest(self, schema: str, table: str, rows: Any) -> None:
        """Create a table from Arrow rows, or append them to it."""
        with closing(self.connection()) as connection, connection.cursor() as cursor:
            cursor.adbc_ingest(table, rows, mode="create_append", db_schema_name=schema)


@contextmanager
def running_postgresql(where: Path) -> Iterator[PostgresqlServer]:
    """Run a server with the programs of the directory `where`.

    The server is killed with the thread that started it, if `setpriv` is installed.
    """
    with tempfile.TemporaryDirectory(prefix="oncelog-postgresql-") as name:
        directory, data = Path(name), Path(name, "data")
        data.mkdir()
        prefix = dying_with_parent()
        if os.geteuid() == 0:
            owner = _owner()
            os.chown(data, owner.pw_uid, owner.pw_gid)
            # The owner needs to reach its directory, but not to read those above.
            for above in (directory, Path(tempfile.gettempdir())):
                above.chmod(0o711)
            prefix = ["setpriv", "--pdeathsig", "KILL", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}"]
            prefix.append("--clear-groups")
        (directory / "password").write_text(PASSWORD)
        (directory / "password").chmod(0o644)
        initdb = ["initdb", "--no-sync", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        initdb += [f"--username={USER}", f"--pwfile={directory / 'password'}", f"--pgdata={data}"]
        _run([*prefix, str(where / initdb[0]), *initdb[1:]])
        (port,) = free_ports(1)
        options = [word for option in (*_OPTIONS, f"port={port}") for word in ("-c", option)]
        with (directory / "log").open("wb") as log:
            command = [*prefix, str(where / "postgres"), "-D", str(data), *options]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", start_new_session=True)
        try:
            login = f"user={USER}&password={_ENCODED_PASSWORD}"
            server = PostgresqlServer(f"jdbc:postgresql://127.0.0.1:{port}/postgres?{login}")
            for _ in attempts(lambda: (directory / "log").read_text(errors="replace"), step_s=0.05):
                with suppress(StorageError):
                    server.connection().close()
                    break
            yield server
        finally:
            # With SIGINT the server disconnects its clients and stops. With SIGTERM it would wait for them.
            end_process(process, signal.SIGINT)


def _owner() -> pwd.struct_passwd:
    for name in _OWNERS:
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError(f"no user of this system is named {' or '.join(_OWNERS)}")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
