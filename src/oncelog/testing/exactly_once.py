"""`assert_exactly_once`: an assertion for tests that a topic, or a table, contains each record once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from oncelog.audit.result import AuditResult

_SHOWN = 10


class HasBootstrapServers(Protocol):
    """A broker, such as `oncelog.Broker` or `BrokerProcess`."""

    @property
    def bootstrap_servers(self) -> str: ...


def assert_exactly_once(
    topics: str | Sequence[str],
    broker: HasBootstrapServers | str,
    *,
    keys: bool = False,
    against: str | Sequence[str] | None = None,
    table: str | None = None,
    columns: str | None = None,
    compacted_topics: Collection[str] | str = (),
    client_config: Mapping[str, object] | None = None,
) -> None:
    """Raise AssertionError unless an audit proves that topics contain each record exactly once.

    The audit is that of `oncelog audit TOPIC --local`. `broker` is a broker of this process, or its bootstrap
    servers. The assertion fails for each violation, and also if nothing is proven: records of a producer
    without idempotence need `keys` or `against`. Open transactions are not a violation.

    - `keys`: each record key must occur once per topic.
    - `against`: topics that must contain the same keys equally often.
    - `table`: a table that must have one row for each committed record, and no other row: `parquet:PATH`,
      `delta:PATH`, `sqlite:PATH` or `jdbc:postgresql://HOST:PORT/DB?table=NAME`. `columns` names its columns,
      as in `oncelog audit --columns`.
    - `compacted_topics`: topics that were compacted in the past.
    """
    from oncelog.local_audit import audit_table, audit_topic

    servers = broker if isinstance(broker, str) else broker.bootstrap_servers
    common: dict[str, Any] = {"compacted_topics": compacted_topics, "client_config": client_config}
    result = audit_topic(servers, topics, key_check=keys, against=against, **common)
    if result.verdict != "clean":
        raise AssertionError(_text(result.to_rows(), _why(result)))
    if table is not None:
        of_table = audit_table(servers, topics, table, columns=columns, **common)
        if of_table.verdict != "clean":
            raise AssertionError(_text(of_table.to_rows(), of_table.summary()[-1]))


def _why(result: AuditResult) -> str:
    if result.verdict == "violated":
        return f"verdict: violated ({result.finding_count} findings)"
    if result.keys_problem is not None:
        return result.keys_problem
    text = f"verdict: unproven: {result.totals.unnumbered_records} records were written without idempotence; "
    if result.keys is None and result.difference is None:
        return text + "check them with keys=True or against=TOPIC"
    return text + "a check of keys does not cover records without a key, or behind an open transaction"


def _text(rows: Sequence[Mapping[str, Any]], verdict: str) -> str:
    lines = [
        f"{row['kind']} in {row['topic']}-{row['partition']} at offsets {row['base_offset']} to "
        f"{row['last_offset']}: {row['explanation']}"
        for row in rows
        if row["severity"] == "violation"
    ]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([verdict, *lines[:_SHOWN], *more])
