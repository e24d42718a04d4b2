"""`oncelog dev prometheus` scrapes a broker, and evaluates the alert rules and the dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broker import wait_until
from support.cli import oncelog

from oncelog import Broker, Producer

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian: apt-get install prometheus)",
)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "prometheus")
    oncelog("dev", "prometheus", "stop", "--directory", str(tmp_path / "prometheus"))


def ask(page: str, path: str, **query: str) -> Any:
    url = f"{page}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)["data"]


def values(page: str, query: str) -> list[str]:
    return [row["value"][1] for row in ask(page, "query", query=query)["result"]]


def rules_of(page: str) -> list[Any]:
    return [rule for group in ask(page, "rules")["groups"] for rule in group["rules"]]


def queries_of_the_dashboard() -> list[str]:
    """Return the queries with the dashboard's variables filled in."""
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [query.replace("$__rate_interval", "1m").replace("$instance", ".*") for query in queries]


@pytest.mark.behaviour("I23")
def test_each_metric_of_the_alerts_and_of_the_dashboard_is_scraped(directory: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    settings = {"oncelog.metrics.names": "true", "oncelog.metrics.token": "secret"}
    with Broker(config=settings, metrics_port=0) as broker:
        send_in_a_transaction(broker)
        target = f"127.0.0.1:{broker.metrics_port}"
        where = ("--directory", directory)
        options = ("--interval", "1", "--token-file", str(token))
        started = oncelog("dev", "prometheus", "start", target, *options, *where)
        assert started.code == 0, started.err
        page = started.out.strip()
        wait_until(lambda: values(page, 'up{job="oncelog"}') == ["1"])
        wait_until(lambda: all(rule["health"] == "ok" for rule in rules_of(page)))
        queries = [*queries_of_the_dashboard(), *(rule["query"] for rule in rules_of(page))]
        assert len(queries) > 30
        names = {name for query in queries for name in re.findall(r"\b(?:oncelog|process)_\w+", query)}
        assert {name for name in names if not values(page, name)} == set()
        for query in queries:
            values(page, query)  # raises HTTPError if Prometheus refuses the query

    (node,) = json.loads(oncelog("dev", "prometheus", "status", *where, "-o", "json").out)
    assert (node["node"], node["state"], node["page"]) == ("prometheus", "running", page)
    again = oncelog("dev", "prometheus", "start", target, *where)
    assert again.code == 2 and "oncelog dev prometheus stop" in again.err
    stopped = oncelog("dev", "prometheus", "stop", *where)
    assert stopped.out == f"stopped node prometheus (pid {node['pid']})\n"


def send_in_a_transaction(broker: Broker) -> None:
    config = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "teller"}
    with Producer(config) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send("payments", b"42.00")
