"""A loader or broker killed by SIGKILL: at the end, the topic has each record once, in order."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import pytest
from support.load import BATCH_RECORDS, PARTITIONS, Loader, content, expected, write_csv
from support.topics import new_topic
from support.wait import pause

from oncelog.load.loader import Load, Report, run_load
from oncelog.load.parsing import Options
from oncelog.server.embedded import Broker
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy import Proxy, Rule, WireEvent

ROWS, FEW = 1_500, 1_000


def finish(servers: str, topic: str, load_id: str, files: list[Path]) -> Report:
    load = Load(files, topic, load_id, Options(key="k"), max_records=BATCH_RECORDS)
    return run_load(load, {"bootstrap.servers": servers})


@pytest.mark.behaviour("P4")
def test_repeated_kills_of_the_loader_lose_and_double_nothing(broker: Broker, tmp_path: Path) -> None:
    servers = broker.bootstrap_servers
    topic = new_topic(servers, PARTITIONS)
    files = [write_csv(tmp_path / f"{n}.csv", n * ROWS, ROWS) for n in range(3)]
    chance = random.Random(4)
    for _ in range(4):
        loader = Loader(servers, topic, "again", files)
        for _ in range(chance.randint(1, 9)):
            loader.wait_for_transaction()
        pause(chance.uniform(0, 0.01))
        loader.kill()
    report = finish(servers, topic, "again", files)
    assert 0 < report.records < 3 * ROWS
    assert report.records + report.records_before == 3 * ROWS
    assert content(servers, topic) == expected(3 * ROWS)
    assert finish(servers, topic, "again", files).was_complete
    assert content(servers, topic) == expected(3 * ROWS)


MOMENTS = [
    ("InitProducerId", "response", 1, 0),
    ("Produce", "request", 4, None),
    ("Produce", "response", 4, None),
    ("EndTxn", "request", 1, 0),
    ("EndTxn", "response", 1, BATCH_RECORDS),
    ("EndTxn", "response", 10, FEW),
]


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(("api", "direction", "nth", "before"), MOMENTS)
def test_a_loader_killed_at_any_message_loses_and_doubles_nothing(
    broker: Broker, tmp_path: Path, api: str, direction: str, nth: int, before: int | None
) -> None:
    """Drop one message of the load and kill its process. If the message is a response, the broker has handled
    the request.
    """
    servers = broker.bootstrap_servers
    topic = new_topic(servers, PARTITIONS)
    files = [write_csv(tmp_path / "rows.csv", 0, FEW)]
    is_struck = threading.Event()

    def strike(event: WireEvent) -> None:
        if event.fate == "dropped":
            is_struck.set()

    rule = Rule(action="drop", direction=direction, api=api, nth=nth)
    with Proxy(servers, rules=[rule], on_event=strike) as proxy:
        loader = Loader(proxy.bootstrap_servers, topic, topic, files)
        assert is_struck.wait(200)
        loader.kill()
    report = finish(servers, topic, topic, files)
    assert before is None or report.records_before == before
    assert report.records + report.records_before == FEW
    assert content(servers, topic) == expected(FEW)


@pytest.mark.behaviour("P4")
def test_kills_of_the_broker_and_the_loader_lose_and_double_nothing(tmp_path: Path) -> None:
    files = [write_csv(tmp_path / "rows.csv", 0, 3 * ROWS)]
    with BrokerProcess(tmp_path / "data") as broker:
        servers = broker.bootstrap_servers
        topic = new_topic(servers, PARTITIONS)
        loader = Loader(servers, topic, "both", files)
        chance = random.Random(5)
        for number in range(4):
            for _ in range(chance.randint(1, 4)):
                loader.wait_for_transaction()
            broker.kill()
            if number == 2:
                loader.kill()
            broker.start()
            if number == 2:
                loader = Loader(servers, topic, "both", files)
        assert loader.end() == (0, "")
        assert finish(servers, topic, "both", files).was_complete
        assert content(servers, topic) == expected(3 * ROWS)


@pytest.mark.behaviour("P4")
def test_the_older_of_two_loaders_is_fenced(broker: Broker, tmp_path: Path) -> None:
    servers = broker.bootstrap_servers
    topic = new_topic(servers, PARTITIONS)
    files = [write_csv(tmp_path / "rows.csv", 0, ROWS)]
    older = Loader(servers, topic, "two", files)
    older.wait_for_transaction()
    older.process.send_signal(signal.SIGSTOP)
    report = finish(servers, topic, "two", files)
    older.process.send_signal(signal.SIGCONT)
    code, errors = older.end()
    assert code == 1
    assert "load 'two': another loader with this id has taken over" in errors
    assert report.records_before >= BATCH_RECORDS
    assert content(servers, topic) == expected(ROWS)
