"""Every scenario of oncelog.conform and of tests/scenarios, on our broker and on Apache Kafka.

If the brokers differ on purpose, docs/differences.md gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.scenarios.run import all_scenarios, run_scenario, target_at

from oncelog.conform.scenario_reader import Scenario
from oncelog.testing.broker_process import BrokerProcess

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"
BROKERS = ("oncelog", "apache")
PROMPT = {"group.consumer.assignment.interval.ms": 0, "group.consumer.assignor.offload.enable": "false"}
QUICK_SCANS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 200}
SCENARIOS = all_scenarios()
CASES = [
    pytest.param(scenario, version, broker, id=_id)
    for scenario in SCENARIOS
    for version in scenario.cases()
    for broker in BROKERS
    if scenario.only in (None, broker)
    for _id in [
        "::".join([scenario.file, scenario.title, *([f"v{version}"] if version is not None else []), broker])
    ]
]


class Oncelog:
    """Our broker, in another process."""

    epochs_rise = False

    def __init__(self, broker: BrokerProcess) -> None:
        self.target, self._broker = target_at(broker.bootstrap_servers, "oncelog"), broker

    def restart(self, *, kill: bool) -> str:
        self._broker.kill() if kill else self._broker.stop()
        self._broker.start()
        return self._broker.bootstrap_servers


class Apache:
    """Apache Kafka, one node."""

    epochs_rise = True

    def __init__(self, kafka: ApacheKafka) -> None:
        self.target, self._kafka = target_at(kafka.bootstrap_servers, "apache"), kafka

    def restart(self, *, kill: bool) -> str:
        (node,) = self._kafka.nodes
        node.kill() if kill else node.stop()
        node.start()
        return self._kafka.bootstrap_servers


@pytest.fixture(scope="module")
def shared_oncelog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oncelog]:
    directory = tmp_path_factory.mktemp("conformance") / "data"
    with BrokerProcess(directory, settings=QUICK_SCANS) as broker:
        yield Oncelog(broker)
        broker.kill()  # no clean stop: it would write the state of a thousand topics


@pytest.fixture(scope="module")
def own_oncelog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oncelog]:
    with BrokerProcess(tmp_path_factory.mktemp("conformance-own") / "data") as broker:
        yield Oncelog(broker)


@pytest.fixture(scope="module")
def shared_apache(apache_kafka: ApacheKafka) -> Apache:
    return Apache(apache_kafka)


@pytest.fixture(scope="module")
def own_apache(kafka_class_path: str) -> Iterator[Apache]:
    with ApacheKafka(properties=PROMPT) as kafka:
        yield Apache(kafka)


@pytest.mark.behaviour(
    "I1",
    "I5",
    "I7",
    "I8",
    "I9",
    "I11",
    "I12",
    "I14",
    "I15",
    "I16",
    "I17",
    "I26",
    "T3",
    "T4",
    "T5",
    "T6",
    "T7",
    "T8",
    "T10",
    "T13",
    "T15",
)
@pytest.mark.parametrize(("scenario", "version", "broker"), CASES)
def test_scenario(
    request: pytest.FixtureRequest, scenario: Scenario, version: int | None, broker: str
) -> None:
    ownership = "own" if scenario.own_broker else "shared"
    run_scenario(scenario, version, request.getfixturevalue(f"{ownership}_{broker}"))


def test_the_behaviour_marker_is_the_union_of_the_scenarios_rows() -> None:
    """docs/behaviours.md uses the `behaviour` marker of `test_scenario`. So the marker must have exactly the
    behaviours that the scenarios name.
    """
    marked = {row for mark in test_scenario.pytestmark for row in mark.args if mark.name == "behaviour"}  # type: ignore[attr-defined]
    assert marked == {row for scenario in SCENARIOS for row in scenario.rows}


def test_every_difference_has_its_reason() -> None:
    """Each `Only` and `Differs` in a scenario names an entry `### key` of docs/differences.md, and each entry
    is used.
    """
    entries = re.findall(r"^### (\S+)$", DIFFERENCES.read_text(), re.MULTILINE)
    assert len(entries) == len(set(entries))
    used = {scenario.differs for scenario in SCENARIOS if scenario.differs}
    assert set(entries) == used
    unexplained = [s.title for s in SCENARIOS if s.expects_different_responses and not s.differs]
    assert unexplained == [], "a scenario that expects different answers needs `Differs: KEY`"
