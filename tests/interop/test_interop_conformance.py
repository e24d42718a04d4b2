"""The same Produce scenarios against our broker and Apache Kafka: both must answer as the table says.

Source: tests/tables/conformance_produce.txt, a row per request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_broker import RawClient
from scenario_produce import Step, create_topic, new_producer_id, produce

import oncelog
from oncelog.dev.apache_kafka import ApacheKafka

TABLE = Path(__file__).parents[1] / "tables" / "conformance_produce.txt"
NEVER_GIVEN_PRODUCER_ID = 2**40


def number(text: str) -> int | None:
    return None if text == "-" else int(text)


def read_scenarios() -> dict[str, list[Step]]:
    scenarios: dict[str, list[Step]] = {}
    for line in TABLE.read_text().splitlines():
        if not line.strip() or line.startswith(("#", "scenario ")):
            continue
        words = line[35:].split()
        producer, epoch, sequence, count, error, offset = words
        step = Step(producer, number(epoch), number(sequence), int(count), error, number(offset))
        scenarios.setdefault(line[:35].strip(), []).append(step)
    return scenarios


SCENARIOS = read_scenarios()


@pytest.fixture(scope="module")
def embedded() -> Iterator[str]:
    with oncelog.Broker() as broker:
        yield broker.bootstrap_servers


@pytest.fixture(params=["oncelog", "apache-kafka"])
def client(request: pytest.FixtureRequest) -> Iterator[RawClient]:
    if request.param == "oncelog":
        bootstrap_servers = request.getfixturevalue("embedded")
    else:
        kafka: ApacheKafka = request.getfixturevalue("apache_kafka")
        bootstrap_servers = kafka.bootstrap_servers
    with RawClient(bootstrap_servers) as connected:
        yield connected


@pytest.mark.behaviour("I1", "I5", "I7", "I8", "I9", "I14", "I15", "I16")
@pytest.mark.parametrize("name", SCENARIOS)
def test_produce_scenario(client: RawClient, name: str) -> None:
    topic = create_topic(client)
    steps = SCENARIOS[name]
    given = {each: new_producer_id(client) for each in {step.producer for step in steps} & {"A", "B"}}
    producer_ids: dict[str, int | None] = {**given, "?": NEVER_GIVEN_PRODUCER_ID, "-": None}
    answers = [produce(client, topic, producer_ids[step.producer], step) for step in steps]
    assert answers == [(step.error, step.offset) for step in steps]
